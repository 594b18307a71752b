"""Defines small models for several ranks, their batches and their optimizer."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint


class Odd(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a frozen block, an embedding that is the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.narrow = nn.Sequential(nn.Linear(16, 3), nn.GELU(), nn.Linear(3, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.narrow(self.embed(tokens))))

    def __iter__(self):
        return iter((self.narrow, self.frozen))


class Checkpointed(nn.Sequential):
    """Recomputed in the backward."""

    def forward(self, values):
        return checkpoint(super().forward, values, use_reentrant=False)


def model(dtype, kind="plain"):
    torch.manual_seed(0)
    if kind == "odd":
        return Odd().to(dtype)
    block = Checkpointed if kind == "checkpointed" else nn.Sequential
    blocks = [block(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(32, 16), *blocks, nn.Linear(16, 32)).to(dtype)


def batch(step, micro):
    """Micro-batch `micro` of a step, of whatever rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, 32, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(trained, step, micro):
    inputs, targets = batch(step, micro)
    return nn.functional.cross_entropy(trained(inputs).float().flatten(0, 1), targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sharded(dtype, kind="plain"):
    trained = model(dtype, kind)
    for block in trained:
        fully_shard(block)
    return fully_shard(trained)
