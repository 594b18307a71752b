"""`memascend train`: fine-tunes a model on files of examples, and resumes where it was killed."""

from __future__ import annotations

import datetime as dt
import errno
import os
import sys
from typing import TYPE_CHECKING

from memascend.cli.train.settings import Settings, add_arguments

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def run(options: argparse.Namespace) -> int:
    """Train. Exit code 0 once OUT holds the model of the last step."""
    settings = Settings.of(options)
    if os.environ.get("RANK", "0") in {"", "0"}:
        # Loading torch and transformers, and reading the data, take a while.
        print(f"memascend train: reading {settings.model} and {' '.join(settings.data)}", file=sys.stderr, flush=True)
    from memascend.cli.train.job import Job
    from memascend.cli.train.output import Ranks

    with Ranks() as ranks, ranks.together(lambda: Job(settings, dt.datetime.now().astimezone(), ranks)) as job:
        if settings.dry_run:
            plan = ranks.together(job.plan)
            if not ranks.rank:
                print(plan)
            job.require_room()
            return 0
        try:
            job.run()
        except KeyboardInterrupt:
            if not ranks.rank:
                print(f"\ninterrupted; {job.position()}", file=sys.stderr)
            raise
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not job.has_steps:
                raise
            raise job.on_full_disk(error) from error
    return 0
