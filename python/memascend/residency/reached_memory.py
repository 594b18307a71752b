"""Holds the real memory of one reached weight, and sees by checksums what is written there."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from memascend.engine import checksum_of
from memascend.residency.unit_slot import alive
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from memascend.residency.placeholder import Place

# What torch calls a tensor with elements that share bytes, as expand() makes it.
_OVERLAPS = 1


class Reached:
    """Real memory of one parameter."""

    __slots__ = ("committed", "in_state_dict", "old", "place", "seen", "settled", "stand_in", "values")

    def __init__(self, place: Place, values: torch.Tensor) -> None:
        self.place = place
        self.hold(values)
        # Of the values on storage, and of those that the model computes with.
        self.committed = self.seen = self.checksum()
        # Nobody else has the memory, so that it stays as it was seen.
        self.settled = False
        # Storage has other values by now, which are to come here.
        self.old = False
        # A state dict has this memory, which later steps do not change.
        self.in_state_dict = False

    def hold(self, values: torch.Tensor) -> None:
        """Have this memory from now on."""
        place = self.place
        with torch.inference_mode(mode=False), torch.no_grad():
            # No view of another tensor, which would count as somebody who has the memory.
            self.values = torch.empty(0, dtype=place.dtype, device=values.device).set_(
                values.untyped_storage(), values.storage_offset(), tuple(values.shape), values.stride()
            )
            # In the place of the parameter where a function is called on it.
            self.stand_in = torch.Tensor._make_subclass(place.kind, self.values, False)  # noqa: SLF001

    def checksum(self) -> str:
        """Of what it holds now."""
        return checksum(self.values, self.place)

    def renew(self, values: torch.Tensor) -> None:
        """Have the values that are on storage now, as an update in memory would have written them here."""
        with torch.inference_mode(mode=False), torch.no_grad():
            # Views count it as a write, and so does the parameter: a graph that saved one is not walked any more.
            self.stand_in.copy_(values)
            torch.autograd.graph.increment_version(self.place.parameter)
        self.place.note_version()
        self.committed = self.seen = self.checksum()
        self.settled = self.old = False

    @property
    def changed(self) -> bool:
        """Whether it is not what is on storage, as far as was seen."""
        return self.seen != self.committed

    @property
    def is_shared(self) -> bool:
        """Whether anybody else has the memory."""
        return _uses(self.values) != _uses_of_two()

    @property
    def is_writable(self) -> bool:
        """Whether each element has bytes of its own; torch's optimizers refuse to update any other tensor."""
        return bool(torch._debug_has_internal_overlap(self.values) != _OVERLAPS)  # noqa: SLF001


def _uses(values: torch.Tensor) -> tuple[int, int]:
    """How often the memory of a tensor is referred to, from torch and from Python."""
    storage = values.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)  # noqa: SLF001


@functools.cache
def _uses_of_two() -> tuple[int, int]:
    """As often as two tensors refer to theirs, which nobody else has; it depends on torch's version."""
    with torch.inference_mode(mode=False), torch.no_grad():
        memory = torch.zeros(1, device="cpu")
        other = torch.Tensor._make_subclass(torch.nn.Parameter, memory, False)  # noqa: SLF001
        uses = _uses(memory)
        del other
        return uses


class Outlived:
    """Memory of a state dict that somebody kept, and that is no parameter's any more."""

    __slots__ = ("_shape", "_weak", "place", "seen")

    def __init__(self, place: Place, values: torch.Tensor) -> None:
        self.place = place
        self.seen = checksum(values, place)
        self._weak = StorageWeakRef(values.untyped_storage())
        self._shape = (values.dtype, values.storage_offset(), tuple(values.shape), values.stride())

    def checksum(self) -> str | None:
        """Of what it holds now; None where it is gone."""
        storage = alive(self._weak)
        if storage is None:
            return None
        dtype, offset, shape, stride = self._shape
        with torch.inference_mode(mode=False), torch.no_grad():
            values = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
            return checksum(values, self.place)


def laid_out(values: torch.Tensor, place: Place) -> torch.Tensor:
    """Values with the strides that they have on storage."""
    if tuple(values.stride()) == place.stride or values.numel() <= 1:
        return values
    return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=values.device).copy_(values)


def checksum(values: torch.Tensor, place: Place) -> str:
    """Of a parameter's values, wherever they are and however they are laid out."""
    with torch.no_grad():
        return checksum_of(bytes_of(laid_out(values, place)).cpu())


def span(values: torch.Tensor) -> tuple[int, int]:
    """The addresses between which a tensor lies."""
    if not values.numel():
        return (0, 0)
    last = sum((size - 1) * stride for size, stride in zip(values.shape, values.stride(), strict=True))
    return values.data_ptr(), values.data_ptr() + (last + 1) * values.element_size()
