"""Tests units that are read part by part."""

import threading

import pytest
import torch
from support.stores import in_one, pages, two_units

from memascend import engine
from memascend.errors import ConfigError


@pytest.fixture
def updates(tmp_path):
    with two_units(tmp_path) as store, engine.Engine(store) as made:
        yield made


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
            updates.update(name, torch.ones(25_000), engine.Adam(step=step))
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
