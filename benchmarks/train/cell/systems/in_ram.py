"""Trains without memascend, in the device's memory: fp32 master weights, torch's fused AdamW."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.workload import LEARNING_RATE, LOSS_SCALE_POWER, Workload, made

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from benchmarks.train.cell.systems import System

__all__ = ["InRam", "begin", "one_after_the_other", "ready"]


def ready() -> list[ModuleType]:
    """Imports the libraries that a user of this system imports; returns them."""
    import torch
    import transformers

    # transformers imports a model's code at the first access to its class.
    transformers.Qwen2ForCausalLM  # noqa: B018
    return [torch, transformers]


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> InRam:  # noqa: ARG001 - part of every `begin`
    """Makes the model and its master weights."""
    return InRam(
        made(work).to(work.device), clip=work.clip, scale=2.0**LOSS_SCALE_POWER if work.dtype == "float16" else None
    )


def one_after_the_other(system: System, batches: list[Any]) -> Any:
    """Computes one micro-batch after the other: its forward, and then its backward. Returns the mean of the losses."""
    total = 0.0
    for batch in batches:
        loss = system.forward(batch) / len(batches)
        system.backward(loss)
        total = total + loss.detach()
    return total


class InRam:
    """Trains a model with fp32 master weights, all in memory."""

    def __init__(self, model: Any, *, clip: float | None = None, scale: float | None = None) -> None:
        import torch

        self.model, self.clip, self.scale = model, clip, scale
        self.grad_norm: float | None = None  # the norm before the last clipping; None before the first
        self.parameters = list(model.parameters())
        self.masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=LEARNING_RATE, fused=True)

    def forward(self, tokens: Any) -> Any:
        """Returns the loss of a batch."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def backward(self, loss: Any) -> None:
        """Computes the gradients of the loss. If there is a loss scale, multiplies the loss by it first."""
        (loss if self.scale is None else loss * self.scale).backward()

    def accumulate(self, batches: list[Any]) -> Any:
        """Computes the gradients of all micro-batches of a step; returns their mean loss."""
        return one_after_the_other(self, batches)

    def update(self) -> None:
        """Updates the master weights and the model, and drops the gradients.

        If there is a loss scale and gradients overflowed, skips the update and halves the loss scale.
        """
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
        """True if all gradients are finite. Without a loss scale, does not look at them and returns True.

        Also divides the gradients by the loss scale, and halves the loss scale after an overflow.
        """
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
        """Returns None, because this system does not count its bytes."""
        return None

    def end(self) -> dict[str, Any]:
        """Returns an empty dict, because this system adds no entries to the answer."""
        return {}
