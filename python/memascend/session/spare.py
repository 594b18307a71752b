"""Chooses the budget of `host_memory="auto"`, equal on all ranks. On a machine, one run at a time chooses."""

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
# The longest time that a run waits while another run holds the lock. A run holds the lock for some seconds, from the
# moment it reads how much memory is free until it has allocated most of its memory.
_TURN_SECONDS = 60.0
_RETRY_SECONDS = 0.05


class Turn:
    """A lock for the whole machine, so that one run at a time reads how much memory is free and allocates memory.

    The lock is `flock` on a folder that every user can read. The system releases it when the process ends.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None

    def wait(self, seconds: float) -> None:
        """Takes the lock. Continues without it, with a log warning, after `seconds` or if it cannot open the folder."""
        folder = next((one for one in ("/dev/shm", tempfile.gettempdir()) if Path(one).is_dir()), "/")  # noqa: S108
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            _log.warning(
                "the lock for host_memory='auto' cannot be opened (%s), so runs that start at the same time may plan "
                "with the same free memory. To prevent this, give each run a size of its own as host_memory=",
                error,
            )
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
        _log.warning(
            "the lock on %s cannot be taken, perhaps because another run holds it, so this run continues without it: "
            "both runs may plan with the same free memory. To prevent this, give each run a size of its own as "
            "host_memory=",
            folder,
        )

    def end(self) -> None:
        """Releases the lock; does nothing if it is not held."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            # Unlock explicitly: close() alone keeps the lock while a forked child has the descriptor.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def agreed(options: Options, exchange: Exchange | Alone, turn: Turn, *, on_host: bool) -> Options:
    """Replaces `host_memory="auto"` in the options by a budget of this run. Returns other options unchanged.

    A resume uses the budget that its store recorded, if that much memory is free. All ranks use the smallest budget of
    all ranks. When this function returns a budget, one rank of each machine holds `turn`, if it could take the lock.
    The caller must end `turn` once the ranks have allocated most of their memory.

    Raises:
        ConfigError: some ranks, but not all, have `host_memory="auto"`.
    """
    host = socket.gethostname()
    found = exchange.all_values([host, options.spare is not None])
    if any(one != found[0][1] for _, one in found):
        raise ConfigError(
            'some ranks have host_memory="auto", but other ranks do not: pass the same host_memory= on all ranks'
        )
    if options.spare is None:
        return options
    hosts = [name for name, _ in found]
    spare = replace(options.spare, processes=max(options.spare.processes, hosts.count(host)))
    if exchange.rank == hosts.index(host):
        # The other ranks wait at the next exchange, so wait for at most half of their timeout.
        turn.wait(min(_TURN_SECONDS, (options.timeout or math.inf) / 2))
    exchange.all_values(None)
    holder = next((run for run in list(RUNS) if holds(run, options.paths or ()) is not None), None)
    if holder is not None and spare.machine is None:
        # A run of this process has the store open. If this call is not rejected, it closes that run, so the memory of
        # that run counts as free.
        here = HostMemory.here()
        spare = replace(spare, machine=replace(here, available=here.available + session_of(holder).report().total))
    stored = _stored_budget(options, holder) if options.resumes else None
    own = stored if stored is not None and spare.fits(stored) else spare.budget(on_host=on_host)
    spare = replace(spare, agreed=min(exchange.all_values(own)), stored=stored)
    return replace(options, host_memory=spare)


def _stored_budget(options: Options, holder: OffloadedOptimizer | None) -> int | None:
    """Returns the budget in the last commit of the store; None if no store can be read, or its commit has no budget."""
    if holder is not None:
        return _budget_in(session_of(holder).run.metadata.hyperparameters())
    # A StorageError is suppressed here: `offload()` raises it again when it opens the store.
    with contextlib.suppress(StorageError):
        found = newest([str(file_of(path)) for path in options.paths or ()])
        return None if found is None else _budget_in(found[0])
    return None


def _budget_in(hyperparameters: dict[str, Any]) -> int | None:
    """Returns the budget in a commit's hyperparameters; None if it is missing or invalid."""
    budget = hyperparameters.get("host_memory")
    return budget if isinstance(budget, int) and budget > 0 else None
