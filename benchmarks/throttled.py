"""Throttles the drive for this process, with a cgroup that limits block I/O. Needs root."""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_GROUPS = Path("/sys/fs/cgroup")


@contextmanager
def throttled(folder: Path, read: float, write: float) -> Iterator[None]:
    """Context manager that limits the I/O of this process and its children on a folder's device.

    `read` and `write` are in bytes a second. The kernel does not throttle reads that the page cache serves.
    """
    device = _device(folder)
    first = _GROUPS / "blkio"
    if first.is_dir():
        parent, home = first, first / _own_group("blkio")
        limits = {
            "blkio.throttle.read_bps_device": f"{device} {int(read)}",
            "blkio.throttle.write_bps_device": f"{device} {int(write)}",
        }
    else:
        parent, home = _GROUPS, _GROUPS / _own_group("")
        limits = {"io.max": f"{device} rbps={int(read)} wbps={int(write)}"}
    group = parent / f"memascend-bench-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        for name, limit in limits.items():
            (group / name).write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        if group.is_dir():
            group.rmdir()
        raise SystemExit(
            f"throttling a drive needs root, and a cgroup with the controller of block I/O: {error}"
        ) from error
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group(controller: str) -> str:
    """Returns this process's cgroup, relative to the root of the controller's hierarchy; "" means cgroup version 2."""
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(path for _, controllers, path in lines if controller in controllers.split(",")).lstrip("/")


def _device(folder: Path) -> str:
    """Returns MAJOR:MINOR of the whole disk of a folder; the kernel does not limit partitions."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not device.exists():
        raise SystemExit(f"{folder} is on no block device of its own: name a folder on one by --storage")
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()
