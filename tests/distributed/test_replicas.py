"""Tests meshes of replicas and shards (HSDP): bits, lost stores, other numbers; no fault loses a committed step."""

import os
import random
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from support import rank_runs
from support.rank_runs import filled, require_same
from support.stores import damage

import memascend
from memascend import engine
from memascend.distributed import replicas
from memascend.distributed.reshard import file_of_rank

pytestmark = pytest.mark.timeout(600)


def lives(folder, replicas, shards, **options):
    """What each rank met; by default it takes two steps."""
    options = {"steps": 2, "replicas": replicas, "given": {"gradients": "ssd"}, **options}
    return rank_runs.lives(folder, replicas * shards, **options)


def stores(folder):
    return sorted(str(path.parent.relative_to(folder / "run")) for path in folder.rglob("*.store"))


def test_replicas_have_the_bits_of_one_process_and_a_lost_store_is_filled_from_another(tmp_path):
    first = lives(tmp_path, 2, 1, micro=4)
    require_same(first, 0, 2)
    assert len({rank["norm"] for rank in first}) == 1
    assert stores(tmp_path) == [".", "replica-1"]
    (tmp_path / "run/memascend.store").unlink()
    second = lives(tmp_path, 2, 1, micro=4, steps=4)
    require_same(second, 2, 4)
    assert "rank 0 had no store: it was filled from that of rank 1" in filled(second)[0]


def test_what_was_filled_and_is_not_what_was_sent_is_no_store_of_the_run(monkeypatch):
    """Rank 2 neither sends nor is filled, and is told of it, too."""
    monkeypatch.setattr(replicas, "Collectives", lambda *_: SimpleNamespace(close=lambda: None))
    exchange = SimpleNamespace(
        rank=2, size=3, tell=lambda *_: [{"records": 0}, None, None], everyone=lambda own: [own, "other", own]
    )
    store = SimpleNamespace(each_record=list, step=3, user_state=None, hyperparameters=None)
    filling = replicas.Refill(SimpleNamespace(exchange=exchange, lost={1: 0}))
    with (
        pytest.raises(memascend.CorruptionError, match="rank 1 was filled from that of rank 0"),
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
def test_any_shape_and_mode_has_them(tmp_path, shape, given, rounds, dtype, kind):
    trained = {"micro": rounds * shape[0] * shape[1], "dtype": dtype, "kind": kind}
    ranks = lives(tmp_path, *shape, given=given, steps=3, slice=True, **trained)
    require_same(ranks, 0, 3, max_grad_norm=given.get("max_grad_norm"), **trained)


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_replicas_and_shards(tmp_path):
    """Each of these has four micro-batches a step; what a replica has is not copied."""
    left = {
        (1, 2): ["rank-0-of-2", "rank-1-of-2"],
        (1, 4): [f"rank-{rank}-of-4" for rank in range(4)],
        (4, 1): [".", "replica-1", "replica-2", "replica-3"],
    }
    shapes = [(2, 2), (1, 2), (2, 2), (1, 4), (2, 2), (4, 1), (1, 2), (1, 2)]
    for steps, shape in enumerate(shapes, start=1):
        ranks = lives(tmp_path, *shape, steps=steps, micro=4)
        require_same(ranks, steps - 1, steps)
        assert shape not in left or stores(tmp_path) == left[shape]
        if steps == 3:
            assert [bool(words) for words in filled(ranks)] == [False, False, True, True]


@pytest.mark.slow
def test_a_store_is_of_the_run_once_all_of_it_was_verified_and_a_fill_takes_longer_than_ranks_wait(tmp_path):
    """A rank that is killed before that finds its store without a number, and fills it anew."""
    lives(tmp_path, 2, 2)
    shutil.rmtree(tmp_path / "run/rank-1-of-2")
    assert lives(tmp_path, 2, 2, steps=3, fault=signal.SIGKILL, point="filled")[1] is None
    began = time.monotonic()
    ranks = lives(tmp_path, 2, 2, steps=3, timeout=4.0, fill_seconds=0.2)
    assert time.monotonic() - began > 4.0
    assert [bool(words) for words in filled(ranks)] == [False, True, False, False]
    assert "rank 1 had no store: it was filled from that of rank 3" in filled(ranks)[1]
    require_same(ranks, 2, 3)
    assert [rank["state"]["rank"] for rank in ranks] == [0, 3, 2, 3]


@pytest.mark.slow
def test_hosts_of_the_last_replicas_go_on_alone_with_the_stores_that_they_have(tmp_path):
    """One process is told that it cannot."""
    lives(tmp_path, 3, 1)
    (tmp_path / "run/memascend.store").unlink()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(memascend.ConfigError, match="is the store of one of several ranks"):
        memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=f"{tmp_path}/run", existing="resume")
    ranks = lives(tmp_path, 2, 1, steps=3)
    assert [(rank["opened"], rank["error"]) for rank in ranks] == [(2, None)] * 2
    assert stores(tmp_path) == ["replica-1", "replica-2"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"gradients": "ssd"}, {"gradients": "fused"}])
def test_ranks_that_computed_other_values_are_named_and_nothing_is_committed(tmp_path, given):
    for rank in lives(tmp_path, 2, 2, steps=3, other=3, given=given):
        assert (rank["committed"], rank["ranks"]) == (2, [3])
        assert "rank 3 computed other values than rank 1" in rank["error"]
    require_same(lives(tmp_path, 2, 2, steps=3, given=given), 2, 3)


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process_and_is_loaded_by_replicas(tmp_path):
    lives(tmp_path, 2, 2, save="saved")
    given = {"gradients": "ssd", "checkpoint": f"{tmp_path}/run/saved"}
    loaded = lives(tmp_path, 2, 2, name="other", steps=3, given=given, save="again")
    require_same(loaded, 2, 3)
    assert [rank["state"]["rank"] for rank in loaded] == [0, 1, 2, 3]
    require_same(lives(tmp_path, 1, 2, name="third", given=given), 2, 2)


# --- random faults ----------------------------------------------------------------------------

RANKS = 6
TIMEOUT = 12.0
# For an error to reach all ranks on a machine that does ten other things.
LATE_SECONDS = 8.0
RUNS = [((3, 2), {"gradients": "ssd", "max_grad_norm": 0.5}), ((2, 3), {"gradients": "ram"})]
IN_A_STEP = ("begin", "between", "before staged", "after staged", "before written", "after written")
OPENING = ("before groups", "in groups")
# By kind, the fault of a rank and where it may come.
FAULTS = {
    "killed": (signal.SIGKILL, (*IN_A_STEP, *OPENING, "time")),
    "stopped": (signal.SIGSTOP, (*IN_A_STEP, *OPENING)),
    "raises": ("raise", ("begin", "between")),
    "full": ("full", ("begin", "between")),
    "killed while a store is filled": (signal.SIGKILL, ("filling", "filled")),
}
KINDS = [*FAULTS, "lost", "flipped"]


class Drill:
    """A run of replicas, its faults, and the last step that a rank reported to be committed."""

    def __init__(self, folder, shape, given, dice):
        self.folder, self.shape, self.given, self.dice = folder, shape, given, dice
        self.done = 0
        folder.mkdir()

    def live(self, **options):
        """A life that goes on where all ranks were."""
        options = {"steps": self.done + 2, "timeout": TIMEOUT, "given": self.given, **options}
        ranks = lives(self.folder, *self.shape, **options)
        told = [rank for rank in ranks if rank is not None]
        assert all(rank["opened"] in (None, self.done, self.done + 1) for rank in told), (self.done, told)
        self.done = max([self.done, *(rank["committed"] or 0 for rank in told)])
        return ranks

    def faulty(self, kind, victim):
        """A life in which a rank has a fault, which the others name in time; the ranks whose stores are lost."""
        lost = {self.lose(victim)} if "filled" in kind else set()
        fault, points = FAULTS[kind]
        point = self.dice.choice(points)
        at = self.dice.uniform(0, 2) if point == "time" else self.done + self.dice.randint(1, 2)
        self.require_named(self.live(faulty=(victim,), fault=fault, point=point, at=at), victim)
        return lost

    def flipped(self, victim):
        """A bit of a store is another one, which each life says; without that store, all is well."""
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
            # The fault may come after all, or never.
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
        """A life in which these ranks' stores are filled, with the bits of one process."""
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
            # Of a host that has two of the ranks.
            run.whole({run.lose(rank) for rank in (victim, victim ^ 1)})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_fault_of_each_kind(tmp_path):
    drill(tmp_path, 1, KINDS)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_forty_random_faults(tmp_path):
    seed = int(os.environ.get("MEMASCEND_SEED", time.time()))
    drill(tmp_path, seed, random.Random(seed).choices(KINDS, k=40))
