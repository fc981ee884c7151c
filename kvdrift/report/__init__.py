"""One self-contained HTML document."""

from kvdrift.report.saved import load_result
from kvdrift.report.write import write_report

__all__ = ["load_result", "write_report"]
