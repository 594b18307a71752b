"""Tests updates, whole and compact: against masters in memory, resumed, killed, and by the bytes they move."""

import functools
import os
import random
import textwrap
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.killed_child import kill_after
from support.stores import CHUNK, NUMBERS, parameters

from memascend import engine, kernels
from memascend.errors import ConfigError, UsageError


def compact(values):
    return engine.encode_state(values, {}, "compact") if values.dtype == torch.bfloat16 else engine.adam_state(values)


def whole_of(values, state):
    """Master and moments; float32 values are their own master."""
    return engine.decode_state(values, state, "compact") if "rest" in state else {"master": values, **state}


def described(held, state_of=compact):
    state = {name: state_of(values) for name, values in held.items()}
    spill = torch.bfloat16
    return [engine.Record(name=name, values=held[name], state=state[name], spill=spill) for name in held]


def made(path, held, *, state_of=compact, **options):
    return engine.Store.create(path, described(held, state_of), chunk_elements=CHUNK, **options)


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


@pytest.mark.parametrize(
    ("state_of", "backend", "resident"),
    [
        (compact, "io_uring", "never"),
        (compact, "io_uring", "always"),
        (compact, "threads", "sometimes"),
        (engine.adam_state, "io_uring", "sometimes"),
        (engine.adam_state, "threads", "never"),
    ],
)
def test_a_hundred_steps_are_those_of_masters_in_memory(tmp_path, state_of, backend, resident):
    held = parameters()
    memory = InMemory(held)
    counts = dict.fromkeys(held, 0)
    store = made(tmp_path / "store", held, state_of=state_of, backend=backend)
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
        assert {record["name"]: record["step"] for record in store.records()} == counts
        found = {record["name"] for record in store.records() if record["compact"]}
        assert found == {name for name in held if state_of is compact and name.startswith("bfloat16")}


def test_updates_by_spilled_gradients_from_fetched_values(tmp_path):
    held = parameters([torch.bfloat16])
    memory = InMemory(held)
    with made(tmp_path, held) as store, engine.Engine(store) as updates:
        unit = torch.zeros(engine.PAGE_BYTES * 10, dtype=torch.uint8)
        unit = unit[-unit.data_ptr() % engine.PAGE_BYTES :][: sum(engine.sizes(described(held)).unit_bytes.values())]
        places = {record["name"]: record["unit_offset"] for record in store.records()}
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
        record = engine.Record(name="w", values=meta, state=state)
        assert engine.sizes([record], chunk_elements=CHUNK).slot_bytes == wanted * numel


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
    plain = [engine.Record(name="w", values=held["w"], state=engine.adam_state(held["w"]))]
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
    records = [engine.Record(name=name, values=tensor, state=compact(tensor)) for name, tensor in made_of.items()]
    records.append(engine.Record(name="odd", values=torch.randn(700, 600), state=odd))
    with engine.Store.create(tmp_path / "store", records, chunk_elements=CHUNK) as store:
        found = {}

        def visit(name, parts):
            assert len({part.values.numel() for part in parts}) == 1
            for part in parts:
                kept = found.setdefault((name, part.of), [])
                assert sum(map(len, kept)) == part.start
                kept.append(part.values.clone())

        store.scan([record.name for record in records], visit)
        for record in records:
            values, state = store.read(record.name)
            for of, tensor in {"": values, **state}.items():
                got = torch.cat(found.pop((record.name, of), [tensor[:0].reshape(-1)]))
                assert same_bits(got, tensor.reshape(-1)), (record.name, of)
        assert not found
        with pytest.raises(ZeroDivisionError):
            store.scan(["f32"], lambda *_: 1 / 0)
        kept = []
        with pytest.raises(UsageError, match="clone"):
            store.scan(["f32"], lambda _, parts: kept.append(parts))


def gradient_of(values, step):
    drawn = torch.randn(values.shape, generator=torch.Generator().manual_seed(step * 1000 + values.numel()))
    return drawn.to(values.dtype)


def trains_until_killed(path, told):
    """What the child does."""
    with engine.Store.open(path) as store, engine.Engine(store) as updates:
        os.write(told, b"x")
        held = {record["name"]: store.read(record["name"])[0] for record in store.records()}
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


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_is_what_was_never_killed(loaded, tmp_path, kills):
    program = """
        import sys, torch
        torch.set_num_threads(1)
        sys.path.insert(0, sys.argv[1])
        from storage import test_engine_compact
        test_engine_compact.killed_at_random_moments(sys.argv[2], int(sys.argv[3]))
    """
    output = loaded(textwrap.dedent(program), Path(__file__).parents[1], tmp_path / "store", kills)
    assert int(output.split()[-1]) > kills  # it got somewhere between the kills
