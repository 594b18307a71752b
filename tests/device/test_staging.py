"""Tests the copies of units to a device and of gradients from the device: slots, staging, gradient windows."""

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.stores import damage, filled, in_one, pages, two_units

from memascend import engine
from memascend.device.arena import DeviceArena
from memascend.device.device import Device
from memascend.device.transfer import DeviceEngine, Staging
from memascend.errors import ConfigError, CorruptionError, DeviceError, StorageError, TimeoutExpired, UsageError

UNITS = ("first", "second")
ELEMENTS, CHUNK = 50_000, 128 << 10
WINDOWS = 24 << 10


@pytest.fixture
def there(device):
    return Device(device)


@pytest.fixture
def store(tmp_path):
    with two_units(tmp_path, ELEMENTS) as made:
        yield made


@pytest.fixture
def updates(store):
    with engine.Engine(store) as made:
        yield made


@pytest.fixture
def arena(there, updates):
    return DeviceArena(there, {in_one(updates, "first").nbytes: 2})


@pytest.fixture
def staging(there, updates, arena):
    made = Staging(there, [pages(CHUNK) for _ in range(3)], updates.parts, arena.after)
    yield made
    made.close()


def leased(arena, updates):
    return arena.lease(in_one(updates, "first").nbytes, 0)


def lent_windows(updates, there):
    return DeviceEngine(updates, there, [pages(WINDOWS) for _ in range(2)])


# --- the arena -----------------------------------------------------------------------------------------


def test_arena_slot_stays_leased_while_a_view_exists(there):
    arena = DeviceArena(there, {10_000: 1})
    base = arena.lease(9_000, 0)
    view = base.copy_(torch.full((9_000,), 7, dtype=torch.uint8))[100:200].view(2, 50)
    del base
    with pytest.raises(TimeoutExpired, match="no slot of 10000 bytes"):
        arena.lease(9_000, 0.05)
    assert bool((view.cpu() == 7).all())
    del view
    assert arena.free_slots(9_000) == 1
    with pytest.raises(ConfigError, match="a lease of 12000 bytes is larger"):
        arena.lease(12_000, 0)


# --- units ---------------------------------------------------------------------------------------------


def test_slot_keeps_its_marks_if_a_unit_is_dropped_before_its_copy(staging, arena, updates):
    """A unit is dropped before it is copied into its slot.

    The next copy into the slot must still wait for the work that used the slot before.
    """
    base = leased(arena, updates)
    arena.used(base)
    del base
    base = leased(arena, updates)
    with staging._changed:
        # The lock keeps the staging thread from taking the unit before the test drops it.
        coming = staging.begin("second", base)
        del coming
    del base
    gc.collect()
    # Each slot has a mark from the allocation of its memory. The slot that was used has a second mark.
    assert sorted(len(arena.after(base)) for base in [leased(arena, updates) for _ in range(2)]) == [1, 2]


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_staging_detects_damage_with_any_number_of_checkers(there, arena, updates, tmp_path, threads):
    """Any number of checker threads gives the same units.

    If a unit is damaged, `wait()` raises an error before any code can use the unit.
    """
    checkers = engine.Checkers(threads)
    assert checkers.threads == threads
    parts_of = partial(updates.parts, checkers=checkers)
    staging = Staging(there, [pages(CHUNK) for _ in range(3)], parts_of, arena.after)
    bases = {unit: leased(arena, updates) for unit in UNITS}
    coming = {unit: staging.begin(unit, base) for unit, base in bases.items()}
    for unit, base in bases.items():
        coming[unit].wait()
        assert torch.equal(base.cpu(), in_one(updates, unit))
    whole = in_one(updates, "second").numpy().tobytes()
    damage(tmp_path / "run.store", whole[CHUNK : CHUNK + (8 << 10)])
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"second\."):
            staging.begin("second", bases["second"]).wait()
    staging.begin("first", bases["second"]).wait()
    assert torch.equal(bases["second"].cpu(), in_one(updates, "first"))
    staging.close()


def fails(*_):
    raise StorageError("the device is lost")


def test_wait_raises_a_copy_error_and_a_retry_succeeds(staging, arena, updates, there, monkeypatch):
    base = leased(arena, updates)
    with monkeypatch.context() as patch:
        patch.setattr(there, "bring", fails)
        with pytest.raises(StorageError, match="the device is lost"):
            staging.begin("first", base).wait()
    staging.begin("first", base).wait()


def test_every_wait_raises_after_a_queued_copy_fails(there, updates, arena):
    """A queued copy that fails ends the staging thread. Each later `wait()` must raise an error instead of hanging."""
    staging = Staging(there, [pages(16 << 10)], updates.parts, arena.after)
    base = leased(arena, updates)
    lost = SimpleNamespace(done=lambda: 1 / 0, wait=lambda: 1 / 0)
    there.bring = lambda *_: lost
    for unit in UNITS:
        with pytest.raises(DeviceError, match=r'division by zero.*existing="resume"'):
            staging.begin(unit, base).wait()
    staging.close()


def test_dropping_a_staged_unit_frees_its_slot(staging, arena, updates):
    base = leased(arena, updates)
    coming = staging.begin("first", base)
    del coming, base
    gc.collect()
    assert arena.free_slots(in_one(updates, "first").nbytes) == 2


def test_closed_staging_rejects_begin(there, updates, arena):
    staging = Staging(there, [pages(CHUNK)], updates.parts, arena.after)
    base = leased(arena, updates)
    coming = staging.begin("first", base)
    staging.close()
    staging.close()
    with pytest.raises(UsageError, match="closed"):
        staging.begin("first", base)
    del coming


# --- windows on gradients --------------------------------------------------------------------------------


def test_gradient_through_windows_has_the_same_bits_as_in_host_memory(store, there, tmp_path):
    """A gradient that passes through five windows must give the same bits as a gradient in host memory."""
    gradient = torch.randn(ELEMENTS // 2)
    values = store.read("first.0")[0]
    record = engine.Record(name="first.0", values=values, state=engine.adam_state(values))
    with (
        filled(tmp_path / "other.store", [record], chunk_elements=2048) as other,
        engine.Engine(other) as plain,
        engine.Engine(store) as updates,
    ):
        lent = lent_windows(updates, there)
        for step in (1, 2):
            plain.update("first.0", gradient, engine.Adam(step=step))
            plain.commit(step)
            lent.update("first.0", gradient.to(there.torch_device), engine.Adam(step=step))
            lent.commit(step)
        (expected, state), (got, ours) = other.read("first.0"), store.read("first.0")
        assert torch.equal(expected, got)
        assert all(torch.equal(state[name], ours[name]) for name in state)


def test_apply_with_windows_updates_given_values_and_rejects_stale_values(store, there):
    gradient, given = torch.randn(ELEMENTS // 2), store.read("first.0")[0]
    found = torch.empty_like(gradient)

    def update(chunk):
        found[chunk.start : chunk.start + chunk.count] = chunk.gradient
        chunk.values -= chunk.gradient

    with engine.Engine(store) as updates:
        lent = lent_windows(updates, there)
        lent.apply("first.0", update, step=1, gradient=gradient.to(there.torch_device), values=given)
        lent.commit(1)
        assert torch.equal(found, gradient)
        assert torch.equal(store.read("first.0")[0], given - gradient)
        lent.apply("first.0", update, step=2, gradient=gradient.to(there.torch_device), values=given)
        with pytest.raises(UsageError, match="not those of the last commit"):
            lent.commit(2)


def test_gradient_is_released_after_its_update(store, there):
    gradient = torch.randn(ELEMENTS // 2).to(there.torch_device)
    with engine.Engine(store) as updates:
        lent_windows(updates, there).update("first.0", gradient, engine.Adam(step=1))
        updates.finish()
        uses = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        gc.collect()
        assert uses <= 2, "the gradient is still referenced after its update"


def test_failed_gradient_copy_fails_the_commit(store, there, monkeypatch):
    before = store.read("first.0")
    with engine.Engine(store) as updates:
        lent = lent_windows(updates, there)
        with monkeypatch.context() as patch:
            patch.setattr(there, "take", lambda *_: 1 / 0)
            lent.update("first.0", torch.ones(ELEMENTS // 2).to(there.torch_device), engine.Adam(step=1))
            with pytest.raises(DeviceError, match="division by zero"):
                updates.commit(1)
        updates.discard()
        assert store.step == 0
        assert torch.equal(store.read("first.0")[0], before[0])
