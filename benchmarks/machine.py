"""Describes the machine, versions and date of a measurement."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path


def described() -> dict[str, str | int]:
    """Returns the machine, the versions and the date. Benchmarks store them together with a measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith(("model name", "CPU part"))]
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "memascend": importlib.metadata.version("memascend"),
        "torch": importlib.metadata.version("torch"),
        "fio": _fio_version(),
    }


def _fio_version() -> str:
    if shutil.which("fio") is None:
        return "none"
    return subprocess.run(["fio", "--version"], check=False, capture_output=True, text=True).stdout.strip()
