"""``swbn report``: one HTML page about runs, which needs nothing but itself; docs/report.md."""

from swbn_lightning.runs.page.page import write_report

__all__ = ["write_report"]
