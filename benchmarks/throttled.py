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
    """Limits the I/O of this process on the disk of `folder` while the context is open.

    The limits also apply to processes that this process starts in the context. End them before the context.
    `read` and `write` are in bytes a second. The kernel does not throttle reads that the page cache serves.

    Raises:
        SystemExit: the kernel cannot limit the I/O of the folder's disk, or this process has no right to set a limit.
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
            f"could not throttle the drive: {error}; run as root, where cgroups can limit block I/O (in cgroup "
            "version 2, /sys/fs/cgroup/cgroup.subtree_control must list io)"
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
    """Returns the MAJOR:MINOR of the whole disk that has `folder`.

    The kernel does not limit the I/O of single partitions.

    Raises:
        SystemExit: /sys/dev/block has no device for the file system of `folder`.
    """
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    if not device.exists():
        raise SystemExit(
            f"could not find the disk of {folder}: choose with --storage a folder whose file system is on one disk, "
            "such as ext4 or xfs"
        )
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()
