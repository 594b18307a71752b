"""Implements `memascend train`: runs TRL's Trainers on models that do not fit in memory.

By default, the same command resumes a training that was stopped or killed.
"""

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
    """Declares no options. `run()` gets all arguments in `options.words`, and passes them to `parse()`."""
    parser.set_defaults(words=())


# The loggers and the warnings with which libraries report, at each start, on other libraries or on their own defaults.
_LOGGERS = ("bitsandbytes", "torch.utils._pytree")
_WARNINGS = (r"`gradient_checkpointing` is deprecated", r"'pin_memory' argument is set as true but no accelerator")


def _silence() -> None:
    """Hides warnings that the user's command did not cause."""
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _WARNINGS:
        warnings.filterwarnings("ignore", message=message)


def run(options: argparse.Namespace) -> int:
    """Trains a model, and saves it in the output folder; with --dry_run, prints the plan. Returns exit code 0."""
    # Without these variables, TRL reports each run to Hugging Face, and `datasets` reports each call of load_dataset().
    # Libraries read the variables when they are imported, so the variables are set before the import.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")
    _silence()
    command = parse(options.words)
    from memascend.cli.train.training import train

    return train(command)
