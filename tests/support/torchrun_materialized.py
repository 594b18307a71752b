"""Changes weights within materialized(), in one process or on ranks of torchrun, of which one raises or dies inside."""

import os
import signal
import sys
import time

import torch
from support.rank_models import Odd, adamw, backward, loss_of, shard, trainable, without_mean
from torch import distributed

import memascend
from memascend import RankError, UsageError

__all__ = ["change"]

# Of a step, on all ranks.
MICRO_BATCHES = 2


def offloaded(storage, *, is_sharded):
    torch.manual_seed(0)
    model = Odd().bfloat16()
    if is_sharded:
        shard(model)
    model, optimizer = memascend.offload(model, adamw(trainable(model)), storage=storage, gradients="ssd", timeout=10)
    without_mean(model)
    return model, optimizer


def step(model, optimizer):
    backward(model, optimizer.steps, MICRO_BATCHES)
    optimizer.step()
    optimizer.zero_grad()


def require_same(kept, weight):
    """What was taken of a divided weight reads what there is now."""
    assert kept is None or torch.equal(kept.full_tensor(), weight.full_tensor())


@torch.no_grad()
def change(folder, name, *, is_sharded=False):
    """Change weights between two steps, in each way that torch has, and save what comes of it."""
    model, optimizer = offloaded(f"{folder}/{name}/", is_sharded=is_sharded)
    with optimizer:
        with torch.enable_grad():
            step(model, optimizer)
        # Of one process it would be a copy, for which the commit below is refused.
        kept = model.embed.weight.detach() if distributed.is_initialized() else None
        # It leaves parameters gathered, under fully_shard().
        loss_of(model, 0, 0)
        with memascend.materialized(model, modify=True):
            named = dict(model.named_parameters())
            # It is the head, too; the biases have the same bits.
            named["embed.weight"].mul_(2)
            named["narrow.2.bias"].mul_(1)
            named["narrow.0.weight"].data.add_(0.25)
            torch._foreach_mul_([named["frozen.weight"], named["frozen.bias"]], 0.5)
            rows = getattr(named["narrow.2.weight"], "_local_tensor", named["narrow.2.weight"])
            rows.detach().view(torch.int16).numpy()[...] ^= 1
            require_same(kept, named["embed.weight"])
            inside = loss_of(model, 0, 0)
            del rows, named
        require_same(kept, model.embed.weight)
        assert loss_of(model, 0, 0).item() == inside.item()
        with memascend.materialized(model):
            assert loss_of(model, 0, 0).item() == inside.item()
        with torch.enable_grad():
            step(model, optimizer)
        optimizer.save(f"{folder}/{name}-saved")


def faults(folder):
    """What each rank meets where rank 1 fails within the block, and where it dies there."""
    rank = distributed.get_rank()
    model, optimizer = offloaded(f"{folder}/faults/", is_sharded=True)
    step(model, optimizer)
    before = [one.full_tensor().clone() for one in model.parameters()]
    for modify in (True, False):
        met = None
        try:
            with memascend.materialized(model, modify=modify), torch.no_grad():
                model.embed.weight.zero_()
                assert rank == 0
        except (AssertionError, RankError) as error:
            met = [type(error).__name__, *getattr(error, "ranks", ())]
        same = all(map(torch.equal, before, [one.full_tensor() for one in model.parameters()]))
        print(f"rank {rank}, modify={modify}: {met}, unchanged: {same}", flush=True)
    loss_of(model, 1, rank).backward()
    try:
        with memascend.materialized(model, modify=True):
            pass
    except (UsageError, RankError) as error:
        print(f"rank {rank}, staged: {error}", flush=True)
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}: {optimizer.steps} steps", flush=True)
    began = time.monotonic()
    try:
        with memascend.materialized(model, modify=True), torch.no_grad():
            model.embed.weight.zero_()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except RankError as error:
        print(f"rank {rank}, dead: {error.ranks}, in time: {time.monotonic() - began < 15}", flush=True)
    optimizer.close()


if __name__ == "__main__":
    # torchrun ends the other ranks once one is dead, often before they can say anything.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    change(sys.argv[1], "replicated")
    change(sys.argv[1], "sharded", is_sharded=True)
    faults(sys.argv[1])
