"""Checks the arguments of a kernel before the kernel uses the addresses of tensors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# The index of a dtype in this tuple is the dtype's code in the Rust extension.
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


def require(name: str, tensor: object, dtypes: tuple[torch.dtype, ...] = FLOATS) -> torch.Tensor:
    """Checks that `tensor` is a dense torch tensor of one of `dtypes` whose memory has its values, and returns it.

    The memory of a tensor on the meta device, or of a lazily negated view, does not have the tensor's values.

    Raises:
        ConfigError: `tensor` is not such a tensor. The message contains `name` and says what to do.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"{name} is a {type(tensor).__name__}: pass a torch.Tensor")
    if tensor.dtype not in dtypes:
        raise ConfigError(f"{name} is {_short(tensor.dtype)}: pass {' or '.join(map(_short, dtypes))}")
    if tensor.layout is not torch.strided:
        raise ConfigError(f"{name} has layout {tensor.layout}: pass a dense tensor, for example tensor.to_dense()")
    if tensor.is_meta:
        raise ConfigError(f"{name} is on the meta device and has no values: pass a tensor on CPU or CUDA")
    if tensor.numel() and not any(_dense_in(tensor, order) for order in _FORMATS):
        raise ConfigError(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous (strides {tensor.stride()}): "
            f"pass tensor.contiguous(), and if the call writes to this tensor, copy the result back"
        )
    if tensor.is_neg():
        raise ConfigError(
            f"{name} is a lazily negated view: pass tensor.resolve_neg(), and if the call writes to this tensor, copy "
            "the result back"
        )
    return tensor


def _dense_in(tensor: torch.Tensor, order: torch.memory_format) -> bool:
    dimensions = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(order)
    return dimensions in (None, tensor.dim()) and tensor.is_contiguous(memory_format=order)


def require_same(first: tuple[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    """Checks that the tensors have one device, one shape and one order of dimensions, so that their elements match.

    Raises:
        ConfigError: a tensor differs from `first`. The message names the two tensors.
    """
    name, tensor = first
    for other_name, other in others.items():
        if other.device != tensor.device:
            raise ConfigError(f"{other_name} is on {other.device}, but {name} is on {tensor.device}: use one device")
        if other.shape != tensor.shape:
            raise ConfigError(
                f"{other_name} has shape {tuple(other.shape)}, but {name} has {tuple(tensor.shape)}: use one shape"
            )
        if other.numel() and other.stride() != tensor.stride() and not _same_order(other, tensor):
            raise ConfigError(
                f"{other_name} has strides {other.stride()}, but {name} has {tensor.stride()}: use the same strides, "
                f"as torch.empty_like({name}) does"
            )


def _same_order(left: torch.Tensor, right: torch.Tensor) -> bool:
    # The stride of a dimension of length one does not affect the position of any element.
    pairs = zip(left.shape, left.stride(), right.stride(), strict=True)
    return all(length == 1 or a == b for length, a, b in pairs)


def require_apart(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checks that no two tensors share memory. Otherwise a kernel would read values that it has just written.

    Raises:
        ConfigError: two tensors overlap. The message names the two tensors.
    """
    spans = sorted(
        (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name) for name, t in tensors if t.numel()
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(spans):
        if start < end:
            raise ConfigError(f"{name} and {other} overlap in memory: pass tensors that share no memory")


def factor_of(name: str, value: float) -> float:
    """Returns `value` as a float, after checking that it is finite in fp32.

    Raises:
        ConfigError: `value` is not an int or a float, is NaN, or is outside the range of fp32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name} is a {type(value).__name__}: pass a float")
    if not abs(value) <= torch.finfo(torch.float32).max:  # also true for NaN
        raise ConfigError(f"{name} is {value}: pass a number that is finite in fp32")
    return float(value)


def threads_of(threads: int | None) -> int:
    """Returns the number of threads to use: `threads`, or `torch.get_num_threads()` if `threads` is None.

    Raises:
        ConfigError: `threads` is not a positive integer.
    """
    if threads is None:
        return torch.get_num_threads()
    if isinstance(threads, bool) or not isinstance(threads, int) or threads < 1:
        raise ConfigError(f"threads is {threads!r}: pass a whole number from 1, or None for torch.get_num_threads()")
    return threads


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
