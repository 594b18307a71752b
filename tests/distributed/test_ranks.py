"""Tests training on several ranks under `fully_shard` against one process that accumulates."""

import pytest
import torch
from support.bits import same_bits
from support.rank_models import accumulated, adamw, loss_of, model, sharded, trainable, without_mean
from support.ranks import on_ranks
from torch import distributed

import memascend

STEPS = 3


def on_storage(folder, dtype, options, rounds, kind="plain", *, mean=False):
    """What the ranks train together: this rank's losses, and all values. `mean`: FSDP2's own of several rounds."""
    trained = model(dtype, kind) if kind == "undivided" else sharded(dtype, kind)
    trained, optimizer = memascend.offload(trained, adamw(trainable(trained)), storage=folder, **options)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    # FSDP2 divides by the number of ranks, which has to be a power of two: else the loss is divided.
    parts = 1 if mean else rounds
    if count & (count - 1):
        parts = rounds * count
        without_mean(trained)
    losses, norms = [], []
    for step in range(STEPS):
        for turn in range(rounds):
            loss = loss_of(trained, step, turn * count + rank)
            (loss / parts).backward()
            losses.append(loss.detach())
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    values = [parameter.full_tensor() for parameter in trained.parameters()]
    optimizer.close()
    return losses, [*values, torch.tensor(norms, dtype=torch.float64)]


def train_all(folder, cases, kind="plain", mean=False):
    count = distributed.get_world_size()
    found = []
    for number, (name, options, rounds) in enumerate(cases):
        dtype = getattr(torch, name)
        losses, values = on_storage(f"{folder}/{number}", dtype, options, rounds, kind, mean=mean)
        divisor = count if mean else 1
        other_losses, others = accumulated(dtype, rounds * count, kind, options.get("max_grad_norm"), divisor)
        found.append((losses, values, other_losses, others))
    return found


def require_same(results, cases):
    for rank, found in enumerate(results):
        for (name, options, rounds), (losses, values, other_losses, others) in zip(cases, found, strict=True):
            case = (rank, name, options, rounds)
            assert all(map(same_bits, values, others)), case
            # Micro-batch j W + r is rank r's in round j.
            theirs = [other_losses[index * len(results) + rank] for index in range(STEPS * rounds)]
            assert all(map(same_bits, losses, theirs)), case


def test_two_ranks_have_the_bits_of_one_process_that_accumulates(tmp_path):
    cases = [
        ("float32", {"gradients": "fused"}, 1),
        ("bfloat16", {"gradients": "ssd"}, 2),
        ("bfloat16", {"gradients": "ram"}, 2),
        ("float32", {}, 1),
        ("bfloat16", {"gradients": "fused", "accumulation_steps": 2}, 2),
        ("float32", {"max_grad_norm": 0.1}, 1),
        ("bfloat16", {"gradients": "ssd", "max_grad_norm": 0.1}, 2),
    ]
    require_same(on_ranks(2, train_all, tmp_path, cases), cases)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_more_ranks_have_them_too(tmp_path, count):
    cases = [
        (name, options, rounds)
        for name in ("float32", "bfloat16")
        for options in ({"gradients": "ssd"}, {"gradients": "ram"}, {}, {"max_grad_norm": 0.1})
        for rounds in (1, 2)
    ]
    require_same(on_ranks(count, train_all, tmp_path, cases, seconds=110), cases)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_uneven_rows_frozen_and_tied_parameters_have_them(tmp_path, count):
    cases = [
        ("bfloat16", {"gradients": "ssd"}, 2),
        ("float32", {"gradients": "fused"}, 1),
        ("bfloat16", {"max_grad_norm": 0.1}, 1),
    ]
    require_same(on_ranks(count, train_all, tmp_path, cases, "odd"), cases)


@pytest.mark.slow
def test_blocks_that_are_recomputed_have_them(tmp_path):
    cases = [("bfloat16", {"gradients": "ssd"}, 2), ("float32", {"gradients": "fused"}, 1)]
    require_same(on_ranks(2, train_all, tmp_path, cases, "checkpointed"), cases)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_a_model_that_nobody_divided_has_them(tmp_path, count):
    cases = [("bfloat16", {"gradients": "ssd"}, 2), ("float32", {"units": ["1"]}, 1)]
    require_same(on_ranks(count, train_all, tmp_path, cases, "undivided"), cases)


MEANS = [
    ("float32", {"gradients": "ssd"}, 2),
    ("bfloat16", {"gradients": "ram"}, 2),
    ("bfloat16", {"gradients": "fused", "accumulation_steps": 2}, 2),
    ("bfloat16", {"gradients": "ssd", "max_grad_norm": 0.1}, 3),
    ("bfloat16", {}, 2),
    ("float32", {"gradients": "fused"}, 1),
    ("bfloat16", {"gradients": "ssd"}, 1),
    ("bfloat16", {"host_memory": "1GiB"}, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_the_mean_of_several_rounds_is_that_of_one_process(tmp_path, count):
    require_same(on_ranks(count, train_all, tmp_path, MEANS, "plain", True), MEANS)
