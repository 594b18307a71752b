"""Tests the commits of several ranks: one step on all or on none, whichever rank dies, hangs or fails where."""

import functools
import json
from pathlib import Path

import pytest
from support.disks import faulty  # noqa: F401

TESTS = Path(__file__).resolve().parents[1]

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from support import rank_runs
print(json.dumps(rank_runs.run(sys.argv[2], **json.loads(sys.argv[3]))))
"""

POINTS = ("begin", "before staged", "after staged", "before written", "after written", "close")


@pytest.fixture
def train(loaded, tmp_path):
    def run(folder="run", **options):
        said = loaded(PROGRAM, TESTS, tmp_path / folder, json.dumps(options))
        line = next(line for line in said.splitlines() if line.startswith("[{"))
        return json.loads(line), said

    return run


def whole(run, steps=5, **options):
    """Trains to the end: what every rank has after each step."""
    ranks, said = run(steps=steps, **options)
    assert [rank["status"] for rank in ranks] == [0] * len(ranks), said
    assert all(rank["error"] is None and rank["committed"] == steps for rank in ranks), said
    return ranks


def same(ranks, reference):
    """Whether each rank has the bits of the run without faults, step by step."""
    for rank, other in zip(ranks, reference, strict=True):
        assert rank["digests"]
        assert rank["digests"] == {step: other["digests"][step] for step in rank["digests"]}


def survived(ranks, faulty_rank):
    """What those ranks met that had no fault: an error that names the one that had."""
    for number, rank in enumerate(ranks):
        if number != faulty_rank:
            assert rank["status"] == 0, rank
            assert rank["error"].startswith("RankError"), rank
            assert rank["ranks"] == [faulty_rank], rank


def cut(train, reference, *, steps=5, world=2, common=None, **fault):
    """A life that ends by a fault; then all go on at one step, with the bits of a life without."""
    ranks, said = train(steps=steps, world=world, **fault)
    # One that dies in close(), or at random after the last step, ends it for nobody else.
    if fault.get("point") != "close" and any(rank.get("error") for rank in ranks):
        survived(ranks, fault.get("faulty", 1))
    again = whole(train, steps=steps + 2, world=world)
    opened = {rank["opened"] for rank in again}
    assert len(opened) == 1, (again, said)
    if common is not None:
        assert opened == {common}, said
    same(again, reference)
    return opened.pop()


@pytest.mark.timeout(400)
def test_a_rank_that_is_killed_between_the_roots_takes_the_step_from_all(train):
    reference = whole(lambda **options: train("reference", **options), steps=7)
    # Rank 0 has written its root, and gives it up when all are opened again.
    cut(train, reference, fault="kill", point="after staged", common=2)


@pytest.mark.timeout(400)
def test_a_rank_that_hangs_after_its_root_ends_the_step_on_all_within_the_timeout(train):
    reference = whole(lambda **options: train("reference", **options), steps=7)
    ranks, _ = train(fault="stop", point="before written", timeout=2.0)
    survived(ranks, 1)
    assert "no answer in time" in ranks[0]["error"]
    again = whole(train, steps=7)
    assert [rank["opened"] for rank in again] == [3, 3]
    same(again, reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faulty_rank", [0, 1])
@pytest.mark.parametrize("point", POINTS)
def test_every_point_of_a_step(train, point, faulty_rank):
    options = {"world": 3}
    reference = whole(lambda **more: train("reference", **more), steps=7, **options)
    has_it = {"begin": 2, "before staged": 2, "after staged": 2, "before written": 3, "after written": 3, "close": 5}
    at = 5 if point == "close" else 3
    cut(
        train,
        reference,
        **options,
        fault="kill",
        faulty=faulty_rank,
        point=point,
        at=at,
        common=has_it[point],
    )


WHOLE = {"whole": True, "world": 2}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("point", [*POINTS, "between"])
@pytest.mark.parametrize(
    "given", [{}, {"host_memory": "1GiB", "log_steps": 3}, {"gradients": "ssd", "max_grad_norm": 0.1}], ids=str
)
def test_every_point_of_a_step_of_a_whole_run(train, point, given):
    train = functools.partial(train, **WHOLE, given=given)
    reference = whole(lambda **more: train("reference", **more), steps=7)
    has_it = {"between": 2, "begin": 2, "before staged": 2, "after staged": 2, "before written": 3, "after written": 3}
    at, common = (5, 5) if point == "close" else (3, has_it[point])
    cut(train, reference, fault="kill", point=point, at=at, common=common)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("point", ["begin", "between", "before staged", "before written"])
def test_a_rank_that_hangs_ends_a_whole_run(train, point):
    ranks, said = train(**{**WHOLE, "world": 3}, fault="stop", point=point, timeout=4.0)
    survived(ranks, 1)
    # The machine may be busy.
    assert all(rank["seconds"] < 30.0 for number, rank in enumerate(ranks) if number != 1), said
    again = whole(train, steps=7, **{**WHOLE, "world": 3})
    assert len({rank["opened"] for rank in again}) == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("given", [{}, {"whole": True}, {"whole": True, "given": {"host_memory": "1GiB"}}], ids=str)
def test_thirty_kills_at_random_moments(train, given):
    import random

    train = functools.partial(train, **given)
    reference = whole(lambda **options: train("reference", **options), steps=70, world=3)
    opened = []
    draw = random.Random(23)
    for life in range(30):
        ranks, said = train(
            steps=(life + 1) * 2, world=3, faulty=draw.randrange(3), kill_after=draw.uniform(0, 0.2), timeout=20.0
        )
        starts = {rank["opened"] for rank in ranks if "opened" in rank}
        assert len(starts) <= 1, said
        same(
            [rank for rank in ranks if rank.get("digests")],
            [other for rank, other in zip(ranks, reference, strict=True) if rank.get("digests")],
        )
        opened += starts
    again = whole(train, steps=70, world=3)
    assert len({rank["opened"] for rank in again}) == 1
    same(again, reference)
    assert opened == sorted(opened)


@pytest.mark.parametrize(
    ("fault", "point"),
    [
        ("kill", "before groups"),
        ("kill", "in groups"),
        pytest.param("stop", "before groups", marks=pytest.mark.slow),
        pytest.param("stop", "in groups", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_gone_before_all_can_talk_is_named(train, fault, point):
    ranks, said = train(world=3, fault=fault, point=point, timeout=2.0)
    for rank in (ranks[0], ranks[2]):
        assert rank["error"].startswith("RankError: rank 1 is gone"), said
        assert rank["ranks"] == [1]
        # gloo waits for as long as it is told, and then the others look for each other.
        assert rank["seconds"] < 9, said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_ends_the_step_on_all_and_it_is_done_again(train, faulty):  # noqa: F811
    options = {
        "paths": {"1": str(faulty.path)},
        "control": str(faulty.control),
        "fault": "full",
        "point": "begin",
    }
    reference = whole(lambda **more: train("reference", **more), steps=7)
    # The disk is a file of zeros, in which a resume begins nothing.
    ranks, said = train(existing="replace", **options)
    assert "no space left on device" in ranks[1]["error"], said
    survived(ranks, 1)
    assert "no space left on device" in ranks[0]["error"]
    faulty.set()
    # The same within one life: all discard it, and go on.
    again = whole(train, steps=7, **{**options, "at": 5, "retry": True})
    assert [rank["opened"] for rank in again] == [2, 2]
    assert all("no space left" in rank["tried"] for rank in again)
    same(again, reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_flipped_bit_is_named_on_all(train, tmp_path):
    reference = whole(lambda **options: train("reference", **options), steps=7)
    whole(train)
    path = tmp_path / "run" / "rank-1"
    bytes_ = bytearray(path.read_bytes())
    # The newest root, in both of its sectors: step 5 is generation 6.
    for at in (4096 + 40, 4096 + 4096 - 512 + 40):
        bytes_[at] ^= 1
    path.write_bytes(bytes_)
    ranks, said = train(steps=7)
    for rank in ranks:
        assert rank["error"].startswith("CorruptionError: rank 1"), said
        assert "existing='previous' opens commit 5" in rank["error"]
    again = whole(train, steps=7, existing="previous")
    assert [rank["opened"] for rank in again] == [4, 4]
    same(again, reference)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stores_that_do_not_belong_together_are_refused_by_rank(train, tmp_path):
    whole(train)
    (tmp_path / "run" / "rank-1").rename(tmp_path / "elsewhere")
    before = (tmp_path / "run" / "rank-0").read_bytes()
    ranks, said = train(steps=7)
    assert all("rank 1: holds no store" in rank["error"] for rank in ranks), said
    whole(lambda **options: train("other", **options))
    (tmp_path / "other" / "rank-1").rename(tmp_path / "run" / "rank-1")
    ranks, said = train(steps=7)
    assert all("the stores are of several runs" in rank["error"] for rank in ranks), said
    assert (tmp_path / "run" / "rank-0").read_bytes() == before
