"""Splits float32 masters into the bfloat16 weight, which is the upper half, and the remaining bits.

Lossless: 10 bytes of state for a parameter instead of 12, and bit for bit the same training. How a master is put
together stands in `docs/store-format.md`; the sign of a compact "exp_avg_sq" says where the value was rounded up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend import _core
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

# The state tensors of a compact entry: int16, float32, float32.
NAMES = ("rest", "exp_avg", "exp_avg_sq")
_ADAM = ("master", "exp_avg", "exp_avg_sq")


def is_compact(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> bool:
    """Whether this is a compact entry: bfloat16 values with an int16 "rest" and float32 moments, all of one shape."""
    import torch

    wanted = dict(zip(NAMES, (torch.int16, torch.float32, torch.float32), strict=True))
    return (
        values.dtype == torch.bfloat16
        and set(state) == set(NAMES)
        and all(state[name].dtype == dtype and state[name].shape == values.shape for name, dtype in wanted.items())
    )


def master_of(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adam's state as torch knows it, from an entry of any layout: "master", "exp_avg" and "exp_avg_sq", float32.

    Of a compact entry the master is put together and the signs of the second moment are cleared, in new tensors; of
    another one the tensors are what was given, float32 values being their own master.

    Raises:
        ConfigError: the state is not Adam's.
    """
    import torch

    if not is_compact(values, state):
        moments = {name: state[name] for name in _ADAM[1:] if name in state}
        master = state.get("master", values)
        if len(moments) != len(_ADAM[1:]) or master.dtype != torch.float32:
            raise ConfigError(f"state of {list(state)} beside values of {values.dtype} is not Adam's: it has no master")
        return {"master": master, **moments}
    order = order_of_strides(values)
    kept, rest = rows(values, order), rows(state["rest"], order)
    exp_avg_sq = rows(state["exp_avg_sq"], order).clone()
    master = torch.empty(kept.shape, dtype=torch.float32, device=values.device)
    _core.kernel_join_master(
        kept.data_ptr(),
        rest.data_ptr(),
        exp_avg_sq.data_ptr(),
        master.data_ptr(),
        kept.numel(),
        torch.get_num_threads(),
    )
    return {
        "master": back(master, order),
        "exp_avg": state["exp_avg"].clone(),
        "exp_avg_sq": back(exp_avg_sq, order),
    }


def compact_of(values: torch.Tensor, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The compact state of a bfloat16 parameter, from "master", "exp_avg" and "exp_avg_sq": what `master_of` undoes.

    A moment that is missing is zeros, and a missing master is the values in float32. A state that is compact already is
    given back as it is.

    Raises:
        ConfigError: the master, rounded to bfloat16, is not the values; a second moment is negative; a tensor does not
            fit.
    """
    import torch

    if is_compact(values, state):
        return dict(state)
    if values.dtype != torch.bfloat16 or not set(state) <= set(_ADAM):
        raise ConfigError(f"state of {list(state)} beside values of {values.dtype} is not that of a bfloat16 parameter")
    for name, tensor in state.items():
        if tensor.dtype != torch.float32 or tensor.shape != values.shape or tensor.device != values.device:
            raise ConfigError(
                f"{name!r} is {tensor.dtype} of shape {list(tensor.shape)} on {tensor.device}, not torch.float32 of "
                f"{list(values.shape)} on {values.device}"
            )
    order = order_of_strides(values)
    kept = rows(values, order)
    zeros = torch.zeros(kept.shape, dtype=torch.float32, device=values.device)
    exp_avg_sq = rows(state["exp_avg_sq"], order).clone() if "exp_avg_sq" in state else zeros.clone()
    rest = torch.zeros(kept.shape, dtype=torch.int16, device=values.device)
    if values.device.type != "meta":
        if bool((exp_avg_sq < 0).any()):
            raise ConfigError("a second moment is negative: exp_avg_sq is a mean of squares")
        exp_avg_sq.abs_()
        if "master" in state:
            _split(rows(state["master"], order), kept, rest, exp_avg_sq)
    return {
        "rest": back(rest, order),
        "exp_avg": state["exp_avg"] if "exp_avg" in state else back(zeros, order),
        "exp_avg_sq": back(exp_avg_sq, order),
    }


def _split(master: torch.Tensor, values: torch.Tensor, rest: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
    import torch

    rounded = torch.empty_like(values)
    _core.kernel_split_master(
        master.data_ptr(),
        rounded.data_ptr(),
        rest.data_ptr(),
        exp_avg_sq.data_ptr(),
        values.numel(),
        torch.get_num_threads(),
    )
    differ = (rounded.view(torch.int16) != values.view(torch.int16)) & ~(rounded.isnan() & values.isnan())
    if bool(differ.any()):
        raise ConfigError(
            f"{int(differ.sum())} of {values.numel()} values are not their master rounded to bfloat16; "
            "give master.bfloat16() as values, or no master"
        )


def order_of_strides(values: torch.Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest: what the kernels see is memory in a row."""
    strides = values.stride()
    return sorted(range(values.dim()), key=lambda dim: -strides[dim])


def rows(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Elements in the order of memory; a copy where they are not."""
    return tensor.permute(order).contiguous()


def back(tensor: torch.Tensor, order: list[int]) -> torch.Tensor:
    """What `rows` undoes."""
    return tensor.permute([order.index(dim) for dim in range(len(order))])
