"""Computes XXH3-64 checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend import _core

if TYPE_CHECKING:
    import torch


class Checksum:
    """XXH3-64 of bytes that come one after the other, as `xxhsum -H3` gives it."""

    __slots__ = ("_core",)

    def __init__(self) -> None:
        self._core = _core.Checksum()

    def update(self, tensor: torch.Tensor) -> None:
        """Take the bytes of a contiguous CPU tensor."""
        self._core.update(tensor.data_ptr(), tensor.nbytes)

    def __str__(self) -> str:
        return f"{self._core.value():016x}"


def checksum_of(tensor: torch.Tensor) -> str:
    """The checksum of the bytes of one contiguous CPU tensor, which may have none."""
    checksum = Checksum()
    if tensor.numel():
        checksum.update(tensor)
    return str(checksum)
