"""Makes chains of layers that were trained for a step."""

import functools

import pytest
import torch
from support.chains import chain, offloaded, step

FUSED = functools.partial(torch.optim.AdamW, eps=1e-3, fused=True)


@pytest.fixture
def taken(tmp_path):
    """Offloads a model to the store of a test, and closes it."""
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
    """Makes a chain that was trained for a step, by default of 16 units."""

    def make(units=16, steps=1, **options):
        model, optimizer = taken(chain(units, bias=True), **options)
        for _ in range(steps):
            step(model, optimizer)
        return model, optimizer

    return make
