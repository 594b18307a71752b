"""Tests gradient hooks of the user on several ranks: they see the sum of all ranks, or are rejected by name."""

import pytest
import torch
from support.bits import same_bits
from support.rank_models import adamw, backward, loss_of, model, sharded, whole
from support.ranks import ranks
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

import memascend

CUSTOM = r"set_custom_reduce_scatter\(\) was called on 1"


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
    for step in range(2):
        backward(found, step)
        optimizer.step()
        optimizer.zero_grad()
    values = whole(found)
    if folder is not None:
        optimizer.close()
    return values


def require_refused(folder, words, prepare, make=sharded, **options):
    mine = make(torch.float32)
    prepare(mine)
    values = [parameter.detach().clone() for parameter in mine.parameters()]
    with pytest.raises(memascend.MemascendError, match=words):
        memascend.offload(mine, adamw(mine.parameters()), storage=f"{folder}/refused", **options)
    assert all(map(torch.equal, values, mine.parameters()))


@ranks(2)
def test_hooks_see_the_sum_of_all_ranks_or_are_rejected(folder):
    """Each way of hooking: refused, or the values are those of FSDP2 in memory."""
    ways = "(?s)set_all_reduce_hook\\(\\) was called on 1.*reduction='native'"
    require_refused(folder, ways, lambda mine: mine[1].set_all_reduce_hook(lambda sums: sums.mul_(2)))
    for options in ({}, {"reduction": "native"}):
        require_refused(folder, CUSTOM, lambda mine: mine[1].set_custom_reduce_scatter(Doubling()), **options)
    hooked = r"1\.0\.weight has a hook of register_post_accumulate_grad_hook\(\)"
    require_refused(folder, hooked, lambda mine: mine[1][0].weight.register_post_accumulate_grad_hook(double))
    new = r"1\.0\.weight has a gradient hook, and fully_shard\(\) makes new parameters"
    require_refused(folder, new, lambda mine: mine[1][0].weight.register_hook(lambda one: 2 * one), model)
    wanted = trained(before=True)
    assert not all(map(same_bits, wanted, trained()))
    for name, options in {
        "native": {"before": True, "reduction": "native", "gradients": "ssd"},
        "ssd": {"after": True, "gradients": "ssd"},
        "ram": {"after": True, "gradients": "ram"},
    }.items():
        assert all(map(same_bits, trained(f"{folder}/{name}", **options), wanted)), name
    mine = sharded(torch.float32)
    mine, optimizer = memascend.offload(mine, adamw(mine.parameters()), storage=f"{folder}/later")
    with optimizer:
        mine[1].set_custom_reduce_scatter(Doubling())
        with pytest.raises(memascend.MemascendError, match=CUSTOM):
            loss_of(mine, 0, 0)
