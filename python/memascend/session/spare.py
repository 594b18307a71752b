"""Agrees how much memory of a machine a run takes: with its own ranks, with other runs, and with its earlier start."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import math
import os
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError, StorageError
from memascend.plan.decision import file_of
from memascend.plan.spare import HostMemory
from memascend.session.open_store import RUNS, holds
from memascend.session.optimizer import session_of
from memascend.storage import newest

if TYPE_CHECKING:
    from memascend.distributed.control_plane import Alone, Exchange
    from memascend.plan.options import Options
    from memascend.session.optimizer import OffloadedOptimizer

_log = logging.getLogger("memascend")
# A run takes its memory some seconds after it looked at what is free.
_TURN_SECONDS = 60.0
_RETRY_SECONDS = 0.05


class Turn:
    """A lock of the machine: runs look at its free memory, and take theirs, one after the other.

    The lock is of a folder that every user can read. The system releases it when the process ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def wait(self, seconds: float) -> None:
        """Take the lock; after so many seconds the run goes on without it: another one takes longer than usual."""
        folder = next((one for one in ("/dev/shm", tempfile.gettempdir()) if Path(one).is_dir()), "/")  # noqa: S108
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            _log.warning("runs cannot take their memory one after the other: %s", error)
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                time.sleep(_RETRY_SECONDS)
            else:
                self._descriptor = descriptor
                return
        os.close(descriptor)
        _log.warning("another run holds the lock of %s, by which runs take their memory one after the other", folder)

    def end(self) -> None:
        """Release the lock; without one nothing happens."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # A forked child has the descriptor, too.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def agreed(options: Options, exchange: Exchange | Alone, turn: Turn, *, on_host: bool) -> Options:
    """The options with the budget of each rank, where it is what the machine can spare.

    A resume takes that of its store where it is free. All ranks take the same, the smallest. `turn` is to end once all
    of them have their memory.

    Raises:
        ConfigError: some ranks are given a budget, and others take what the machine can spare.
    """
    host = socket.gethostname()
    said = exchange.everyone([host, options.spare is not None])
    if any(one != said[0][1] for _, one in said):
        raise ConfigError('some ranks have host_memory="auto" and others a budget: give all ranks the same option')
    if options.spare is None:
        return options
    hosts = [name for name, _ in said]
    spare = replace(options.spare, processes=max(options.spare.processes, hosts.count(host)))
    if exchange.rank == hosts.index(host):
        # Other ranks wait for this one.
        turn.wait(min(_TURN_SECONDS, (options.timeout or math.inf) / 2))
    exchange.everyone(None)
    holder = next((run for run in list(RUNS) if holds(run, options.paths or ()) is not None), None)
    if holder is not None and spare.machine is None:
        # A run of this process, which gives its memory back when the store is opened again.
        here = HostMemory.here()
        spare = replace(spare, machine=replace(here, available=here.available + session_of(holder).report().total))
    stored = _stored_budget(options, holder) if options.resumes else None
    own = stored if stored is not None and spare.fits(stored) else spare.budget(on_host=on_host)
    spare = replace(spare, agreed=min(exchange.everyone(own)), stored=stored)
    return replace(options, host_memory=spare)


def _stored_budget(options: Options, holder: OffloadedOptimizer | None) -> int | None:
    """The budget of the last commit of a store; None where there is none, or it does not say."""
    if holder is not None:
        return _budget_in(session_of(holder).run.metadata.hyperparameters())
    # What is wrong with a store is for its opening to say.
    with contextlib.suppress(StorageError):
        found = newest([str(file_of(path)) for path in options.paths or ()])
        return None if found is None else _budget_in(found[0])
    return None


def _budget_in(hyperparameters: dict[str, Any]) -> int | None:
    budget = hyperparameters.get("host_memory")
    return budget if isinstance(budget, int) and budget > 0 else None
