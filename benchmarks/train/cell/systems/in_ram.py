"""Trains in the memory of what computes, as users do without memascend: float32 masters under torch's fused AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.workload import LEARNING_RATE, LOSS_SCALE_POWER, Workload, made

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from benchmarks.train.cell.systems import System

__all__ = ["InRam", "begin", "one_after_the_other", "ready"]


def ready() -> list[ModuleType]:
    """Import what a user imports."""
    import torch
    import transformers

    # transformers loads a model's code when it is first asked for it.
    transformers.Qwen2ForCausalLM  # noqa: B018
    return [torch, transformers]


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> InRam:  # noqa: ARG001 - as every system is begun
    """The model beside its masters."""
    return InRam(
        made(work).to(work.device), clip=work.clip, scale=2.0**LOSS_SCALE_POWER if work.dtype == "float16" else None
    )


def one_after_the_other(system: System, batches: list[Any]) -> Any:
    """The usual loop over a step's micro-batches: the mean of their losses, each with its backward."""
    total = 0.0
    for batch in batches:
        loss = system.forward(batch) / len(batches)
        system.backward(loss)
        total = total + loss.detach()
    return total


class InRam:
    """Trains a 16-bit model by float32 masters, all in memory."""

    def __init__(self, model: Any, *, clip: float | None = None, scale: float | None = None) -> None:
        import torch

        self.model, self.clip, self.scale = model, clip, scale
        self.grad_norm: float | None = None  # of the last step that had a limit
        self.parameters = list(model.parameters())
        self.masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)

    def forward(self, tokens: Any) -> Any:
        """The loss of a batch."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Gradients, times the loss scale where there is one."""
        (loss if self.scale is None else loss * self.scale).backward()

    def accumulate(self, batches: list[Any]) -> Any:
        """The mean loss of the step's batches, with its gradients."""
        return one_after_the_other(self, batches)

    def update(self) -> None:
        """Through the masters; a step that overflowed is left out and halves the scale."""
        import torch

        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.grad is not None:
                    master.grad = parameter.grad.float()
                    parameter.grad = None
            if self._finite():
                if self.clip is not None:
                    self.grad_norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self.clip))
                self.adam.step()
                for parameter, master in zip(self.parameters, self.masters, strict=True):
                    parameter.copy_(master)
        self.adam.zero_grad()

    def _finite(self) -> bool:
        """Whether the step counts. The gradients have lost their scale afterwards."""
        import torch

        if self.scale is None:
            return True
        grads = [master.grad for master in self.masters if master.grad is not None]
        finite = all(bool(torch.isfinite(grad).all()) for grad in grads)
        for grad in grads:
            grad.mul_(1.0 / self.scale)
        if not finite:
            self.scale /= 2
        return finite

    def counted(self) -> int | None:
        """It keeps no account."""
        return None

    def end(self) -> dict[str, Any]:
        """Nothing to add."""
        return {}
