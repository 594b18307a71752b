"""Tests runs of several ranks whose processes or drives fail: all have a step or none, and go on by the right bits."""

import functools
import itertools
import signal

import pytest
import torch
from support.bits import same_bits
from support.rank_models import backward, offloaded, train
from support.rank_runs import lives
from support.ranks import ranks
from torch import distributed

from memascend.checkpoint.reader import Checkpoint, identity_of
from memascend.errors import RankError

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# The last step that all ranks have if one dies there, of those after the third step was begun.
COMMON = {
    "begin": 2, "between": 2, "before staged": 2, "after staged": 2, "before written": 3, "after written": 3,
    "close": 5,
}  # fmt: skip
GIVEN = ({}, {"host_memory": "1GiB", "log_steps": 3}, {"gradients": "ssd", "max_grad_norm": 0.1})


def whole(ranks, steps):
    """Ranks of a life without an error."""
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


# In the first one rank 0 has written its root, and gives it up when all are opened again.
POINTS = [("after staged", {}, 2), *((*one, 3) for one in zip(COMMON, itertools.cycle(GIVEN), strict=False))]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("point", "given", "world"),
    [POINTS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in POINTS[1:])],
    ids=str,
)
def test_a_rank_that_is_killed_takes_the_step_from_all_or_from_none(tmp_path, point, given, world):
    """All go on at one step, with the bits of a life without a fault."""
    run = functools.partial(lives, tmp_path, world, given=given)
    reference = whole(run(name="reference", steps=7), 7)
    faulty, at = (0 if given == GIVEN[1] else 1), (5 if point == "close" else 3)
    ranks = run(fault=KILL, point=point, at=at, faulty=(faulty,))
    # One that dies in close() ends it for nobody else.
    if point != "close":
        survived(ranks, faulty)
    again = whole(run(steps=7), 7)
    assert [rank["opened"] for rank in again] == [COMMON[point]] * world
    same(again, reference)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_rank_whose_code_raises_or_hangs_is_named_on_all_others(tmp_path, fault):
    """Where it hangs, its threads go on."""
    first, second, third = lives(tmp_path, 3, fault=fault, point="begin", timeout=6.0)
    assert second["error"].startswith("ValueError")
    for rank in (first, third):
        assert rank["error"].startswith("RankError"), rank
        assert rank["ranks"] == [1], rank


@pytest.mark.parametrize("point", ["before groups", "in groups"])
@pytest.mark.parametrize("fault", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_a_rank_that_is_gone_before_all_can_talk_is_named(tmp_path, fault, point):
    # gloo waits for as long as it is told, and then the others look for each other.
    ranks = lives(tmp_path, 3, fault=fault, point=point, timeout=2.0)
    survived(ranks, seconds=30.0)
    assert all("rank 1 is gone" in ranks[rank]["error"] for rank in (0, 2))


def test_a_run_that_was_closed_goes_on(tmp_path):
    run = functools.partial(lives, tmp_path, 2, given={"durability": "none", "host_memory": "1GiB"})
    reference = whole(run(name="reference", steps=3), 3)
    whole(run(steps=1), 1)
    again = whole(run(steps=3), 3)
    assert [rank["state"] for rank in again] == [{"step": 1, "rank": rank} for rank in range(2)]
    same(again, reference)


def store_of(tmp_path, rank):
    return tmp_path / f"run/rank-{rank}-of-2/memascend.store"


@pytest.mark.timeout(400)
def test_a_full_disk_and_flipped_bits_end_on_all_ranks(tmp_path):
    """Each error names its rank, nothing is left, and what was committed goes on."""
    reference, saved = whole(lives(tmp_path, 2, "reference", steps=4), 4), tmp_path / "run/saved"
    first, second = lives(tmp_path, 2, fault="full", point="before groups")
    assert second["error"].startswith("StorageError"), second
    assert first["ranks"] == [1] or first["error"].startswith("ConfigError"), first
    assert not list(tmp_path.glob("run/**/*.store"))
    whole(lives(tmp_path, 2, steps=2, save="saved"), 2)
    before = identity_of(saved)
    first, second = lives(tmp_path, 2, steps=3, save="saved", faulty=(0,), fault="full", point="saving")
    assert first["error"].startswith("StorageError"), first
    # Its own file may be gone by then.
    assert second["error"].startswith(("RankError", "StorageError")), second
    assert identity_of(saved) == before
    content = store_of(tmp_path, 1).read_bytes()
    half = len(content) // 2
    store_of(tmp_path, 1).write_bytes(content[:half] + bytes(255 - byte for byte in content[half:]))
    first, second = lives(tmp_path, 2, steps=4)
    assert second["error"].startswith("CorruptionError"), second
    assert "rank 1" in first["error"], first
    store_of(tmp_path, 1).write_bytes(content)
    again = whole(lives(tmp_path, 2, steps=4), 4)
    assert [rank["opened"] for rank in again] == [3, 3]
    same(again, reference)


@pytest.mark.timeout(400)
def test_a_damaged_log_of_one_rank_leaves_the_commit_before_to_all(tmp_path):
    """Two ranks are killed, and then a bit of rank 1's last gradients is flipped."""
    run = functools.partial(lives, tmp_path, 2, given={"host_memory": "1GiB", "log_steps": 16, "gradients": "ssd"})
    reference = whole(run(name="reference", steps=4), 4)
    assert run(steps=3, faulty=(0, 1), fault=KILL, point="close") == [None, None]
    store = store_of(tmp_path, 1)
    content = bytearray(store.read_bytes())
    heads = [at for at in range(0, len(content), 4096) if content[at : at + 8] == b"mascstep"]
    newest = max(heads, key=lambda at: int.from_bytes(content[at + 16 : at + 24], "little"))
    content[newest - 4096] ^= 1
    store.write_bytes(content)
    # A program that is started again and again.
    for _ in range(2):
        assert [rank["error"].split(":")[0] for rank in run(steps=4)] == ["ConfigError", "CorruptionError"]
        assert store.read_bytes() == content
    again = whole(run(steps=4, existing="previous"), 4)
    assert [rank["opened"] for rank in again] == [2, 2]
    same(again, reference)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("place", ["saved", "hidden/saved"])
@pytest.mark.parametrize("fault", [KILL, STOP])
def test_a_rank_that_is_gone_in_the_midst_of_a_save(tmp_path, place, fault):
    """The earlier checkpoint is whole, and the run goes on where it was committed."""
    run = functools.partial(lives, tmp_path, 3, save=place, timeout=6.0)
    reference = whole(lives(tmp_path, 3, "reference", steps=4), 4)
    whole(run(steps=1), 1)
    for victim in (0, 1):
        survived(run(steps=2 + victim, faulty=(victim,), fault=fault, point="saving"), victim)
        assert identity_of(tmp_path / "run" / place)["step"] == 1
        Checkpoint(tmp_path / "run" / place).verify()
    again = whole(run(steps=4), 4)
    assert [rank["opened"] for rank in again] == [3] * 3
    same(again, reference)
    # What the dead ranks had written is gone with the next save.
    assert not list((tmp_path / "run" / place).parent.glob(".saved*"))


# --- one of two ranks fails -------------------------------------------------------------------

# Micro-batches of a step, on both ranks; and steps.
MICROS, STEPS = 6, 4
SMALL = {"timeout": 30.0, "dtype": torch.float32, "gradients": "ssd"}


def failing(*_, **__):
    raise OSError(5, "as if the drive were gone")


def require_the_failure(do):
    """Rank 1 fails by its own error, and rank 0 names it."""
    faulty = distributed.get_rank() == 1
    with pytest.raises(OSError if faulty else RankError, match="as if the drive were gone") as raised:
        do()
    assert faulty or raised.value.ranks == (1,)


@ranks(2)
def test_a_rank_that_fails_ends_its_step_on_both_by_its_name(folder):
    """Rank 1 fails in step(), in a gather, in a backward; a step is done again, or the run is resumed."""
    faulty = distributed.get_rank() == 1
    trained, optimizer = offloaded(f"{folder}/whole", **SMALL)
    values = train(trained, optimizer, STEPS, MICROS)
    optimizer.close()
    trained, optimizer = offloaded(f"{folder}/run", **SMALL)
    train(trained, optimizer, 1, MICROS)
    backward(trained, 1, MICROS)
    buffers = optimizer._session.run.buffers
    if faulty:
        buffers.stage = failing
    require_the_failure(optimizer.step)
    if faulty:
        del buffers.stage
    optimizer.zero_grad()
    assert all(map(same_bits, train(trained, optimizer, STEPS, MICROS), values))
    if faulty:
        optimizer._session.run.residency.read_into = failing
    require_the_failure(lambda: backward(trained, STEPS))
    with pytest.raises(RankError):
        optimizer.step()
    optimizer.close()
    trained, optimizer = offloaded(f"{folder}/run", existing="resume", **SMALL)
    if faulty:
        optimizer._session.run.gradients._arrive = failing
    require_the_failure(lambda: backward(trained, STEPS))
    optimizer.close()
    with offloaded(f"{folder}/run", existing="resume", **SMALL)[1] as optimizer:
        assert optimizer.steps == STEPS
