"""Makes stacks of layers that were trained for a step."""

import pytest
import torch
from support.reached import OPTIMIZERS, one_step, stack, taken


@pytest.fixture
def training(tmp_path):
    """Makes a stack that was trained for a step, by default of 16 units in fp32."""
    made = []

    def make(units=16, dtype=torch.float32, optimizer="adamw", steps=1, **options):
        model = stack(units, dtype)
        model, offloaded = taken(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path, **options)
        made.append(offloaded)
        for _ in range(steps):
            one_step(model, offloaded, dtype)
        return model, offloaded

    yield make
    for offloaded in made:
        offloaded.close()
