"""Makes chains of layers that were trained for a step."""

import pytest
import torch
from support.chains import chain, step
from support.reached import OPTIMIZERS, taken


@pytest.fixture
def training(tmp_path):
    """Makes a chain that was trained for a step, by default of 16 units in fp32."""
    made = []

    def make(units=16, dtype=torch.float32, optimizer="adamw", steps=1, **options):
        model = chain(units, bias=True, dtype=dtype)
        model, offloaded = taken(model, OPTIMIZERS[optimizer](model.parameters()), tmp_path, **options)
        made.append(offloaded)
        for _ in range(steps):
            step(model, offloaded)
        return model, offloaded

    yield make
    for offloaded in made:
        offloaded.close()
