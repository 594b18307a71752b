"""Watches how fast storage is while a run begins, and forecasts from that how long its steps take."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from memascend.closing import Closing
from memascend.planning.costs import Drive, assumed_host, storage_seconds
from memascend.planning.forecast import Forecast, forecast

if TYPE_CHECKING:
    from memascend.engine import Engine, Store
    from memascend.planning.table import Plan

# Of what moves less, the time says nothing of storage.
_BYTES_MIN = 64 << 20
# Storage is read for a moment: this much, or so long.
_PROBE_BYTES, _PROBE_SECONDS = 256 << 20, 0.2


class Watch(Closing):
    """The bytes that are read and written while it is open, and the seconds."""

    def __init__(self, store: Store) -> None:
        """Begin."""
        self._store = store
        self._before = self._counted()
        self._began = time.perf_counter()
        self._read, self._written, self._seconds = 0, 0, 0.0

    def _counted(self) -> tuple[int, int]:
        counters = self._store.counters()
        return counters["read_bytes"], counters["written_bytes"]

    def close(self) -> None:
        """End."""
        self._read, self._written = (now - then for now, then in zip(self._counted(), self._before, strict=True))
        self._seconds = time.perf_counter() - self._began

    def forecast(self, plan: Plan, engine: Engine, *, host_computes: bool) -> Forecast | None:
        """Seconds that storage and the update take of a step; None where too little was moved to tell.

        Storage is read for a moment, unless what is held was just read. Where nothing was written, as in a run that is
        resumed, it is taken to be written as fast as it is read.
        """
        if plan.disk_bytes < 2 * _BYTES_MIN:
            return None
        read, took = self._read, self._seconds
        if read < _BYTES_MIN:
            read, took = engine.probe(_PROBE_BYTES, _PROBE_SECONDS)
        reads = read / took if read >= _BYTES_MIN // 2 else None
        writes = self._written / self._seconds if self._written >= _BYTES_MIN else None
        if reads is None and writes is None:
            return None
        drive = Drive(read=reads or writes or 1.0, write=writes or reads or 1.0)
        # One thread updates what streams; what is held has all of them.
        host = replace(assumed_host(None, shared=host_computes), held_threads=torch.get_num_threads())
        return forecast(plan, lambda plan: storage_seconds(plan, drive, host))
