"""Says which units the tests of staging copy, and takes memory for them."""

import pytest
import torch

UNITS = ("first", "second")
ELEMENTS, CHUNK = 50_000, 128 << 10
# The same on a real device, where there is one.
EITHER = pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


def pages(nbytes):
    whole = torch.empty(nbytes + 4096, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 4096 :][:nbytes]


def in_one(store, unit):
    into = pages(sum(store.parts(unit, 1 << 30).places()[-1]))
    store.fetch(unit, into).wait()
    return into


def leased(arena, store):
    nbytes = in_one(store, "first").nbytes
    return arena.lease(nbytes, 0, "units").tensor((nbytes,), torch.uint8)
