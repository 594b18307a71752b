"""Samples host memory over a step, at each use of a unit and each gradient."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

# Enough for a picture; a step that has more is kept every second, then every fourth time, and so on.
_SAMPLES_MAX = 4096


class Sample(NamedTuple):
    """What was held at one moment."""

    seconds: float  # since the step began
    units: int  # bytes of the arena that were lent
    gradients: int  # bytes of gradients that were held
    arrived: int  # bytes of all gradients of the step so far, which training in memory holds
    waiting: int  # bytes of gradients of held parameters that waited for `step()`


class Meter:
    """Bounded in memory, and some microseconds for each sample."""

    __slots__ = (
        "_arrived",
        "_arrived_bytes",
        "_began",
        "_events",
        "_every",
        "_held_peak",
        "_keeps_all",
        "_last",
        "_queued",
        "_samples",
        "_stale",
        "_units",
        "_waiting",
        "handing_seconds",
    )

    def __init__(
        self,
        units: Callable[[], int],
        queued: Callable[[], int],
        waiting: Callable[[], int] = int,
        *,
        keeps_all: bool = False,
    ) -> None:
        """Begin.

        Args:
            units: bytes of the arena that are lent now.
            queued: bytes of gradients that wait for the engine now.
            waiting: bytes of gradients of held parameters that wait for `step()` now.
            keeps_all: gradients stay in memory until step().
        """
        self._units = units
        self._queued = queued
        self._waiting = waiting
        self._keeps_all = keeps_all
        # What backward spent in handing on gradients, waiting for room among them.
        self.handing_seconds = 0.0
        # Of the last step that was whole, and of this one. As numbers one after another: a tuple for each would be
        # left between what a block computes with.
        self._last = array("d")
        self._samples = array("d")
        self._arrived: set[str] = set()
        self._arrived_bytes = 0
        self._stale = False
        self._held_peak = 0
        self._restart()

    def used(self) -> None:
        """A unit was used."""
        if not self._samples:
            # The step begins with its first use, and not when the one before it ended.
            self._began = time.perf_counter()
        self._events += 1
        if self._events % self._every == 0:
            self._take()

    def arrived(self, name: str, nbytes: int, began: float) -> None:
        """A gradient was handed on, which began at `began`."""
        if self._stale:
            # The gradients of the step before were let go, by whatever means.
            self.cleared()
        if name not in self._arrived:
            self._arrived.add(name)
            self._arrived_bytes += nbytes
            if self._keeps_all:
                self._held_peak = max(self._held_peak, self._arrived_bytes)
        self.handing_seconds += time.perf_counter() - began
        self.used()

    def cleared(self) -> None:
        """There are no gradients any more."""
        self._arrived.clear()
        self._arrived_bytes = 0
        self._stale = False

    def step_ended(self) -> None:
        """A step was committed."""
        self._take()
        self._last = self._samples
        self._stale = True
        self._restart()

    @property
    def samples(self) -> list[Sample]:
        """Of the last whole step; of the one that runs, while there is none."""
        numbers = iter(self._last or self._samples)
        return [
            Sample(sample[0], *map(int, sample[1:])) for sample in zip(*[numbers] * len(Sample._fields), strict=True)
        ]

    @property
    def gradients(self) -> int:
        """Bytes of gradients that are held now."""
        # Those that are kept in memory wait for the engine in that same memory.
        return max(self._queued(), self._arrived_bytes if self._keeps_all else 0)

    @property
    def gradients_peak(self) -> int:
        """The most that was ever kept in memory until step(); 0 where none is."""
        return self._held_peak

    def _restart(self) -> None:
        self._samples = array("d")
        self._began = time.perf_counter()
        self._events = 0
        self._every = 1

    def _take(self) -> None:
        if len(self._samples) >= len(Sample._fields) * _SAMPLES_MAX:
            kept = [self._samples[field :: 2 * len(Sample._fields)] for field in range(len(Sample._fields))]
            self._samples = array("d", (number for sample in zip(*kept, strict=True) for number in sample))
            self._every *= 2
        now = time.perf_counter() - self._began
        self._samples.extend((now, self._units(), self.gradients, self._arrived_bytes, self._waiting()))
