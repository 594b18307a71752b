"""Makes a device, a store of two units, the arena and staging between them, and memory for units."""

import pytest
import torch
from support.fake_device import Fake
from support.stores import filled

from memascend import engine
from memascend.device.arena import DeviceArena
from memascend.device.device import Device
from memascend.device.transfer import Staging

UNITS = ("first", "second")
ELEMENTS, CHUNK = 50_000, 128 << 10
# The same on a real device, where there is one.
EITHER = pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def pages(nbytes):
    whole = torch.empty(nbytes + 4096, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 4096 :][:nbytes]


def in_one(updates, unit):
    into = pages(sum(updates.parts(unit, 1 << 30).places()[-1]))
    updates.fetch(unit, into).wait()
    return into


def leased(arena, updates):
    return arena.lease(in_one(updates, "first").nbytes, 0)


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
    made = filled(tmp_path / "run.store", records, chunk_elements=2048)
    yield made
    made.close()


@pytest.fixture
def updates(store):
    with engine.Engine(store) as made:
        yield made


@pytest.fixture
def arena(device, updates):
    return DeviceArena(device, {in_one(updates, "first").nbytes: 2})


@pytest.fixture
def staging(device, updates, arena):
    made = Staging(device, [pages(CHUNK) for _ in range(3)], updates.parts, arena.after)
    yield made
    made.close()
