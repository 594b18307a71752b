"""Reads the memory of this process from /proc/self/status."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Returns the bytes that are resident now."""
    return _status("VmRSS")


def resident_peak() -> int:
    """Returns the peak of resident bytes since the start of the process, or since `restart_peak()`."""
    return _status("VmHWM")


def restart_peak() -> None:
    """Resets the peak to the bytes that are resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"\n{name}:")[2].split()[0]) << 10
