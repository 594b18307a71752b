"""Runs memascend's AdamW on optimizer state with 16 or 8 bits. Prepares calls of this AdamW and of its peers."""

from __future__ import annotations

import importlib
import tempfile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    Call = Callable[[], object]

# The Rust extension identifies the dtype of a gradient by its index in this tuple.
_FLOATS = ("float32", "bfloat16", "float16")
FORMS = ("compact bf16", "compact 8bit")
_STEP_NUMBER = 10


def adamw_reduced(
    values: torch.Tensor,
    state: Mapping[str, torch.Tensor],
    grad: torch.Tensor,
    *,
    form: str,
    step: int,
    name: str = "",
    threads: int | None = None,
    **numbers: Any,
) -> None:
    """Makes one AdamW step in place on contiguous tensors, with the engine's arithmetic.

    Args:
        values: the values of the parameter, in its dtype.
        state: the state tensors, as `encoded` returns them.
        grad: the gradient.
        form: a format of the store, such as "compact 8bit".
        step: the number of this update, counted from 1.
        name: the parameter's name. It seeds the random numbers of stochastic rounding.
        threads: the number of threads; None means `torch.get_num_threads()`.
        numbers: `lr`, `betas`, `eps` and `weight_decay`.
    """
    import torch

    from memascend import _core

    of_values, of_grad = (str(tensor.dtype).removeprefix("torch.") for tensor in (values, grad))
    described = _core.store_state_in(of_values, list(values.shape), form, False)
    options = [numbers[option] for option in ("lr", "betas", "eps", "weight_decay")]
    _core.state_update(
        form, of_values, False, values.data_ptr(), [state[of].data_ptr() for of, _, _ in described],
        (grad.data_ptr(), _FLOATS.index(of_grad)), (*options, True, step, 1.0, False, 0), name, 0, values.numel(),
        threads or torch.get_num_threads(),
    )  # fmt: skip


def encoded(values: torch.Tensor, given: Mapping[str, torch.Tensor], form: str) -> dict[str, torch.Tensor]:
    """Returns the state tensors that `Engine.fill(..., values, given)` writes for a record of the format `form`."""
    from memascend import engine

    state = engine.state_tensors(values, form, "momentum" if "momentum_buffer" in given else "adam")
    record = engine.Record(name="it", values=values, state=state, format=form, order=engine.order_of(values))
    with tempfile.TemporaryDirectory() as folder, engine.Store.create(folder, [record]) as store:
        with engine.Engine(store) as filling:
            filling.fill("it", values, given)
            filling.commit(0)
        return store.read("it")[1]


def reduced_calls(numel: int, numbers: dict[str, Any]) -> Iterator[tuple[str, Call, dict[str, Call]]]:
    """Yields for each format: its name, memascend's call, and the calls of the peers by name.

    Each call updates its own copy of the state.
    """
    import torch

    from memascend import kernels

    master, first = torch.randn(numel), torch.randn(numel) * 1e-3
    second, grad, values = first.square() * torch.rand(numel), first.bfloat16(), master.bfloat16()
    wide = [tensor.clone() for tensor in (master, first, second)]
    out = values.clone()

    def single() -> None:
        kernels.adamw(wide[0], grad, wide[1], wide[2], out, step=_STEP_NUMBER, **numbers)

    fused = _fused(wide, grad, out, numbers)
    for form in FORMS:
        kept = values.clone()
        given = {"master": master, "exp_avg": first, "exp_avg_sq": second}
        state = encoded(kept, given, form)

        def ours(kept: torch.Tensor = kept, state: dict[str, torch.Tensor] = state, form: str = form) -> None:
            adamw_reduced(kept, state, grad, form=form, step=_STEP_NUMBER, **numbers)

        peers: dict[str, Call] = {"adamw with fp32 moments": single, "AdamW(fused=True) and casts": fused}
        if form.endswith("8bit"):
            peers |= _eight_bits(master, grad, numbers)
        yield f"adamw {form}", ours, peers


def _fused(wide: list[torch.Tensor], grad: torch.Tensor, out: torch.Tensor, numbers: dict[str, Any]) -> Call:
    """Returns a call that runs torch's fused AdamW on a float32 master weight.

    The call first casts `grad` to float32, and finally rounds the master weight into `out`.
    """
    import torch

    parameter = torch.nn.Parameter(wide[0].clone())
    parameter.grad = grad.float()
    optimizer = torch.optim.AdamW([parameter], fused=True, **numbers)
    moments = {"exp_avg": wide[1].clone(), "exp_avg_sq": wide[2].clone()}
    optimizer.state[parameter] = {"step": torch.tensor(float(_STEP_NUMBER)), **moments}

    def both() -> None:
        parameter.grad.copy_(grad)  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            out.copy_(parameter)

    return both


def _eight_bits(master: torch.Tensor, grad: torch.Tensor, numbers: dict[str, Any]) -> dict[str, Call]:
    """Returns calls that make a step of AdamW with 8-bit moments on float32 parameters.

    There is one call for bitsandbytes and one for torchao, if they are installed.
    """
    import torch

    peers: dict[str, Call] = {}
    for package in ("bitsandbytes", "torchao"):
        try:
            optimizers = importlib.import_module(f"{package}.optim")
        except ImportError:
            continue
        parameter = torch.nn.Parameter(master.clone())
        parameter.grad = grad.float()
        optimizer = optimizers.AdamW8bit([parameter], **numbers)
        # The first step is not measured. It creates the state. torchao also compiles its step here, which takes half a
        # minute.
        optimizer.step()
        peers[f"{package}'s AdamW8bit"] = optimizer.step
    return peers
