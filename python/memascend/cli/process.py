"""Reads the kernel's account of this process's memory."""

from __future__ import annotations

from pathlib import Path


def resident() -> int:
    """Bytes in memory now."""
    return _status("VmRSS")


def resident_peak() -> int:
    """The most bytes in memory at once since the start, or since `restart_peak`."""
    return _status("VmHWM")


def restart_peak() -> None:
    """Reset the peak to the bytes in memory now."""
    Path("/proc/self/clear_refs").write_text("5")


def _status(name: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"\n{name}:")[2].split()[0]) << 10
