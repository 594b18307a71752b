"""Tests what several ranks cannot do: it is refused on all of them, and nothing is left or changed."""

import math
import os
from pathlib import Path

import torch
from support.bits import same_bits
from support.rank_models import adamw, backward, loss_of, model, offloaded, said, sharded
from support.ranks import on_ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memascend
from memascend.session.optimizer import session_of


def what_is_refused(folder):
    """The words of every error, and whether nothing was left."""
    found = {}
    rank = distributed.get_rank()

    def refused(name, make, **options):
        found[name] = said(lambda: memascend.offload(*make(), **{"storage": f"{folder}/{name}", **options}))

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
    part = fully_shard(model(torch.float32), mesh=mesh["shard"])
    refused("part", lambda: (part, adamw(part.parameters())))
    refused("one file", whole, storage=[f"{folder}/same.store"])
    # As if each were on a host of its own.
    os.environ["LOCAL_RANK"] = "0"
    refused("twice", whole, storage=f"{folder}/twice-{{local_rank}}")
    os.environ["LOCAL_RANK"] = str(rank)
    refused("adafactor", lambda: whole(torch.optim.Adafactor))
    wide = fully_shard(nn.Linear(40, 110))
    refused("blocks", lambda: (wide, adamw(wide.parameters())), state="8bit")
    # What one rank refuses, none does.
    refused("budget", whole, host_memory=1 if rank else None)
    # Once the others have taken back what they began, too.
    distributed.barrier()
    found["left"] = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.store"))
    return found


def what_can_be_done(folder):
    """What is offloaded is read; what the model computes with is not written to meanwhile."""
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

    *_, last = trained.parameters()

    def inside(*_):
        with torch.no_grad():
            raised("write", lambda: last.mul_(2.0))
            raised("view", lambda: last.detach().t())

    hook = trained[0].register_forward_hook(inside)
    with torch.no_grad():
        loss_of(trained, 0, rank)
    hook.remove()
    raised("load", lambda: trained.load_state_dict(trained.state_dict(), assign=True))
    raised("cast", trained.double)
    for module in trained.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(3.0)
    raised("mean", lambda: loss_of(trained, 0, rank))
    with torch.no_grad():
        loss_of(trained, 0, rank)
    for module in trained.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)
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


def a_norm_that_is_not_finite(folder):
    """What the steps of all ranks say, and how many there were; only rows of the last rank are not finite."""
    found = {}
    ways = {
        "clips": {"max_grad_norm": 1.0},
        "keeps": {"gradients": "ssd"},
        "skips": {"gradients": "fused", "nonfinite": "skip"},
    }
    for way, options in ways.items():
        trained, optimizer = offloaded(f"{folder}/{way}", **options)
        backward(trained, 0)
        optimizer.step()
        optimizer.zero_grad()
        values = [parameter.full_tensor() for parameter in trained.parameters()]
        if way == "skips":
            (loss_of(trained, 1, 0) * math.nan).backward()
        else:
            backward(trained, 1)
            if distributed.get_rank():
                *_, last = trained.parameters()
                session_of(optimizer).sharding.leaf_of(last).grad.mul_(math.nan)
        words = said(optimizer.step)
        optimizer.zero_grad()
        same = all(map(same_bits, values, (one.full_tensor() for one in trained.parameters())))
        steps, overflowed = optimizer.steps, optimizer.overflowed
        backward(trained, 1)
        optimizer.step()
        found[way] = words, same, steps, overflowed, optimizer.steps
        optimizer.close()
    return found


def both(folder):
    return {**what_is_refused(folder), **what_can_be_done(folder), **a_norm_that_is_not_finite(folder)}


def test_what_does_not_work_is_refused_on_all_ranks(tmp_path):
    for rank, found in enumerate(on_ranks(2, both, tmp_path)):
        assert "rank 1 has other values" in found["plain"]
        assert "give the module inside it" in found["ddp"]
        assert "tensor parallelism" in found["tensor parallel"]
        assert "a mesh of 1 of 2 ranks" in found["part"]
        assert "put {rank}" in found["one file"]
        assert "rank 0 and to rank 1" in found["twice"]
        assert "Adafactor needs whole parameters" in found["adafactor"]
        assert "within a block of 256" in found["blocks"]
        assert ("rank 1 refused" in found["budget"]) == (rank == 0)
        assert found["left"] == []
        assert found["read"]
        assert found["rows"]
        assert "is offloaded, and is not written to by mul_()" in found["write"]
        assert "t() needs their memory while the model computes" in found["view"]
        assert "Couldn't swap" in found["cast"]
        assert "by 3, which rounds" in found["mean"]
        assert "set_gradient_divide_factor(1.0)" in found["mean"]
        assert found["mean"].startswith("UsageError")
        for name in ("load", "closed"):
            assert found[name].startswith("UsageError"), found[name]
        assert torch.allclose(found["norm"], found["norm of one"])
        for way in ("clips", "keeps"):
            words, *rest = found[way]
            assert words.startswith("UsageError: step 2 was not committed: the norm of its gradients is nan")
            assert ("(not finite: " in words) == (rank == 1)
            assert rest == [True, 1, False, 2]
        assert found["skips"] == ("", True, 1, True, 2)
