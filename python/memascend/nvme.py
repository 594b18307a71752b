"""Reads and writes files and raw block devices with direct I/O, at the speed of the disk.

    with memascend.nvme.open("/mnt/nvme/scratch", size=1 << 30) as volume:
        ticket = volume.write(tensor, 0)
        ...                                     # compute meanwhile
        ticket.wait()
        volume.flush()                          # now it survives a loss of power

Sizes and offsets are in bytes, times in seconds. The memory of a transfer belongs to the transfer until its ticket is
done: do not change a tensor that is being written, do not use one that is being read, and do not resize its storage.

Errors: `ConfigError` for a wrong argument, also for a range past the end, before anything is done. `StorageError` if a
device rejects an operation or fails, with `errno`, `path`, `offset` on that device and `nbytes`. `TimeoutExpired`.
`UsageError` for a volume that was closed or belongs to the parent of this process.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING, Literal

from memascend._core import Ticket, Volume, io_uring_why_not
from memascend.errors import ConfigError, MemascendError
from memascend.text import expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Ticket", "Volume", "io_uring_why_not", "open"]

_Path = str | os.PathLike[str]


def open(  # noqa: A001
    paths: _Path | Sequence[_Path],
    *,
    size: int | None = None,
    queue_depth: int | None = None,
    stripe: int | None = None,
    backend: Literal["auto", "io_uring", "threads"] = "auto",
) -> Volume:
    """Open one or several files or raw block devices as one volume.

    Files get no header: the byte at offset 0 is yours. A file is reserved whole, so that no later write finds the file
    system full; one whose length is no multiple of the alignment is extended to one, and `size` does not count that.
    A raw device is opened exclusively. It is rejected if it is mounted, in use, or contains a file system, a partition
    table or a member of LVM, RAID or an encrypted volume. No other process can open an open volume.

    Args:
        paths: a file, a raw block device, or several of them, over which the volume is striped.
        size: bytes of the volume. A file that does not exist needs it, and is made private (0600); a larger one grows
            files that are there. None takes what is there, of several devices as much as the smallest has.
        queue_depth: requests that the kernel has at once, for each device (1 to 1,024; None: 16).
        stripe: bytes that lie together on one of several devices (a multiple of 4,096; None: 1 MiB). The volume has
            no record of it: the same paths, order and stripe find the same bytes again.
        backend: "auto" takes io_uring where the system gives it, else threads (`Volume.why_not` says why).

    Raises:
        ConfigError: an argument is wrong, or the backend cannot be had.
        StorageError: a device is full, mounted, foreign, read-only or in use (by which process). Everything is left
            as it was.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    names = []
    for path in several:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"paths must be a path or a list of paths, not {path!r} in one")
        name = expanded(path)
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"{name!r} is not a path")
        names.append(name)
    volume = Volume(names, size, queue_depth, stripe, backend)
    _open.add(volume)
    return volume


# Volumes that are open, for the end of the interpreter.
_open: weakref.WeakSet[Volume] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for volume in list(_open):
        # After a fork, volumes of the parent report that they are closed.
        if not volume.closed:
            try:
                volume.close()
            except MemascendError as error:
                print(f"memascend: {error}", file=sys.stderr)  # too late to raise it
