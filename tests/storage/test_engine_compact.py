"""Tests the update of compact entries: against whole masters, resumed, killed, and by the bytes it moves."""

import functools
import itertools
import os
import random
import textwrap
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.killed_child import kill_after

from memascend import engine, kernels
from memascend.errors import ConfigError, UsageError

CHUNK = 2048
SIZES = [(1,), (13,), (2048,), (2049,), (3, 1741), (0, 5)]
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.5}


def parameters(dtypes=(torch.bfloat16,)):
    torch.manual_seed(1)
    pairs = itertools.product(dtypes, SIZES)
    return {f"{str(of)[6:]}.{'x'.join(map(str, shape))}": torch.randn(shape).to(of) for of, shape in pairs}


def compact(values):
    return engine.encode_state(values, {}, "compact") if values.dtype == torch.bfloat16 else engine.adam_state(values)


def whole_of(values, state):
    """Master and moments; float32 values are their own master."""
    return engine.decode_state(values, state, "compact") if "rest" in state else {"master": values, **state}


def described(held):
    state = {name: compact(values) for name, values in held.items()}
    spill = torch.bfloat16
    return [engine.Entry(name=name, values=held[name], state=state[name], spill=spill) for name in held]


def made(path, held, **options):
    return engine.Store.create(path, described(held), chunk_elements=CHUNK, **options)


class InMemory:
    """The same training in memory, on whole masters."""

    def __init__(self, held):
        self.values = {name: values.clone() for name, values in held.items()}
        self.states = {name: whole_of(values, engine.adam_state(values)) for name, values in self.values.items()}

    def step(self, name, gradient, step, numbers):
        values, state = self.values[name], self.states[name]
        out = None if values.dtype == torch.float32 else values
        moments = state["exp_avg"], state["exp_avg_sq"]
        kernels.adamw(state["master"], gradient, *moments, out, step=step, **numbers)

    def check(self, store):
        for name, values in self.values.items():
            stored, raw = store.read(name)
            assert same_bits(stored, values), name
            found = whole_of(stored, raw)
            for of, tensor in self.states[name].items():
                assert same_bits(found[of], tensor), (name, of)


@pytest.mark.parametrize("resident", ["never", "always", "sometimes"])
def test_a_hundred_steps_are_those_of_whole_masters(tmp_path, resident):
    held = parameters([torch.bfloat16, torch.float16, torch.float32])
    memory = InMemory(held)
    counts = dict.fromkeys(held, 0)
    store = made(tmp_path / "store", held)
    for first in (1, 36, 71):  # resumed twice
        with store, engine.Engine(store, queue=30_000) as updates:
            for step in range(first, first + (35 if first < 71 else 30)):
                for index, (name, values) in enumerate(memory.values.items()):
                    if index % 4 == 1 and step % 3:
                        continue  # an expert that got no token
                    live = {
                        "never": None,
                        "always": values.clone(),
                        "sometimes": values.clone() if (step + index) % 2 else None,
                    }[resident]
                    gradient = torch.randn(values.shape).to(torch.float32 if step % 5 == 0 else values.dtype)
                    counts[name] += 1
                    if step % 10 == 5:
                        # A step that is skipped costs nothing.
                        updates.update(
                            name, torch.full_like(gradient, 9), engine.Adam(step=counts[name], **NUMBERS), values=live
                        )
                        updates.finish()
                        updates.discard()
                    updates.update(name, gradient, engine.Adam(step=counts[name], **NUMBERS), values=live)
                    if step % 10 == 5:
                        updates.commit(step)
                    memory.step(name, gradient, counts[name], NUMBERS)
                updates.commit(step)
            memory.check(store)
            store.verify()
        store = engine.Store.open(tmp_path / "store")
    with store:
        memory.check(store)
        assert {entry["name"]: entry["step"] for entry in store.entries()} == counts
        compact = {entry["name"] for entry in store.entries() if entry["compact"]}
        assert compact == {name for name in held if name.startswith("bfloat16")}


def test_updates_by_spilled_gradients_from_fetched_values(tmp_path):
    held = parameters()
    memory = InMemory(held)
    with made(tmp_path, held) as store, engine.Engine(store) as updates:
        unit = torch.zeros(engine.PAGE_BYTES * 10, dtype=torch.uint8)
        unit = unit[-unit.data_ptr() % engine.PAGE_BYTES :][: sum(engine.sizes(described(held)).unit_bytes.values())]
        places = {entry["name"]: entry["unit_offset"] for entry in store.entries()}
        for step in range(1, 21):
            assert store.fetch("all", unit).wait() == store.info()["generation"]
            for index, (name, values) in enumerate(memory.values.items()):
                one, other = (torch.randn(values.shape).bfloat16() for _ in range(2))
                updates.spill(name, one)
                updates.spill(name, other, add=True)
                place = places[name]
                live = unit[place : place + values.nbytes].view(torch.bfloat16).view(values.shape)
                live = live if (step + index) % 2 else None
                updates.update_spilled(name, engine.Adam(step=step, **NUMBERS), factors=[0.5], values=live)
                memory.step(name, (one + other) * 0.5, step, NUMBERS)
            updates.commit(step)
        memory.check(store)


def test_values_that_are_resident_are_not_read(tmp_path):
    numel = 3 * CHUNK
    values = torch.randn(numel).bfloat16()
    with made(tmp_path, {"w": values}) as store, engine.Engine(store) as updates:
        before = updates.counters()

        def moved(live):
            updates.update("w", torch.ones(numel).bfloat16(), engine.Adam(step=1), values=live)
            updates.finish()
            updates.discard()
            counters = updates.counters()
            kinds = ("state_read", "values_read", "state_written", "values_written")
            bytes_moved = [(counters[kind] - before[kind]) / numel for kind in kinds]
            before.update(counters)
            return bytes_moved

        assert moved(None) == [10, 2, 10, 2]
        assert moved(values) == [10, 0, 10, 2]
        assert store.info()["slot_bytes"] == 12 * numel
    meta = values.to("meta")
    for state, wanted in ((compact(meta), 12), (engine.adam_state(meta), 14)):
        entry = engine.Entry(name="w", values=meta, state=state)
        assert engine.sizes([entry], chunk_elements=CHUNK).slot_bytes == wanted * numel


def test_values_that_are_not_the_committed_ones_are_refused(tmp_path):
    values = torch.randn(5000).bfloat16()
    with made(tmp_path, {"w": values}) as store, engine.Engine(store) as updates:
        changed = values.clone()
        changed[4999] += 1
        updates.update("w", torch.ones(5000).bfloat16(), engine.Adam(step=1), values=changed)
        with pytest.raises(UsageError, match="not those of its last commit"):
            updates.finish()
        updates.discard()
        with pytest.raises(ConfigError, match="float16"):
            updates.update("w", torch.ones(5000).bfloat16(), engine.Adam(step=1), values=values.half())
        with pytest.raises(ConfigError, match="shape"):
            updates.update("w", torch.ones(5000).bfloat16(), engine.Adam(step=1), values=values[:-1])
        updates.update("w", torch.ones(5000).bfloat16(), engine.Adam(step=1), values=values)
        updates.commit(1)
        # Now these are of the step before.
        updates.update("w", torch.ones(5000).bfloat16(), engine.Adam(step=2), values=values)
        with pytest.raises(UsageError, match="not those of its last commit"):
            updates.commit(2)


def test_a_store_of_the_other_layout_is_refused(tmp_path):
    held = {"w": torch.randn(50).bfloat16()}
    made(tmp_path, held).close()
    plain = [engine.Entry(name="w", values=held["w"], state=engine.adam_state(held["w"]))]
    with pytest.raises(ConfigError, match=r'the state of "w" .*rest'):
        engine.Store.create(tmp_path, plain, existing="resume", chunk_elements=CHUNK)
    made(tmp_path, held, existing="resume").close()


def test_whole_state_is_made_compact_on_its_way_in(tmp_path):
    master = torch.randn(5000)
    whole = {"master": master, "exp_avg": torch.randn(5000), "exp_avg_sq": torch.rand(5000)}
    values = master.bfloat16()
    with made(tmp_path, {"w": torch.zeros(5000).bfloat16()}) as store, engine.Engine(store) as updates:
        store.stage("w", values, whole, step=3)
        store.commit(3)
        found = whole_of(*store.read("w"))
        assert all(same_bits(found[of], whole[of]) for of in whole)
        updates.fill("w", values)
        updates.commit(0)
        found = whole_of(*store.read("w"))
        assert torch.equal(found["master"], values.float())
        assert not found["exp_avg"].any()
        assert not found["exp_avg_sq"].any()
        updates.fill("w", values, whole)
        updates.commit(0)
        raw = store.read("w")[1]
        found = whole_of(values, raw)
        assert all(same_bits(found[of], whole[of]) for of in whole)
        updates.fill("w", values, raw)
        updates.commit(0)
        assert all(same_bits(tensor, raw[of]) for of, tensor in store.read("w")[1].items())
        updates.fill("w", values * 2, whole)
        with pytest.raises(ConfigError, match="not its master rounded"):
            updates.commit(1)
        updates.discard()
        assert all(same_bits(tensor, raw[of]) for of, tensor in store.read("w")[1].items())


def test_a_walk_shows_every_byte_once(tmp_path):
    torch.manual_seed(3)
    made_of = {
        "bf16": torch.randn(5000).bfloat16(),
        "none": torch.zeros(0),
        "f32": torch.randn(3, 1741),
    }
    odd = {"row": torch.randn(600), "moment": torch.randn(700, 600), "big": torch.randn(300_000)}
    entries = [engine.Entry(name=name, values=tensor, state=compact(tensor)) for name, tensor in made_of.items()]
    entries.append(engine.Entry(name="odd", values=torch.randn(700, 600), state=odd))
    with engine.Store.create(tmp_path / "store", entries, chunk_elements=CHUNK) as store:
        found = {}

        def visit(name, parts):
            assert len({part.values.numel() for part in parts}) == 1
            for part in parts:
                kept = found.setdefault((name, part.of), [])
                assert sum(map(len, kept)) == part.start
                kept.append(part.values.clone())

        store.scan([entry.name for entry in entries], visit)
        for entry in entries:
            values, state = store.read(entry.name)
            for of, tensor in {"": values, **state}.items():
                got = torch.cat(found.pop((entry.name, of), [tensor[:0].reshape(-1)]))
                assert same_bits(got, tensor.reshape(-1)), (entry.name, of)
        assert not found
        with pytest.raises(ZeroDivisionError):
            store.scan(["f32"], lambda *_: 1 / 0)
        kept = []
        with pytest.raises(UsageError, match="clone"):
            store.scan(["f32"], lambda _, parts: kept.append(parts))


def gradient_of(values, step):
    return torch.randn(values.shape, generator=torch.Generator().manual_seed(step * 1000 + values.numel())).bfloat16()


def trains_until_killed(path, told):
    """What the child does."""
    with engine.Store.open(path) as store, engine.Engine(store) as updates:
        os.write(told, b"x")
        held = {entry["name"]: store.read(entry["name"])[0] for entry in store.entries()}
        step = store.step
        while True:
            step += 1
            for index, (name, values) in enumerate(held.items()):
                live = values if (step + index) % 2 else None
                updates.update(name, gradient_of(values, step), engine.Adam(step=step), values=live)
            updates.commit(step)
            held = {name: store.read(name)[0] for name in held}


def killed_at_random_moments(path, kills):
    """What an interpreter of its own does, because it forks."""
    held = parameters()
    memory = InMemory(held)
    made(path, held).close()
    dice, at = random.Random(5), 0
    numbers = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}
    for _ in range(kills):
        child = functools.partial(trains_until_killed, path)
        kill_after(dice.uniform(0.02, 0.2), child, begun=dice.random() >= 0.1)
        with engine.Store.open(path) as store:
            assert store.step >= at
            while at < store.step:
                at += 1
                for name, values in memory.values.items():
                    memory.step(name, gradient_of(values, at), at, numbers)
            memory.check(store)
    print("steps", at)


def test_killed_at_random_moments_it_is_what_was_never_killed(loaded, tmp_path):
    program = """
        import sys, torch
        torch.set_num_threads(1)
        sys.path.insert(0, sys.argv[1])
        from storage import test_engine_compact
        test_engine_compact.killed_at_random_moments(sys.argv[2], 8)
    """
    output = loaded(textwrap.dedent(program), Path(__file__).parents[1], tmp_path / "store")
    assert int(output.split()[-1]) > 15  # it got somewhere between the kills
