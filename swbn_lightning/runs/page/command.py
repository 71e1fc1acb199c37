"""The command ``swbn report RUN…``."""

import argparse
from collections.abc import Sequence

from swbn_lightning.files.reading import printable
from swbn_lightning.runs.page.page import write_report


def main(args: Sequence[str]) -> None:
    """Write the page and say where.

    Raises:
        InputError: runs that are not there, or a page that cannot be written.
        SystemExit: 2 for arguments that cannot be understood, 0 after ``--help``.
    """
    options = _parser().parse_args(args)
    print(f"report: {printable(write_report(options.runs, options.output))}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="swbn report",
        description="One HTML page about runs: results with intervals, settings that differ, curves, whiteness, "
        "heatmaps and environment. It holds all it needs, and nothing of a run is run to read it.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="runs/NAME, one of its versions, or a study's folder: all runs below it"
    )
    parser.add_argument("--output", metavar="FILE", help="the page; report.html in the folder, or of several here")
    return parser
