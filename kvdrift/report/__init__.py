"""One self-contained HTML document."""

from kvdrift.report.write import write_report

__all__ = ["write_report"]
