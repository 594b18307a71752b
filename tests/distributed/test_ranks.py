"""Tests training on several ranks under `fully_shard`: against one process that accumulates, or FSDP2 in memory."""

from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.rank_models import (
    accumulated,
    adamw,
    loss_of,
    model,
    position,
    shard,
    sharded,
    step,
    trainable,
    whole,
    without_mean,
)
from support.ranks import on_ranks, ranks
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

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
    for number in range(STEPS):
        for turn in range(rounds):
            loss = loss_of(trained, number, turn * count + rank)
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
    "two": ((2,), "plain", False, CASES),
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "two" else pytest.mark.slow) for name in RUNS])
def test_ranks_have_the_bits_of_one_process_that_accumulates(tmp_path, name):
    counts, kind, mean, cases = RUNS[name]
    for count in counts:
        on_ranks(count, train_all, tmp_path / str(count), cases, kind, mean, seconds=110)


# --- schedules, and groups of parameters ---------------------------------------------------------------

SCHEDULED = 6
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
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-2, 1e-3], total_steps=SCHEDULED)


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
    wanted, values = train(tmp_path / "whole", SCHEDULED)
    rates = on_ranks(2, train, tmp_path, 3)[0][0]
    if then == 2:
        on_ranks(2, require_refusals, tmp_path)
    more, found = on_ranks(then, train, tmp_path, SCHEDULED)[0]
    assert rates + more == wanted
    assert all(map(same_bits, found, values))


@ranks(2)
def test_close_waits_for_no_other_rank_to_commit_a_changed_rate(folder):
    """A run changed it after its last step, on one rank alone."""
    trained, optimizer = begun(f"{folder}/changed/")
    rank = distributed.get_rank()
    with optimizer:
        loss_of(trained, 0, rank).backward()
        optimizer.step()
        if rank == 0:
            optimizer.param_groups[1]["lr"] = 0.5
    (path,) = Path(folder, "changed").glob(f"*{rank}-of-2*")
    with memascend.engine.Store.open(path) as store:
        assert store.hyperparameters["groups"][1]["lr"] == 1e-3


# --- policies of precision, and experts that nothing reaches -------------------------------------------


class Experts(nn.Module):
    """Blocks of which some are used, each a unit."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 32)

    def forward(self, tokens, used, first=0):
        values = self.embed(tokens)
        for number in range(first, first + used):
            values = values + self.experts[number](values)
        return self.head(values)


def trained_experts(store=None, *, dtype=torch.float32, policy=None, used=3, fused=True, is_one=False, **options):
    """All values after some steps: of FSDP2 in memory, or offloaded where there is a store.

    Without a policy of precision no mean is taken, and one process adds up the batches of three ranks.
    """
    torch.manual_seed(0)
    model = Experts().to(dtype)
    for module in () if is_one else (*model.experts, model):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
        if policy is None:
            # The mean of three is no exact division.
            module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    if store is not None:
        model, optimizer = memascend.offload(model, optimizer, storage=store, gradients="ssd", **options)
    for number in range(3):
        for rank in range(3) if is_one else [position()[0]]:
            generator = torch.Generator().manual_seed(3 * number + rank)
            model(torch.randint(0, 32, (4, 6), generator=generator), used).to(dtype).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    values = whole(model)
    if store is not None:
        optimizer.close()
    return values


def by_policies(folder):
    for dtype in (None, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype)
        for used in (3, 1):
            wanted = trained_experts(policy=policy, used=used)
            assert all(map(same_bits, trained_experts(f"{folder}/{dtype}-{used}", policy=policy, used=used), wanted))


def doubles_of_three(folder):
    """Torch's fused kernel rounds the end of a tensor differently, and a rank's tensor is its rows."""
    one = trained_experts(dtype=torch.float64, fused=False, is_one=True)
    assert all(map(same_bits, trained_experts(f"{folder}/in-order", dtype=torch.float64, fused=False), one))
    fused = trained_experts(f"{folder}/fused", dtype=torch.float64, reduction="native")
    assert all(map(same_bits, fused, trained_experts(dtype=torch.float64)))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "do"), [(2, by_policies), (3, doubles_of_three)])
def test_ranks_have_the_bits_of_fsdp2_in_memory_and_float64_those_of_one_process(tmp_path, count, do):
    on_ranks(count, do, tmp_path)


@ranks(2)
def test_experts_that_one_rank_alone_reaches_are_refused_by_name(folder):
    """Each rank reaches an expert of its own, which is a unit or not: that is refused, and the run goes on."""
    rank, tokens = distributed.get_rank(), torch.zeros(2, 3, dtype=torch.long)
    for each in (True, False):
        torch.manual_seed(0)
        model = Experts()
        for module in (*(model.experts if each else ()), model):
            fully_shard(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/own-{each}", gradients="ssd")
        before = whole(model)
        model(tokens, 1, first=rank).square().mean().backward()
        with pytest.raises(memascend.UsageError, match="the ranks reached different parts of the model") as refused:
            optimizer.step()
        assert "experts.0" in str(refused.value)
        assert "experts.1" in str(refused.value) or not each
        optimizer.zero_grad()
        assert all(map(same_bits, before, whole(model)))
        model(tokens, 2).square().mean().backward()
        optimizer.step()
        assert optimizer.steps == 1
        optimizer.close()
