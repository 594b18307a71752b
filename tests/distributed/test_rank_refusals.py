"""Tests what several ranks cannot do: it is refused on all of them, and nothing is left or changed."""

import math
import os
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.rank_models import adamw, backward, loss_of, model, offloaded, sharded, whole
from support.ranks import ranks
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import memascend
from memascend.session.optimizer import session_of


def require_refusals(folder):
    rank = distributed.get_rank()

    def refused(words, trained, kind=adamw, **options):
        options = {"storage": f"{folder}/refused", **options}
        with pytest.raises(memascend.MemascendError, match=words):
            memascend.offload(trained, kind(trained.parameters()), **options)

    plain = model(torch.float32)
    with torch.no_grad():
        plain[0].weight.add_(rank)
    refused("rank 1 has other values", plain)
    refused("give the module inside it", nn.parallel.DistributedDataParallel(model(torch.float32)))
    columns = parallelize_module(model(torch.float32), init_device_mesh("cpu", (2,)), {"3": ColwiseParallel()})
    refused("tensor parallelism", columns)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    refused("a mesh of 1 of 2 ranks", fully_shard(model(torch.float32), mesh=mesh["shard"]))
    refused("put {rank}", sharded(torch.float32), storage=[f"{folder}/same.store"])
    # As if each were on a host of its own.
    os.environ["LOCAL_RANK"] = "0"
    refused("rank 0 and to rank 1", sharded(torch.float32), storage=f"{folder}/twice-{{local_rank}}")
    os.environ["LOCAL_RANK"] = str(rank)
    refused("Adafactor needs whole parameters", sharded(torch.float32), torch.optim.Adafactor)
    refused("within a block of 256", fully_shard(nn.Linear(40, 110)), state="8bit")
    # What one rank refuses, none does.
    refused("" if rank else "rank 1 refused", sharded(torch.float32), host_memory=1 if rank else None)
    # Once the others have taken back what they began, too.
    distributed.barrier()
    assert not list(Path(folder).rglob("*.store"))


def require_reads_and_no_writes(folder):
    """What is offloaded is read; what the model computes with is not written to meanwhile."""
    rank = distributed.get_rank()
    trained = sharded(torch.float32)
    optimizer = adamw(trained.parameters())
    values = whole(trained)
    trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/run")
    assert all(map(same_bits, values, whole(trained)))
    rows = [one.to_local().clone() for one in trained.state_dict().values()]
    assert all(map(same_bits, [one.to_local().clone() for one in trained.parameters()], rows))
    *_, last = trained.parameters()
    raised = []

    def inside(*_):
        with pytest.raises(memascend.UsageError, match=r"is offloaded, and is not written to by mul_\(\)"):
            last.mul_(2.0)
        with pytest.raises(memascend.UsageError, match=r"t\(\) needs their memory while the model computes"):
            last.detach().t()
        raised.append(True)

    def divide(by):
        for module in trained.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(by)

    hook = trained[0].register_forward_hook(inside)
    with torch.no_grad():
        loss_of(trained, 0, rank)
    hook.remove()
    assert raised
    with pytest.raises(memascend.UsageError):
        trained.load_state_dict(trained.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match="Couldn't swap"):
        trained.double()
    divide(3.0)
    with pytest.raises(memascend.UsageError, match=r"(?s)by 3, which rounds.*set_gradient_divide_factor\(1\.0\)"):
        loss_of(trained, 0, rank)
    with torch.no_grad():
        loss_of(trained, 0, rank)
    divide(2.0)
    # torch's own clipping goes by all ranks' norm.
    loss_of(trained, 0, rank).backward()
    whole_model = model(torch.float32)
    sum(loss_of(whole_model, 0, micro) / 2 for micro in range(2)).backward()
    wanted = torch.nn.utils.clip_grad_norm_(whole_model.parameters(), 0.01)
    assert torch.allclose(optimizer.clip_grad_norm_(0.01).full_tensor(), wanted)
    optimizer.step()
    optimizer.close()
    with pytest.raises(memascend.UsageError):
        loss_of(trained, 0, rank)


def require_finite_norms(folder, **options):
    """A step is not committed where only rows of the last rank are not finite; or, without a norm, it is skipped."""
    rank, skips = distributed.get_rank(), "nonfinite" in options
    trained, optimizer = offloaded(folder, **options)
    backward(trained, 0)
    optimizer.step()
    optimizer.zero_grad()
    values = whole(trained)
    if skips:
        (loss_of(trained, 1, 0) * math.nan).backward()
        optimizer.step()
    else:
        backward(trained, 1)
        if rank:
            *_, last = trained.parameters()
            session_of(optimizer).sharding.leaf_of(last).grad.mul_(math.nan)
        with pytest.raises(
            memascend.UsageError, match="step 2 was not committed: the norm of its gradients is nan"
        ) as no:
            optimizer.step()
        assert ("(not finite: " in str(no.value)) == (rank == 1)
    optimizer.zero_grad()
    assert all(map(same_bits, values, whole(trained)))
    assert (optimizer.steps, optimizer.overflowed) == (1, skips)
    backward(trained, 1)
    optimizer.step()
    assert optimizer.steps == 2
    optimizer.close()


@ranks(2)
def test_what_does_not_work_is_refused_on_all_ranks(folder):
    require_refusals(folder)
    require_reads_and_no_writes(folder)
    require_finite_norms(f"{folder}/clips", max_grad_norm=1.0)
    require_finite_norms(f"{folder}/keeps", gradients="ssd")
    require_finite_norms(f"{folder}/skips", gradients="fused", nonfinite="skip")
