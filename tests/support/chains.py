"""Builds chains of equal linear layers, offloads models, trains models, and compares their values."""

import pytest
import torch
from torch import nn

import memascend

WIDTH = 32


def chain(layers=2, bias=False, *, width=WIDTH, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers))).to(dtype)


def batch(seed=1, width=WIDTH, dtype=torch.float32):
    return torch.randn(4, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def loss_of(model, seed=1):
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    return model(batch(seed, first.in_features, next(model.parameters()).dtype)).float().square().mean()


def step(model, optimizer, seed=1, of=loss_of):
    loss = of(model, seed)
    (optimizer.backward if hasattr(optimizer, "backward") else torch.Tensor.backward)(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model, optimizer, seeds, of=loss_of):
    return [step(model, optimizer, seed, of) for seed in seeds]


def offloaded(storage, model=None, kind=torch.optim.AdamW, rate=1e-2, **options):
    model = chain(bias=True) if model is None else model
    return memascend.offload(model, kind(model.parameters(), lr=rate), storage=storage, **options)


def smallest(offload, *arguments, **options):
    """Returns the smallest `host_memory` that works. The BudgetError of `offload` contains this number."""
    with pytest.raises(memascend.BudgetError) as refused:
        offload(*arguments, **options, host_memory=1)
    return refused.value.smallest


def twins(
    tmp_path, gradients="ssd", make=chain, rate=0.1, kind=torch.optim.SGD, host_memory: str | None = "64MiB", **options
):
    """Returns a model in RAM and its optimizer, then an equal offloaded model and its optimizer."""
    plain = make()
    options = {"gradients": gradients, "host_memory": host_memory, **options}
    return plain, kind(plain.parameters(), lr=rate), *offloaded(tmp_path / "twin.store", make(), kind, rate, **options)


def values(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def everything(model, optimizer):
    """Returns copies of the model's values, and of the optimizer state of each parameter that the optimizer owns."""
    found = values(model)
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter in owned:
            found |= {f"{name}: {of}": torch.as_tensor(v).clone() for of, v in optimizer.state_of(parameter).items()}
    return found


def require_same(plain, model):
    with memascend.materialized(model):
        for (name, wanted), got in zip(plain.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(wanted, got), f"{name} differs by {(wanted - got).abs().max()}"


def require_same_training(plain, theirs, model, optimizer, seeds=range(3), of=loss_of):
    """Trains both models of `twins`, and requires that their losses and values are equal."""
    with optimizer:
        assert train(model, optimizer, seeds, of) == train(plain, theirs, seeds, of)
        require_same(plain, model)
