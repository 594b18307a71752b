"""Tests aliases on several ranks: of weights, which are refused on all, and of gradients, which are followed."""

import gc

import pytest
import torch
from support.bits import same_bits
from support.rank_models import adamw, backward, loss_of, model, sharded, whole
from support.ranks import ranks
from torch import distributed
from torch.distributed.tensor import DTensor

import memascend

# Ways to alias a weight; the last one is what `to_local()` gave before torch 2.15.
VIEW = {"view": lambda p: p.detach()}
ROWS = {
    "rows": lambda p: p.to_local(),
    "rows without a graph": torch.no_grad()(lambda p: p.to_local()),
    "very rows": lambda p: p._local_tensor,
}


@ranks(2)
def test_an_alias_on_one_rank_is_refused_on_all(folder):
    """Each alias is refused on both ranks; once it is gone, the loss of a step is that of the other kind of model."""
    rank, losses = distributed.get_rank(), []
    for make, ways in ((sharded, VIEW | ROWS), (model, VIEW)):
        trained = make(torch.float32)
        optimizer = adamw(trained.parameters())
        for take in ways.values():
            kept = take(trained[0].weight) if rank else None
            words = "(?s)0.weight shares memory" if rank else "(?s)rank 1 refused.*0.weight shares memory"
            with pytest.raises(memascend.MemascendError, match=words):
                memascend.offload(trained, optimizer, storage=f"{folder}/{make.__name__}", gradients="ssd")
            del kept
            gc.collect()
        trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/{make.__name__}", gradients="ssd")
        with optimizer:
            loss = loss_of(trained, 0, rank)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] == losses[1]


def flat_views(trained):
    """One buffer of this rank's rows of all gradients, of which each gradient is a view."""
    parameters = list(trained.parameters())
    flat = torch.zeros(sum(one.to_local().numel() for one in parameters))
    begin = 0
    for one in parameters:
        rows = one.to_local()
        own = flat[begin : begin + rows.numel()].view(rows.shape)
        one.grad = DTensor.from_local(own, one.device_mesh, one.placements, shape=one.shape, stride=one.stride())
        begin += rows.numel()
    return flat


@ranks(2)
def test_gradients_of_rows_that_are_views_of_one_buffer_are_that_buffer(folder):
    """A loop sees in a buffer of gradients what it sees in memory, in each mode, and ends with the same weights."""
    wanted = []
    for mode in (None, "ssd", "ram", "auto", "fused"):
        trained = sharded(torch.float32)
        # Its bits do not depend on where in a vector an element lies.
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        if mode is not None:
            trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/{mode}", gradients=mode)
        flat, seen = flat_views(trained), []
        for step in range(3):
            backward(trained, step)
            seen.append(flat.clone())
            flat.mul_(0.5)
            optimizer.step()
            if step:
                flat.zero_()
            else:
                optimizer.zero_grad(set_to_none=False)
        assert all(one.any() for one in seen)
        found = [*seen, *whole(trained)]
        wanted = wanted or found
        assert all(map(same_bits, found, wanted)), mode
        if mode is not None:
            optimizer.close()
