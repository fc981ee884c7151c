"""One self-contained HTML document: result objects in, a file out, no model needed."""

from kvdrift.report.saved import load_result
from kvdrift.report.write import write_report

__all__ = ["load_result", "write_report"]
