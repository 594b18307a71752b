"""Throttles the drive for this process with a cgroup that limits I/O. Needs root."""

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
    """Limits the I/O of this process and its children on the disk of `folder` while the context is open.

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
            f"could not throttle the drive: run as root, on a kernel that limits block I/O in cgroups: {error}"
        ) from error
    try:
        yield
    finally:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _own_group(controller: str) -> str:
    """Returns the path of this process's cgroup, relative to the root of the controller's hierarchy.

    The controller "" stands for cgroup version 2.
    """
    lines = (line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines())
    return next(path for _, controllers, path in lines if controller in controllers.split(",")).lstrip("/")


def _device(folder: Path) -> str:
    """Returns the MAJOR:MINOR of the whole disk that has a folder.

    The kernel does not limit the I/O of single partitions.
    """
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not device.exists():
        raise SystemExit(f"{folder} is not on a disk that can be throttled: choose another folder with --storage")
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()
