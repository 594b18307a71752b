"""Reads from /proc how much memory this process uses, and resets its recorded peak."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Returns the bytes of this process that are in memory now."""
    return _status("VmRSS")


def resident_peak() -> int:
    """Returns the largest value of `resident()` since the process started, or since the last `restart_peak()`."""
    return _status("VmHWM")


def restart_peak() -> None:
    """Resets `resident_peak()` to the present value of `resident()`."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"\n{name}:")[2].split()[0]) << 10
