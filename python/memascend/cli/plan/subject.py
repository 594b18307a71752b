"""Defines the inputs of a plan: `Subject` (model and optimizer), `Batch`, and `Trace` (operations and memory).

This module needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.plan.decision import Decision
    from memascend.plan.options import Options


# How a loss is computed. "full": from the logits of all tokens at once, which is the default of transformers' models.
# "chunked": from the logits of some tokens and words at a time, as TRL's fused LM head and Liger do. "score": from one
# number for each sequence, as reward models do.
Loss = Literal["full", "chunked", "score"]
# The size of a tile in TRL's chunked loss. A tile is the tokens and the words whose logits are in memory at once.
_TILE_TOKENS, _TILE_WORDS = 4096, 32_768
# The number of float32 copies of a tile that torch makes in the backward on a CPU. A GPU kernel makes no copies.
_HOST_COPIES = 7


def tile_bytes(tokens: int, words: int, width: int, *, on_host: bool, element: int = 2) -> int:
    """Returns the bytes that a chunked loss allocates, without the bytes of gradients.

    `words` is the size of the vocabulary. `width` is the number of elements of a hidden state, and `element` is the
    number of bytes of one such element.
    """
    rows, columns = min(tokens, _TILE_TOKENS), min(words, _TILE_WORDS)
    buffer = element * rows * _TILE_WORDS
    if not on_host:
        return buffer
    # On a CPU, torch also allocates the larger of two amounts, both in float32. The first amount is all copies of a
    # tile's logits. The second amount is the tile's logits, plus the tile's hidden states or the LM head's weights for
    # the tile, whichever are larger.
    return buffer + 4 * max(_HOST_COPIES * rows * columns, rows * columns + width * max(rows, columns))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch, and how the loss of the micro-batch is computed."""

    sequences: int
    length: int  # tokens of each sequence
    loss: Loss = "full"
    on_host: bool = False  # True if the CPU computes the micro-batch

    @property
    def tokens(self) -> int:
        """The number of tokens in all sequences."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Trace:
    """The operations of one forward and backward, and the memory that torch takes, without parameters."""

    tokens: int  # the number of tokens in the micro-batch
    # The floating-point operations of matrix products and attention in the forward. The masked half of causal attention
    # does not count.
    forward: int
    backward: int  # the operations of the backward, including the forward that activation checkpointing repeats
    peak: int  # the largest number of bytes that torch takes; each gradient is freed when the gradient is complete
    held: dict[str, int]  # the bytes at the peak by kind: logits, gradients, activations
    kept: int  # bytes of activations, without logits, that the forward keeps for the backward
    recomputes: bool  # True if activation checkpointing is on
    loss: Loss = "full"  # the loss that was traced: "full" instead of "chunked" if the model has no suitable LM head


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the optimizer of a plan."""

    by: str  # a phrase for the user that says where the model's config is from
    parameters: int  # the number of elements of all parameters
    trained: int  # the number of elements of all trained parameters
    # Bytes of the gradients of tied parameters. If micro-batches are computed by layer, each micro-batch keeps separate
    # gradients of the tied parameters until the last use of the tied parameters.
    tied_bytes: int
    dtype: str  # the dtype of the first parameter
    longest: int | None  # the number of tokens in the longest possible sequence; None: not known
    # The name of the model's method that turns on activation checkpointing. None: it is not supported.
    checkpointing: str | None
    # The functions `plan` and `trace` cache their results, because a command calls them often with the same arguments.
    # `plan` takes the options of `offload()` and the number of ranks, and returns the plan of one rank.
    plan: Callable[[Options, int], Decision]
    trace: Callable[[Batch], Trace | str]  # returns the reason as text if the model cannot be traced
    module: nn.Module | None = None  # the model on the device "meta"; None for a built-in shape
