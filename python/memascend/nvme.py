"""Reads and writes files and raw block devices with direct I/O, at the speed of the disk.

    with memascend.nvme.open("/mnt/nvme/scratch", size=1 << 30) as volume:
        ticket = volume.write(tensor, 0)
        ...                                     # compute meanwhile
        ticket.wait()
        volume.flush()                          # now it survives a loss of power

Sizes and offsets are in bytes, times in seconds. Memory of a transfer in flight belongs to it: do not write to what is
being written, touch what is being read, or resize its storage before the ticket is done. Errors: `ConfigError` for a
wrong argument (a range past the end is one, found before anything is done), `StorageError` for what a device refused
or failed, with `errno`, `path`, `offset` on that device and `nbytes`; `TimeoutExpired`; `UsageError` for a volume that
was closed or belongs to the parent of this process.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Literal

from memascend import _core
from memascend.errors import ConfigError, MemascendError
from memascend.text import Closing, expanded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from typing_extensions import Buffer

__all__ = ["Ticket", "Volume", "io_uring_why_not", "open"]

_Path = str | os.PathLike[str]


class Ticket:
    """One operation in flight. Dropping it cancels nothing: the operation goes on and its memory lives until the end.

    If a write fails after its ticket was dropped, the next `Volume.flush()` or `Volume.close()` raises its error, once.
    """

    __slots__ = ("_core",)

    def __init__(self, core: _core.Ticket) -> None:
        self._core = core

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, without the GIL; Ctrl-C ends the wait, not the operation.

        Args:
            timeout: seconds; None waits for ever.

        Returns:
            The bytes moved, which is all of them. Waiting again says the same again.

        Raises:
            StorageError: the device failed it.
            TimeoutExpired: it was not done in time; it goes on.
        """
        return self._core.wait(timeout)

    def done(self) -> bool:
        """Whether it has ended, well or not; `wait()` then returns or raises at once."""
        return self._core.done()


class Volume(Closing):
    """One address space over one or several devices; `open()` makes it. Any thread may use it.

    Operations on different bytes never disturb each other, also inside one block of the device. Of operations on the
    same bytes, wait for one before beginning the next. Closing, dropping and the end of the interpreter wait for what
    is in flight.
    """

    __slots__ = ("__weakref__", "_core", "paths")

    paths: tuple[str, ...]

    def __init__(self, core: _core.Volume, paths: tuple[str, ...]) -> None:
        self._core = core
        self.paths = paths

    def read(self, into: torch.Tensor | Buffer, offset: int) -> Ticket:
        """Begin to fill `into`, a contiguous CPU tensor or a writable buffer, with the bytes from `offset` on.

        Offset, length and address that are multiples of `alignment` go straight; others are right, and are copied.

        Raises:
            ConfigError: the range does not lie in the volume, or the memory cannot be read into.
        """
        return self._begin(into, offset, write=False)

    def write(self, data: torch.Tensor | Buffer, offset: int) -> Ticket:
        """Begin to write `data`, a contiguous CPU tensor or a buffer, to `offset`.

        Done means that the device has the bytes; `flush()` makes them survive a loss of power.

        Raises:
            ConfigError: the range does not lie in the volume, or the memory cannot be written from.
        """
        return self._begin(data, offset, write=True)

    def flush(self, timeout: float | None = None) -> None:
        """Make every write that was begun before survive a loss of power, on every device. Waits for them first.

        Raises:
            StorageError: a device failed to. It stays so: every later flush fails too, because the system has dropped
                what it could not write. Or a write failed whose ticket was dropped; that is raised once.
            TimeoutExpired: it was not done in time; it goes on.
        """
        self._core.flush(timeout)

    def close(self) -> None:
        """Wait for what is in flight, then let go of the devices. Twice is fine. Does not flush.

        Raises:
            StorageError: a write failed whose ticket was dropped. The volume is closed all the same.
        """
        self._core.close()

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._core.closed

    @property
    def size(self) -> int:
        """Bytes that it holds."""
        return self._core.size

    @property
    def alignment(self) -> int:
        """What offset, length and address must be multiples of to go straight to the device; 1: all do."""
        return self._core.alignment

    @property
    def backend(self) -> str:
        """Who carries the requests: "io_uring" or "threads"."""
        return self._core.backend

    @property
    def why_not(self) -> str | None:
        """Why the backend is no better; None where it is the best or was asked for."""
        return self._core.why_not

    @property
    def direct(self) -> bool:
        """Whether every device bypasses the page cache; `devices()` says why one does not."""
        return self._core.direct

    @property
    def queue_depth(self) -> int:
        """Requests of at most 1 MiB that the kernel has at once, for each device."""
        return self._core.queue_depth

    def devices(self) -> list[dict[str, Any]]:
        """Its devices: "path", "kind" ("file" or "raw"), "bytes", "why_buffered" (None where it is direct)."""
        return self._core.devices()

    def stats(self) -> dict[str, Any]:
        """What it has done since it was opened.

        "read" and "written" (each "bytes", "operations", "requests"), "flushes", "failed" operations, transfers that
        were "continued" after stopping short, requests "retried", "bounced_bytes" (copied because they were not
        aligned), operations "in_flight".
        """
        return self._core.stats()

    def _begin(self, memory: torch.Tensor | Buffer, offset: int, *, write: bool) -> Ticket:
        # A tensor exists only if torch was imported; who reads into a bytearray need not wait for that.
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(memory, torch.Tensor):
            _check_tensor(memory)
            keep = memory.untyped_storage()
            nbytes = memory.numel() * memory.element_size()
            return Ticket(self._core.begin_at(write, memory.data_ptr(), nbytes, keep, offset))
        try:
            view = memoryview(memory)  # type: ignore[arg-type]
        except TypeError as error:
            raise ConfigError(
                f"only contiguous CPU tensors and buffers can be read and written, not {type(memory).__name__}"
            ) from error
        if not view.c_contiguous:
            raise ConfigError("the buffer is not contiguous; make a contiguous copy")
        if view.readonly and not write:
            raise ConfigError("the buffer is read-only, so nothing can be read into it")
        # A view of no bytes cannot be cast.
        flat = view.cast("B") if view.nbytes else memoryview(bytearray())
        return Ticket(self._core.begin_buffer(write, flat, offset))

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.backend}, {'direct' if self.direct else 'buffered'}"
        return f"Volume({', '.join(self.paths)}: {self.size} bytes, {state})"


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
    A raw device is opened exclusively, and refused where it is mounted, in use, or holds a file system, a partition
    table or a member of LVM, RAID or an encrypted volume. Nobody else can open what is open.

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
    volume = Volume(_core.Volume(names, size, queue_depth, stripe, backend), tuple(names))
    _open.add(volume)
    return volume


def io_uring_why_not() -> str | None:
    """Why there is no io_uring for this process; None where there is."""
    return _core.io_uring_why_not()


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"only CPU tensors can be read and written, and this one is on {tensor.device}; copy it first"
        )
    if str(tensor.layout) != "torch.strided" or not tensor.is_contiguous():
        raise ConfigError(
            "the tensor is not contiguous; pass tensor.contiguous(), or a tensor to read into and copy from"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ConfigError(
            "the tensor is a lazy conjugate or negative, whose memory holds other values; resolve it first"
        )


# Volumes that are open, for the end of the interpreter.
_open: weakref.WeakSet[Volume] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for volume in list(_open):
        # In a fork the parent's volumes are none of ours, and say that they are closed.
        if not volume.closed:
            try:
                volume.close()
            except MemascendError as error:
                print(f"memascend: {error}", file=sys.stderr)  # too late to raise it
