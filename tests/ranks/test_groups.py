"""Tests who is named for ranks that are missing, and groups that are made while they are given up."""

import contextlib
import json
import threading
import time
from pathlib import Path

import pytest
from support.ranks import on_ranks
from torch import distributed

from memascend.errors import RankError
from memascend.ranks import groups
from memascend.ranks.exchange import Exchange

SECONDS = 60.0


class Words:
    """The store of ranks of which some left, each because of others; some words come while they are asked for."""

    def __init__(self, said, late=()):
        self.said = {groups._left(groups._Next.number, rank): json.dumps(blamed) for rank, blamed in said.items()}
        self.late = {groups._left(groups._Next.number, rank) for rank in late}

    def check(self, keys):
        (key,) = keys
        found = key in self.said and key not in self.late
        self.late.discard(key)
        return found

    def get(self, key):
        return self.said[key].encode()


@pytest.fixture
def rank_0_of_5(monkeypatch):
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 5)
    return lambda store: monkeypatch.setattr(groups, "_store", lambda: store)


@pytest.mark.parametrize(
    ("missing", "said", "named"),
    [
        ([1, 2], {}, (1, 2)),
        ([1, 2], {2: [1]}, (1,)),
        ([2], {2: [1]}, (1,)),
        # One because of another, and that because of a third.
        ([3], {3: [2], 2: [1]}, (1,)),
        # This one came too late for them.
        ([1, 2], {2: [0, 1]}, (1,)),
        ([2], {2: [0]}, (2,)),
        # Each missed the other.
        ([1, 2, 3], {2: [1, 3], 3: [1, 2]}, (1,)),
        ([2, 3], {2: [3], 3: [2]}, (2, 3)),
        ([1, 2], {2: []}, (1,)),
    ],
)
def test_who_left_because_of_others_is_not_named(rank_0_of_5, missing, said, named):
    rank_0_of_5(Words(said))
    assert groups.at_fault(missing) == named
    # A word may come a moment after the connection is gone.
    rank_0_of_5(Words(said, late=said))
    assert groups.at_fault(missing) == named


def test_who_is_missing_is_named_where_the_store_is_gone_or_hangs(rank_0_of_5):
    class Gone(Words):
        def check(self, keys):
            raise RuntimeError(f"connection reset: {keys}")

    over = threading.Event()

    class Hanging(Words):
        def check(self, keys):
            over.wait(SECONDS)
            return super().check(keys)

    for kind in (Gone, Hanging):
        rank_0_of_5(kind({2: [1]}))
        assert groups.at_fault([1, 2]) == (1, 2)
    over.set()


def leaving(folder):
    """Rank 1 is gone once rank 0 heard it; rank 2 did not hear it, and left before rank 0 asks again."""
    rank, exchange, named = distributed.get_rank(), Exchange(SECONDS), None
    if rank == 1:
        exchange._others = [0]
        with contextlib.suppress(KeyError):
            exchange.tell("first", rank)
        _await(folder, "heard")
    elif rank == 2:
        with contextlib.suppress(RankError):
            exchange.tell("first", rank)
    else:
        assert exchange.tell("first", rank) == [0, 1, 2]
        Path(folder, "heard").touch()
        _await(folder, "left-1")
        _await(folder, "left-2")
        try:
            exchange.tell("second", rank)
        except RankError as error:
            named = [list(error.ranks), str(error)]
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    # The processes go on: what others see of them is their connections.
    _await(folder, "left-0")
    return named


def _await(folder, name):
    until = time.monotonic() + SECONDS
    while not Path(folder, name).exists():
        assert time.monotonic() < until, name
        time.sleep(0.005)


def test_a_rank_that_ended_because_of_a_dead_one_is_not_named_beside_it(tmp_path):
    ranks, words = on_ranks(3, leaving, tmp_path)[0]
    assert ranks == [1], words
    assert words.startswith("rank 1 did not take part"), words
    assert "2: it ended because of rank 1" in words
