"""Tests which commit several ranks open, and which stores of one folder go together or stand for others."""

from types import SimpleNamespace

import pytest
import torch

from memascend.distributed.opening import EARLIER, Stores, choose, common_of, outlived_by
from memascend.distributed.rows import Layout, Rows
from memascend.errors import ConfigError

RUNS = {1: "0" * 32, 2: "2" * 32, 3: "3" * 32, 4: "4" * 32}


def store(count, *numbers):
    """What is seen of a store of so many ranks whose roots name these commits, the newest first."""
    commits = [{"run": RUNS[count], "number": number, "identity": f"{number:032x}", "ranks": 0} for number in numbers]
    return {"there": True, "filled": bool(commits), "commits": commits, "damage": None, "error": None}


@pytest.mark.parametrize("last", [(3, 2), (4, 3), (9,)])
@pytest.mark.parametrize("count", [1, 3])
def test_stores_of_several_runs_do_not_go_together_though_their_numbers_do(last, count):
    with pytest.raises(ConfigError, match=f"several runs.*rank {count}: is of run 44444444"):
        common_of([*[store(2, 3, 2)] * count, store(4, *last)])


@pytest.mark.parametrize(
    ("shards", "each", "number", "lost"),
    [
        # The last one was filled, and not verified: it has a commit of the run without a number.
        (1, [store(2, 3, 2), store(2, 0)], 3, {1: 0}),
        # A replica took no part in the last step.
        (2, [*[store(2, 3, 2)] * 2, *[store(2, 2, 1)] * 2], 3, {2: 0, 3: 1}),
        # Ranks were killed between their roots.
        (2, [store(2, 3, 2), store(2, 2, 1), store(2, 2, 1), store(2, 3, 2)], 2, {}),
    ],
)
def test_replicas_fill_stores_that_are_not_whole_or_were_left_out_of_a_step(shards, each, number, lost):
    told = {"a new run": ["9" * 32], "the stores": [{**one, "others": [], "pending": False} for one in each]}
    exchange = SimpleNamespace(rank=0, tell=lambda about, _: told[about])
    opening = choose(None, exchange, "resume", Layout(0, len(each) // shards, shards))
    assert (opening.number, opening.lost) == (number, lost)


def test_rows_take_the_scale_of_a_last_block_that_is_not_full():
    rows = Rows(torch.Size([5, 128]), first=2, count=3)
    assert rows.of("exp_avg_absmax", torch.arange(3)).tolist() == [1, 2]


def stores(count, *each, said=None):
    """Those of a number of ranks; None where a rank's is not there. `said`: by each of them."""
    seen = {rank: {**one, "said": said} for rank, one in enumerate(each) if one is not None}
    return Stores(count=count, all_owners=dict.fromkeys(seen, 0), all_seen=seen)


def identity(count, number):
    return {"ranks": count, "run": "uuid" if count == 1 else RUNS[count], "number": number}


def said(*earlier, step=7):
    return {"uuid": "uuid", "step": step, EARLIER: list(earlier)}


def new(said):
    return stores(2, store(2, 1), store(2, 1), said=said)


ZEROS = {**store(4), "there": False, "filled": True}


@pytest.mark.parametrize(
    ("old", "outlived"),
    [
        (stores(4, *[store(4, 9, 8)] * 4), [4]),
        # One rank was ahead.
        (stores(4, *[store(4, 9, 8)] * 3, store(4, 10, 9)), [4]),
        # Others were removed, or are being replaced.
        (stores(4, None, None, store(4, 9, 8), None), [4]),
        (stores(4, store(4), ZEROS, store(4, 9, 8), None), [4]),
        # Another commit of the run, as in a copy of it, or another run.
        (stores(4, *[store(4, 8, 7)] * 4), []),
        (stores(4, *[store(2, 9, 8)] * 4), []),
    ],
)
def test_new_stores_stand_for_what_they_name(old, outlived):
    assert list(outlived_by([old, new(said(identity(4, 9)))])) == outlived
    # Nothing says so.
    assert not outlived_by([old, new(said())])
    assert not outlived_by([old, new(None)])


@pytest.mark.parametrize("last", [None, store(2)])
def test_stores_of_which_one_is_missing_stand_for_none(last):
    old = stores(4, *[store(4, 9, 8)] * 4)
    assert not outlived_by([old, stores(2, store(2, 1), last, said=said(identity(4, 9)))])


def test_stores_stand_for_all_that_those_had_outlived():
    """One process, then two ranks, then three: of the two one is gone."""
    two = stores(2, None, store(2, 1), said=said(identity(1, 7)))
    three = stores(3, *[store(3, 1)] * 3, said=said(identity(2, 1), identity(1, 7)))
    assert sorted(outlived_by([stores(1, store(1, 0), said=said()), two, three])) == [1, 2]
    # A single process that went on is none of them.
    assert list(outlived_by([stores(1, store(1, 0), said=said(step=8)), two, three])) == [2]


@pytest.mark.parametrize(
    ("each", "is_unfilled", "missing"),
    [
        ([store(2), store(2)], True, [0, 1]),
        ([store(2, 1), store(2)], True, [1]),
        # All have made the first commit once one has the second: this one is damaged.
        ([store(2, 2, 1), store(2)], False, [1]),
        ([store(2, 2, 1), {**store(2), "there": False, "filled": True}], False, [1]),
        ([store(2, 2, 1), None], False, [1]),
        ([store(2, 1), store(2, 1)], False, []),
        # Whatever it is, it can be asked what it lacks.
        ([store(2, 2, 1), {**store(2), "filled": True, "error": "no memascend store"}], False, []),
    ],
)
def test_a_store_without_a_commit_is_unfilled_or_lost(each, is_unfilled, missing):
    found = stores(2, *each)
    assert (found.is_unfilled, found.missing) == (is_unfilled, missing)
