"""Reads the kernel's counters for this process: bytes read from and written to devices, and processor seconds.

It also reads the busy seconds of a disk, and samples the machine's available memory.

This file imports only the standard library, because processes in DeepSpeed's environment also import it.
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
    """The totals of the counters at one moment. `since` returns the differences from an earlier moment."""

    wall: float
    main_thread: float
    """Seconds that the calling thread ran on a processor. In the rest of `wall`, this thread waited."""
    processor: float
    """Seconds that all threads of this process together ran on processors."""
    disk_busy: float
    """Seconds in which the disk worked on requests of any process."""
    read: int
    """Bytes that this process read from devices."""
    written: int

    def since(self, before: Counts) -> dict[str, float]:
        """Returns the difference of each total from its value in `before`."""
        return {name: value - getattr(before, name) for name, value in self.__dict__.items()}


def counts(disk: Path | None = None) -> Counts:
    """Returns the totals of this process.

    If `disk` is a path, the totals include the busy seconds of the disk that has this path.
    """
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
    """Returns the busy seconds of the disk that has `path`; 0 if the kernel does not count them.

    For example, the kernel does not count them for network file systems.
    """
    device = path.stat().st_dev
    try:
        words = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except OSError:
        return 0.0
    return int(words[9]) / 1e3


class MemoryTaken(threading.Thread):
    """Samples the machine's available memory in a thread, until the process ends.

    A driver may pin memory that the kernel counts for no process. Pinned memory still lowers the available memory.
    """

    _EVERY = 0.02

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = self._least = _available()
        self.start()

    def run(self) -> None:
        """Samples until the process ends."""
        while True:
            self._least = min(self._least, _available())
            time.sleep(self._EVERY)

    @property
    def peak(self) -> int:
        """The largest number of bytes by which the available memory shrank since this object was made."""
        return self._before - self._least


def _available() -> int:
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10
