"""Measures kernels on optimizer state of 16 and 8 bits: ours, and those of torch, bitsandbytes and torchao."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    Call = Callable[[], object]

FORMS = ("compact bf16", "compact 8bit")
_STEP_NUMBER = 10


def reduced_calls(numel: int, numbers: dict[str, Any]) -> Iterator[tuple[str, Call, dict[str, Call]]]:
    """Of each format: its name, our call, and the peers'. Each has state of its own, with moments of all sizes."""
    import torch

    from memascend import engine, kernels

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
        state = engine.encode_state(kept, given, form)

        def ours(kept: torch.Tensor = kept, state: dict[str, torch.Tensor] = state, form: str = form) -> None:
            kernels.adamw_reduced(kept, state, grad, form=form, step=_STEP_NUMBER, **numbers)

        peers: dict[str, Call] = {"adamw with fp32 moments": single, "AdamW(fused=True) and casts": fused}
        if form.endswith("8bit"):
            peers |= _eight_bits(master, grad, numbers)
        yield f"adamw {form}", ours, peers


def _fused(wide: list[torch.Tensor], grad: torch.Tensor, out: torch.Tensor, numbers: dict[str, Any]) -> Call:
    """Torch's fused update of a float32 master, which `out` is rounded from."""
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
    """The peers with moments of 8 bits that are installed. They update float32 parameters from float32 gradients."""
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
        # The first makes the state; torchao's is compiled then, which takes half a minute.
        optimizer.step()
        peers[f"{package}'s AdamW8bit"] = optimizer.step
    return peers
