"""Builds small chains of layers twice, in memory and offloaded, and compares them."""

import torch
from torch import nn

import memascend

WIDTH = 32


def chain(layers=2, bias=False):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(layers)))


def batch(seed=1):
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model, seed=1):
    return model(batch(seed)).square().mean()


def twins(
    tmp_path, gradients="ssd", make=chain, rate=0.1, kind=torch.optim.SGD, host_memory: str | None = "64MiB", **options
):
    """The same model twice: in RAM, and offloaded."""
    plain, model = make(), make()
    ours = kind(model.parameters(), lr=rate)
    model, ours = memascend.offload(
        model, ours, storage=tmp_path / "twin.store", gradients=gradients, host_memory=host_memory, **options
    )
    return plain, kind(plain.parameters(), lr=rate), model, ours


def require_same(plain, model):
    with memascend.materialized(model):
        for (name, wanted), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(wanted, got), f"{name} differs by {(wanted - got).abs().max()}"
