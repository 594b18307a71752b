"""Tests who is named for ranks that are missing, and groups that are made while they are given up."""

import contextlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.ranks import on_ranks
from torch import distributed

from memascend.distributed import groups
from memascend.distributed.control_plane import Exchange
from memascend.distributed.reduce import Collectives
from memascend.distributed.reshard import Passed, Transfer
from memascend.errors import RankError

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


def test_ranks_that_blame_each_other_are_named_and_not_those_that_left_because_of_another(rank_0_of_5):
    for said, named in (({1: [2], 2: [1]}, (1, 2)), ({1: [2], 2: [1, 3]}, (1, 2)), ({1: [2]}, ()), ({}, ())):
        rank_0_of_5(Words(said))
        assert groups.lost_each_other([1, 2, 3], 0.1) == named


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


def test_a_store_that_hangs_ends_the_wait_for_a_group_in_time(rank_0_of_5):
    """As that of rank 0, where it lies, does with it."""
    over = threading.Event()

    class Hanging:
        def __getattr__(self, name):
            return lambda *_: over.wait(SECONDS)

    rank_0_of_5(Hanging())
    with pytest.raises(RankError, match=r"a rank is gone.* does not answer: no answer within 0\.6 s"):
        groups.make_group(0.1)
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


def _named(folder, gone, exchange, part, work):
    """Whom this rank names in work that one is gone from; nobody's process ends before all have left."""
    rank, named = distributed.get_rank(), None
    if rank != gone:
        try:
            work()
        except RankError as error:
            named = [list(error.ranks), str(error)]
    part.close()
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    for other in range(distributed.get_world_size()):
        _await(folder, f"left-{other}")
    return named


def gathering(folder):
    """Rank 3 is gone in a gather; rank 1, which is not next to it in gloo's ring, hears of that from its neighbours."""
    exchange = Exchange(SECONDS)
    collectives = Collectives(exchange, range(4), torch.device("cpu"))

    def gather(group):
        return distributed.all_gather_into_tensor(torch.zeros(16), torch.zeros(4), group)

    return _named(folder, 3, exchange, collectives, lambda: collectives.meet("a gather", None, gather))


def test_a_rank_that_is_gone_in_a_gather_is_named_by_those_far_from_it(tmp_path):
    for found in on_ranks(4, gathering, tmp_path)[:3]:
        assert found[0] == [3], found


def moving(folder):
    """Rank 2 is gone while rows are moved; rank 0 waits for rank 1, and that for rank 2."""
    rank, exchange = distributed.get_rank(), Exchange(SECONDS)
    transfer = Transfer(exchange)
    piece = Passed(rank + 1, rank, None, torch.zeros(4))
    return _named(folder, 2, exchange, transfer, lambda: transfer.move([piece]))


def test_a_rank_that_is_gone_while_rows_are_moved_is_named_alone(tmp_path):
    for found in on_ranks(3, moving, tmp_path)[:2]:
        assert found[0] == [2], found


def apart(folder):
    """Ranks 0 and 1 lose each other, in a gather and before; rank 2 talks to both."""
    rank, others, found = distributed.get_rank(), {0: 1, 1: 0}, []
    exchange = Exchange(SECONDS)
    collectives = Collectives(exchange, range(3), torch.device("cpu"))
    begun = exchange._begun
    exchange._begun = lambda begin, memory, other: (
        RuntimeError("connection reset") if others.get(rank) == other else begun(begin, memory, other)
    )

    def gather(*_, **__):
        raise RuntimeError("connection reset by peer")

    with pytest.raises(RankError) as met:
        collectives.meet("a gather", None, gather)
    found.append([list(met.value.ranks), str(met.value)])
    exchange.close()
    # The third may see both as gone, once they gave up.
    exchange, message = Exchange(SECONDS), None
    if rank in others:
        groups.left_by([others[rank]])
    else:
        _await(folder, "left-note-0")
        _await(folder, "left-note-1")
        error = exchange._gone(dict.fromkeys((0, 1), "no answer in time"), {}, "a step")
        message = [list(error.ranks), str(error)]
    Path(folder, f"left-note-{rank}").touch()
    exchange.tell("over", None)
    exchange.close()
    found.append(message)
    # A group that only the third has.
    exchange, make = Exchange(SECONDS), distributed.new_group
    if rank in others:
        distributed.new_group = lambda *given, **options: gather(make(*given, **options))
    with pytest.raises(RankError) as met:
        groups.make_group(SECONDS)
    distributed.new_group = make
    found.append([list(met.value.ranks), str(met.value)])
    exchange.close()
    Path(folder, f"left-{rank}").touch()
    for other in range(3):
        _await(folder, f"left-{other}")
    return found


def test_two_ranks_that_lose_each_other_are_named_by_the_third(tmp_path):
    first, second, third = on_ranks(3, apart, tmp_path)
    assert [first[0][0], second[0][0]] == [[1], [0]]
    ranks, words = third[0]
    assert ranks == [0, 1], words
    assert "rank 0, rank 1 lost each other" in words
    ranks, words = third[1]
    assert ranks == [0, 1], words
    assert "rank 0, rank 1, which lost each other, did not take part" in words
    for found in (first, second, third):
        ranks, words = found[2]
        assert ranks == [0, 1], words
        assert "rank 0, rank 1 could not connect with each other" in words
        assert "rank 1: connection reset by peer" in words


class Pause:
    """Stops a thread at one of the lines that it comes to after `begin()`, until the one that waits for it has gone."""

    def __init__(self, line):
        self.line = line
        self.reached = 0
        self.waiter_gone = threading.Event()
        self._code = None

    def begin(self, code):
        """Count lines of this code from now on."""
        self._code = code

    def trace(self, frame, event, _):
        """A trace function of `sys.settrace`."""
        if event == "line" and frame.f_code is self._code:
            self.reached += 1
            if self.reached == self.line:
                # A waiter that waits for this very line goes once it is over.
                self.waiter_gone.wait(1.0)
        return self.trace


def met_while_paused(monkeypatch, line):
    """The group that is made just as its time is over, what the waiter has of it, what was let go, and the lines."""
    pause, group, let_go = Pause(line), object(), []
    monkeypatch.setattr(groups, "let_go", let_go.append)

    def make(*_, **__):
        pause.begin(sys._getframe(1).f_code)
        return group

    monkeypatch.setattr(distributed, "new_group", make)
    before = {*threading.enumerate()}
    threading.settrace(pause.trace)
    try:
        has, _ = groups._met(None, 0.05)
    finally:
        threading.settrace(None)
        pause.waiter_gone.set()
    for thread in {*threading.enumerate()} - before:
        thread.join(SECONDS)
    return group, has, let_go, pause.reached


def test_a_group_that_is_made_just_as_it_is_given_up_is_let_go(monkeypatch):
    """Wherever the thread that makes it is held up, the waiter has the group, or it is let go."""
    line, reached = 0, 0
    while line <= reached:
        group, has, let_go, reached = met_while_paused(monkeypatch, line)
        assert (has, let_go) in ((group, []), (None, [group])), f"held up at line {line} after the group was made"
        line += 1
    assert reached
