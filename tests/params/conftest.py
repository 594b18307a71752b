"""Provides offloaded models, and offloaded chains of layers that have trained for some steps."""

import functools

import pytest
import torch
from support.chains import chain, offloaded, step

FUSED = functools.partial(torch.optim.AdamW, eps=1e-3, fused=True)


@pytest.fixture
def taken(tmp_path):
    """Returns a function that offloads a model to the test's store; the fixture closes all runs at the end."""
    made = []

    def take(model, **options):
        model, optimizer = offloaded(tmp_path / "run.store", model, FUSED, **{"host_memory": "64MiB", **options})
        made.append(optimizer)
        return model, optimizer

    yield take
    for optimizer in made:
        optimizer.close()


@pytest.fixture
def training(taken):
    """Returns a function that offloads a chain, by default of 16 units, and trains it, by default for one step."""

    def make(units=16, steps=1, **options):
        model, optimizer = taken(chain(units, bias=True), **options)
        for _ in range(steps):
            step(model, optimizer)
        return model, optimizer

    return make
