"""Tests optimizer.schedule() and groups of parameters on several ranks: rates and weights are those of one process."""

from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.rank_models import Odd, loss_of, said, shard
from support.ranks import on_ranks
from torch import distributed

import memascend

STEPS = 6
MICRO_BATCHES = 2


def groups_of(model):
    """Biases, of which a rank has no rows, and the rest."""
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    biases = [one for name, one in trained if name.endswith("bias")]
    rest = [one for name, one in trained if not name.endswith("bias")]
    return [{"params": rest, "lr": 1e-2}, {"params": biases, "lr": 1e-3, "weight_decay": 0.0}]


def made(*, ranks):
    torch.manual_seed(0)
    model = Odd()
    if ranks:
        shard(model)
    return model, torch.optim.AdamW(groups_of(model), fused=True)


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-2, 1e-3], total_steps=STEPS)


def train(folder, until, *, ranks):
    """Resumes, and trains to a step; the rates of each step, and all values at the end."""
    model, optimizer = made(ranks=ranks)
    model, optimizer = memascend.offload(model, optimizer, storage=folder, existing="resume", gradients="ssd")
    scheduler = scheduler_of(optimizer)
    optimizer.schedule(scheduler)
    rank, count = (distributed.get_rank(), distributed.get_world_size()) if ranks else (0, 1)
    rates = []
    with optimizer:
        for step in range(optimizer.steps, until):
            for micro in range(rank, MICRO_BATCHES, count):
                (loss_of(model, step, micro) * (count / MICRO_BATCHES)).backward()
            rates.append([group["lr"] for group in optimizer.param_groups])
            optimizer.step()
            optimizer.zero_grad()
        if ranks:
            values = [one.full_tensor().clone() for one in model.parameters()]
        else:
            values = [value.clone() for value in model.state_dict().values()]
    return rates, values


def of_ranks(folder, until):
    return train(f"{folder}/runs/", until, ranks=True)


def refused(folder):
    """What a rank is told that swaps groups, has another scheduler, or advances it itself."""
    model, _ = made(ranks=True)
    one, other = groups_of(model)
    swapped = torch.optim.AdamW([{**one, "params": other["params"]}, {**other, "params": one["params"]}], fused=True)
    found = [said(lambda: memascend.offload(model, swapped, storage=f"{folder}/runs/", existing="resume"))]
    model, optimizer = made(ranks=True)
    model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/runs/", existing="resume")
    with optimizer:
        found.append(said(lambda: optimizer.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2))))
        scheduler = scheduler_of(optimizer)
        optimizer.schedule(scheduler)
        scheduler.step()
        loss_of(model, 0, 0).backward()
        found.append(said(optimizer.step))
    return found


@pytest.mark.parametrize("then", [1, 2])
def test_a_scheduled_run_goes_on_with_the_same_or_another_number_of_ranks(tmp_path, then):
    whole = train(tmp_path / "whole", STEPS, ranks=False)
    rates = on_ranks(2, of_ranks, tmp_path, 3)[0][0]
    for words in on_ranks(2, refused, tmp_path) if then == 2 else ():
        assert "was in group" in words[0]
        assert "scheduled by OneCycleLR, not StepLR" in words[1]
        assert "delete the line scheduler.step()" in words[2]
    more, values = on_ranks(then, of_ranks, tmp_path, STEPS)[0]
    assert rates + more == whole[0]
    assert all(map(same_bits, values, whole[1]))


def changes_a_rate_at_the_end(folder):
    """The rate that a store has whose run changed it after its last step, on one rank alone."""
    model, optimizer = made(ranks=True)
    model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/changed/", timeout=20)
    rank = distributed.get_rank()
    with optimizer:
        loss_of(model, 0, rank).backward()
        optimizer.step()
        if rank == 0:
            optimizer.param_groups[1]["lr"] = 0.5
    (path,) = Path(folder, "changed").glob(f"*{rank}-of-2*")
    with memascend.engine.Store.open(path) as store:
        return store.hyperparameters["groups"][1]["lr"]


def test_close_waits_for_no_other_rank_to_commit_a_changed_rate(tmp_path):
    assert on_ranks(2, changes_a_rate_at_the_end, tmp_path) == [1e-3, 1e-3]
