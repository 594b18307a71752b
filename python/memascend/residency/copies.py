"""Copies parameters' values into unlinked files, so that a whole model takes no memory of its size."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError, StorageError
from memascend.memory import file_memory
from memascend.tensors import bytes_of, memory_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from memascend.residency.placeholder import Place

_WRITE_BYTES = 8 << 20


class Copies:
    """Where copies lie: a file for each parameter, which nothing else sees and which is gone with its tensor."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` is where they lie; None where nobody named one and the storage is no folder."""
        self._given = folder

    def of(self, place: Place) -> torch.Tensor:
        """A copy of a parameter that is bound."""
        # No name for the values, see there.
        return self.of_values(place, place.parameter.detach())

    def of_values(self, place: Place, values: torch.Tensor) -> torch.Tensor:
        """A copy of values of a parameter, which have its strides."""
        nbytes, folder = place.nothing.nbytes, self._folder
        with _unlinked(folder) as descriptor:
            try:
                _write(descriptor, bytes_of(values), folder)
            finally:
                # The traceback of an error would hold them, and with them their unit's place in memory.
                del values
            if nbytes == 0:
                return torch.empty(place.shape, dtype=place.dtype, device="cpu")
            return file_memory(descriptor, nbytes).view(place.dtype).as_strided(place.shape, place.stride)

    def of_bytes(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of bytes."""
        folder = self._folder
        with _unlinked(folder) as descriptor:
            _write(descriptor, values, folder)
            return file_memory(descriptor, values.nbytes)

    @property
    def _folder(self) -> Path:
        if self._given is None:
            raise ConfigError("the storage is a raw device: give offload(scratch=) a folder for copies of the weights")
        return self._given


@contextlib.contextmanager
def _unlinked(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        descriptor = _named_for_a_moment(folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _named_for_a_moment(folder: Path) -> int:
    """For file systems without O_TMPFILE."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".memascend-copy-", dir=folder)
    except OSError as error:
        raise _no_copy(folder, error) from error
    os.unlink(name)  # noqa: PTH108
    return descriptor


def _no_copy(folder: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{folder}: no room for a copy of the weights: {error.strerror}; give offload(scratch=) another folder",
        errno=error.errno,
        path=str(folder),
    )


def _write(descriptor: int, values: torch.Tensor, folder: Path) -> None:
    """Write bytes to a file, and let the page cache go behind it."""
    nbytes = values.nbytes
    for start in range(0, nbytes, _WRITE_BYTES):
        length = min(_WRITE_BYTES, nbytes - start)
        # A piece at a time is in host memory where they lie on a device.
        piece = values[start : start + length].cpu()
        part = memory_of(piece)
        at = 0
        while at < length:
            try:
                at += os.pwrite(descriptor, part[at:], start + at)
            except OSError as error:
                # The traceback would hold the values, and with them their place in memory.
                del values, piece, part
                raise _no_copy(folder, error) from error
    if nbytes > _WRITE_BYTES:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
