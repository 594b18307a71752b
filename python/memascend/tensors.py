"""Views tensors as flat memory and bytes, compares them bit by bit, and sums squares without rounding."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.dlpack import from_dlpack

from memascend import _core

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def strides_of(shape: Sequence[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Returns the strides of a tensor without gaps.

    `order` lists the dimensions from the largest stride to the smallest; None: row-major.
    """
    strides, step = [1] * len(shape), 1
    for dimension in reversed(list(range(len(shape)) if order is None else order)):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-dimensional view of a tensor, in the order of addresses. The tensor must not have gaps."""
    return tensor.as_strided((tensor.numel(),), (1,))


def laid_out(tensor: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """Returns `tensor` if it has `strides` or at most one element, else a copy with `strides`, which leave no gaps."""
    if tensor.stride() == strides or tensor.numel() <= 1:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a uint8 view of a tensor's bytes, in the order of addresses. The tensor must not have gaps."""
    return flat(tensor).view(torch.uint8)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Returns the memory of a CPU tensor without gaps as a writable buffer; unlike `Tensor.numpy()`, needs no numpy."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors have the same bits; both must have the same dtype, shape and device."""
    left, right = (tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)


# A sum of squares. An int is exact: it counts multiples of 2^-298, the square of the smallest positive fp32 number. A
# float was rounded, or is infinity or NaN.
Squares = int | float


_UNITS = 1 << 298


def total(squares: Iterable[Squares]) -> Squares:
    """Sums `squares`: exactly if all are ints. Otherwise adds the floats in order, and returns a float."""
    whole, rest, exact = 0, 0.0, True
    for one in squares:
        if isinstance(one, int):
            whole += one
        else:
            rest, exact = rest + one, False
    return whole if exact else rounded(whole) + rest


def rounded(squares: Squares) -> float:
    """Returns `squares` as the nearest float."""
    # Python's division of two ints rounds once.
    return squares / _UNITS if isinstance(squares, int) else squares


# DLPack's numbers of device types. torch calls ROCm's GPUs "cuda", too, but DLPack has different numbers for CUDA and
# ROCm.
_KINDS = {"cpu": 1, "cuda": 10 if torch.version.hip else 2}


def lent(address: int, nbytes: int, device: torch.device, owner: Any) -> torch.Tensor:
    """Wraps `nbytes` of a device's memory at `address` in a uint8 tensor.

    The tensor and its views keep `owner` alive. The function does not wait for CUDA streams: the caller must
    synchronise the streams.
    """
    index = 0 if device.index is None else device.index
    tensor: torch.Tensor = from_dlpack(_core.dlpack(address, nbytes, _KINDS[device.type], index, owner))
    return tensor
