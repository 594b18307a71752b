"""Tests aliases on several ranks: of weights, which are refused on all, and of gradients, which are followed."""

import gc
from functools import partial

import torch
from support.bits import same_bits
from support.rank_models import adamw, loss_of, model, said, sharded
from support.ranks import on_ranks
from torch import distributed
from torch.distributed.tensor import DTensor

import memascend


def aliased(folder):
    """The words of each refusal, and the loss of a step after it."""
    found = {}
    for name, make in {"divided": sharded, "whole": model}.items():
        trained = make(torch.float32)
        optimizer = adamw(trained.parameters())
        kinds = {"view": lambda p: p.detach()}
        if name == "divided":
            kinds["rows"] = lambda p: p.to_local()
            kinds["rows without a graph"] = torch.no_grad()(lambda p: p.to_local())
            # What that was before torch 2.15.
            kinds["very rows"] = lambda p: p._local_tensor
        for kind, take in kinds.items():
            kept = take(trained[0].weight) if distributed.get_rank() else None
            offload = partial(memascend.offload, trained, optimizer, storage=f"{folder}/{name}", gradients="ssd")
            found[f"{name} {kind}"] = said(offload)
            del kept
            gc.collect()
        trained, optimizer = offload()
        with optimizer:
            loss = loss_of(trained, 0, distributed.get_rank())
            loss.backward()
            optimizer.step()
            found[name] = float(loss.detach())
    return found


def test_an_alias_on_one_rank_is_refused_on_all(tmp_path):
    for rank, found in enumerate(on_ranks(2, aliased, tmp_path)):
        for name in ("divided view", "divided rows", "divided rows without a graph", "divided very rows", "whole view"):
            assert "0.weight shares memory" in found[name], (name, found[name])
            assert rank or "rank 1 refused" in found[name]
        assert found["divided"] == found["whole"]


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


def flat_gradients(folder, modes):
    """What a loop sees of a buffer of gradients, and the weights at its end: in memory, and in each mode."""
    found = []
    for mode in (None, *modes):
        trained = sharded(torch.float32)
        # Its bits do not depend on where in a vector an element lies.
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        if mode is not None:
            trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/{mode}", gradients=mode)
        flat, seen = flat_views(trained), []
        for step in range(3):
            loss_of(trained, step, distributed.get_rank()).backward()
            seen.append(flat.clone())
            flat.mul_(0.5)
            optimizer.step()
            if step:
                flat.zero_()
            else:
                optimizer.zero_grad(set_to_none=False)
        found.append([*seen, *(one.full_tensor().detach() for one in trained.parameters())])
        if mode is not None:
            optimizer.close()
    return found


def test_gradients_of_rows_that_are_views_of_one_buffer_are_that_buffer(tmp_path):
    modes = ["ssd", "ram", "auto", "fused"]
    for in_memory, *others in on_ranks(2, flat_gradients, tmp_path, modes):
        assert all(one.any() for one in in_memory[:3])
        for mode, found in zip(modes, others, strict=True):
            same = [same_bits(one, other) for one, other in zip(in_memory, found, strict=True)]
            assert all(same), (mode, same)
