"""`memascend train`: TRL's Trainers on a model that does not fit in memory; the same command goes on after a kill."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from memascend.cli.train.arguments import HELP, USAGE, parse

if TYPE_CHECKING:
    import argparse

__all__ = ["HELP", "USAGE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take all words as they are: TRL's parser reads them."""
    parser.set_defaults(words=())


def run(options: argparse.Namespace) -> int:
    """Train. Exit code 0 once the output folder holds the model of the last step."""
    # TRL reports each run otherwise, and `datasets` each file that it reads. Both are looked at when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    command = parse(options.words)
    from memascend.cli.train.training import train

    return train(command)
