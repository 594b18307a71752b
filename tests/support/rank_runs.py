"""Trains on several ranks, with a fault on one of them, and returns what each rank met."""

import hashlib
import json
import logging
import os
import signal
import time
from pathlib import Path

import torch
from support.rank_models import loss_of, offloaded
from support.ranks import on_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from memascend.distributed.control_plane import Agreement
from memascend.distributed.groups import Meeting
from memascend.distributed.replicas import Refill
from memascend.errors import MemascendError

__all__ = ["lives"]

DEFAULTS = {
    "steps": 5,
    "existing": "resume",
    "timeout": 20.0,
    # The rank that has the fault, the signal that ends or stops it, or "raise" or "hang"; the step and where in it.
    "faulty": 1,
    "fault": None,
    "at": 3,
    "point": None,
    # Micro-batches of a step on all ranks; None: one on each.
    "micro": None,
    # Where all ranks save at the end.
    "save": None,
    # More options of `offload()`.
    "given": {},
    # Replicas of a mesh of replicas and shards, which may be a slice of one of more dimensions; None: no mesh.
    "replicas": None,
    "slice": False,
    "dtype": torch.bfloat16,
    "kind": "plain",
    # A rank with another learning rate in the last step.
    "other": None,
}


def lives(tmp_path, world, name="run", **options):
    """What each rank of a run in a folder met, see `life`; None where one was killed."""
    return on_ranks(world, life, tmp_path, name, options, ends=(0, -signal.SIGKILL))


def life(folder, name, options):
    """One life of a run: where it began and what it had after each step, and the error that ended it."""
    options = {**DEFAULTS, "folder": folder, **options}
    rank, count = distributed.get_rank(), distributed.get_world_size()
    if rank == options["faulty"]:
        _watch(options)
    distributed.barrier()
    told = {"opened": None, "committed": None, "error": None, "ranks": [], "digests": {}, "values": [], "said": []}
    handler = logging.Handler()
    handler.emit = lambda record: told["said"].append(record.getMessage())
    logging.getLogger("memascend").addHandler(handler)
    mesh = _mesh(options)
    began = first = time.monotonic()
    optimizer = None
    try:
        given = {key: options[key] for key in ("existing", "timeout", "dtype")}
        trained, optimizer = offloaded(f"{folder}/{name}", of=options["kind"], mesh=mesh, **given, **options["given"])
        told["state"] = optimizer.user_state
        told["opened"] = told["committed"] = optimizer.steps
        told["digests"][optimizer.steps] = _digest(trained, optimizer)
        while optimizer.steps < options["steps"]:
            step, micros = optimizer.steps + 1, options["micro"] or count
            began = time.monotonic()
            _fault(options, step, "begin")
            if rank == options["other"] and step == options["steps"]:
                optimizer.param_groups[0]["lr"] *= 2
            for micro in range(rank, micros, count):
                loss = loss_of(trained, optimizer.steps, micro) / micros
                _fault(options, step, "between")
                loss.backward()
            optimizer.user_state = {"step": step, "rank": rank}
            optimizer.step()
            optimizer.zero_grad()
            told["committed"] = step
            told["digests"][step] = _digest(trained, optimizer)
        if mesh is not None:
            told["values"] = [one.full_tensor().detach().clone() for one in trained.parameters()]
            told["norm"] = optimizer.grad_norm
        if options["save"] is not None:
            optimizer.save(f"{folder}/{name}/{options['save']}")
        _fault(options, options["at"], "close")
        optimizer.close()
    except (MemascendError, ValueError) as error:
        Path(folder, f"failed-{rank}").touch()
        told |= {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", ()))}
        if optimizer is not None:
            optimizer.close()
    # Of the step that failed, or of the opening; without an error, of the whole life.
    told["seconds"] = time.monotonic() - (began if told["error"] else first)
    return told


def _mesh(options):
    """The mesh of replicas and shards that the options name; None: they name none."""
    if options["replicas"] is None:
        return None
    shape, names = (options["replicas"], distributed.get_world_size() // options["replicas"]), ("replicate", "shard")
    if options["slice"]:
        return init_device_mesh("cpu", (1, *shape, 1), mesh_dim_names=("pp", *names, "tp"))[names]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _digest(trained, optimizer):
    """Of every number that this rank's store has."""
    digest = hashlib.sha256(json.dumps([optimizer.steps, optimizer.user_state]).encode())
    for parameter in trained.parameters():
        state = optimizer.state_of(parameter) if parameter.requires_grad else {}
        for tensor in (parameter.detach().to_local(), *state.values()):
            digest.update(bytes(torch.as_tensor(tensor).clone().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _watch(options):
    """Have the fault happen before or after the ranks agree, look for each other, or have done so and begin to meet.

    Or once a rank's store is filled from a replica's, before it is verified.
    """
    ask, all_at, end = Agreement._ask, Meeting._all_at, Refill._end

    def asked(self, phase, number, remedy):
        # The first commit made the store.
        _fault(options, number - 1, f"before {phase}")
        ask(self, phase, number, remedy)
        _fault(options, number - 1, f"after {phase}")

    def looked(*given):
        _fault(options, options["at"], "before groups")
        found = all_at(*given)
        _fault(options, options["at"], "in groups")
        return found

    def filled(*given):
        _fault(options, options["at"], "filled")
        end(*given)

    Agreement._ask, Meeting._all_at, Refill._end = asked, looked, filled


def _fault(options, step, point):
    if distributed.get_rank() != options["faulty"] or (step, point) != (options["at"], options["point"]):
        return
    if isinstance(options["fault"], int):
        os.kill(os.getpid(), options["fault"])
        return
    others = distributed.get_world_size() - 1
    while options["fault"] == "hang" and len(list(Path(options["folder"]).glob("failed-*"))) < others:
        time.sleep(0.05)
    raise ValueError("as a user's code may")
