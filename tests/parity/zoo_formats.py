"""Cases of training with moments of 16 and 8 bits, and with parameters that are rounded by chance."""

from __future__ import annotations

import torch
from parity import loops
from parity.harness import KEPT, Case, usual_loop
from parity.zoo_loops import BF16, FP16, WHOLE, other
from parity.zoo_plain import VOCABULARY, next_token, tokens
from torch import nn

WIDTH, WIDE = 320, 313


class Mixed(nn.Module):
    """Parameters of more than one chunk, of blocks in part, of fewer elements than are quantised, and an embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDE)
        self.down = nn.Linear(WIDE, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.nn.functional.silu(self.up(self.norm(x)))))


def mixed(name, state, loop=usual_loop, *, rounding="nearest", seed=7, options=None, **fields):
    given = {"seed": seed, **({} if state is None else {"state": state}), **(options or {})}
    if rounding == "stochastic":
        given |= {"rounding": rounding, "master_dtype": None}
    return Case(name=name, model=Mixed, batches=tokens, loss=next_token, options=given, loop=loop, **fields)


sgd = other(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.25)
nesterov = other(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)


def _of(state):
    return [
        mixed(f"{state}-bf16", state, loops.drops_some, dtype=BF16),
        mixed(f"{state}-fp16", state, loops.scales, dtype=FP16),
        mixed(f"{state}-accumulates", state, loops.accumulates, optimizer=sgd, dtype=BF16, gradients=KEPT),
        mixed(f"{state}-nesterov", state, optimizer=nesterov),
        mixed(f"{state}-stochastic", state, dtype=BF16, rounding="stochastic"),
    ]


FORMATS = [
    *_of("bf16"),
    *_of("8bit"),
    mixed("stochastic-clipped", "fp32", loops.clips_in_step, dtype=BF16, rounding="stochastic", gradients=WHOLE,
          options={"max_grad_norm": loops.CLIPPED}),
    mixed("stochastic-sgd", None, loops.scales, optimizer=sgd, dtype=FP16, rounding="stochastic",
          options={"loss_scale": 128.0}),
]  # fmt: skip
