"""Checks a kernel's tensors before their addresses are taken."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# A dtype's position is its code in the Rust extension.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def require(name: str, tensor: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """Check that `tensor` is a dense torch tensor of one of `dtypes`, and return it.

    Raises:
        ConfigError: it is not; the message names it and says what to do.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise ConfigError(f"{name} is {_short(tensor.dtype)}: pass {' or '.join(map(_short, dtypes))}")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} has layout {tensor.layout}: pass a dense tensor, as tensor.to_dense() makes")
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and holds no values")
    if tensor.numel() and not any(_dense_in(tensor, order) for order in _FORMATS):
        raise ConfigError(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}): "
            f"pass tensor.contiguous() and copy the result back"
        )
    if tensor.is_neg():
        raise ConfigError(f"{name} is a lazily negated view: pass tensor.resolve_neg()")
    return tensor


def _dense_in(tensor: torch.Tensor, order: torch.memory_format) -> bool:
    dimensions = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(order)
    return dimensions in (None, tensor.dim()) and tensor.is_contiguous(memory_format=order)


def require_same(first: tuple[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    """Check that element i of each tensor is the same element: one device, one shape, one order of dimensions.

    Raises:
        ConfigError: one of them differs; the message names it.
    """
    name, tensor = first
    for other_name, other in others.items():
        if other.device != tensor.device:
            raise ConfigError(f"{other_name} is on {other.device} and {name} on {tensor.device}: use one device")
        if other.shape != tensor.shape:
            raise ConfigError(
                f"{other_name} has shape {tuple(other.shape)} and {name} {tuple(tensor.shape)}: they must agree"
            )
        if other.numel() and other.stride() != tensor.stride() and not _same_order(other, tensor):
            raise ConfigError(
                f"{other_name} has strides {other.stride()} and {name} {tensor.stride()}: "
                f"lay both out alike, as torch.empty_like({name}) does"
            )


def _same_order(left: torch.Tensor, right: torch.Tensor) -> bool:
    # The stride of a dimension of length one does not affect the position of any element.
    pairs = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(length == 1 or a == b for length, a, b in pairs)


def require_apart(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Check that no two tensors share a byte: a single pass would read values that it has just written.

    Raises:
        ConfigError: two of them overlap; the message names both.
    """
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in tensors if t.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ConfigError(f"{name} and {other} overlap in memory: pass tensors that share no bytes")


def factor_of(name: str, value: float) -> float:
    """`value` as a float that is finite in fp32.

    Raises:
        ConfigError: it is not a number, or not finite once rounded to fp32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is a {type(value).__name__}: pass a float")
    if not math.isfinite(value) or abs(value) > torch.finfo(torch.float32).max:
        raise ConfigError(f"{name} is {value}: pass a number that is finite in fp32")
    return float(value)


def threads_of(threads: int | None) -> int:
    """How many threads to use; None means torch's own count.

    Raises:
        ConfigError: not a positive whole number.
    """
    if threads is None:
        return torch.get_num_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"threads is {threads!r}: pass a whole number from 1, or None for torch.get_num_threads()")
    return threads


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
