"""Reads the kernel's counters for this process: bytes to and from devices, seconds run.

Read also in a peer's environment: nothing of ours is imported.
"""

from __future__ import annotations

import os
import resource
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Running totals at one moment; two of them make the figures of what lay between."""

    wall: float
    main_thread: float
    """Seconds that the calling thread ran; the rest of `wall` it waited."""
    processor: float
    """Seconds that all threads ran."""
    disk_busy: float
    """Seconds in which the disk had something to do, whoever asked."""
    read: int
    """Bytes that this process read from devices."""
    written: int

    def since(self, before: Counts) -> dict[str, float]:
        """What happened between two moments."""
        return {name: value - getattr(before, name) for name, value in self.__dict__.items()}


def counts(disk: Path | None = None) -> Counts:
    """Totals of this process, and of the disk that a path lies on."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    moved = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return Counts(
        wall=time.perf_counter(),
        main_thread=time.thread_time(),
        processor=used.ru_utime + used.ru_stime,
        disk_busy=_disk_busy(disk) if disk is not None else 0.0,
        read=int(moved["read_bytes"]),
        written=int(moved["write_bytes"]),
    )


def _disk_busy(path: Path) -> float:
    """Zero where the kernel keeps no such account: of network file systems, for example."""
    device = path.stat().st_dev
    try:
        words = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except OSError:
        return 0.0
    return int(words[9]) / 1e3


class MemoryTaken(threading.Thread):
    """Watches what the machine's memory lacks beside its caches: a driver's pinned memory too, which no process has."""

    _EVERY = 0.02

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = self._least = _available()
        self.start()

    def run(self) -> None:
        """Until the process ends."""
        while True:
            self._least = min(self._least, _available())
            time.sleep(self._EVERY)

    @property
    def peak(self) -> int:
        """The most bytes, since it began."""
        return self._before - self._least


def _available() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10
