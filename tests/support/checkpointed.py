"""Provides a model of checkpointed blocks, and an activation checkpoint that does not use torch's implementation."""

import weakref

import torch
from support import chains
from support.chains import values
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 64


class OwnCheckpoint(torch.autograd.Function):
    """A reentrant activation checkpoint that does not call torch's checkpoint(), as some libraries have."""

    @staticmethod
    def forward(ctx, function, tensor):
        ctx.function = function
        ctx.save_for_backward(tensor)
        with torch.no_grad():
            return function(tensor)

    @staticmethod
    def backward(ctx, gradient):
        tensor = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.function(tensor)
        torch.autograd.backward(out, gradient)
        return None, tensor.grad


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x, *others):
        return x + self.down(torch.relu(self.up(x))) + sum(others)


class Model(nn.Module):
    """A stack of checkpointed blocks. `inputs` has a weak reference to the storage of each block's latest input."""

    def __init__(self, width, blocks, *, reentrant=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.reentrant = reentrant
        self.inputs = []
        self.others = ()

    def forward(self, x):
        self.inputs = []
        for block in self.blocks:
            self.inputs.append(weakref.ref(x.untyped_storage()))
            x = checkpoint(block, x, *self.others, use_reentrant=self.reentrant)
        return x


def keeper(model):
    return model._memascend._session.run.residency.hooks.keeper


def offloaded(folder, *, blocks, reentrant=False, **options):
    torch.manual_seed(0)
    return chains.offloaded(folder / "run.store", Model(WIDTH, blocks, reentrant=reentrant), **options)


def rows(count, seed=1):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def mean_square(model, x):
    return model(x).square().mean()


def trained(model, optimizer, batches):
    """Trains and closes a run; returns the losses and the final values."""
    with optimizer:
        return chains.train(model, optimizer, batches, mean_square), values(model)


def require_two_backwards(model, x):
    """Requires that two backwards of one retained graph give equal gradients.

    Each backward reads the graph's saved tensors.
    """
    loss = mean_square(model, x)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)
