"""`memascend train`: trains the model of a folder on rows of a file, and goes on where it was killed."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import sys
from typing import TYPE_CHECKING

from memascend.cli.train.settings import Settings, add_arguments
from memascend.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Train; 0 once OUT holds the model of the last step."""
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}: memascend train does not run on several ranks yet; start it "
            "without torchrun, on one"
        )
    settings = Settings.of(options)
    from memascend.cli.train.job import Job

    with contextlib.closing(Job(settings, dt.datetime.now().astimezone())) as job:
        if settings.dry_run:
            print(job.plan())
            return 0
        try:
            job.run()
        except KeyboardInterrupt:
            print(f"\ninterrupted; {job.position()}", file=sys.stderr)
            raise
    return 0
