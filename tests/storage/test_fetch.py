"""Tests background reads of units: they hold up no step, and show what was there when asked."""

from __future__ import annotations

import mmap
import time

import pytest
import torch
from support.stores import damage

from memascend import engine
from memascend.errors import CorruptionError, UsageError

NUMEL = 3 << 18


def values(step):
    return torch.full((NUMEL,), float(step))


def pages(nbytes):
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def train(store, updates, steps):
    for step in steps:
        updates.fill("weight", values(step), {}, step=step)
        updates.commit(step)
        assert store.step == step


def wait_for(*reads):
    while not all(read.done() for read in reads):
        time.sleep(0.001)


@pytest.fixture
def made(tmp_path):
    records = [engine.Record(name="weight", unit="one", values=values(0), state={})]
    store = engine.Store.create(tmp_path / "store", records, chunk_elements=1 << 18)
    with store, engine.Engine(store) as updates:
        yield store, updates


@pytest.mark.timeout(60)
@pytest.mark.parametrize("held", [True, False])
def test_a_fetch_that_ended_holds_up_no_step(made, held):
    store, updates = made
    into = pages(values(0).nbytes)
    fetch = store.fetch("one", into)
    wait_for(fetch)
    if not held:
        del fetch
    train(store, updates, range(1, 5))
    if held:
        assert fetch.wait() == fetch.wait() == 1, "the generation that it began at"
    assert torch.equal(into.view(torch.float32), values(0))


@pytest.mark.timeout(60)
def test_a_fetch_of_a_damaged_unit_says_so_after_its_slot_was_written_again(made, tmp_path):
    store, updates = made
    train(store, updates, range(1, 2))
    damage(tmp_path / "store", values(1)[: 1 << 18].numpy().tobytes())
    fetch = store.fetch("one", pages(values(0).nbytes))
    wait_for(fetch)
    train(store, updates, range(2, 5))
    with pytest.raises(CorruptionError, match="weight"):
        fetch.wait()


@pytest.mark.timeout(60)
def test_parts_that_were_read_hold_up_no_step(made):
    store, updates = made
    parts = store.parts("one", 1 << 20)
    places = parts.places()
    assert len(places) == 3
    memory = [pages(nbytes) for _, nbytes in places]
    reads = [parts.begin(index, into) for index, into in enumerate(memory)]
    wait_for(*reads)
    train(store, updates, range(1, 5))
    for read in reads:
        read.wait()
    assert torch.equal(torch.cat(memory).view(torch.float32), values(0))
    with pytest.raises(UsageError, match="overwritten"):
        parts.begin(0, memory[0])


@pytest.mark.timeout(60)
def test_parts_that_are_never_read_do_not_keep_an_engine_open(made):
    store, updates = made
    parts = store.parts("one", 1 << 20)
    train(store, updates, range(1, 2))
    # Its slot is still to be read: this waits, and is given up.
    updates.fill("weight", values(2), {}, step=2)
    updates.discard()
    updates.fill("weight", values(2), {}, step=2)
    updates.close()
    assert store.step == 1
    into = pages(parts.places()[0][1])
    parts.begin(0, into).wait()
    assert torch.equal(into.view(torch.float32), values(0)[: 1 << 18])
