"""Tests the commits of several ranks: one step on all or on none, whichever rank dies, hangs or fails where."""

import functools
import signal

import pytest
from support.rank_runs import lives

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# The last step that all ranks have if one dies there, of those after the third step was begun.
COMMON = {
    "begin": 2, "between": 2, "before staged": 2, "after staged": 2, "before written": 3, "after written": 3,
    "close": 5,
}  # fmt: skip
GIVEN = ({}, {"host_memory": "1GiB", "log_steps": 3}, {"gradients": "ssd", "max_grad_norm": 0.1})


def whole(ranks, steps):
    """Of a life without an error: what every rank has after each step."""
    assert all((rank["error"], rank["committed"]) == (None, steps) for rank in ranks), ranks
    return ranks


def same(ranks, reference):
    """Whether each rank has the bits of the run without faults, step by step."""
    for rank, other in zip(ranks, reference, strict=True):
        assert rank is None or rank["digests"] == {step: other["digests"][step] for step in rank["digests"]}


def survived(ranks, faulty=1, seconds=60.0):
    """What those ranks met that had no fault: an error that names the one that had."""
    assert ranks[faulty] is None
    for rank in ranks[:faulty] + ranks[faulty + 1 :]:
        assert rank["error"].startswith("RankError"), rank
        assert rank["ranks"] == [faulty], rank
        assert rank["seconds"] < seconds, rank


def cut(tmp_path, point, given, *, world=3, faulty=1):
    """A life that ends by a fault; then all go on at one step, with the bits of a life without."""
    run = functools.partial(lives, tmp_path, world, given=given)
    reference = whole(run(name="reference", steps=7), 7)
    at = 5 if point == "close" else 3
    ranks = run(fault=KILL, point=point, at=at, faulty=faulty)
    # One that dies in close() ends it for nobody else.
    if point != "close":
        survived(ranks, faulty)
    again = whole(run(steps=7), 7)
    assert [rank["opened"] for rank in again] == [COMMON[point]] * world
    same(again, reference)


@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_between_the_roots_takes_the_step_from_all(tmp_path):
    # Rank 0 has written its root, and gives it up when all are opened again.
    cut(tmp_path, "after staged", {}, world=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("given", GIVEN, ids=str)
@pytest.mark.parametrize("point", COMMON)
def test_every_point_of_a_step(tmp_path, point, given):
    cut(tmp_path, point, given, faulty=0 if given == GIVEN[1] else 1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", ["begin", "between", "before staged", "before written"])
def test_a_rank_that_hangs_ends_a_run(tmp_path, point):
    ranks = lives(tmp_path, 3, fault=STOP, point=point, timeout=4.0)
    # The machine may be busy.
    survived(ranks, seconds=30.0)
    assert "no answer in time" in ranks[0]["error"]
    assert {rank["opened"] for rank in whole(lives(tmp_path, 3, steps=7), 7)} == {COMMON[point]}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_rank_whose_code_raises_or_hangs_is_named_on_all_others(tmp_path, fault):
    """Where it hangs, its threads go on."""
    first, second, third = lives(tmp_path, 3, fault=fault, point="begin", timeout=6.0)
    assert second["error"].startswith("ValueError")
    for rank in (first, third):
        assert rank["error"].startswith("RankError"), rank
        assert rank["ranks"] == [1], rank


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        (KILL, "before groups"),
        (KILL, "in groups"),
        pytest.param(STOP, "before groups", marks=pytest.mark.slow),
        pytest.param(STOP, "in groups", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_before_all_can_talk_is_named(tmp_path, fault, point):
    # gloo waits for as long as it is told, and then the others look for each other.
    ranks = lives(tmp_path, 3, fault=fault, point=point, timeout=2.0)
    survived(ranks, seconds=9.0)
    assert all("rank 1 is gone" in ranks[rank]["error"] for rank in (0, 2))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_flipped_bit_is_named_on_all(tmp_path):
    reference = whole(lives(tmp_path, 2, "reference", steps=7), 7)
    whole(lives(tmp_path, 2), 5)
    (path,) = (tmp_path / "run" / "rank-1-of-2").iterdir()
    content = bytearray(path.read_bytes())
    # The newest root, in both of its sectors: step 5 is generation 6.
    for at in (4096 + 40, 4096 + 4096 - 512 + 40):
        content[at] ^= 1
    path.write_bytes(content)
    for rank in lives(tmp_path, 2, steps=7):
        assert rank["error"].startswith("CorruptionError: rank 1"), rank
        assert "existing='previous' opens commit 5" in rank["error"]
    again = whole(lives(tmp_path, 2, steps=7, existing="previous"), 7)
    assert [rank["opened"] for rank in again] == [4, 4]
    same(again, reference)
