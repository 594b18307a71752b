"""Tests copies to a device and back: checks, order, and how long memory is held."""

import gc
import math
import threading

import pytest
import torch
from support.fake_device import SPOILT, Fake, Work

from memascend import engine
from memascend.device.arena import DeviceArena
from memascend.device.device import Cuda
from memascend.device.download import WINDOWS, DeviceEngine
from memascend.device.upload import Staging
from memascend.engine.entries import CHUNK_ELEMENTS
from memascend.errors import ConfigError, CorruptionError, DeviceError, StorageError, TimeoutExpired, UsageError

ELEMENTS, CHUNK = 50_000, 128 << 10
UNITS = ("first", "second")


# The same on a real one, where there is one.
EITHER = pytest.mark.parametrize("device", ["fake", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture
def device(request):
    if getattr(request, "param", "fake") == "cuda":
        yield Cuda(torch.device("cuda", 0))
        return
    made = Fake()
    yield made
    made.end()


@pytest.fixture
def slow():
    """One whose memory was somebody's a moment ago."""
    made = Fake(fills=0.3)
    yield made
    made.end()


@pytest.fixture
def store(tmp_path):
    entries = []
    for number, unit in enumerate(UNITS):
        values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(number))
        for part, of in enumerate(values.chunk(2)):
            entries.append(
                engine.Entry(name=f"{unit}.{part}", values=of.contiguous(), state=engine.adam_state(of), unit=unit)
            )
    # Pieces of 8 KiB, so that a part has several.
    made = engine.Store.create(tmp_path / "run.store", entries, chunk_elements=2048)
    yield made
    made.close()


def pages(nbytes):
    whole = torch.empty(nbytes + 4096, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 4096 :][:nbytes]


def in_one(store, unit):
    into = pages(sum(store.parts(unit, 1 << 30).places()[-1]))
    store.fetch(unit, into).wait()
    return into


@pytest.fixture
def arena(device, store):
    return DeviceArena(device, {in_one(store, "first").nbytes: 2})


@pytest.fixture
def staging(device, store, arena):
    made = Staging(device, [pages(CHUNK) for _ in range(3)], store.parts, arena.after)
    yield made
    made.close()


def leased(arena, store):
    nbytes = in_one(store, "first").nbytes
    return arena.lease(nbytes, 0, "units").tensor((nbytes,), torch.uint8)


# --- parts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bytes_max", [8 << 10, 20 << 10, 1 << 20])
def test_parts_are_the_unit(store, bytes_max):
    whole, parts = in_one(store, "second"), store.parts("second", bytes_max)
    into = torch.zeros_like(whole)
    for index, (start, nbytes) in enumerate(parts.places()):
        assert nbytes <= bytes_max
        chunk = pages(nbytes)
        parts.begin(index, chunk).wait()
        into[start : start + nbytes] = chunk
    assert torch.equal(into, whole)


def test_parts_that_cannot_be(store):
    with pytest.raises(ConfigError, match='a piece of unit "first" has 8192 bytes, and parts have 4096'):
        store.parts("first", 4096)
    with pytest.raises(ConfigError, match="no unit 'third'"):
        store.parts("third", 1 << 20)
    with pytest.raises(ConfigError):
        store.parts("first", 1 << 20).begin(0, pages(4096))


def test_all_parts_are_of_one_commit(store):
    """A commit between two parts changes neither; the slots are written again once the parts are gone."""
    before, parts = in_one(store, "first"), store.parts("first", 8 << 10)
    with engine.Engine(store) as updates:
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


# --- staging ----------------------------------------------------------------------------------------------------------


@EITHER
def test_a_unit_arrives_whole(staging, arena, store):
    bases = {unit: leased(arena, store) for unit in UNITS}
    coming = {unit: staging.begin(unit, base) for unit, base in bases.items()}
    for unit in reversed(UNITS):
        coming[unit].wait()
        assert torch.equal(bases[unit].cpu(), in_one(store, unit))
        assert coming[unit].done()


def test_who_does_not_wait_sees_what_is_spoilt(staging, arena, store, device):
    device.inward.delay = 0.2
    base = leased(arena, store)
    coming = staging.begin("first", base)
    assert not coming.done()
    assert bool((base == SPOILT).all())
    coming.wait()
    assert torch.equal(base, in_one(store, "first"))


def test_damage_is_named_by_whoever_waits(staging, arena, store, tmp_path):
    whole = in_one(store, "second").numpy().tobytes()
    file = tmp_path / "run.store"
    at = file.read_bytes().index(whole[: 8 << 10])
    with file.open("r+b") as opened:
        opened.seek(at + 100)
        opened.write(b"\0\1\2\3")
    base = leased(arena, store)
    with pytest.raises(CorruptionError, match=r"second\.0"):
        staging.begin("second", base).wait()
    # The others still come.
    staging.begin("first", base).wait()
    assert torch.equal(base, in_one(store, "first"))


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_threads_that_check(device, arena, store, tmp_path, threads):
    """The same units, and damage is named by whoever waits, before anything was computed with it."""
    checkers = engine.Checkers(threads)
    assert checkers.threads == threads
    parts_of = lambda name, nbytes: store.parts(name, nbytes, checkers)  # noqa: E731
    staging = Staging(device, [pages(CHUNK) for _ in range(3)], parts_of, arena.after)
    bases = {unit: leased(arena, store) for unit in UNITS}
    coming = {unit: staging.begin(unit, base) for unit, base in bases.items()}
    for unit, base in bases.items():
        coming[unit].wait()
        assert torch.equal(base, in_one(store, unit))
    whole = in_one(store, "second").numpy().tobytes()
    file = tmp_path / "run.store"
    at = file.read_bytes().index(whole[CHUNK : CHUNK + (8 << 10)])
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes([whole[CHUNK] ^ 1]))
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"second\."):
            staging.begin("second", bases["second"]).wait()
    staging.begin("first", bases["second"]).wait()
    assert torch.equal(bases["second"], in_one(store, "first"))
    staging.close()


def test_a_device_that_fails_is_heard_of(staging, arena, store, device):
    device.fails = StorageError("the device is lost")
    base = leased(arena, store)
    with pytest.raises(StorageError, match="the device is lost"):
        staging.begin("first", base).wait()
    device.fails = None
    staging.begin("first", base).wait()


def test_a_device_that_is_lost_is_heard_of(device, store, arena):
    """A copy that fails later than it began ends the thread; nobody waits for it in vain."""
    staging = Staging(device, [pages(16 << 10)], store.parts, arena.after)
    base = leased(arena, store)
    lost = Work(lambda: 1 / 0)
    lost.run()
    device.bring = lambda *_: lost
    for unit in UNITS:
        with pytest.raises(DeviceError, match=r'division by zero.*existing="resume"'):
            staging.begin(unit, base).wait()
    staging.close()


def test_dropping_lets_go(staging, arena, store, device):
    device.inward.delay = 0.05
    base = leased(arena, store)
    coming = staging.begin("first", base)
    del coming, base
    gc.collect()
    assert arena.stats()["in_use"] == 0


def test_closing_ends_it(device, store, arena):
    staging = Staging(device, [pages(CHUNK)], store.parts, arena.after)
    base = leased(arena, store)
    coming = staging.begin("first", base)
    staging.close()
    staging.close()
    with pytest.raises(UsageError, match="closed"):
        staging.begin("first", base)
    del coming


# --- the arena --------------------------------------------------------------------------------------------------------


def test_a_view_keeps_a_slot(device):
    arena = DeviceArena(device, {10_000: 1})
    base = arena.lease(9_000).tensor((9_000,), torch.uint8)
    view = base.fill_(7)[100:200].view(2, 50)
    del base
    with pytest.raises(TimeoutExpired, match="no slot of 10000 bytes"):
        arena.lease(9_000, 0.05)
    assert bool((view == 7).all())
    del view
    assert arena.stats()["in_use"] == 0
    again = arena.lease(9_000, 0).tensor((9_000,), torch.uint8)
    assert bool((again == SPOILT).all())


@EITHER
def test_a_slot_comes_back_to_whoever_waits(device):
    arena = DeviceArena(device, {4096: 1})
    held = [arena.lease(4096).tensor((4096,), torch.uint8)]
    timer = threading.Timer(0.1, held.clear)
    timer.start()
    assert arena.lease(4096, 30) is not None
    timer.join()


def test_what_is_written_next_comes_after_every_use(device):
    """The marks are taken when the last view is gone, on the streams that were told of, and told to the next one."""
    arena = DeviceArena(device, {4096: 1})
    # Of whoever had this memory before.
    assert device.marks == 1
    base = arena.lease(4096).tensor((4096,), torch.uint8)
    assert [type(mark) for mark in arena.after(base)] == [Work]
    assert arena.after(base) == []
    arena.used(base)
    arena.used(base)
    assert device.marks == 1
    del base
    base = arena.lease(4096).tensor((4096,), torch.uint8)
    assert device.marks == 2
    assert [type(mark) for mark in arena.after(base)] == [Work]
    assert arena.after(base) == []


def test_the_first_copies_come_after_what_the_memory_was_used_for(store, slow):
    """It may be a block that torch's allocator had back a moment ago, and that the stream still writes to."""
    nbytes = in_one(store, "first").nbytes
    arena = DeviceArena(slow, {nbytes: 2})
    staging = Staging(slow, [pages(CHUNK) for _ in range(3)], store.parts, arena.after)
    bases = {unit: leased(arena, store) for unit in UNITS}
    for unit, coming in [(unit, staging.begin(unit, base)) for unit, base in bases.items()]:
        coming.wait()
        assert torch.equal(bases[unit], in_one(store, unit))
    slow.begun.wait()
    for unit, base in bases.items():
        assert torch.equal(base, in_one(store, unit)), unit
    staging.close()


def test_a_unit_that_never_came_leaves_its_marks(store, device, staging, arena):
    """Whatever used a slot before a unit that was dropped on its way still comes before the next copy there."""
    base = leased(arena, store)
    arena.used(base)
    using = device.begun = Work(lambda: None)
    del base
    base = leased(arena, store)
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
    bases = [leased(arena, store) for _ in range(2)]
    for taken in bases:
        staging.begin("first", taken).wait()
    assert using in seen


def test_a_lease_that_fits_no_class(device):
    arena = DeviceArena(device, {4096: 1})
    with pytest.raises(ConfigError, match="5000 bytes are more than"):
        arena.lease(5000)
    lease = arena.lease(4000)
    with pytest.raises(ConfigError):
        lease.tensor((4001,), torch.uint8)


def test_another_stream_comes_after_the_copy_too(device, store):
    """Whoever waited for a unit may have been on another stream than who uses it next."""
    nbytes = in_one(store, "first").nbytes
    arena = DeviceArena(device, {nbytes: 1})
    base = arena.lease(nbytes).tensor((nbytes,), torch.uint8)
    assert arena.used(base)
    assert not arena.used(base)
    device.stream = lambda: "another one"
    assert arena.used(base)


# --- gradients --------------------------------------------------------------------------------------------------------


@EITHER
def test_gradients_are_lent_in_windows(store, device, tmp_path):
    """Five windows a gradient, and the bits of one that is in memory."""
    gradient = torch.randn(ELEMENTS // 2)
    values = store.read("first.0")[0]
    entry = engine.Entry(name="first.0", values=values, state=engine.adam_state(values))
    with (
        engine.Store.create(tmp_path / "other.store", [entry], chunk_elements=2048) as other,
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


def test_python_is_asked_for_few_windows(device, tmp_path):
    """Of a step's time on the engine's thread, windows are to be little: 7 B parameters have 14 GB of them."""
    elements = 2_600_000
    values = torch.zeros(elements, dtype=torch.bfloat16)
    entry = engine.Entry(name="large", values=values, state=engine.adam_state(values))
    ((window_bytes, count),) = WINDOWS.items()
    asked = []
    with engine.Store.create(tmp_path / "large.store", [entry]) as store, engine.Engine(store) as updates:
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
