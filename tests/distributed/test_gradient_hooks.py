"""Tests gradient hooks of the user on several ranks: they see the sum of all ranks, or are rejected by name."""

import torch
from support.bits import same_bits
from support.rank_models import adamw, loss_of, model, said, sharded
from support.ranks import on_ranks
from torch import distributed
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import memascend

STEPS = 2


def double(parameter):
    parameter.grad.mul_(2)


class Doubling(DefaultReduceScatter):
    """A reduction of the user."""


def trained(folder=None, *, before=False, after=False, **options):
    """The values of a run with hooks that are registered before or after `offload()`; in memory without a folder.

    A sum of two ranks has the same bits in any order.
    """
    found = sharded(torch.float32)
    optimizer = adamw(found.parameters())
    for parameter in found.parameters() if before else ():
        parameter.register_post_accumulate_grad_hook(double)
    if folder is not None:
        found, optimizer = memascend.offload(found, optimizer, storage=folder, **options)
    for parameter in found.parameters() if after else ():
        parameter.register_post_accumulate_grad_hook(double)
    for step in range(STEPS):
        loss_of(found, step, distributed.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
    values = [parameter.full_tensor().clone() for parameter in found.parameters()]
    if folder is not None:
        optimizer.close()
    return values


def hooks_of_two_ranks(folder):
    """What each way of hooking does: the texts of errors, and whether values are those of FSDP2 in memory."""
    found = {}

    def refused(name, prepare, make=lambda: sharded(torch.float32), **options):
        mine = make()
        prepare(mine)
        values = [parameter.detach().clone() for parameter in mine.parameters()]
        found[name] = said(
            lambda: memascend.offload(mine, adamw(mine.parameters()), storage=f"{folder}/{name}", **options)
        )
        assert all(map(torch.equal, values, mine.parameters()))

    refused("sums", lambda mine: mine[1].set_all_reduce_hook(lambda sums: sums.mul_(2)))
    refused("reduction", lambda mine: mine[1].set_custom_reduce_scatter(Doubling()))
    refused("native reduction", lambda mine: mine[1].set_custom_reduce_scatter(Doubling()), reduction="native")
    refused("accumulated", lambda mine: mine[1][0].weight.register_post_accumulate_grad_hook(double))
    refused(
        "plain",
        lambda mine: mine[1][0].weight.register_hook(lambda gradient: 2 * gradient),
        lambda: model(torch.float32),
    )
    hooked, plain = trained(before=True), trained()
    found["differs"] = not all(map(same_bits, hooked, plain))
    for name, options in {
        "native": {"before": True, "reduction": "native", "gradients": "ssd"},
        "ssd": {"after": True, "gradients": "ssd"},
        "ram": {"after": True, "gradients": "ram"},
    }.items():
        found[name] = all(map(same_bits, trained(f"{folder}/{name}", **options), hooked))
    mine = sharded(torch.float32)
    mine, optimizer = memascend.offload(mine, adamw(mine.parameters()), storage=f"{folder}/later")
    with optimizer:
        mine[1].set_custom_reduce_scatter(Doubling())
        found["later"] = said(lambda: loss_of(mine, 0, 0))
    return found


def test_hooks_see_the_sum_of_all_ranks_or_are_rejected(tmp_path):
    for found in on_ranks(2, hooks_of_two_ranks, tmp_path):
        assert "set_all_reduce_hook() was called on 1" in found["sums"]
        assert "reduction='native'" in found["sums"]
        for name in ("reduction", "native reduction", "later"):
            assert "set_custom_reduce_scatter() was called on 1" in found[name]
        assert "1.0.weight has a hook of register_post_accumulate_grad_hook()" in found["accumulated"]
        assert "1.0.weight has a gradient hook, and fully_shard() makes new parameters" in found["plain"]
        assert found["differs"]
        assert [found[name] for name in ("native", "ssd", "ram")] == [True] * 3
