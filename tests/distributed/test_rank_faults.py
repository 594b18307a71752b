"""Tests ranks and replicas (HSDP) whose processes or drives fail.

Either all ranks commit a step, or no rank commits it. The run then continues with the same bits as a run without a
fault.
"""

import functools
import itertools
import os
import random
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from support.bits import same_bits
from support.rank_models import backward, offloaded, train
from support.rank_runs import failing, filled, lives, require_same
from support.ranks import ranks
from support.stores import damage
from torch import distributed

import memascend
from memascend import engine
from memascend.checkpoint.reader import Checkpoint, identity_of
from memascend.distributed import replicas
from memascend.distributed.reshard import file_of_rank
from memascend.errors import RankError

pytestmark = pytest.mark.timeout(900)

KILL, STOP = signal.SIGKILL, signal.SIGSTOP
# The keys are points at which a rank is killed. Each value is the step at which all ranks then resume. At the point
# "close", the rank is killed after step 5, before it calls close(). At every other point, the rank is killed in step 3.
COMMON = {
    "begin": 2, "between": 2, "before staged": 2, "after staged": 2, "before written": 3, "after written": 3,
    "close": 5,
}  # fmt: skip
GIVEN = ({}, {"host_memory": "1GiB", "log_steps": 3}, {"gradients": "ssd", "max_grad_norm": 0.1})


def whole(ranks, steps):
    """Requires that all ranks committed step `steps` without an error; returns `ranks`."""
    assert all((rank["error"], rank["committed"]) == (None, steps) for rank in ranks), ranks
    return ranks


def same(ranks, reference):
    """Requires that each rank that was not killed has the same bits after each step as in the `reference` run."""
    for rank, other in zip(ranks, reference, strict=True):
        assert rank is None or rank["digests"] == {step: other["digests"][step] for step in rank["digests"]}


def survived(ranks, faulty=1, seconds=60.0):
    """Requires that rank `faulty` was killed.

    Within `seconds`, each other rank must have raised an error that names rank `faulty`.
    """
    assert ranks[faulty] is None
    for rank in ranks[:faulty] + ranks[faulty + 1 :]:
        assert rank["error"].startswith("RankError"), rank
        assert rank["ranks"] == [faulty], rank
        assert rank["seconds"] < seconds, rank


# In the first case, rank 1 is killed before it writes its root for step 3, but rank 0 writes its own root. When all
# ranks open their stores again, they drop rank 0's commit of step 3.
POINTS = [("after staged", {}, 2), *((*one, 3) for one in zip(COMMON, itertools.cycle(GIVEN), strict=False))]


@pytest.mark.parametrize(
    ("point", "given", "world"),
    [POINTS[0], *(pytest.param(*one, marks=pytest.mark.slow) for one in POINTS[1:])],
    ids=str,
)
def test_all_ranks_resume_at_the_same_step_after_a_rank_is_killed(tmp_path, point, given, world):
    """After a restart all ranks resume at the same step, with the bits of a run without a fault."""
    run = functools.partial(lives, tmp_path, world, given=given)
    reference = whole(run(name="reference", steps=7), 7)
    faulty, at = (0 if given == GIVEN[1] else 1), (5 if point == "close" else 3)
    ranks = run(fault=KILL, point=point, at=at, faulty=(faulty,))
    # At "close", a rank dies just before its own close(). The other ranks then end without an error.
    if point != "close":
        survived(ranks, faulty)
    again = whole(run(steps=7), 7)
    assert [rank["opened"] for rank in again] == [COMMON[point]] * world
    same(again, reference)


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_a_rank_whose_code_raises_or_hangs_is_named_on_all_others(tmp_path, fault):
    """With the fault "hang", only the main thread of rank 1 hangs. The other threads of rank 1 keep running."""
    first, second, third = lives(tmp_path, 3, fault=fault, point="begin", timeout=6.0)
    assert second["error"].startswith("ValueError")
    for rank in (first, third):
        assert rank["error"].startswith("RankError"), rank
        assert rank["ranks"] == [1], rank


@pytest.mark.parametrize("point", ["before groups", "in groups"])
@pytest.mark.parametrize("fault", [KILL, pytest.param(STOP, marks=pytest.mark.slow)])
def test_rank_lost_before_or_in_group_creation_is_named(tmp_path, fault, point):
    # At "before groups", the remaining ranks miss rank 1 in torch's store. At "in groups", they first wait for gloo's
    # timeout, and then look for one another in torch's store.
    ranks = lives(tmp_path, 3, fault=fault, point=point, timeout=2.0)
    survived(ranks, seconds=30.0)
    assert all("rank 1 is gone" in ranks[rank]["error"] for rank in (0, 2))


def test_closed_run_without_durability_resumes_exactly(tmp_path):
    run = functools.partial(lives, tmp_path, 2, given={"durability": "none", "host_memory": "1GiB"})
    reference = whole(run(name="reference", steps=3), 3)
    whole(run(steps=1), 1)
    again = whole(run(steps=3), 3)
    assert [rank["state"] for rank in again] == [{"step": 1, "rank": rank} for rank in range(2)]
    same(again, reference)


def store_of(tmp_path, rank):
    return tmp_path / f"run/rank-{rank}-of-2/memascend.store"


def test_full_disk_and_damaged_store_raise_errors_on_all_ranks(tmp_path):
    """If the disk of one rank is full, or the store of one rank is damaged, all ranks must raise errors.

    A failed start of a new run must leave no store, and a failed save must keep the earlier checkpoint. The run must
    resume from its last commit.
    """
    reference, saved = whole(lives(tmp_path, 2, "reference", steps=4), 4), tmp_path / "run/saved"
    first, second = lives(tmp_path, 2, fault="full", point="before groups")
    assert second["error"].startswith("StorageError"), second
    assert first["ranks"] == [1] or first["error"].startswith("ConfigError"), first
    assert not list(tmp_path.glob("run/**/*.store"))
    whole(lives(tmp_path, 2, steps=2, save="saved"), 2)
    before = identity_of(saved)
    first, second = lives(tmp_path, 2, steps=3, save="saved", faulty=(0,), fault="full", point="saving")
    assert first["error"].startswith("StorageError"), first
    # Rank 0 may already have removed the file to which rank 1 writes. Then rank 1 raises a StorageError.
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


def test_previous_opens_the_commit_before_a_damaged_gradient_log(tmp_path):
    """Kills both ranks, and then flips a bit of the last gradients in rank 1's gradient log."""
    run = functools.partial(lives, tmp_path, 2, given={"host_memory": "1GiB", "log_steps": 16, "gradients": "ssd"})
    reference = whole(run(name="reference", steps=4), 4)
    assert run(steps=3, faulty=(0, 1), fault=KILL, point="close") == [None, None]
    store = store_of(tmp_path, 1)
    content = bytearray(store.read_bytes())
    heads = [at for at in range(0, len(content), 4096) if content[at : at + 8] == b"mascstep"]
    newest = max(heads, key=lambda at: int.from_bytes(content[at + 16 : at + 24], "little"))
    content[newest - 4096] ^= 1
    store.write_bytes(content)
    # Starts the ranks twice. A start that fails changes nothing, so the second start fails in the same way.
    for _ in range(2):
        assert [rank["error"].split(":")[0] for rank in run(steps=4)] == ["ConfigError", "CorruptionError"]
        assert store.read_bytes() == content
    again = whole(run(steps=4, existing="previous"), 4)
    assert [rank["opened"] for rank in again] == [2, 2]
    same(again, reference)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["saved", "hidden/saved"])
@pytest.mark.parametrize("fault", [KILL, STOP])
def test_rank_lost_during_save_leaves_the_earlier_checkpoint_complete(tmp_path, place, fault):
    """If a rank fails in a save, the earlier checkpoint stays complete. The run then resumes from its last commit."""
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
    # The save of the last run has removed the temporary files of the killed ranks.
    assert not list((tmp_path / "run" / place).parent.glob(".saved*"))


# --- one of two ranks fails -------------------------------------------------------------------

# MICROS is the number of micro-batches that both ranks together run in a step. STEPS is the number of steps.
MICROS, STEPS = 6, 4
SMALL = {"timeout": 30.0, "dtype": torch.float32, "gradients": "ssd"}


def require_the_failure(do):
    """Requires that `do` raises rank 1's own error on rank 1, and an error that names rank 1 on rank 0."""
    faulty = distributed.get_rank() == 1
    with pytest.raises(OSError if faulty else RankError, match="as if the drive were gone") as raised:
        do()
    assert faulty or raised.value.ranks == (1,)


@ranks(2)
def test_failure_of_one_rank_is_named_on_both_ranks_and_the_step_repeats(folder):
    """Rank 1 fails in step(), in a gather, and in a backward.

    After each failure, both ranks repeat the step or resume the run.
    """
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


# --- meshes of replicas and shards: bits, lost stores, other shapes ------------------------------------


def meshed(folder, replicas, shards, **options):
    """Runs `lives` on a mesh of replicas and shards, by default for two steps; returns each rank's result."""
    options = {"steps": 2, "replicas": replicas, "given": {"gradients": "ssd"}, **options}
    return lives(folder, replicas * shards, **options)


def stores(folder):
    return sorted(str(path.parent.relative_to(folder / "run")) for path in folder.rglob("*.store"))


def test_replicas_equal_one_process_and_refill_a_lost_store(tmp_path):
    first = meshed(tmp_path, 2, 1, micro=4)
    require_same(first, 0, 2)
    assert len({rank["norm"] for rank in first}) == 1
    assert stores(tmp_path) == [".", "replica-1"]
    (tmp_path / "run/memascend.store").unlink()
    second = meshed(tmp_path, 2, 1, micro=4, steps=4)
    require_same(second, 2, 4)
    assert "the new store of rank 0 was filled from the store of rank 1" in filled(second)[0]


def test_refill_rejects_a_store_that_differs_from_its_source(monkeypatch):
    """Rank 0 fills the store of rank 1. Rank 2 sends and receives no records, but must also raise the error."""
    monkeypatch.setattr(replicas, "Collectives", lambda *_: SimpleNamespace(close=lambda: None))
    exchange = SimpleNamespace(
        rank=2, size=3, all_gather=lambda *_: [{"records": 0}, None, None], all_values=lambda own: [own, "other", own]
    )
    store = SimpleNamespace(each_record=list, step=3, user_state=None, hyperparameters=None)
    filling = replicas.Refill(SimpleNamespace(exchange=exchange, lost={1: 0}))
    with (
        pytest.raises(memascend.CorruptionError, match="rank 1 was filled from the store of rank 0"),
        filling.between(store),
    ):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "given", "rounds", "dtype", "kind"),
    [
        ((2, 2), {"gradients": "ssd"}, 2, torch.bfloat16, "odd"),
        ((3, 1), {"gradients": "ram"}, 2, torch.float32, "plain"),
        ((2, 2), {"gradients": "fused", "accumulation_steps": 2}, 2, torch.bfloat16, "plain"),
        ((2, 2), {"max_grad_norm": 0.1, "host_memory": "1GiB"}, 1, torch.bfloat16, "checkpointed"),
        ((2, 3), {}, 1, torch.float32, "odd"),
    ],
)
def test_each_mesh_and_gradients_mode_has_the_bits_of_one_process(tmp_path, shape, given, rounds, dtype, kind):
    trained = {"micro": rounds * shape[0] * shape[1], "dtype": dtype, "kind": kind}
    ranks = meshed(tmp_path, *shape, given=given, steps=3, slice=True, **trained)
    require_same(ranks, 0, 3, max_grad_norm=given.get("max_grad_norm"), **trained)


@pytest.mark.slow
def test_run_resumes_with_other_numbers_of_replicas_and_shards(tmp_path):
    """Each mesh runs four micro-batches in a step.

    If only the number of replicas grows, only the ranks without a store fill new stores from another replica.
    """
    left = {
        (1, 2): ["rank-0-of-2", "rank-1-of-2"],
        (1, 4): [f"rank-{rank}-of-4" for rank in range(4)],
        (4, 1): [".", "replica-1", "replica-2", "replica-3"],
    }
    shapes = [(2, 2), (1, 2), (2, 2), (1, 4), (2, 2), (4, 1), (1, 2), (1, 2)]
    for steps, shape in enumerate(shapes, start=1):
        ranks = meshed(tmp_path, *shape, steps=steps, micro=4)
        require_same(ranks, steps - 1, steps)
        assert shape not in left or stores(tmp_path) == left[shape]
        if steps == 3:
            assert [bool(words) for words in filled(ranks)] == [False, False, True, True]


@pytest.mark.slow
def test_unverified_refill_is_repeated_and_may_exceed_the_timeout(tmp_path):
    """If a rank is killed before it has verified its refilled store, a restart fills the store again.

    The store's commit has number 0 until the rank has verified the store.
    """
    meshed(tmp_path, 2, 2)
    shutil.rmtree(tmp_path / "run/rank-1-of-2")
    assert meshed(tmp_path, 2, 2, steps=3, fault=signal.SIGKILL, point="filled")[1] is None
    began = time.monotonic()
    ranks = meshed(tmp_path, 2, 2, steps=3, timeout=4.0, fill_seconds=0.2)
    assert time.monotonic() - began > 4.0
    assert [bool(words) for words in filled(ranks)] == [False, True, False, False]
    assert "the new store of rank 1 was filled from the store of rank 3" in filled(ranks)[1]
    require_same(ranks, 2, 3)
    assert [rank["state"]["rank"] for rank in ranks] == [0, 3, 2, 3]


@pytest.mark.slow
def test_remaining_replicas_resume_with_their_own_stores(tmp_path):
    """A single process is rejected: it cannot continue with the stores of several ranks."""
    meshed(tmp_path, 3, 1)
    (tmp_path / "run/memascend.store").unlink()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(memascend.ConfigError, match="is the store of one of several ranks"):
        memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=f"{tmp_path}/run", existing="resume")
    ranks = meshed(tmp_path, 2, 1, steps=3)
    assert [(rank["opened"], rank["error"]) for rank in ranks] == [(2, None)] * 2
    assert stores(tmp_path) == ["replica-1", "replica-2"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"gradients": "ssd"}, {"gradients": "fused"}])
def test_ranks_that_computed_other_values_are_named_and_nothing_is_committed(tmp_path, given):
    for rank in meshed(tmp_path, 2, 2, steps=3, other=3, given=given):
        assert (rank["committed"], rank["ranks"]) == (2, [3])
        assert "rank 3 computed other values than rank 1" in rank["error"]
    require_same(meshed(tmp_path, 2, 2, steps=3, given=given), 2, 3)


@pytest.mark.slow
def test_replicas_load_a_checkpoint_with_the_bits_of_one_process(tmp_path):
    meshed(tmp_path, 2, 2, save="saved")
    given = {"gradients": "ssd", "checkpoint": f"{tmp_path}/run/saved"}
    loaded = meshed(tmp_path, 2, 2, name="other", steps=3, given=given, save="again")
    require_same(loaded, 2, 3)
    assert [rank["state"]["rank"] for rank in loaded] == [0, 1, 2, 3]
    require_same(meshed(tmp_path, 1, 2, name="third", given=given), 2, 2)


# --- random faults ----------------------------------------------------------------------------

RANKS = 6
TIMEOUT = 12.0
# After the timeout, an error may take this many seconds to reach all ranks on a busy machine.
LATE_SECONDS = 8.0
RUNS = [((3, 2), {"gradients": "ssd", "max_grad_norm": 0.5}), ((2, 3), {"gradients": "ram"})]
IN_A_STEP = [point for point in COMMON if point != "close"]
OPENING = ("before groups", "in groups")
# For each kind of fault: the fault of one rank, and the points at which the fault may happen.
FAULTS = {
    "killed": (signal.SIGKILL, (*IN_A_STEP, *OPENING, "time")),
    "stopped": (signal.SIGSTOP, [*IN_A_STEP, *OPENING]),
    "raises": ("raise", ("begin", "between")),
    "full": ("full", ("begin", "between")),
    "killed while a store is filled": (signal.SIGKILL, ("filling", "filled")),
}
KINDS = [*FAULTS, "lost", "flipped"]


class Drill:
    """A run of replicas with faults; `done` is the last step that a rank reported as committed."""

    def __init__(self, folder, shape, given, dice):
        self.folder, self.shape, self.given, self.dice = folder, shape, given, dice
        self.done = 0
        folder.mkdir()

    def live(self, **options):
        """Begins or resumes the run on all ranks, for up to two more steps; returns each rank's result."""
        options = {"steps": self.done + 2, "timeout": TIMEOUT, "given": self.given, **options}
        ranks = meshed(self.folder, *self.shape, **options)
        answer = [rank for rank in ranks if rank is not None]
        assert all(rank["opened"] in (None, self.done, self.done + 1) for rank in answer), (self.done, answer)
        self.done = max([self.done, *(rank["committed"] or 0 for rank in answer)])
        return ranks

    def faulty(self, kind, victim):
        """Resumes the run with a fault of rank `victim`. Any error of another rank must name `victim` in time.

        Returns the ranks whose stores were removed: `victim` for a fault during a fill, otherwise no rank.
        """
        lost = {self.lose(victim)} if "filled" in kind else set()
        fault, points = FAULTS[kind]
        point = self.dice.choice(points)
        at = self.dice.uniform(0, 2) if point == "time" else self.done + self.dice.randint(1, 2)
        self.require_named(self.live(faulty=(victim,), fault=fault, point=point, at=at), victim)
        return lost

    def flipped(self, victim):
        """Damages `victim`'s store, requires that each restart reports the damage, and then removes the store.

        Returns the ranks whose stores were removed.
        """
        with engine.Store.open(self.store(victim)) as store:
            names = [one["name"] for one in store.each_record() if one["shape"][0]]
            content = bytes(store.read(self.dice.choice(names))[0].view(torch.uint8).flatten().tolist())
        damage(self.store(victim), content)
        for _ in range(2):
            ranks = self.live()
            assert ranks[victim]["error"].startswith("CorruptionError"), ranks[victim]
            self.require_named(ranks, victim)
        return {self.lose(victim)}

    def require_named(self, ranks, victim):
        for number, rank in enumerate(ranks):
            # If the fault comes after the last step, or does not happen at all, no rank has an error.
            if number != victim and rank["error"]:
                assert rank["error"].startswith(("RankError", "ConfigError")), rank
                assert set(rank["ranks"]) <= {victim}, rank
                assert f"rank {victim}" in rank["error"], rank
                assert rank["seconds"] < TIMEOUT + LATE_SECONDS, rank

    def store(self, rank):
        return file_of_rank(str(self.folder / "run"), rank, self.shape[1])

    def lose(self, rank):
        self.store(rank).unlink()
        return rank

    def whole(self, lost):
        """Resumes the run; requires the bits of one process, and that only the ranks in `lost` refill their stores."""
        ranks = self.live()
        assert {number for number, words in enumerate(filled(ranks)) if words} == lost
        require_same(ranks, ranks[0]["opened"], self.done, RANKS, max_grad_norm=self.given.get("max_grad_norm"))


def drill(folder, seed, kinds):
    dice = random.Random(seed)
    runs = [Drill(folder / str(number), *run, dice) for number, run in enumerate(RUNS)]
    for run in runs:
        run.whole(set())
    for number, kind in enumerate(kinds):
        run, victim = runs[number % len(runs)], dice.randrange(RANKS)
        print(f"seed {seed}, {number}: {kind}, rank {victim} of {run.shape}, step {run.done}", flush=True)
        if kind in FAULTS:
            run.whole(run.faulty(kind, victim))
        elif kind == "flipped":
            run.whole(run.flipped(victim))
        else:
            # A host has two of the ranks, and loses the stores of these two ranks.
            run.whole({run.lose(rank) for rank in (victim, victim ^ 1)})


@pytest.mark.slow
def test_replicas_recover_from_one_fault_of_each_kind(tmp_path):
    drill(tmp_path, 1, KINDS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_replicas_recover_from_forty_random_faults(tmp_path):
    seed = int(os.environ.get("MEMASCEND_SEED", time.time()))
    drill(tmp_path, seed, random.Random(seed).choices(KINDS, k=40))
