"""Tests meshes of replicas and shards (HSDP), in processes that torchrun starts: bits, lost stores, other numbers."""

import json
import shutil

import pytest
import torch
from support import torchrun_replicas
from support.torchrun import torchrun
from support.torchrun_replicas import in_one_process

import memascend

pytestmark = pytest.mark.timeout(600)


def lives(folder, replicas, shards, status=0, **options):
    """What each rank met that ended."""
    given = json.dumps({"folder": f"{folder}/run", "replicas": replicas, **options})
    output = torchrun(torchrun_replicas.__file__, given, count=replicas * shards, status=status)
    told = [json.loads(line.removeprefix("told ")) for line in output.splitlines() if line.startswith("told ")]
    return [met for _, met in sorted(told)], output


def stores(folder):
    return sorted(str(path.parent.relative_to(folder / "run")) for path in folder.rglob("*.store"))


def test_replicas_have_the_bits_of_one_process_and_a_lost_store_is_filled_from_another(tmp_path):
    first, _ = lives(tmp_path, 2, 1, rounds=2)
    assert {met["digest"] for met in first} == {in_one_process(2, 4)}
    assert len({met["norm"] for met in first}) == 1
    assert stores(tmp_path) == [".", "replica-1"]
    (tmp_path / "run/memascend.store").unlink()
    second, output = lives(tmp_path, 2, 1, rounds=2, steps=4)
    assert [met["began"] for met in second] == [2, 2]
    assert {met["digest"] for met in second} == {in_one_process(4, 4)}
    assert "rank 0 had no store: it was filled from that of rank 1" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "given", "rounds", "dtype", "kind"),
    [
        ((2, 2), {"gradients": "ssd"}, 2, "bfloat16", "odd"),
        ((3, 1), {"gradients": "ram"}, 2, "float32", "plain"),
        ((2, 2), {"gradients": "fused", "accumulation_steps": 2}, 2, "bfloat16", "plain"),
        ((2, 2), {"max_grad_norm": 0.1, "host_memory": "1GiB"}, 1, "bfloat16", "checkpointed"),
        ((2, 3), {}, 1, "float32", "odd"),
    ],
)
def test_any_shape_and_mode_has_them(tmp_path, shape, given, rounds, dtype, kind):
    met, _ = lives(tmp_path, *shape, given=given, rounds=rounds, dtype=dtype, kind=kind, steps=3, slice=True)
    micros = rounds * shape[0] * shape[1]
    expected = in_one_process(3, micros, dtype, kind, given.get("max_grad_norm"))
    assert {one["digest"] for one in met} == {expected}


@pytest.mark.slow
def test_a_run_goes_on_with_other_numbers_of_replicas_and_shards(tmp_path):
    """Each of these has four micro-batches a step; what a replica has is not copied."""
    lives(tmp_path, 2, 2, steps=1)
    one, _ = lives(tmp_path, 1, 2, steps=2, rounds=2)
    assert stores(tmp_path) == ["rank-0-of-2", "rank-1-of-2"]
    two, output = lives(tmp_path, 2, 2, steps=3)
    assert [f"rank {rank} had no store" in output for rank in range(4)] == [False, False, True, True]
    three, _ = lives(tmp_path, 1, 4, steps=4)
    assert stores(tmp_path) == [f"rank-{rank}-of-4" for rank in range(4)]
    four, _ = lives(tmp_path, 2, 2, steps=5)
    five, _ = lives(tmp_path, 4, 1, steps=6)
    assert stores(tmp_path) == [".", "replica-1", "replica-2", "replica-3"]
    six, _ = lives(tmp_path, 1, 2, steps=7, rounds=2)
    assert stores(tmp_path) == ["rank-0-of-2", "rank-1-of-2"]
    seven, _ = lives(tmp_path, 1, 2, steps=8, rounds=2)
    for steps, met in enumerate((one, two, three, four, five, six, seven), start=2):
        assert {(each["began"], each["digest"]) for each in met} == {(steps - 1, in_one_process(steps, 4))}


@pytest.mark.slow
def test_a_store_is_not_of_the_run_before_all_of_it_was_verified(tmp_path):
    """A rank that is killed before that finds its store without a number, and fills it anew."""
    lives(tmp_path, 2, 2)
    shutil.rmtree(tmp_path / "run/rank-1-of-2")
    lives(tmp_path, 2, 2, status=1, killed=1, steps=3)
    met, output = lives(tmp_path, 2, 2, steps=3)
    assert "rank 1 had no store: it was filled from that of rank 3" in output
    assert {(each["began"], each["digest"]) for each in met} == {(2, in_one_process(3, 4))}
    assert [each["state"] for each in met] == [0, 3, 2, 3]


@pytest.mark.slow
def test_a_whole_replica_is_filled_and_one_that_was_left_behind_is_refused(tmp_path):
    lives(tmp_path, 2, 2)
    shutil.copytree(tmp_path / "run/replica-1", tmp_path / "behind")
    for name in ("rank-0-of-2", "rank-1-of-2"):
        shutil.rmtree(tmp_path / "run" / name)
    met, _ = lives(tmp_path, 2, 2, steps=4)
    assert {(each["began"], each["digest"]) for each in met} == {(2, in_one_process(4, 4))}
    shutil.rmtree(tmp_path / "run/replica-1")
    shutil.copytree(tmp_path / "behind", tmp_path / "run/replica-1")
    _, output = lives(tmp_path, 2, 2, steps=5, status=1)
    assert "no commit is there on every rank" in output
    assert "move away" in output
    shutil.rmtree(tmp_path / "run/replica-1")
    met, _ = lives(tmp_path, 2, 2, steps=5)
    assert {(each["began"], each["digest"]) for each in met} == {(4, in_one_process(5, 4))}


@pytest.mark.slow
def test_a_replica_that_missed_one_step_is_filled_and_no_rank_goes_back(tmp_path):
    lives(tmp_path, 2, 2)
    shutil.copytree(tmp_path / "run/replica-1", tmp_path / "behind")
    lives(tmp_path, 1, 2, steps=3, rounds=2)
    shutil.copytree(tmp_path / "behind", tmp_path / "run/replica-1")
    met, output = lives(tmp_path, 2, 2, steps=4)
    assert "rank 3 had no store" in output
    assert {(each["began"], each["digest"]) for each in met} == {(3, in_one_process(4, 4))}


@pytest.mark.slow
def test_hosts_of_the_last_replicas_go_on_alone_with_the_stores_that_they_have(tmp_path):
    """One process is told that it cannot."""
    lives(tmp_path, 3, 1)
    (tmp_path / "run/memascend.store").unlink()
    model = torch.nn.Linear(2, 2)
    with pytest.raises(memascend.ConfigError, match="is the store of one of several ranks"):
        memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=f"{tmp_path}/run", existing="resume")
    met, _ = lives(tmp_path, 2, 1, steps=3)
    assert [each["began"] for each in met] == [2, 2]
    assert stores(tmp_path) == ["replica-1", "replica-2"]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"gradients": "ssd"}, {"gradients": "fused"}])
def test_ranks_that_computed_other_values_are_named_and_nothing_is_committed(tmp_path, given):
    met, _ = lives(tmp_path, 2, 2, steps=3, other=3, given=given)
    assert [each["steps"] for each in met] == [2] * 4
    for each in met:
        ((ranks, words),) = each["errors"]
        assert ranks == [3]
        assert "rank 3 computed other values than rank 1" in words
    met, _ = lives(tmp_path, 2, 2, steps=3, given=given)
    assert {(each["began"], each["digest"]) for each in met} == {(2, in_one_process(3, 4))}


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process_and_is_loaded_by_replicas(tmp_path):
    met, _ = lives(tmp_path, 2, 2, save=f"{tmp_path}/saved")
    loaded, _ = lives(tmp_path / "other", 2, 2, steps=3, checkpoint=f"{tmp_path}/saved", save=f"{tmp_path}/again")
    assert {(each["began"], each["digest"]) for each in loaded} == {(2, in_one_process(3, 4))}
    assert [each["state"] for each in loaded] == [0, 1, 2, 3]
    again, _ = lives(tmp_path / "third", 1, 2, steps=2, checkpoint=f"{tmp_path}/saved")
    assert {each["digest"] for each in again} == {each["digest"] for each in met}
