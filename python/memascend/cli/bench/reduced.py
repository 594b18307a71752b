"""Measures kernels on optimizer state of 16 and 8 bits: ours, torch's and bitsandbytes'."""

from __future__ import annotations

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
            peers |= _bitsandbytes(master, grad, numbers)
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


def _bitsandbytes(master: torch.Tensor, grad: torch.Tensor, numbers: dict[str, Any]) -> dict[str, Call]:
    import torch

    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError:
        return {}
    parameter = torch.nn.Parameter(master.clone())
    parameter.grad = grad.float()
    return {"bitsandbytes' AdamW8bit": AdamW8bit([parameter], **numbers).step}
