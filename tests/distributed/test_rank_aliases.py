"""Tests aliases of weights on several ranks: those of one rank are refused on all, and without them all go on."""

import gc

import torch
from support.rank_models import adamw, loss_of, model, sharded
from support.ranks import on_ranks
from torch import distributed

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
        for kind, take in kinds.items():
            kept = take(trained[0].weight) if distributed.get_rank() else None
            try:
                memascend.offload(trained, optimizer, storage=f"{folder}/{name}", gradients="ssd")
            except memascend.MemascendError as error:
                found[f"{name} {kind}"] = str(error)
            del kept
            gc.collect()
        trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/{name}", gradients="ssd")
        with optimizer:
            loss = loss_of(trained, 0, distributed.get_rank())
            loss.backward()
            optimizer.step()
            found[name] = float(loss.detach())
    return found


def test_an_alias_on_one_rank_is_refused_on_all(tmp_path):
    for rank, found in enumerate(on_ranks(2, aliased, tmp_path)):
        for name in ("divided view", "divided rows", "divided rows without a graph", "whole view"):
            assert "0.weight shares memory" in found[name], (name, found[name])
            assert rank or "rank 1 refused" in found[name]
        assert found["divided"] == found["whole"]
