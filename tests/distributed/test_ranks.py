"""Tests training on several ranks under `fully_shard` against one process that accumulates."""

import pytest
import torch
from support.bits import same_bits
from support.rank_models import accumulated, adamw, loss_of, model, position, sharded, trainable, whole, without_mean
from support.ranks import on_ranks

import memascend

STEPS = 3


def train_all(folder, cases, kind="plain", mean=False):
    for number, (name, options, rounds) in enumerate(cases):
        require_same(f"{folder}/{number}", getattr(torch, name), options, rounds, kind, mean=mean)


def require_same(folder, dtype, options, rounds, kind, *, mean):
    """This rank's losses, all values and norms are those of one process. `mean`: FSDP2's own of several rounds."""
    trained = model(dtype, kind) if kind == "undivided" else sharded(dtype, kind)
    trained, optimizer = memascend.offload(trained, adamw(trainable(trained)), storage=folder, **options)
    rank, count = position()
    # FSDP2 divides by the number of ranks, which has to be a power of two: else the loss is divided.
    parts = 1 if mean else rounds
    if count & (count - 1):
        parts = rounds * count
        without_mean(trained)
    found, norms = [], []
    for step in range(STEPS):
        for turn in range(rounds):
            loss = loss_of(trained, step, turn * count + rank)
            (loss / parts).backward()
            found.append(loss.detach())
        optimizer.step()
        norms.append(optimizer.grad_norm)
        optimizer.zero_grad()
    found += [*whole(trained), torch.tensor(norms, dtype=torch.float64)]
    optimizer.close()
    divisor = count if mean else 1
    losses, values = accumulated(dtype, rounds * count, kind, options.get("max_grad_norm"), divisor)
    # Micro-batch j W + r is rank r's in round j.
    assert all(map(same_bits, found, [*losses[rank::count], *values])), (kind, dtype, options, rounds)


# The dtype, options, and micro-batches of a rank.
CASES = [
    ("float32", {"gradients": "fused"}, 1),
    ("bfloat16", {"gradients": "ssd"}, 2),
    ("bfloat16", {"gradients": "ram"}, 2),
    ("float32", {}, 1),
    ("bfloat16", {"gradients": "fused", "accumulation_steps": 2}, 2),
    ("float32", {"max_grad_norm": 0.1}, 1),
    ("bfloat16", {"gradients": "ssd", "max_grad_norm": 0.1}, 2),
]
# Numbers of ranks, the model, whether FSDP2 takes the means, and cases.
RUNS = {
    "more": ((3, 4), "plain", False, CASES),
    # Uneven rows, frozen and tied parameters.
    "odd": ((2, 3, 4, 5), "odd", False, [CASES[1], CASES[0], ("bfloat16", {"max_grad_norm": 0.1}, 1)]),
    # Blocks that are recomputed.
    "checkpointed": ((2,), "checkpointed", False, [CASES[1], CASES[0]]),
    # A model that offload() shards itself.
    "undivided": ((2, 3), "undivided", False, [CASES[1], ("float32", {"units": ["1"]}, 1)]),
    # In RAM gradients may wait in another way.
    "means": ((2, 4), "plain", True, [*CASES, ("bfloat16", {"host_memory": "1GiB"}, 2)]),
}


def test_two_ranks_have_the_bits_of_one_process_that_accumulates(tmp_path):
    on_ranks(2, train_all, tmp_path, CASES)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_other_models_and_more_ranks_have_them(tmp_path, name):
    counts, kind, mean, cases = RUNS[name]
    for count in counts:
        on_ranks(count, train_all, tmp_path / str(count), cases, kind, mean, seconds=110)
