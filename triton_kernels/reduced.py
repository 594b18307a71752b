"""Computes one step of AdamW or Adam on small state: moments of 16 or 8 bits, a compact master or none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memascend import _core
from memascend.errors import ConfigError

from .arguments import FLOATS, require, require_apart, require_same, threads_of
from .scalars import checked_scalars

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["adamw_reduced"]

_BLOCK = 256
_SEEDS = 1 << 64


def adamw_reduced(
    values: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    *,
    form: str,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool = True,
    grad_scale: float = 1.0,
    maximize: bool = False,
    seed: int = 0,
    name: str = "",
    first: int = 0,
    threads: int | None = None,
) -> None:
    """One step in place, on the CPU; bit-identical for any number of threads, instruction set and division into parts.

    With moments of 8 bits the results are bit-identical to `bitsandbytes.optim.AdamW8bit` on a CPU, on float32 values
    or a compact master. One exception: torch sometimes rounds the square root there incorrectly.

    Args:
        values: the parameter, contiguous, in the dtype of the format.
        state: the tensors of `memascend.engine.state_tensors(values, form)`, by name, contiguous.
        grad: the gradient, fp32, bf16 or fp16; only read.
        form: a format of the store, such as "compact 8bit"; see `memascend.engine.FORMATS`.
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled, or with `decoupled=False` the weight of the parameter in the gradient (L2).
        step: the number of this update, which counts from 1.
        decoupled: True for AdamW, False for Adam.
        grad_scale: the factor that multiplies the gradient, in fp32.
        maximize: ascend instead of descend.
        seed: 0 to 2**64 - 1. Stochastic rounding draws from it, `name`, `step` and the element's index.
        name: of the parameter.
        first: the index in the whole parameter of the first element of `values`, a multiple of 256.
        threads: None means `torch.get_num_threads()`.

    Raises:
        ConfigError: a tensor or a number is wrong; the message says which. Nothing has been changed.
    """
    checked_scalars(
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step, grad_scale=grad_scale, maximize=maximize,
        amsgrad=False, decoupled=decoupled,
    )  # fmt: skip
    if not 0 <= seed < _SEEDS or first < 0 or first % _BLOCK:
        raise ConfigError(
            f"seed is {seed} and first {first}: pass a seed below 2**64, and a first that is a multiple of 256"
        )
    tensors = {"values": require("values", values), "grad": require("grad", grad)}
    require_same(("values", values), tensors)
    if values.device.type != "cpu":
        raise ConfigError(f"values are on {values.device}: state of few bytes is updated on the CPU")
    of_values = str(values.dtype).removeprefix("torch.")
    described = _core.store_state_in(of_values, list(values.shape), form, False)
    if sorted(state) != sorted(of for of, _, _ in described):
        raise ConfigError(f"the state in the format {form!r} is {[of for of, _, _ in described]}, not {list(state)}")
    for of, dtype, shape in described:
        tensor = require(of, state[of], (getattr(torch, dtype),))
        if list(tensor.shape) != shape or not tensor.is_contiguous() or tensor.device != values.device:
            raise ConfigError(f"{of} has shape {list(tensor.shape)}, not {shape}, or is not contiguous on the CPU")
    require_apart([*tensors.items(), *state.items()])
    if not values.is_contiguous():
        raise ConfigError("values are not contiguous: pass values.contiguous() and copy the result back")
    numbers = (lr, betas, eps, weight_decay, decoupled, step, grad_scale, maximize, seed)
    _core.state_update(
        form, of_values, False, values.data_ptr(), [state[of].data_ptr() for of, _, _ in described],
        (grad.data_ptr(), FLOATS.index(grad.dtype)), numbers, name, first, values.numel(), threads_of(threads),
    )  # fmt: skip
    torch.autograd.graph.increment_version([values, *state.values()])
