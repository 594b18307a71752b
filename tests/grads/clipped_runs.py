"""Trains an offloaded chain whose gradients are clipped; what such runs came to is compared bit for bit."""

import torch
from support.bits import same_states
from support.chains import chain, everything, loss_of

import memascend

WIDTH = 24
LIMIT = 1e-3  # far below the norm of every step


def stack(dtype=torch.bfloat16, layers=4):
    return chain(layers, True, width=WIDTH, dtype=dtype)


def adamw(model):
    groups = [{"params": model[:2].parameters()}, {"params": model[2:].parameters(), "lr": 3e-2}]
    return torch.optim.AdamW(groups, lr=1e-2)


def offloaded(folder, gradients="ssd", make=stack, optimizer=adamw, **options):
    model = make()
    options = {"max_grad_norm": LIMIT, "existing": "resume", **options}
    return memascend.offload(model, optimizer(model), storage=folder, gradients=gradients, **options)


def nothing(*_):
    """What a loop does at a point where it does nothing."""


def walk(model, optimizer, index):
    optimizer.backward(loss_of(model, index))


def run(folder, gradients="ssd", *, steps=6, loop=walk, before=nothing, between=nothing, **options):
    """What a run came to: its state, the norms of its steps, and its report."""
    model, optimizer = offloaded(folder, gradients, **options)
    norms = []
    with optimizer:
        for index in range(optimizer.steps, steps):
            before(model, optimizer, index)
            loop(model, optimizer, index)
            between(model, optimizer, index)
            optimizer.step()
            norms.append((optimizer.grad_norm, optimizer.overflowed))
            optimizer.zero_grad()
        return everything(model, optimizer), norms, optimizer.report()


def require_same(one, other):
    assert repr(one[1]) == repr(other[1]), "the norms"
    assert same_states(one[0], other[0])
