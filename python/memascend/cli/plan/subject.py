"""Defines the inputs of a plan: a model with its optimizer, a micro-batch, and its operations and memory.

The module needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from memascend.plan.decision import Decision
    from memascend.plan.options import Options


# How a loss is computed. "full": from the logits of all tokens, the default of transformers' models. "chunked": from
# the logits of some tokens and words at a time, as in TRL's fused LM head and Liger. "score": from one number for each
# sequence, as in reward models.
Loss = Literal["full", "chunked", "score"]
# A tile of TRL's chunked loss: the tokens and words whose logits are in memory at once.
_TILE_TOKENS, _TILE_WORDS = 4096, 32_768
# Float32 copies of a tile that torch's CPU operations make in the backward; a GPU kernel works in place.
_HOST_COPIES = 7


def tile_bytes(tokens: int, words: int, width: int, *, on_host: bool, element: int = 2) -> int:
    """Returns the bytes that a chunked loss allocates besides gradients.

    `words`: size of the vocabulary; `width`: elements of a hidden state; `element`: bytes of one element of it.
    """
    rows, columns = min(tokens, _TILE_TOKENS), min(words, _TILE_WORDS)
    buffer = element * rows * _TILE_WORDS
    if not on_host:
        return buffer
    # In float32, the larger of: all copies of the tile's logits; the logits with the larger factor of the product that
    # computes them (hidden states or weights of the LM head).
    return buffer + 4 * max(_HOST_COPIES * rows * columns, rows * columns + width * max(rows, columns))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch, and how its loss is computed."""

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
    """The operations and torch's memory of one forward and backward, without the memory of parameters."""

    tokens: int  # tokens of the micro-batch
    forward: int  # floating-point operations of products and attention; of causal attention, the unmasked part
    backward: int  # operations of the backward, with the forward that activation checkpointing repeats
    peak: int  # bytes of torch's own memory at its peak; a gradient is freed as soon as it is complete
    held: dict[str, int]  # the peak by kind: logits, gradients, activations
    kept: int  # bytes that the forward leaves for the backward: the memory of each further micro-batch
    recomputes: bool  # True if activation checkpointing is on
    loss: Loss = "full"  # the loss that was traced; always "full" for a model without an LM head


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The model and the optimizer of a plan."""

    by: str  # the source of the description, for readers
    parameters: int  # number of elements
    trained: int  # number of elements that are trained
    # Bytes of the gradients of tied parameters. With micro-batches by layer, each micro-batch keeps its own gradients
    # of these parameters until their last use.
    tied_bytes: int
    dtype: str  # dtype of the first parameter
    longest: int | None  # tokens of the longest sequence; None: not known
    checkpointing: str | None  # the method that turns activation checkpointing on; None: the model has none
    # `plan` and `trace` are cached: a command calls them many times with the same arguments.
    plan: Callable[[Options, int], Decision]  # options of `offload()`, number of ranks -> the plan of one rank
    trace: Callable[[Batch], Trace | str]  # returns the reason if the model cannot be traced
    module: nn.Module | None = None  # the model on "meta"; None for a built-in shape
