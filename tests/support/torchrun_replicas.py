"""Trains a small model on a mesh of replicas and shards, as torchrun starts it; each rank says what it met."""

import hashlib
import json
import math
import os
import signal
import sys

import torch
from support.rank_models import adamw, loss_of, model, without_mean
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memascend
from memascend.distributed.replicas import Refill

__all__ = ["digest", "in_one_process"]

DEFAULTS = {
    "steps": 2,
    "rounds": 1,
    "dtype": "bfloat16",
    "kind": "plain",
    "given": {"gradients": "ssd"},
    # A rank with another learning rate in the last step.
    "other": None,
    # A rank that is killed while its store is filled.
    "killed": None,
    # The folder of a checkpoint that is saved at the end.
    "save": None,
    # The model is made on meta, and its first values are those of a checkpoint.
    "checkpoint": None,
    # The mesh is a part of one with more dimensions.
    "slice": False,
}


def digest(parameters):
    """Of all values."""
    found = hashlib.sha256()
    for values in parameters:
        found.update(bytes(values.detach().contiguous().flatten().view(torch.uint8).tolist()))
    return found.hexdigest()


def in_one_process(steps, micros, dtype="bfloat16", kind="plain", max_grad_norm=None):
    """The digest of what one process has that accumulates so many micro-batches a step."""
    trained = model(getattr(torch, dtype), kind)
    own = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    masters = [parameter.detach().float().clone().requires_grad_() for parameter in own]
    optimizer = adamw(masters)
    for step in range(steps):
        for micro in range(micros):
            (loss_of(trained, step, micro) / micros).backward()
        squares = (square for one in own for square in one.grad.double().square().flatten().tolist())
        norm = math.sqrt(math.fsum(squares))
        factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / (norm + 1e-6))
        with torch.no_grad():
            for master, parameter in zip(masters, own, strict=True):
                master.grad, parameter.grad = parameter.grad.float() * torch.tensor(factor), None
            optimizer.step()
            for master, parameter in zip(masters, own, strict=True):
                parameter.copy_(master)
    return digest(trained.parameters())


def train(options):
    """What this rank met."""
    rank, count = distributed.get_rank(), distributed.get_world_size()
    shape = options["replicas"], count // options["replicas"]
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if options["slice"]:
        mesh = init_device_mesh("cpu", (1, *shape, 1), mesh_dim_names=("pp", *names, "tp"))[names]
    with torch.device("cpu" if options["checkpoint"] is None else "meta"):
        trained = model(getattr(torch, options["dtype"]), options["kind"])
    for block in trained:
        fully_shard(block, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    without_mean(trained)
    if rank == options["killed"]:
        Refill._end = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    own = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    trained, optimizer = memascend.offload(
        trained, adamw(own), storage=options["folder"], existing="resume", timeout=30, checkpoint=options["checkpoint"],
        **options["given"],
    )  # fmt: skip
    told = {"began": optimizer.steps, "errors": [], "state": optimizer.user_state}
    for step in range(optimizer.steps, options["steps"]):
        rate = optimizer.param_groups[0]["lr"]
        if rank == options["other"] and step == options["steps"] - 1:
            optimizer.param_groups[0]["lr"] = 2 * rate
        for turn in range(options["rounds"]):
            (loss_of(trained, step, turn * count + rank) / (options["rounds"] * count)).backward()
        optimizer.user_state = rank
        try:
            optimizer.step()
        except memascend.RankError as error:
            told["errors"].append([list(error.ranks), str(error)])
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rate
    told |= {"steps": optimizer.steps, "norm": optimizer.grad_norm}
    told["digest"] = digest(parameter.full_tensor() for parameter in trained.parameters())
    if options["save"]:
        optimizer.save(options["save"])
    optimizer.close()
    return told


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    said = json.dumps([distributed.get_rank(), train({**DEFAULTS, **json.loads(sys.argv[1])})])
    # One write: lines of several ranks come in one pipe.
    os.write(1, f"told {said}\n".encode())
    distributed.destroy_process_group()
