"""Trains on several ranks, with a fault on one of them, and returns what each rank met."""

import ctypes
import hashlib
import itertools
import json
import logging
import os
import resource
import signal
import subprocess
import threading
import time
from pathlib import Path

import torch
from support.bits import same_bits
from support.rank_models import accumulated, loss_of, offloaded, whole
from support.ranks import on_ranks
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from memascend.checkpoint.shares import TensorFiles
from memascend.distributed.control_plane import Agreement
from memascend.distributed.groups import Line, Meeting
from memascend.distributed.replicas import Refill
from memascend.errors import MemascendError

__all__ = ["failing", "filled", "lives", "make_hidden", "require_same"]

CLONE_NEWNS = 0x20000

DEFAULTS = {
    "steps": 5,
    "existing": "resume",
    "timeout": 20.0,
    # The ranks that have the fault: a signal that ends or stops them, "raise", "hang", or "full", that of a drive; the
    # step and where in it, or so many seconds after the life began ("time").
    "faulty": (1,),
    "fault": None,
    "at": 3,
    "point": None,
    # Micro-batches of a step on all ranks; None: one on each.
    "micro": None,
    # Where all ranks save at the end; within "hidden" the first rank alone can write, and the others send their rows.
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
    # Seconds that each message takes by which a store is filled.
    "fill_seconds": 0,
}


def make_hidden(folder):
    """Make a folder `hidden` that the first rank alone sees; others have an empty one there. Needs root."""
    path = Path(folder, "hidden")
    path.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    if distributed.get_rank():
        # Of this thread, and of the commands that it starts.
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", os.fspath(path)], check=True)
    distributed.barrier()


def lives(tmp_path, world, name="run", **options):
    """What each rank of a run in a folder met, see `life`; None where one was killed."""
    return on_ranks(world, life, tmp_path, name, options, ends=(0, -signal.SIGKILL))


def require_same(ranks, opened, steps, micro=4, **options):
    """Each rank began at a step, took the others, and has the values of one process."""
    *values, _ = accumulated(options.pop("dtype", torch.bfloat16), micro, steps=steps, **options)[1]
    for rank in ranks:
        assert (rank["opened"], rank["committed"], rank["error"]) == (opened, steps, None), rank
        assert len(rank["values"]) == len(values)
        assert all(map(same_bits, rank["values"], values))


def failing(*_, **__):
    raise OSError(5, "as if the drive were gone")


def filled(ranks):
    """What each rank said of its store that was filled."""
    return ["".join(words for words in rank["said"] if "had no store" in words) for rank in ranks]


def life(folder, name, options):
    """One life of a run: where it began and what it had after each step, and the error that ended it."""
    options = {**DEFAULTS, "folder": folder, **options}
    rank, count = distributed.get_rank(), distributed.get_world_size()
    _watch(options)
    if (options["save"] or "").startswith("hidden"):
        make_hidden(f"{folder}/{name}")
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
            told["values"] = whole(trained)
            told["norm"] = optimizer.grad_norm
        if options["save"] is not None:
            optimizer.save(f"{folder}/{name}/{options['save']}")
        _fault(options, options["at"], "close")
        optimizer.close()
    except (MemascendError, OSError, ValueError) as error:
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
    """Have the fault happen at a moment of the clock, or of what ranks do together.

    These are before and after they agree, and look for each other; while a rank's store is filled from a replica's,
    and before it is verified; and in the midst of a save.
    """
    if options["point"] == "time" and distributed.get_rank() in options["faulty"]:
        timer = threading.Timer(options["at"], _meet, [options])
        timer.daemon = True
        timer.start()
    ask, all_at, end, send = Agreement._ask, Meeting._all_at, Refill._end, Refill._meet

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

    def sent(*given):
        time.sleep(options["fill_seconds"])
        _fault(options, options["at"], "filling")
        send(*given)

    def saves(own, calls):
        def saved(*given):
            if next(calls) == 3:
                _fault(options, options["at"], "saving")
            return own(*given)

        return saved

    Agreement._ask, Meeting._all_at, Refill._end, Refill._meet = asked, looked, filled, sent
    TensorFiles.put, Line.send = saves(TensorFiles.put, itertools.count(1)), saves(Line.send, itertools.count(1))


def _fault(options, step, point):
    if distributed.get_rank() in options["faulty"] and (step, point) == (options["at"], options["point"]):
        _meet(options)


def _meet(options):
    if isinstance(options["fault"], int):
        os.kill(os.getpid(), options["fault"])
        return
    if options["fault"] == "full":
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, limits[1]))
        return
    others = distributed.get_world_size() - 1
    while options["fault"] == "hang" and len(list(Path(options["folder"]).glob("failed-*"))) < others:
        time.sleep(0.05)
    raise ValueError("as a user's code may")
