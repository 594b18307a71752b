"""Tests who is named for ranks that are missing, and for ranks that left because of others."""

import contextlib
import functools
import json
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.ranks import ranks
from torch import distributed

from memascend.distributed import groups
from memascend.distributed.collectives import Collectives
from memascend.distributed.control_plane import Exchange
from memascend.distributed.reshard import Passed, Transfer
from memascend.distributed.rows import Layout
from memascend.errors import RankError

SECONDS = 60.0


class Words:
    """The store of ranks of which some left, each because of others; some words come while they are asked for."""

    def __init__(self, said, late=()):
        self.said = {f"keys/0/left/{rank}": json.dumps(blamed) for rank, blamed in said.items()}
        self.late = {f"keys/0/left/{rank}" for rank in late}

    def check(self, keys):
        (key,) = keys
        found = key in self.said and key not in self.late
        self.late.discard(key)
        return found

    def get(self, key):
        return self.said[key].encode()


@pytest.fixture
def rank_0_of_5(monkeypatch):
    """The meeting of this rank with four others, of which a store knows."""
    monkeypatch.setattr(distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 5)
    monkeypatch.setattr(groups, "meet", lambda *_: "keys/0")

    def meeting(store):
        monkeypatch.setattr(groups, "_store", lambda: store)
        monkeypatch.setattr(distributed.distributed_c10d._world, "group_count", 0)
        return groups.Meeting(SECONDS)

    return meeting


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
    assert rank_0_of_5(Words(said)).at_fault(missing) == named
    # A word may come a moment after the connection is gone.
    assert rank_0_of_5(Words(said, late=said)).at_fault(missing) == named


def hang(over):
    return lambda *_: over.wait(SECONDS)


def test_who_is_missing_is_named_where_the_store_is_gone_or_hangs(rank_0_of_5):
    over, gone, hanging = threading.Event(), Words({2: [1]}), Words({2: [1]})
    gone.check, hanging.check = Mock(side_effect=RuntimeError("connection reset")), hang(over)
    for store in (gone, hanging):
        assert rank_0_of_5(store).at_fault([1, 2]) == (1, 2)
    over.set()


def test_a_store_that_hangs_ends_the_wait_for_a_group_in_time(rank_0_of_5):
    """As that of rank 0, where it lies, does with it."""
    over = threading.Event()
    store = Mock(**dict.fromkeys(("check", "get", "set", "add", "wait"), hang(over)))
    with pytest.raises(RankError, match=r"a rank is gone.* does not answer: no answer within 0\.6 s"):
        rank_0_of_5(store).make_group(0.1)
    over.set()


@ranks(3)
def test_a_rank_that_ended_because_of_a_dead_one_is_not_named_beside_it(folder):
    """Rank 1 is gone once rank 0 heard it; rank 2 did not hear it, and left before rank 0 asks again."""
    rank, exchange = distributed.get_rank(), Exchange(SECONDS)
    if rank == 0:
        assert exchange.tell("first", rank) == [0, 1, 2]
        Path(folder, "heard").touch()
        _await(folder, "left-1", "left-2")
        with pytest.raises(RankError, match=r"(?s)^rank 1 did not take part.*2: it ended because of rank 1") as raised:
            exchange.tell("second", rank)
        assert raised.value.ranks == (1,)
    else:
        move = exchange._move
        if rank == 1:

            def moved(*given):
                exchange._move = move
                # Rank 0 alone has its message.
                move(given[0], *({0: each[0]} for each in given[1:3]), *given[3:])

            exchange._move = moved
        with contextlib.suppress(RankError, KeyError):
            exchange.tell("first", rank)
        _await(folder, *(["heard"] if rank == 1 else []))
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    # The processes go on: what others see of them is their connections.
    _await(folder, "left-0")


def _await(folder, *names):
    until = time.monotonic() + SECONDS
    while not all(Path(folder, name).exists() for name in names):
        assert time.monotonic() < until, names
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["gather", "move"])
@ranks(4)
def test_a_rank_that_is_gone_in_a_collective_is_named_by_those_far_from_it(folder, kind):
    """Whom a rank names where rank 3 is gone: rank 1, which is not next to it in gloo's ring, hears of it from others.

    Nobody's process ends before all have left.
    """
    rank, exchange = distributed.get_rank(), Exchange(SECONDS)
    if kind == "move":
        part = Transfer(exchange)
        pieces = [Passed(rank, to, torch.zeros(4), torch.zeros(4) if to == rank else None) for to in range(4)]
        pieces += [Passed(of, rank, None, torch.zeros(4)) for of in range(4) if of != rank]
        work = functools.partial(part.move, pieces)
    else:
        part = Collectives(exchange, Layout(rank, 1, 4), torch.device("cpu"))
        gather = functools.partial(distributed.all_gather_into_tensor, torch.zeros(16), torch.zeros(4))
        work = functools.partial(part.meet, "a gather", None, gather)
    if rank != 3:
        with pytest.raises(RankError) as raised:
            work()
        assert raised.value.ranks == (3,)
    part.close()
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    _await(folder, *(f"left-{other}" for other in range(4)))
