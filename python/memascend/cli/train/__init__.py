"""`memascend train`: TRL's Trainers on a model that does not fit in memory; the same command goes on after a kill."""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

from memascend.cli.train.arguments import HELP, USAGE, parse

if TYPE_CHECKING:
    import argparse

__all__ = ["HELP", "USAGE", "add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Take all words as they are: TRL's parser reads them."""
    parser.set_defaults(words=())


# What libraries say at each start about other libraries and their own defaults, by the names of their loggers.
_LOGGERS = ("bitsandbytes", "torch.utils._pytree")
_WARNINGS = (r"`gradient_checkpointing` is deprecated", r"'pin_memory' argument is set as true but no accelerator")


def _silence() -> None:
    """Show no warning that the user's command did not cause."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def run(options: argparse.Namespace) -> int:
    """Train. Exit code 0 once the output folder holds the model of the last step."""
    # TRL reports each run otherwise, and `datasets` each file that it reads. Both are looked at when they are imported.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    _silence()
    command = parse(options.words)
    from memascend.cli.train.training import train

    return train(command)
