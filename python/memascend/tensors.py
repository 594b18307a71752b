"""Looks at tensors as memory: flat, as bytes, bit for bit; sums their squares without rounding."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from memascend import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def strides_of(shape: Sequence[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """The strides of a tensor without gaps: row-major, or with `order`, from the largest stride to the smallest."""
    strides, step = [1] * len(shape), 1
    for dimension in reversed(list(range(len(shape)) if order is None else order)):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps in the order in which they lie, on its memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The tensor with these strides, which have no gaps: itself where it has them, else a copy."""
    if tensor.stride() == strides or tensor.numel() <= 1:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without gaps as bytes, in the order in which they lie."""
    return flat(tensor).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU without gaps; without numpy, which need not be installed."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one kind and shape, on one device, hold the same bits."""
    left, right = (tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


# An int counts units of 2^-298, the square of the smallest fp32. A float was rounded already, or is infinity or NaN.
Squares = int | float


_UNITS = 1 << 298


def total(squares: Iterable[Squares]) -> Squares:
    """The sum of all squares. Rounded ones are added in the order given."""
    whole, rest, exact = 0, 0.0, True
    for one in squares:
        if isinstance(one, int):
            whole += one
        else:
            rest, exact = rest + one, False
    return whole if exact else rounded(whole) + rest


def rounded(squares: Squares) -> float:
    """The nearest float."""
    # Python's division of two integers rounds once.
    return squares / _UNITS if isinstance(squares, int) else squares


# DLPack's numbers of devices. torch calls both kinds of GPU "cuda".
_KINDS = {"cpu": 1, "cuda": 10 if torch.version.hip else 2}


def lent(address: int, nbytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """Bytes of a device as a uint8 tensor; `owner` is kept alive until the last view of it is gone.

    The caller orders streams; this function waits for nothing.
    """
    index = 0 if device.index is None else device.index
    tensor: torch.Tensor = from_dlpack(_core.dlpack(address, nbytes, _KINDS[device.type], index, owner))
    return tensor
