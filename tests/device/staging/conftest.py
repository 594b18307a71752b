"""Makes a device, a store of two units, and the arena and staging between them."""

import pytest
import torch
from support.fake_device import Fake
from support.staged_units import CHUNK, ELEMENTS, UNITS, in_one, pages

from memascend import engine
from memascend.device.arena import DeviceArena
from memascend.device.device import Device
from memascend.device.transfer import Staging


@pytest.fixture
def device(request):
    if getattr(request, "param", "fake") == "cuda":
        yield Device(torch.device("cuda", 0))
        return
    made = Fake()
    yield made
    made.end()


@pytest.fixture
def store(tmp_path):
    records = []
    for number, unit in enumerate(UNITS):
        values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number))
        for part, of in enumerate(values.chunk(2)):
            records.append(
                engine.Record(name=f"{unit}.{part}", values=of.contiguous(), state=engine.adam_state(of), unit=unit)
            )
    # Pieces of 8 KiB, so that a part has several.
    made = engine.Store.create(tmp_path / "run.store", records, chunk_elements=2048)
    yield made
    made.close()


@pytest.fixture
def arena(device, store):
    return DeviceArena(device, {in_one(store, "first").nbytes: 2})


@pytest.fixture
def staging(device, store, arena):
    made = Staging(device, [pages(CHUNK) for _ in range(3)], store.parts, arena.after)
    yield made
    made.close()
