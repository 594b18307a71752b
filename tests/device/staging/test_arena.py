"""Tests the arena of a device: who may have a slot, and in which order copies and uses come."""

import gc
import threading

import pytest
from device.staging.conftest import EITHER, leased
from support.fake_device import SPOILT, Work

from memascend.device.arena import DeviceArena
from memascend.errors import ConfigError, TimeoutExpired


def test_a_view_keeps_a_slot(device):
    arena = DeviceArena(device, {10_000: 1})
    base = arena.lease(9_000, 0)
    view = base.fill_(7)[100:200].view(2, 50)
    del base
    with pytest.raises(TimeoutExpired, match="no slot of 10000 bytes"):
        arena.lease(9_000, 0.05)
    assert bool((view == 7).all())
    del view
    assert arena.free_slots(9_000) == 1
    again = arena.lease(9_000, 0)
    assert bool((again == SPOILT).all())


@EITHER
def test_a_slot_comes_back_to_whoever_waits(device):
    arena = DeviceArena(device, {4096: 1})
    held = [arena.lease(4096, 0)]
    timer = threading.Timer(0.1, held.clear)
    timer.start()
    assert arena.lease(4096, 30) is not None
    timer.join()


def test_what_is_written_next_comes_after_every_use(device):
    """The marks are taken when the last view is gone, on the streams that were told of, and told to the next one."""
    arena = DeviceArena(device, {4096: 1})
    # Of whoever had this memory before.
    assert device.marks == 1
    base = arena.lease(4096, 0)
    assert [type(mark) for mark in arena.after(base)] == [Work]
    assert arena.after(base) == []
    assert arena.used(base)
    assert not arena.used(base)
    assert device.marks == 1
    del base
    base = arena.lease(4096, 0)
    assert device.marks == 2
    assert [type(mark) for mark in arena.after(base)] == [Work]
    assert arena.after(base) == []
    assert arena.used(base)
    # Whoever waited for a unit may have been on another stream than who uses it next.
    device.stream = lambda: "another one"
    assert arena.used(base)


def test_a_unit_that_never_came_leaves_its_marks(updates, device, staging, arena):
    """Whatever used a slot before a unit that was dropped on its way still comes before the next copy there."""
    base = leased(arena, updates)
    arena.used(base)
    using = device.begun = Work(lambda: None)
    del base
    base = leased(arena, updates)
    with staging._changed:
        # The thread comes to it no more.
        coming = staging.begin("second", base)
        del coming
    del base
    gc.collect()
    seen = []
    begins = device.inward.copy

    def note(source, target, after):
        seen.extend(after)
        return begins(source, target, after)

    device.inward.copy = note
    using.run()
    bases = [leased(arena, updates) for _ in range(2)]
    for taken in bases:
        staging.begin("first", taken).wait()
    assert using in seen


def test_a_lease_that_fits_no_class(device):
    arena = DeviceArena(device, {4096: 1})
    with pytest.raises(ConfigError, match="5000 bytes are more than"):
        arena.lease(5000, 0)
