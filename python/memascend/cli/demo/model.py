"""Defines the demonstration's model: a small language model of bytes in plain torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

_BYTES = 256
_HEAD_WIDTH = 64


class ByteModel(nn.Module):
    """A decoder: embeddings, blocks of attention and two linear layers, a head."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(_BYTES, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _BYTES, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of foretelling each byte from those before it."""
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        hidden = self.bytes(given) + self.places(torch.arange(given.shape[1]))
        for block in self.blocks:
            # Activations are the same with and without offloading, so both sides keep few.
            hidden = checkpoint(block, hidden, use_reentrant=False)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // _HEAD_WIDTH)
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows, length, width = hidden.shape
        parts = self.mix(self.norm1(hidden)).view(rows, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.join(mixed.transpose(1, 2).reshape(rows, length, width))
        wide: torch.Tensor = self.widen(self.norm2(hidden))
        narrow: torch.Tensor = self.narrow(functional.gelu(wide))
        return hidden + narrow
