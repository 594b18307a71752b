"""Defines what a plan reads of a model, and the operations and memory of a batch; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.plan.cost import Network
    from memascend.plan.options import Options
    from memascend.plan.table import Plan


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


def grown(one: Trace, two: Trace, times: int) -> Trace:
    """The trace of a larger batch: `one`, and `times` the difference to `two`."""

    def line(first: int, second: int) -> int:
        return first + times * (second - first)

    names = ("tokens", "forward", "backward", "peak", "kept")
    figures: dict[str, Any] = {name: line(getattr(one, name), getattr(two, name)) for name in names}
    held = {kind: line(nbytes, two.held[kind]) for kind, nbytes in one.held.items()}
    return replace(one, held=held, **figures)


@dataclass(frozen=True)
class Traces:
    """The traces of batches of one model and one length. Each sequence adds the same, so two are made at most."""

    trace: Callable[[int, int], Trace | str]  # of a number of sequences, and the tokens of each
    length: int  # tokens of each sequence

    def of(self, batch: int) -> Trace | str:
        """The trace of a number of sequences; where there is none, the reason."""
        if batch == 1 or isinstance(self._one, str):
            return self._one
        return self._two if isinstance(self._two, str) else grown(self._one, self._two, batch - 1)

    @cached_property
    def _one(self) -> Trace | str:
        return self.trace(1, self.length)

    @cached_property
    def _two(self) -> Trace | str:
        return self.trace(2, self.length)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What `offload()` would decide."""

    plan: Plan
    state_bytes: int  # of the same optimizer in memory
    network: Network | None = None  # bytes that one of several ranks sends and receives


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the optimizer of a plan."""

    by: str  # the source of the description, in words
    parameters: int
    trained: int  # of them
    nbytes: int  # of their values
    gradient_bytes: int  # of the trained ones' gradients
    tied_bytes: int  # of these, the gradients of tied parameters: each micro-batch keeps its own until their last use
    dtype: str  # of the first parameter
    longest: int | None  # tokens of the longest sequence; None: not known
    # Without the name of the method, the model cannot recompute activations.
    checkpointing: str | None
    # With the options of `offload()`, of one of so many ranks. Made once for each: a command asks for it many times.
    plan: Callable[[Options, int], Planned]
    trace: Callable[[int, int], Trace | str]  # of a batch: sequences, and the tokens of each
    module: nn.Module | None = None  # on "meta", where there is one
