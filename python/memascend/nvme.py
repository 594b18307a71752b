"""Reads and writes files and raw block devices at the speed of the disk, with direct I/O where possible.

    with memascend.nvme.open("/mnt/nvme/scratch", size=1 << 30) as volume:
        ticket = volume.write(tensor, 0)
        ...                                     # compute meanwhile
        ticket.wait()
        volume.flush()                          # the bytes survive a loss of power

Sizes and offsets are in bytes, times in seconds. The memory of a transfer belongs to the transfer until its ticket is
done: during a write do not change the tensor, during a read do not use the tensor, and do not resize its storage during
either.

Errors: `ConfigError` for a wrong argument or a range past the end of the volume; nothing was done. `StorageError` if a
device rejects an operation or fails, with `errno`, `path`, `offset` on that device and `nbytes`. `TimeoutExpired` if a
`timeout=` ran out. `UsageError` for a volume that was closed, that has too many operations in flight, or that the
parent of this process opened.
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
    """Opens one or several files or raw block devices as one volume.

    Files get no header: the byte at offset 0 is yours. `open` reserves the disk space of the whole file, so that no
    later write finds the file system full. `open` extends a file to a multiple of the alignment; `size` does not
    include the extension. `open` opens a raw device exclusively. It rejects a device that is mounted or in use, and a
    device that contains a file system, a partition table or a member of LVM, RAID or an encrypted volume. While the
    volume is open, `open` rejects its files and devices, also in other processes.

    Args:
        paths: a file, a raw block device, or several of them, over which the volume is striped.
        size: bytes of the volume. A new file needs a `size`, and is made private (0600). An existing file grows if
            `size` is larger. None: the present size of the file or device. With several files or devices, the volume
            uses the same number of bytes of each; without `size`, this is the size of the smallest one.
        queue_depth: number of requests per device (1 to 1,024; None: 16). n devices share at most n times
            this number of requests at once: one device may get more requests while another device gets fewer.
        stripe: if the volume has several devices, the number of contiguous bytes on one device (a multiple of 4,096;
            None: 1 MiB). The volume does not store this number. To find the same bytes again, pass the same stripe and
            the same paths in the same order.
        backend: "auto" takes io_uring if the system supports it, else threads (`Volume.why_not` gives the reason).

    Raises:
        ConfigError: an argument is wrong, or the system does not support the backend.
        StorageError: a device is full, mounted, read-only or in use (the message names the process), or has foreign
            contents. Nothing was changed.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    names = []
    for path in several:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"paths must be a path or a list of paths, but the list contains {path!r}")
        name = expanded(path)
        if not isinstance(name, str) or not name or "\0" in name:
            raise ConfigError(f"{name!r} is not a path: pass a string that is not empty and has no null byte")
        names.append(name)
    volume = Volume(names, size, queue_depth, stripe, backend)
    _open.add(volume)
    return volume


# The volumes that `_close_all` closes at the end of the interpreter, unless they are closed already.
_open: weakref.WeakSet[Volume] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for volume in list(_open):
        # In a forked child, `closed` is True for the parent's volumes.
        if not volume.closed:
            try:
                volume.close()
            except MemascendError as error:
                print(f"memascend: {error}", file=sys.stderr)  # nothing could catch an exception of an atexit function
