"""`memascend bench`: benchmarks with another system measured in the same run, one module for each subject."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

# Each module has SUMMARY, add_arguments(parser) and run(options) -> exit code.
_SUBJECTS = ("io", "update")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the subjects and their options."""
    subjects = parser.add_subparsers(dest="subject", required=True, metavar="SUBJECT")
    for name in _SUBJECTS:
        subject = importlib.import_module(f"memascend.cli.bench.{name}")
        subject_parser = subjects.add_parser(name, help=subject.SUMMARY, description=subject.SUMMARY)
        subject_parser.add_argument("--json", action="store_true", help="print JSON")
        subject.add_arguments(subject_parser)
        subject_parser.set_defaults(measure=subject.run)


def run(options: argparse.Namespace) -> int:
    """Run the subject that was named."""
    status: int = options.measure(options)
    return status
