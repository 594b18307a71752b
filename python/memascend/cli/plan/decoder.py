"""A Llama or Qwen2 in plain torch, on "meta" alone, which is traced without transformers.

Names, shapes and operations are those of transformers' models, so that units, memory and operations are the same.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping

_EPSILON = 1e-5


class _Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _EPSILON)
        return self.weight * wide.to(hidden.dtype)


def _rotated(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = values.chunk(2, dim=-1)
    return values * cos + torch.cat((-second, first), dim=-1) * sin


class _Attention(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        width, bias = config.hidden_size, config.model_type == "qwen2"
        self.head = width // config.num_attention_heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            project(hidden).view(*hidden.shape[:-1], -1, self.head).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        # As a CPU attends: on "meta", torch would choose the attention that keeps a matrix of tokens by tokens.
        found, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)  # noqa: SLF001
        projected: torch.Tensor = self.o_proj(found.transpose(1, 2).reshape(hidden.shape))
        return projected


class _FeedForward(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return found


class _Block(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _FeedForward(config)
        self.input_layernorm = _Norm(config.hidden_size)
        self.post_attention_layernorm = _Norm(config.hidden_size)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        found: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return found


class _Body(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size)
        self.width: int = config.hidden_size // config.num_attention_heads  # of a head

    def forward(self, input_ids: torch.Tensor, *, recomputes: bool) -> torch.Tensor:
        hidden = self.embed_tokens(input_ids)
        # Of each position; nothing depends on the values.
        cos, sin = (hidden.new_empty(input_ids.shape[1], self.width) for _ in range(2))
        for layer in self.layers:
            hidden = checkpoint(layer, hidden, cos, sin, use_reentrant=False) if recomputes else layer(hidden, cos, sin)
        found: torch.Tensor = self.norm(hidden)
        return found


class Decoder(nn.Module):
    """A language model of transformers, as far as `trace` uses one."""

    main_input_name = "input_ids"
    supports_gradient_checkpointing = True

    def __init__(self, values: Mapping[str, Any]) -> None:
        """Make it from the values of a config.json; on "meta", where the caller chose that device."""
        super().__init__()
        self.config = SimpleNamespace(**values)
        self.recomputes = False
        self.model = _Body(self.config)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def gradient_checkpointing_enable(self, **_: Any) -> None:
        """Compute each block again in the backward."""
        self.recomputes = True

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """The loss of the next token."""
        logits = self.lm_head(self.model(input_ids, recomputes=self.recomputes)).float()
        following = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
        return SimpleNamespace(loss=functional.cross_entropy(logits.flatten(0, 1), following.flatten()))
