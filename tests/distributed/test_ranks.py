"""Tests training on several ranks, and resuming a run with a different number of ranks.

The results must have the same bits as training in one process, or as training with FSDP2 in memory.
"""

import os
import signal
from pathlib import Path

import pytest
import torch
from support import rank_models
from support.bits import same_bits
from support.forked_child import in_child
from support.rank_models import (
    Odd,
    accumulated,
    adamw,
    divide_gradients,
    loss_of,
    model,
    offloaded,
    output,
    position,
    shard,
    sharded,
    step,
    trainable,
    whole,
)
from support.rank_runs import failing
from support.ranks import on_ranks, ranks
from support.stores import filled
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memascend
from memascend.distributed.control_plane import Alone, Exchange
from memascend.distributed.reshard import Earlier, EarlierValues, find_earlier, left_over, remove_store
from memascend.distributed.rows import Layout
from memascend.engine import Record, Store

STEPS = 3


def train_all(folder, cases, kind="plain", mean=False):
    for number, (name, options, rounds) in enumerate(cases):
        require_same(f"{folder}/{number}", getattr(torch, name), options, rounds, kind, mean=mean)


def require_same(folder, dtype, options, rounds, kind, *, mean):
    """Trains on this rank; requires the losses, values and norms of training in one process.

    If `mean` is true, the loop does not divide the loss, and only FSDP2 divides: by the number of ranks, which must be
    a power of two.
    """
    trained = model(dtype, kind) if kind == "undivided" else sharded(dtype, kind)
    trained, optimizer = memascend.offload(trained, adamw(trainable(trained)), storage=folder, **options)
    rank, count = position()
    # FSDP2 divides gradients by the number of ranks. The division rounds unless the number of ranks is a power of two.
    # For any other number of ranks, FSDP2 only adds the gradients here, and the test divides the loss instead.
    parts = 1 if mean else rounds
    if count & (count - 1):
        parts = rounds * count
        divide_gradients(trained)
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
    # In round j, rank r trained on micro-batch j * count + r. So its losses are every `count`-th loss of one process.
    assert all(map(same_bits, found, [*losses[rank::count], *values])), (kind, dtype, options, rounds)


# Each case has a dtype, options of offload(), and the number of micro-batches that each rank runs in a step.
CASES = [
    ("float32", {"gradients": "fused"}, 1),
    ("bfloat16", {"gradients": "ssd"}, 2),
    ("bfloat16", {"gradients": "ram"}, 2),
    ("float32", {}, 1),
    ("bfloat16", {"gradients": "fused", "accumulation_steps": 2}, 2),
    ("float32", {"max_grad_norm": 0.1}, 1),
    ("bfloat16", {"gradients": "ssd", "max_grad_norm": 0.1}, 2),
]
# Each run has numbers of ranks, the kind of model, the argument `mean` of `require_same`, and cases.
RUNS = {
    "two": ((2,), "plain", False, CASES),
    "more": ((3, 4), "plain", False, CASES),
    # This model has rows that the ranks cannot divide evenly, frozen parameters, and tied parameters.
    "odd": ((2, 3, 4, 5), "odd", False, [CASES[1], CASES[0], ("bfloat16", {"max_grad_norm": 0.1}, 1)]),
    # The blocks of this model use activation checkpointing.
    "checkpointed": ((2,), "checkpointed", False, [CASES[1], CASES[0]]),
    # The test does not shard this model: offload() shards it.
    "undivided": ((2, 3), "undivided", False, [CASES[1], ("float32", {"units": ["1"]}, 1)]),
    # In the last case, records are kept in RAM. Gradients of these records may wait for step() in a different place
    # than other gradients.
    "means": ((2, 4), "plain", True, [*CASES, ("bfloat16", {"host_memory": "1GiB"}, 2)]),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "two" else pytest.mark.slow) for name in RUNS])
def test_ranks_have_the_bits_of_one_process_that_accumulates(tmp_path, name):
    counts, kind, mean, cases = RUNS[name]
    for count in counts:
        on_ranks(count, train_all, tmp_path / str(count), cases, kind, mean, seconds=110)


# --- schedules, and groups of parameters ---------------------------------------------------------------

SCHEDULED, SCHEDULED_MICRO_BATCHES = 6, 2


def begun(storage, *, swapped=False, **options):
    """Begins or resumes a run. Of the trainable parameters, group 1 has the biases, and group 0 has all others.

    If `swapped` is true, the two groups exchange their parameters.
    """
    trained = model(torch.float32, "odd")
    if distributed.is_initialized():
        shard(trained)
    groups = [{"params": [], "lr": 1e-2}, {"params": [], "lr": 1e-3, "weight_decay": 0.0}]
    for name, one in trained.named_parameters():
        if one.requires_grad:
            groups[name.endswith("bias") != swapped]["params"].append(one)
    optimizer = torch.optim.AdamW(groups, fused=True)
    trained, optimizer = memascend.offload(trained, optimizer, storage=storage, timeout=20, **options)
    divide_gradients(trained)
    return trained, optimizer


def scheduler_of(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, [2e-2, 1e-3], total_steps=SCHEDULED)


def train_scheduled(folder, until):
    """Begins or resumes a run, and trains to step `until`.

    Returns the learning rates of each step, and the final values.
    """
    trained, optimizer = begun(f"{folder}/runs/", existing="resume", gradients="ssd")
    optimizer.schedule(scheduler_of(optimizer))
    rates = []
    with optimizer:
        while optimizer.steps < until:
            rates.append([group["lr"] for group in optimizer.param_groups])
            step(trained, optimizer, SCHEDULED_MICRO_BATCHES)
        return rates, whole(trained)


def require_refusals(folder):
    """Requires errors for swapped groups, a different scheduler, and a loop that calls `scheduler.step()` itself."""
    with pytest.raises(memascend.ConfigError, match="was in group"):
        begun(f"{folder}/runs/", swapped=True, existing="resume")
    trained, optimizer = begun(f"{folder}/runs/", existing="resume")
    with optimizer:
        with pytest.raises(memascend.MemascendError, match="used OneCycleLR, not StepLR"):
            optimizer.schedule(torch.optim.lr_scheduler.StepLR(optimizer, 2))
        scheduler = scheduler_of(optimizer)
        optimizer.schedule(scheduler)
        scheduler.step()
        loss_of(trained, 0, 0).backward()
        with pytest.raises(memascend.UsageError, match=r"delete your calls of scheduler\.step\(\)"):
            optimizer.step()


@pytest.mark.parametrize("then", [1, 2])
def test_scheduled_run_resumes_with_the_same_or_another_number_of_ranks(tmp_path, then):
    (tmp_path / "whole").mkdir()
    wanted, values = train_scheduled(tmp_path / "whole", SCHEDULED)
    rates = on_ranks(2, train_scheduled, tmp_path, 3)[0][0]
    if then == 2:
        on_ranks(2, require_refusals, tmp_path)
    more, found = on_ranks(then, train_scheduled, tmp_path, SCHEDULED)[0]
    assert rates + more == wanted
    assert all(map(same_bits, found, values))


@ranks(2)
def test_close_drops_a_learning_rate_changed_on_one_rank_only(folder):
    """Only rank 0 changes a learning rate after the last step.

    A commit needs all ranks, so `close()` drops the changed rate instead of waiting for rank 1.
    """
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


# --- mixed precision, and experts that no forward reaches ----------------------------------------------


class Experts(nn.Module):
    """A model with three experts. A forward uses the experts from `first` to `first + used - 1`."""

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
    """Trains three steps, offloaded to `store`, or in memory with FSDP2 if `store` is None; returns the final values.

    If `policy` is None, FSDP2 adds gradients and does not divide the sum. If `is_one` is true, this process trains
    alone, without FSDP2, on the batches of all ranks.
    """
    torch.manual_seed(0)
    model = Experts().to(dtype)
    for module in () if is_one else (*model.experts, model):
        fully_shard(module, mp_policy=policy or MixedPrecisionPolicy())
        if policy is None:
            # Dividing the gradients by three ranks would round them.
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
    """Without fused kernels, requires the bits of one process. With fused kernels, requires those of FSDP2 in memory.

    torch's fused kernel rounds the last elements of a tensor differently. A shard ends at a different element than the
    whole tensor, so the fused optimizer on one process would give different bits.
    """
    one = trained_experts(dtype=torch.float64, fused=False, is_one=True)
    assert all(map(same_bits, trained_experts(f"{folder}/in-order", dtype=torch.float64, fused=False), one))
    fused = trained_experts(f"{folder}/fused", dtype=torch.float64, reduction="native")
    assert all(map(same_bits, fused, trained_experts(dtype=torch.float64)))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "do"), [(2, by_policies), (3, doubles_of_three)])
def test_ranks_equal_fsdp2_in_memory_and_float64_equals_one_process(tmp_path, count, do):
    on_ranks(count, do, tmp_path)


@ranks(2)
def test_step_names_the_experts_that_only_one_rank_reached(folder):
    """Each rank's forward uses a different expert. `step()` must raise an error, and the run must then continue.

    In the first round, each expert is a unit. In the second round, the experts are not units of their own.
    """
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


# --- resuming a run with a different number of ranks ---------------------------------------------------

MICRO_BATCHES = 12
LEFT_OPEN = []
LOGGED = {"host_memory": "1GiB", "log_steps": 16}


class Counted(Odd):
    """`Odd` with a persistent buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens):
        self.seen += 1
        return super().forward(tokens)


class Blocks(nn.Sequential):
    """A model whose shards have a multiple of 256 elements on two, three and four ranks."""

    def __init__(self):
        square = [nn.Linear(96, 96, bias=False) for _ in range(2)]
        super().__init__(
            nn.Embedding(96, 32), nn.Linear(32, 96, bias=False), nn.Tanh(), square[0], nn.Tanh(), square[1]
        )


def several(trained, lr):
    return [torch.optim.SGD(trained[::2], lr=lr, momentum=0.9), torch.optim.AdamW(trained[1::2], lr=lr)]


def train(folder, name, until, plain, options):
    """Begins or resumes a run, and trains to step `until`.

    Returns the step at which the run began, the `user_state` of this step, the final values, and the stores in the
    folder.
    """
    folder = Path(folder, name)
    folder.mkdir(exist_ok=True)
    options = {"existing": "resume", "gradients": "ssd", **options}
    kinds = {"several": several, "RMSprop": torch.optim.RMSprop, "AdamW": torch.optim.AdamW}
    options["kind"] = kinds[options.get("kind", "AdamW")]
    options["dtype"] = getattr(torch, options.get("dtype", "bfloat16"))
    kind = Blocks if options.get("state") == "8bit" else Counted
    model, optimizer = offloaded(folder, of=kind, shards=not plain, **options)
    began, user_state = optimizer.steps, optimizer.user_state
    values = rank_models.train(model, optimizer, until, MICRO_BATCHES)
    if "log_steps" in options:
        # Does not close the run, as if the process were killed. So the last updates of the RAM tier are only in the
        # gradient log.
        LEFT_OPEN.append(optimizer)
    else:
        optimizer.close()
    distributed.barrier()
    return began, user_state, values, there(folder)


def there(folder):
    """Returns the paths of all stores in a folder, relative to the folder."""
    return sorted(str(file.relative_to(folder)) for file in Path(folder).rglob("*.store"))


def stores(count):
    return ["memascend.store"] if count == 1 else [f"rank-{rank}-of-{count}/memascend.store" for rank in range(count)]


def train_whole(folder, until, options):
    """Trains a run in one process without a stop; returns the final values.

    Also begins a second run, which `go_on` resumes later, and takes the first step of the second run.
    """
    whole = train(folder, "whole", until, True, options)[2]
    train(folder, "run", 1, True, options)
    return whole


def go_on(tmp_path, counts, options):
    """Takes one step of a run with each of `counts`; requires the bits of one process that never stopped.

    Each of `counts` is a pair: the number of ranks, and whether the test leaves the model unsharded.
    """
    (whole,) = on_ranks(1, train_whole, tmp_path, len(counts), options)
    for number, (count, plain) in list(enumerate(counts))[1:]:
        found = on_ranks(count, train, tmp_path, "run", number + 1, plain, options)
        for rank, (began, user_state, _, left) in enumerate(found):
            assert began == number
            old = rank if rank < counts[number - 1][0] else 0
            assert user_state == {"rank": old, "step": number - 1}
            assert left == stores(count)
    for _, _, values, _ in found:
        assert all(map(same_bits, values, whole))


@pytest.mark.parametrize("options", [{}, {"kind": "several"}], ids=str)
def test_run_of_one_rank_resumes_with_two(tmp_path, options):
    go_on(tmp_path, [(1, True), (2, False)], options)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32", "gradients": "ram"},
        {"host_memory": "1GiB", "log_steps": 3},
        {"kind": "RMSprop", "durability": "none"},
        {"kind": "several"},
        {"state": "8bit"},
        {"state": "8bit", **LOGGED},
        {"state": "bf16"},
        {"state": "bf16", **LOGGED},
        {"state": "bf16", "rounding": "stochastic", "master_dtype": None, "seed": 3, **LOGGED},
    ],
    ids=str,
)
def test_run_resumes_with_four_two_three_and_one_ranks(tmp_path, options):
    """With `log_steps`, no run calls `close()`, so the next run replays the gradient log."""
    go_on(tmp_path, [(1, True), (4, False), (2, False), (3, False), (1, True), (2, False), (1, False)], options)


def test_left_over_excludes_stores_of_replicas_in_use(tmp_path):
    file = tmp_path / "replica-1/memascend.store"
    file.parent.mkdir()
    file.touch()
    assert left_over(str(tmp_path), Layout(0, 1, 1)) == [file]
    assert left_over(str(tmp_path), Layout(0, 1, 1), {f"{file.parent}/"}) == []


def test_remove_store_flushes_the_folder_after_the_removal(tmp_path, monkeypatch):
    file, flushed = tmp_path / "memascend.store", []
    file.touch()
    monkeypatch.setattr(os, "fsync", lambda of: flushed.append((os.readlink(f"/proc/self/fd/{of}"), file.exists())))
    remove_store(file)
    assert flushed == [(str(tmp_path), False)]


# --- ranks that fail while their number changes ----------------------------------------------


def gone(folder, point, until, options):
    """Resumes the run with a different number of ranks, and makes ranks fail at `point`.

    Returns this rank's error, and the stores that exist afterwards.
    """
    _break_at(point, distributed.get_rank())
    try:
        error = output(lambda: train(folder, "run", until, False, options))
    except OSError as met:
        error = str(met)
    return error, there(Path(folder, "run"))


def _break_at(point, rank):
    """Makes this process fail while the number of ranks changes, if `rank` is a rank that fails at `point`.

    `point` is "read", "first root", "root", "none" or "half". With any other `point`, no rank fails.
    """
    all_gather, remove = Exchange.all_gather, Earlier.remove

    def answer(self, about, output, **given):
        if point == "root" and about == "written":
            # Only rank 0 gets here, because the other ranks were killed below. Rank 0 has already written its root.
            _die()
        answers = all_gather(self, about, output, **given)
        if about == "staged" and rank:
            _die()
        return answers

    def removed(self):
        if point == "half" and rank == 0:
            # Rank 0 removes the old stores that it has read. All ranks are killed before any other rank removes old
            # stores.
            remove(self)
        distributed.barrier()
        _die()

    if point == "read" and rank == 1:
        # Rank 1 cannot read its part of the earlier stores.
        EarlierValues._read = failing
    elif point == "root" or (point == "first root" and rank == 1):
        # "first root": rank 1 is killed before it writes the first root of its new store. The other ranks may have
        # written the roots of their new stores. "root": all ranks are killed when only rank 0 has written the root of
        # its new store.
        Exchange.all_gather = answer
    elif point in ("none", "half"):
        # All ranks are killed after all ranks have committed. "none": no rank has removed old stores yet. "half": only
        # rank 0 has removed old stores.
        Earlier.remove = removed


def _die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_find_earlier_excludes_unfilled_stores_and_includes_damaged_stores(tmp_path):
    paths = [tmp_path / f"rank-{rank}-of-2" / "memascend.store" for rank in range(2)]
    records = [Record(name="w", values=torch.zeros(3), state={})]
    for path in paths:
        path.parent.mkdir()
    filled(paths[0], records).close()
    # The child process leaves a store without a commit, as if the child were killed before its first commit.
    in_child(lambda: LEFT_OPEN.append(Store.create(paths[1], records)))
    with pytest.raises(memascend.ConfigError, match="its first write did not finish"):
        find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1))
    assert find_earlier(str(tmp_path), "replace", Alone(), Layout(0, 1, 1)) is None
    paths[1].write_bytes(b"another file")
    assert find_earlier(str(tmp_path), "resume", Alone(), Layout(0, 1, 1)).files == paths


def test_failed_change_of_the_rank_count_keeps_the_earlier_stores(tmp_path):
    ((_, _, whole, _),) = on_ranks(1, train, tmp_path, "whole", 2, True, {})
    on_ranks(3, train, tmp_path, "run", 1, False, {"timeout": 20.0})
    for error, left in on_ranks(2, gone, tmp_path, "read", 2, {"timeout": 20.0}):
        assert "as if the drive were gone" in error
        assert set(stores(3)) <= set(left)
    first, _ = on_ranks(2, gone, tmp_path, "first root", 2, {"timeout": 20.0}, ends=(0, -9))
    assert first[0].startswith("RankError"), first
    assert set(stores(3)) <= set(first[1])
    for error, left in on_ranks(2, gone, tmp_path, "", 2, {"timeout": 20.0, "kind": "several"}):
        assert "the earlier stores are of AdamW, and the optimizer is SGD + AdamW" in error
        assert set(stores(3)) <= set(left)
    for _, _, values, left in on_ranks(2, train, tmp_path, "run", 2, False, {"timeout": 20.0}):
        assert all(map(same_bits, values, whole))
        assert left == stores(2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("counts", "point", "last"),
    [
        ((4, 2), "root", 1), ((2, 4), "root", 2), ((1, 2, 3), "root", 3), ((4, 2), "none", 4), ((2, 4), "none", 1),
        ((1, 2, 3), "none", 2), ((4, 2), "half", 3), ((2, 4), "half", 4), ((1, 2, 3), "half", 1),
    ],
    ids=str,
)  # fmt: skip
def test_run_resumes_after_ranks_are_killed_while_their_count_changes(tmp_path, counts, point, last):
    """The first of `counts` is the number of ranks that begin the run.

    Each later item of `counts` is a number of ranks that resume the run and fail at `point`. In the end, `last` ranks
    resume the run, and must have the same bits as one process.
    """
    ((_, _, whole, _),) = on_ranks(1, train, tmp_path, "whole", 2, True, {})
    first, *others = counts
    on_ranks(first, train, tmp_path, "run", 1, False, {})
    for count in others:
        # A rank that is not killed raises an error because other ranks are killed.
        on_ranks(count, gone, tmp_path, point, 2, {"timeout": 20.0}, ends=(0, -9))
    for began, _, values, left in on_ranks(last, train, tmp_path, "run", 2, False, {}):
        assert began == 1
        assert all(map(same_bits, values, whole))
        # A store that was never filled stays in the folder, because a damaged store looks the same. A warning tells the
        # user that the store may be removed.
        unfilled = {file for count in others if point == "root" and count != last for file in stores(count)}
        assert set(left) - unfilled == set(stores(last))
