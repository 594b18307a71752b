"""Tests the windows through which gradients come from a device."""

import gc
import math

import pytest
import torch
from device.staging.conftest import EITHER, ELEMENTS, pages
from support.fake_device import Fake
from support.stores import filled

from memascend import engine
from memascend.device.transfer import DeviceEngine
from memascend.errors import DeviceError, UsageError
from memascend.plan.decision import GRADIENT_WINDOWS
from memascend.storage.records import CHUNK_ELEMENTS


@EITHER
def test_gradients_are_lent_in_windows(store, device, tmp_path):
    """Five windows a gradient, and the bits of one that is in memory."""
    gradient = torch.randn(ELEMENTS // 2)
    values = store.read("first.0")[0]
    record = engine.Record(name="first.0", values=values, state=engine.adam_state(values))
    with (
        filled(tmp_path / "other.store", [record], chunk_elements=2048) as other,
        engine.Engine(other) as plain,
        engine.Engine(store) as updates,
    ):
        lent = DeviceEngine(updates, device, [pages(24 << 10) for _ in range(2)])
        for step in (1, 2):
            plain.update("first.0", gradient, engine.Adam(step=step))
            plain.commit(step)
            lent.update("first.0", gradient.to(device.torch_device), engine.Adam(step=step))
            lent.commit(step)
        if isinstance(device, Fake):
            assert device.taken == 2 * gradient.nbytes
        (expected, state), (got, ours) = other.read("first.0"), store.read("first.0")
        assert torch.equal(expected, got)
        assert all(torch.equal(state[name], ours[name]) for name in state)


@EITHER
def test_arithmetic_of_others_has_lent_gradients_and_given_values(store, device):
    gradient, given = torch.randn(ELEMENTS // 2), store.read("first.0")[0]
    found = torch.empty_like(gradient)

    def update(chunk):
        found[chunk.start : chunk.start + chunk.count] = chunk.gradient
        chunk.values -= chunk.gradient

    with engine.Engine(store) as updates:
        lent = DeviceEngine(updates, device, [pages(24 << 10) for _ in range(2)])
        lent.apply("first.0", update, step=1, gradient=gradient.to(device.torch_device), values=given)
        lent.commit(1)
        assert torch.equal(found, gradient)
        assert torch.equal(store.read("first.0")[0], given - gradient)
        lent.apply("first.0", update, step=2, gradient=gradient.to(device.torch_device), values=given)
        with pytest.raises(UsageError, match="not those of its last commit"):
            lent.commit(2)


def test_python_is_asked_for_few_windows(device, tmp_path):
    """Of a step's time on the engine's thread, windows are to be little: 7 B parameters have 14 GB of them."""
    elements = 2_600_000
    values = torch.zeros(elements, dtype=torch.bfloat16)
    record = engine.Record(name="large", values=values, state=engine.adam_state(values))
    ((window_bytes, count),) = GRADIENT_WINDOWS.items()
    asked = []
    with filled(tmp_path / "large.store", [record]) as store, engine.Engine(store) as updates:
        lent = DeviceEngine(updates, device, [pages(window_bytes) for _ in range(count)])
        window = lent._window
        lent._window = lambda *where: asked.append(where) or window(*where)
        lent.update("large", torch.ones_like(values), engine.Adam(step=1))
        lent.commit(1)
        updates.finish()
    assert len(asked) == math.ceil(2 * elements / (window_bytes // (2 * CHUNK_ELEMENTS) * 2 * CHUNK_ELEMENTS))
    assert len(asked) <= 2 * elements // (4 << 20) + 1
    assert device.taken == 2 * elements


def test_a_gradient_is_let_go_when_it_was_used(store, device):
    gradient = torch.randn(ELEMENTS // 2)
    with engine.Engine(store) as updates:
        lent = DeviceEngine(updates, device, [pages(24 << 10) for _ in range(2)])
        lent.update("first.0", gradient, engine.Adam(step=1))
        updates.finish()
        uses = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        gc.collect()
        assert uses <= 2, "something holds the gradient"


def test_a_copy_that_fails_fails_the_step(store, device):
    before = store.read("first.0")
    with engine.Engine(store) as updates:
        lent = DeviceEngine(updates, device, [pages(24 << 10) for _ in range(2)])
        device.fails = RuntimeError("an error of the device")
        lent.update("first.0", torch.ones(ELEMENTS // 2), engine.Adam(step=1))
        with pytest.raises(DeviceError, match="an error of the device"):
            updates.commit(1)
        device.fails = None
        updates.discard()
        assert store.step == 0
        assert torch.equal(store.read("first.0")[0], before[0])
