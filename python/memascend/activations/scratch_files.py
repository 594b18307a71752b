"""Allocates equal-sized places in unlinked scratch files, for data that the process reads again before it ends."""

from __future__ import annotations

import contextlib
import uuid
from typing import TYPE_CHECKING

from memascend import nvme
from memascend.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import torch

# The first file; each later one is as large as all before it, so that there are few.
_FIRST_BYTES = 64 << 20


class ScratchPlace:
    """One of the places; it is given back as a whole."""

    __slots__ = ("_volume", "offset")

    def __init__(self, volume: nvme.Volume, offset: int) -> None:
        self._volume = volume
        self.offset = offset

    @property
    def path(self) -> str:
        """The file, which has no name any more, for errors."""
        return ", ".join(self._volume.paths)

    def write(self, memory: torch.Tensor) -> nvme.Ticket:
        """Begin to write its first bytes."""
        return self._volume.write(memory, self.offset)

    def read(self, memory: torch.Tensor) -> nvme.Ticket:
        """Begin to read its first bytes."""
        return self._volume.read(memory, self.offset)


class Scratch:
    """Places in files that grow as they are needed, striped over some folders, and are gone with the process."""

    def __init__(self, folders: Sequence[Path], place_bytes: int, *, what: str) -> None:
        """Begin without a file.

        Args:
            folders: one file is made in each.
            place_bytes: the size of a place, a multiple of 4,096.
            what: what it is for, as errors say it.
        """
        self._folders = list(folders)
        self._place_bytes = place_bytes
        self._what = what
        self._volumes: list[nvme.Volume] = []
        self._free: list[ScratchPlace] = []

    @property
    def file_bytes(self) -> int:
        """Room that is taken on storage."""
        return sum(volume.size for volume in self._volumes)

    def take(self) -> ScratchPlace:
        """A place that nobody has.

        Raises:
            StorageError: the file system is full.
        """
        if not self._free:
            self._grow()
        return self._free.pop()

    def give_back(self, place: ScratchPlace) -> None:
        """Somebody else may have it; nothing is on its way there any more."""
        self._free.append(place)

    def _grow(self) -> None:
        granule = self._place_bytes * len(self._folders)
        size = -(-max(_FIRST_BYTES, self.file_bytes) // granule) * granule
        files = [folder / f".memascend-{uuid.uuid4().hex}" for folder in self._folders]
        try:
            volume = nvme.open(files, size=size, stripe=self._place_bytes if len(files) > 1 else None)
        except StorageError as error:
            raise StorageError(
                f"no room for {self._what} ({size} bytes more than the {self.file_bytes} that it has): {error}; give "
                "offload(scratch=) a folder with more",
                errno=error.errno,
                path=error.path,
            ) from error
        finally:
            for file in files:
                with contextlib.suppress(FileNotFoundError):
                    file.unlink()
        self._volumes.append(volume)
        # The first place is taken first.
        self._free += [
            ScratchPlace(volume, offset) for offset in range(size - self._place_bytes, -1, -self._place_bytes)
        ]

    def close(self) -> None:
        """Wait for what is in flight; the files are gone. Twice is fine."""
        volumes, self._volumes = self._volumes, []
        self._free.clear()
        for volume in volumes:
            volume.close()
