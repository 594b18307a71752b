"""Makes chains of layers that were trained for a step."""

import pytest
from support.chains import chain, step
from support.reached import OPTIMIZERS, taken


@pytest.fixture
def training(tmp_path):
    """Makes a chain that was trained for a step, by default of 16 units."""
    made = []

    def make(units=16, steps=1, **options):
        model = chain(units, bias=True)
        model, offloaded = taken(model, OPTIMIZERS["adamw"](model.parameters()), tmp_path, **options)
        made.append(offloaded)
        for _ in range(steps):
            step(model, offloaded)
        return model, offloaded

    yield make
    for offloaded in made:
        offloaded.close()
