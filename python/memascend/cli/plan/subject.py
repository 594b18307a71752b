"""Defines what a plan reads of a model, and the operations and memory of a batch; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.plan.decision import Decision
    from memascend.plan.options import Options


@dataclass(frozen=True)
class Trace:
    """The operations and the memory of one backward, without parameters."""

    tokens: int  # of the batch
    forward: int  # floating-point operations of products and attention; of causal attention, the unmasked part
    backward: int  # likewise, with the recomputation of activation checkpointing
    peak: int  # bytes of torch's own memory at its peak; a gradient is freed as soon as it is complete
    held: dict[str, int]  # the peak by kind: logits, gradients, activations
    kept: int  # bytes that the forward leaves for the backward: the memory of each further micro-batch
    recomputes: bool  # whether activation checkpointing is on

    @property
    def flops(self) -> int:
        """Operations of forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the optimizer of a plan."""

    by: str  # the source of the description, in words
    parameters: int
    trained: int  # of them
    tied_bytes: int  # of the gradients of tied parameters: each micro-batch keeps its own until their last use
    dtype: str  # of the first parameter
    longest: int | None  # tokens of the longest sequence; None: not known
    # Without the name of the method, the model cannot recompute activations.
    checkpointing: str | None
    # Both are made once for the same arguments: a command asks for them many times.
    plan: Callable[[Options, int], Decision]  # with the options of `offload()`, of one of so many ranks
    trace: Callable[[int, int], Trace | str]  # of a batch (sequences, and the tokens of each); or why there is none
    module: nn.Module | None = None  # on "meta", where there is one
