"""Tests training on several ranks under `fully_shard` against one process that accumulates, and against DDP."""

import math
import os
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.ranks import on_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import memascend

STEPS = 3


class Odd(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a frozen block, an embedding that is the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.narrow = nn.Sequential(nn.Linear(16, 3), nn.GELU(), nn.Linear(3, 16))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.frozen(self.narrow(self.embed(tokens))))

    def __iter__(self):
        return iter((self.narrow, self.frozen))


class Checkpointed(nn.Sequential):
    """Recomputed in the backward."""

    def forward(self, values):
        return checkpoint(super().forward, values, use_reentrant=False)


def model(dtype, kind="plain"):
    torch.manual_seed(0)
    if kind == "odd":
        return Odd().to(dtype)
    block = Checkpointed if kind == "checkpointed" else nn.Sequential
    blocks = [block(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16)) for _ in range(2)]
    return nn.Sequential(nn.Embedding(32, 16), *blocks, nn.Linear(16, 32)).to(dtype)


def batch(step, micro):
    """Micro-batch `micro` of a step, of whatever rank."""
    generator = torch.Generator().manual_seed(1000 * step + micro)
    tokens = torch.randint(0, 32, (4, 6), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(trained, step, micro):
    inputs, targets = batch(step, micro)
    return nn.functional.cross_entropy(trained(inputs).float().flatten(0, 1), targets.flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def sharded(dtype, kind="plain"):
    trained = model(dtype, kind)
    for block in trained:
        fully_shard(block)
    return fully_shard(trained)


def trainable(trained):
    return [parameter for parameter in trained.parameters() if parameter.requires_grad]


def on_storage(folder, dtype, options, rounds, kind="plain"):
    """What the ranks train together: this rank's losses, and all values."""
    trained = model(dtype, kind) if kind == "undivided" else sharded(dtype, kind)
    trained, optimizer = memascend.offload(trained, adamw(trainable(trained)), storage=folder, **options)
    rank, count = distributed.get_rank(), distributed.get_world_size()
    # FSDP2 divides by the number of ranks, which is exact for powers of two: else the loss is divided.
    parts = rounds
    if count == 3:
        parts = rounds * count
        for module in trained.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
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


def accumulated(dtype, micros, kind="plain", max_grad_norm=None):
    """What one process does: it accumulates micro-batches."""
    trained = model(dtype, kind)
    masters = [p.detach().float().clone().requires_grad_() for p in trainable(trained)]
    optimizer = adamw(masters)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(micros):
            loss = loss_of(trained, step, micro)
            (loss / micros).backward()
            losses.append(loss.detach())
        norms.append(_norm(trainable(trained)))
        factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norms[-1] + 1e-6))
        _step(trained, masters, optimizer, torch.tensor(factor, dtype=torch.float32))
    values = [parameter.detach() for parameter in trained.parameters()]
    return losses, [*values, torch.tensor(norms, dtype=torch.float64)]


def _norm(parameters):
    """Of all gradients: of the sum of squares that is rounded once, whatever the order."""
    # A square of fp32 has a float64, and fsum rounds at its end.
    return math.sqrt(math.fsum(square for p in parameters for square in p.grad.double().square().flatten().tolist()))


def _step(trained, masters, optimizer, factor=1.0):
    with torch.no_grad():
        for master, parameter in zip(masters, trainable(trained), strict=True):
            master.grad = parameter.grad.float() * factor
            parameter.grad = None
        optimizer.step()
        for master, parameter in zip(masters, trainable(trained), strict=True):
            parameter.copy_(master)


def beside_ddp(dtype):
    """What DDP does with the same loop."""
    trained = model(dtype)
    masters = [p.detach().float().clone().requires_grad_() for p in trained.parameters()]
    optimizer = adamw(masters)
    wrapped = nn.parallel.DistributedDataParallel(trained)
    for step in range(STEPS):
        loss_of(wrapped, step, distributed.get_rank()).backward()
        _step(trained, masters, optimizer)
    return [parameter.detach() for parameter in trained.parameters()]


def train_all(folder, cases, kind="plain"):
    count = distributed.get_world_size()
    found = []
    for number, (name, options, rounds) in enumerate(cases):
        dtype = getattr(torch, name)
        losses, values = on_storage(f"{folder}/{number}", dtype, options, rounds, kind)
        other_losses, others = accumulated(dtype, rounds * count, kind, options.get("max_grad_norm"))
        found.append((losses, values, other_losses, others))
    return found


def train_by_the_mean(folder, cases):
    """FSDP2's own mean over several rounds, against a process that divides the sum of all once."""
    count, rank = distributed.get_world_size(), distributed.get_rank()
    found = []
    for number, (name, options, rounds) in enumerate(cases):
        dtype = getattr(torch, name)
        trained = sharded(dtype)
        trained, optimizer = memascend.offload(
            trained, adamw(trained.parameters()), storage=f"{folder}/{number}", **options
        )
        whole = model(dtype)
        masters = [p.detach().float().clone().requires_grad_() for p in whole.parameters()]
        other = adamw(masters)
        norms, others = [], []
        for step in range(STEPS):
            for turn in range(rounds):
                loss_of(trained, step, turn * count + rank).backward()
            optimizer.step()
            norms.append(optimizer.grad_norm)
            optimizer.zero_grad()
            for micro in range(rounds * count):
                loss_of(whole, step, micro).backward()
            for parameter in whole.parameters():
                parameter.grad.div_(count)
            others.append(_norm(whole.parameters()))
            factor = min(1.0, options.get("max_grad_norm", math.inf) / (others[-1] + 1e-6))
            _step(whole, masters, other, torch.tensor(factor, dtype=torch.float32))
        values = [parameter.full_tensor() for parameter in trained.parameters()]
        optimizer.close()
        same = all(map(same_bits, values, (parameter.detach() for parameter in whole.parameters())))
        found.append((same, norms == others))
    return found


def train_beside_ddp(folder):
    found = []
    for name in ("float32", "bfloat16"):
        dtype = getattr(torch, name)
        found.append((on_storage(f"{folder}/{name}", dtype, {}, 1)[1][:-1], beside_ddp(dtype)))
    return found


def what_is_refused(folder):
    """The words of every error, and whether nothing was left."""
    found = {}
    rank = distributed.get_rank()

    def refused(name, make, **options):
        try:
            trained, optimizer = make()
            memascend.offload(trained, optimizer, **{"storage": f"{folder}/{name}", **options})
        except memascend.MemascendError as error:
            found[name] = str(error)

    def whole(kind=adamw):
        trained = sharded(torch.float32)
        return trained, kind(trained.parameters())

    plain = model(torch.float32)
    if rank:
        with torch.no_grad():
            plain[0].weight.add_(1)
    refused("plain", lambda: (plain, adamw(plain.parameters())))
    wrapped = nn.parallel.DistributedDataParallel(model(torch.float32))
    refused("ddp", lambda: (wrapped, adamw(wrapped.parameters())))
    columns = parallelize_module(model(torch.float32), init_device_mesh("cpu", (2,)), {"3": ColwiseParallel()})
    refused("tensor parallel", lambda: (columns, adamw(columns.parameters())))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    hybrid = fully_shard(model(torch.float32), mesh=mesh)
    refused("hsdp", lambda: (hybrid, adamw(hybrid.parameters())))
    refused("one file", whole, storage=[f"{folder}/same.store"])
    # As if each were on a host of its own.
    os.environ["LOCAL_RANK"] = "0"
    refused("twice", whole, storage=f"{folder}/twice-{{local_rank}}")
    os.environ["LOCAL_RANK"] = str(rank)
    refused("adafactor", lambda: whole(torch.optim.Adafactor))
    # What one rank refuses, none does.
    refused("budget", whole, host_memory=1 if rank else None)
    # Once the others have taken back what they began, too.
    distributed.barrier()
    found["left"] = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.store"))
    return found


def what_can_be_done(folder):
    """What is offloaded is read, and not written to."""
    found = {}
    rank = distributed.get_rank()
    trained = sharded(torch.float32)
    optimizer = adamw(trained.parameters())
    values = [parameter.full_tensor() for parameter in trained.parameters()]
    trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/run")
    found["read"] = all(map(same_bits, values, (one.full_tensor() for one in trained.parameters())))
    rows = [one.to_local() for one in trained.state_dict().values()]
    found["rows"] = all(
        same_bits(one.to_local().clone(), local.clone()) for one, local in zip(trained.parameters(), rows, strict=True)
    )

    def raised(name, call):
        try:
            call()
        except (memascend.UsageError, RuntimeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    first = next(iter(trained.parameters()))
    with torch.no_grad():
        raised("write", lambda: first.mul_(2.0))
        raised("view", lambda: first.to_local()[0])
    raised("load", lambda: trained.load_state_dict(trained.state_dict()))
    raised("materialized", lambda: memascend.materialized(trained).__enter__())
    # torch's own clipping goes by all ranks' norm.
    loss_of(trained, 0, rank).backward()
    found["norm"] = optimizer.clip_grad_norm_(0.01).full_tensor()
    whole_model = model(torch.float32)
    sum(loss_of(whole_model, 0, micro) / 2 for micro in range(2)).backward()
    found["norm of one"] = torch.nn.utils.clip_grad_norm_(whole_model.parameters(), 0.01)
    optimizer.step()
    optimizer.close()
    raised("closed", lambda: loss_of(trained, 0, rank))
    return found


def both(folder):
    return {**what_is_refused(folder), **what_can_be_done(folder)}


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


def test_what_does_not_work_is_refused_on_all_ranks(tmp_path):
    for rank, found in enumerate(on_ranks(2, both, tmp_path)):
        assert "rank 1 has other values" in found["plain"]
        assert "give the module inside it" in found["ddp"]
        assert "tensor parallelism" in found["tensor parallel"]
        assert "a mesh on which ranks replicate it" in found["hsdp"] or "a mesh of two dimensions" in found["hsdp"]
        assert "put {rank}" in found["one file"]
        assert "rank 0 and to rank 1" in found["twice"]
        assert "Adafactor needs whole parameters" in found["adafactor"]
        assert ("rank 1 refused" in found["budget"]) == (rank == 0)
        assert found["left"] == []
        assert found["read"]
        assert found["rows"]
        assert "cannot be written to by mul_()" in found["write"]
        assert "clone() them first" in found["view"]
        for name in ("load", "materialized", "closed"):
            assert found[name].startswith("UsageError"), found[name]
        assert torch.allclose(found["norm"], found["norm of one"])


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
@pytest.mark.parametrize("count", [2, 3, 4])
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
@pytest.mark.parametrize("count", [3, 5])
def test_the_mean_of_several_rounds_is_divided_once(tmp_path, count):
    assert on_ranks(count, train_by_the_mean, tmp_path, MEANS) == [[(True, True)] * len(MEANS)] * count


def touch_between_rounds(folder, cases):
    """What loops see of a gradient between two rounds, and of both; and what torch's own clipping makes of it."""
    count, rank = distributed.get_world_size(), distributed.get_rank()
    found = []
    for number, (name, options) in enumerate(cases):
        dtype = getattr(torch, name)
        trained = sharded(dtype)
        trained, optimizer = memascend.offload(
            trained, adamw(trained.parameters()), storage=f"{folder}/{number}", **options
        )
        whole = model(dtype)
        seen, others = [], []
        for turn in range(2):
            loss_of(trained, 0, turn * count + rank).backward()
            if turn or number % 2:
                # One that only looks at the end has the sum of all divided once.
                seen += [one.grad.full_tensor().clone() for one in trained.parameters()]
            for micro in range(count):
                loss_of(whole, 0, turn * count + micro).backward()
            if turn or number % 2:
                others += [one.grad / count for one in whole.parameters()]
        norm = torch.nn.utils.clip_grad_norm_(trained.parameters(), 0.01).full_tensor()
        after = torch.stack([one.grad.full_tensor().float().norm() for one in trained.parameters()]).norm()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.close()
        # Parts of what was looked at are divided one by one: they differ in the last bits.
        same = same_bits if not number % 2 else lambda a, b: torch.allclose(a.float(), b.float(), atol=1e-2)
        of_one = torch.stack([one.float().norm() for one in others[-len(list(whole.parameters())) :]]).norm()
        close = torch.allclose(norm.float(), of_one, rtol=1e-2) and torch.allclose(after, torch.tensor(0.01), rtol=0.05)
        found.append((all(map(same, seen, others)), close))
    return found


@pytest.mark.slow
def test_a_gradient_that_is_touched_between_rounds_is_divided(tmp_path):
    cases = [(name, {"gradients": wait}) for wait in ("ssd", "ram") for name in ("bfloat16", "float32")]
    assert on_ranks(3, touch_between_rounds, tmp_path, cases) == [[(True, True)] * len(cases)] * 3


@pytest.mark.slow
def test_two_ranks_have_the_bits_of_ddp(tmp_path):
    for found in on_ranks(2, train_beside_ddp, tmp_path):
        for values, others in found:
            assert all(map(same_bits, values, others))
