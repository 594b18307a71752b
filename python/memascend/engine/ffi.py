"""Converts tensors, values and paths for the Rust extension, and checks them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

_Path = str | os.PathLike[str]


class Lent(NamedTuple):
    """A gradient that the extension cannot reach, and a function that lends it.

    Attributes:
        tensor: it, wherever it lies, without gaps in the order in which its parameter is stored.
        window: of (first byte, bytes), on the engine's thread: an address in host memory, aligned to 8, the first byte
            there, and how many, which hold what was asked for. They are left alone until the next call of any window of
            the same engine's.
        order: lets what the calling thread does with it from now on come after what made it.
    """

    tensor: torch.Tensor
    window: Callable[[int, int], tuple[int, int, int]]
    order: Callable[[], None]


def place_of(tensor: torch.Tensor | Lent) -> tuple[int, int, object]:
    """Address, bytes, and what keeps them valid; of what is lent no address, and the function that lends it."""
    if isinstance(tensor, Lent):
        return 0, tensor.tensor.nbytes, tensor.window
    return tensor.data_ptr(), tensor.nbytes, tensor.untyped_storage()


def dtype_of(tensor: torch.Tensor | Lent) -> str:
    """The type of its elements, as descriptions name it."""
    of = tensor.tensor if isinstance(tensor, Lent) else tensor
    return str(of.dtype).removeprefix("torch.")


def stored_order(entry: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...] | None:
    """In which order a tensor of an entry is stored: state of its shape lies as its values do."""
    return entry["order"] if list(shape) == entry["shape"] else None


def require_laid_out(name: str, tensor: torch.Tensor, order: Sequence[int] | None) -> None:
    """Refuse a tensor that is not on the CPU, or not without gaps in this order."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"the tensors of {name!r} must be on the CPU, not on {tensor.device}")
    require_order(name, tensor, order)


def require_order(name: str, tensor: torch.Tensor, order: Sequence[int] | None) -> None:
    """Refuse a tensor that has gaps in this order."""
    if order is None and not tensor.is_contiguous():
        raise ConfigError(f"the tensors of {name!r} must be contiguous")
    if order is not None and not (len(order) == tensor.dim() and tensor.permute(tuple(order)).is_contiguous()):
        raise ConfigError(f"the tensors of {name!r} must have their dimensions in memory in the order {list(order)}")


def require(name: str, tensor: torch.Tensor, dtype: str, shape: list[int], order: Sequence[int] | None) -> None:
    """Refuse a tensor that is not what is described."""
    require_laid_out(name, tensor, order)
    got = str(tensor.dtype).removeprefix("torch.")
    if got != dtype or list(tensor.shape) != shape:
        raise ConfigError(f"a tensor of {name!r} is {got} of shape {list(tensor.shape)}, not {dtype} of {shape}")


def json_of(value: Any) -> str | None:
    """A value as text; None stays None."""
    if value is None:
        return None
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"only JSON values can be committed: {error}") from error
