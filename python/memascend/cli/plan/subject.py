"""Defines what a plan reads of a model, and the operations and memory of a batch; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.plan.decision import Decision
    from memascend.plan.options import Options


# How a loss is computed. "full": from the logits of all tokens, as models of transformers do it by themselves.
# "chunked": from those of some tokens and words at a time, as TRL's fused LM head, Liger and others do it.
# "score": from one number for each sequence, as reward models do it.
Loss = Literal["full", "chunked", "score"]
# Tokens and words whose logits TRL has in memory at once.
_TILE_TOKENS, _TILE_WORDS = 4096, 32_768
# Float32 copies of them that torch's operations make in the backward, where no kernel of a GPU does it in place.
_HOST_COPIES = 7


def tile_bytes(tokens: int, words: int, width: int, *, on_host: bool, element: int = 2) -> int:
    """Bytes that a chunked loss has beside gradients; `width` is that of hidden states, `element` the bytes of one."""
    rows, columns = min(tokens, _TILE_TOKENS), min(words, _TILE_WORDS)
    buffer = element * rows * _TILE_WORDS
    if not on_host:
        return buffer
    # Logits, or the factors of a product.
    return buffer + 4 * max(_HOST_COPIES * rows * columns, rows * columns + width * max(rows, columns))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch."""

    sequences: int
    length: int  # tokens of each sequence
    loss: Loss = "full"
    on_host: bool = False  # whether the processor computes it

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.sequences * self.length


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
    loss: Loss = "full"  # a model without an LM head has no other


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
    trace: Callable[[Batch], Trace | str]  # or why there is none
    module: nn.Module | None = None  # on "meta", where there is one
