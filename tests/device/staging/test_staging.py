"""Tests copies of units to a device: checked, in order, ended by name when something fails."""

import gc
import threading
from functools import partial

import pytest
import torch
from device.staging.conftest import CHUNK, EITHER, ELEMENTS, UNITS, in_one, leased, pages
from support.fake_device import SPOILT, Work
from support.stores import damage

from memascend import engine
from memascend.device.transfer import Staging
from memascend.errors import ConfigError, CorruptionError, DeviceError, StorageError, UsageError


@pytest.mark.parametrize("bytes_max", [8 << 10, 20 << 10, 1 << 20])
def test_parts_are_the_unit(updates, bytes_max):
    whole, parts = in_one(updates, "second"), updates.parts("second", bytes_max)
    into = torch.zeros_like(whole)
    for index, (start, nbytes) in enumerate(parts.places()):
        assert nbytes <= bytes_max
        chunk = pages(nbytes)
        parts.begin(index, chunk).wait()
        into[start : start + nbytes] = chunk
    assert torch.equal(into, whole)


def test_parts_that_cannot_be(updates):
    with pytest.raises(ConfigError, match='an extent of unit "first" has 8192 bytes, and parts have 4096'):
        updates.parts("first", 4096)
    with pytest.raises(ConfigError, match="no unit 'third'"):
        updates.parts("third", 1 << 20)
    with pytest.raises(ConfigError):
        updates.parts("first", 1 << 20).begin(0, pages(4096))


def test_all_parts_are_of_one_commit(updates):
    """A commit between two parts changes neither; the slots are written again once the parts are gone."""
    before, parts = in_one(updates, "first"), updates.parts("first", 8 << 10)
    for step in (1, 2):
        for name in ("first.0", "first.1"):
            updates.update(name, torch.ones(ELEMENTS // 2), engine.Adam(step=step))
        if step == 2:
            # It would write to the slots that are being read.
            finished = threading.Thread(target=updates.finish)
            finished.start()
            finished.join(0.3)
            assert finished.is_alive()
        else:
            updates.commit(step)
    for index, (start, nbytes) in enumerate(parts.places()):
        chunk = pages(nbytes)
        parts.begin(index, chunk).wait()
        assert torch.equal(chunk, before[start : start + nbytes])
    del parts
    finished.join(30)
    assert not finished.is_alive()
    updates.commit(2)


@EITHER
def test_a_unit_arrives_whole(staging, arena, updates):
    bases = {unit: leased(arena, updates) for unit in UNITS}
    coming = {unit: staging.begin(unit, base) for unit, base in bases.items()}
    for unit in reversed(UNITS):
        coming[unit].wait()
        assert torch.equal(bases[unit].cpu(), in_one(updates, unit))


def test_who_does_not_wait_sees_what_is_spoilt(staging, arena, updates, device):
    device.inward.delay = 0.2
    base = leased(arena, updates)
    coming = staging.begin("first", base)
    assert bool((base == SPOILT).all())
    coming.wait()
    assert torch.equal(base, in_one(updates, "first"))


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_threads_that_check(device, arena, updates, tmp_path, threads):
    """The same units, and damage is named by whoever waits, before anything was computed with it."""
    checkers = engine.Checkers(threads)
    assert checkers.threads == threads
    parts_of = partial(updates.parts, checkers=checkers)
    staging = Staging(device, [pages(CHUNK) for _ in range(3)], parts_of, arena.after)
    bases = {unit: leased(arena, updates) for unit in UNITS}
    coming = {unit: staging.begin(unit, base) for unit, base in bases.items()}
    for unit, base in bases.items():
        coming[unit].wait()
        assert torch.equal(base, in_one(updates, unit))
    whole = in_one(updates, "second").numpy().tobytes()
    damage(tmp_path / "run.store", whole[CHUNK : CHUNK + (8 << 10)])
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"second\."):
            staging.begin("second", bases["second"]).wait()
    staging.begin("first", bases["second"]).wait()
    assert torch.equal(bases["second"], in_one(updates, "first"))
    staging.close()


def test_a_device_that_fails_is_heard_of(staging, arena, updates, device):
    device.fails = StorageError("the device is lost")
    base = leased(arena, updates)
    with pytest.raises(StorageError, match="the device is lost"):
        staging.begin("first", base).wait()
    device.fails = None
    staging.begin("first", base).wait()


def test_a_device_that_is_lost_is_heard_of(device, updates, arena):
    """A copy that fails later than it began ends the thread; nobody waits for it in vain."""
    staging = Staging(device, [pages(16 << 10)], updates.parts, arena.after)
    base = leased(arena, updates)
    lost = Work(lambda: 1 / 0)
    lost.run()
    device.bring = lambda *_: lost
    for unit in UNITS:
        with pytest.raises(DeviceError, match=r'division by zero.*existing="resume"'):
            staging.begin(unit, base).wait()
    staging.close()


def test_dropping_lets_go(staging, arena, updates, device):
    device.inward.delay = 0.05
    base = leased(arena, updates)
    coming = staging.begin("first", base)
    del coming, base
    gc.collect()
    assert arena.free_slots(in_one(updates, "first").nbytes) == 2


def test_closing_ends_it(device, updates, arena):
    staging = Staging(device, [pages(CHUNK)], updates.parts, arena.after)
    base = leased(arena, updates)
    coming = staging.begin("first", base)
    staging.close()
    staging.close()
    with pytest.raises(UsageError, match="closed"):
        staging.begin("first", base)
    del coming
