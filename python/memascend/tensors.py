"""Looks at tensors as memory: flat, as bytes, for Python's own calls; compares them bit for bit."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

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
