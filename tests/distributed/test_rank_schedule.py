"""Tests optimizer.schedule() and groups of parameters on several ranks: rates and weights are those of one process."""

from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.rank_models import loss_of, model, shard, step, whole, without_mean
from support.ranks import on_ranks
from torch import distributed

import memascend

STEPS = 6
MICRO_BATCHES = 2


def begun(storage, *, swapped=False, **options):
    """A run with two groups: biases, of which a rank has no rows, and the rest."""
    trained = model(torch.float32, "odd")
    if distributed.is_initialized():
        shard(trained)
    groups = [{"params": [], "lr": 1e-2}, {"params": [], "lr": 1e-3, "weight_decay": 0.0}]
    for name, one in trained.named_parameters():
        if one.requires_grad:
            groups[name.endswith("bias") != swapped]["params"].append(one)
    optimizer = torch.optim.AdamW(groups, fused=True)
    trained, optimizer = memascend.offload(trained, optimizer, storage=storage, timeout=20, **options)
    without_mean(trained)
    return trained, optimizer


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-2, 1e-3], total_steps=STEPS)


def train(folder, until):
    """Resumes, and trains to a step; the rates of each step, and all values at the end."""
    trained, optimizer = begun(f"{folder}/runs/", existing="resume", gradients="ssd")
    optimizer.schedule(scheduler_of(optimizer))
    rates = []
    with optimizer:
        while optimizer.steps < until:
            rates.append([group["lr"] for group in optimizer.param_groups])
            step(trained, optimizer, MICRO_BATCHES)
        return rates, whole(trained)


def require_refusals(folder):
    """A rank is told that swaps groups, has another scheduler, or advances it itself."""
    with pytest.raises(memascend.ConfigError, match="was in group"):
        begun(f"{folder}/runs/", swapped=True, existing="resume")
    trained, optimizer = begun(f"{folder}/runs/", existing="resume")
    with optimizer:
        with pytest.raises(memascend.MemascendError, match="scheduled by OneCycleLR, not StepLR"):
            optimizer.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2))
        scheduler = scheduler_of(optimizer)
        optimizer.schedule(scheduler)
        scheduler.step()
        loss_of(trained, 0, 0).backward()
        with pytest.raises(memascend.UsageError, match=r"delete the line scheduler\.step\(\)"):
            optimizer.step()


@pytest.mark.parametrize("then", [1, 2])
def test_a_scheduled_run_goes_on_with_the_same_or_another_number_of_ranks(tmp_path, then):
    (tmp_path / "whole").mkdir()
    wanted, values = train(tmp_path / "whole", STEPS)
    rates = on_ranks(2, train, tmp_path, 3)[0][0]
    if then == 2:
        on_ranks(2, require_refusals, tmp_path)
    more, found = on_ranks(then, train, tmp_path, STEPS)[0]
    assert rates + more == wanted
    assert all(map(same_bits, found, values))


def changes_a_rate_at_the_end(folder):
    """The rate that a store has whose run changed it after its last step, on one rank alone."""
    trained, optimizer = begun(f"{folder}/changed/")
    rank = distributed.get_rank()
    with optimizer:
        loss_of(trained, 0, rank).backward()
        optimizer.step()
        if rank == 0:
            optimizer.param_groups[1]["lr"] = 0.5
    (path,) = Path(folder, "changed").glob(f"*{rank}-of-2*")
    with memascend.engine.Store.open(path) as store:
        return store.hyperparameters["groups"][1]["lr"]


def test_close_waits_for_no_other_rank_to_commit_a_changed_rate(tmp_path):
    assert on_ranks(2, changes_a_rate_at_the_end, tmp_path) == [1e-3, 1e-3]
