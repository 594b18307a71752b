"""Trains on several ranks and causes a fault on some of these ranks; returns each rank's steps, values and error."""

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
from memascend.distributed.agreement import Agreement
from memascend.distributed.groups import Line, Meeting
from memascend.distributed.replicas import Refill
from memascend.errors import MemascendError

__all__ = ["failing", "filled", "lives", "make_hidden", "require_same"]

CLONE_NEWNS = 0x20000

DEFAULTS = {
    "steps": 5,
    "existing": "resume",
    "timeout": 20.0,
    # `fault` is a signal number, "raise", "hang" or "full" (see `_meet`). The fault happens on the ranks in `faulty`,
    # at `point` of step `at`. Points outside of a step, such as "filling", ignore `at`. If `point` is "time", the fault
    # happens `at` seconds after `life` began. If `point` is None, no fault happens.
    "faulty": (1,),
    "fault": None,
    "at": 3,
    "point": None,
    # The number of micro-batches in a step, on all ranks together. If None, each rank has one micro-batch.
    "micro": None,
    # The folder to which all ranks save at the end. If None, the ranks do not save. If the name begins with "hidden",
    # the other ranks do not see the first rank's folder (see `make_hidden`), so they send their rows to the first rank.
    "save": None,
    # Additional options for the call of `offload()`.
    "given": {},
    # The number of replicas in a mesh of replicas and shards; None: no mesh. If `slice` is true, this mesh is a slice
    # of a mesh with four dimensions.
    "replicas": None,
    "slice": False,
    "dtype": torch.bfloat16,
    "kind": "plain",
    # The rank that doubles its learning rate in the last step; None: no rank.
    "other": None,
    # Seconds of delay before each message that refills a store.
    "fill_seconds": 0,
}


def make_hidden(folder):
    """Makes a folder `hidden` and hides its files from all ranks except the first. Needs root.

    Every other rank sees an empty folder at this path.
    """
    path = Path(folder, "hidden")
    path.mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    if distributed.get_rank():
        # Gives this thread a new mount namespace. The commands that this thread starts inherit the namespace.
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", os.fspath(path)], check=True)
    distributed.barrier()


def lives(tmp_path, world, name="run", **options):
    """Runs `life` on `world` ranks; returns each rank's result, or None for a rank that was killed."""
    return on_ranks(world, life, tmp_path, name, options, ends=(0, -signal.SIGKILL))


def require_same(ranks, opened, steps, micro=4, **options):
    """Requires that each rank began at step `opened` and committed step `steps`, without an error.

    Also requires that each rank has the values that training on one process gives.
    """
    *values, _ = accumulated(options.pop("dtype", torch.bfloat16), micro, steps=steps, **options)[1]
    for rank in ranks:
        assert (rank["opened"], rank["committed"], rank["error"]) == (opened, steps, None), rank
        assert len(rank["values"]) == len(values)
        assert all(map(same_bits, rank["values"], values))


def failing(*_, **__):
    raise OSError(5, "as if the drive were gone")


def filled(ranks):
    """Returns each rank's log message about the refill of its store, or "" for a rank without this message."""
    return ["".join(words for words in rank["said"] if "was filled from" in words) for rank in ranks]


def life(folder, name, options):
    """Trains on this rank; returns a dict of results.

    "opened" is the step at which the run began. "committed" is the last step for which `step()` returned, or "opened".
    "digests" has a digest for each step from "opened" to "committed". "error" is the error that ended the training, or
    None.
    """
    options = {**DEFAULTS, "folder": folder, **options}
    rank, count = distributed.get_rank(), distributed.get_world_size()
    _watch(options)
    if (options["save"] or "").startswith("hidden"):
        make_hidden(f"{folder}/{name}")
    distributed.barrier()
    answer = {"opened": None, "committed": None, "error": None, "ranks": [], "digests": {}, "values": [], "said": []}
    handler = logging.Handler()
    handler.emit = lambda record: answer["said"].append(record.getMessage())
    logging.getLogger("memascend").addHandler(handler)
    mesh = _mesh(options)
    began = first = time.monotonic()
    optimizer = None
    try:
        given = {key: options[key] for key in ("existing", "timeout", "dtype")}
        trained, optimizer = offloaded(f"{folder}/{name}", of=options["kind"], mesh=mesh, **given, **options["given"])
        answer["state"] = optimizer.user_state
        answer["opened"] = answer["committed"] = optimizer.steps
        answer["digests"][optimizer.steps] = _digest(trained, optimizer)
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
            answer["committed"] = step
            answer["digests"][step] = _digest(trained, optimizer)
        if mesh is not None:
            answer["values"] = whole(trained)
            answer["norm"] = optimizer.grad_norm
        if options["save"] is not None:
            optimizer.save(f"{folder}/{name}/{options['save']}")
        _fault(options, options["at"], "close")
        optimizer.close()
    except (MemascendError, OSError, ValueError) as error:
        Path(folder, f"failed-{rank}").touch()
        answer |= {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", ()))}
        if optimizer is not None:
            optimizer.close()
    # After an error: the seconds since the last step began, or since the call of `offloaded` if no step began. Without
    # an error: the seconds since the call of `offloaded`.
    answer["seconds"] = time.monotonic() - (began if answer["error"] else first)
    return answer


def _mesh(options):
    """Returns the mesh of replicas and shards that the options describe, or None if they have no `replicas`."""
    if options["replicas"] is None:
        return None
    shape, names = (options["replicas"], distributed.get_world_size() // options["replicas"]), ("replicate", "shard")
    if options["slice"]:
        return init_device_mesh("cpu", (1, *shape, 1), mesh_dim_names=("pp", *names, "tp"))[names]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def _digest(trained, optimizer):
    """Returns a hash of the values, optimizer state, step and user state in this rank's store."""
    digest = hashlib.sha256(json.dumps([optimizer.steps, optimizer.user_state]).encode())
    for parameter in trained.parameters():
        state = optimizer.state_of(parameter) if parameter.requires_grad else {}
        for tensor in (parameter.detach().to_local(), *state.values()):
            digest.update(bytes(torch.as_tensor(tensor).clone().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _watch(options):
    """Patches functions so that the fault happens when a rank in `faulty` reaches the point in `options`.

    The point "time" starts a timer instead. `life` itself causes faults at "begin", "between" and "close". The points
    in the patched functions are:
    - "before" or "after" a phase: around the agreement of the ranks on this phase of a commit
    - "before groups", "in groups": before and after this rank first waits for all ranks, in order to form groups
    - "filling": while a store is refilled from the store of a replica
    - "filled": before the refilled store is verified
    - "saving": in the middle of a save
    """
    if options["point"] == "time" and distributed.get_rank() in options["faulty"]:
        timer = threading.Timer(options["at"], _meet, [options])
        timer.daemon = True
        timer.start()
    ask, all_at, end, send = Agreement._ask, Meeting._all_at, Refill._end, Refill._meet

    def asked(self, phase, number, remedy):
        # The first commit creates the store, so commit `number` ends step `number - 1`.
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
    """Causes the fault if the options choose this rank, step and point."""
    if distributed.get_rank() in options["faulty"] and (step, point) == (options["at"], options["point"]):
        _meet(options)


def _meet(options):
    """Causes the fault: sends this process a signal, limits its files to 4 KiB ("full"), or raises ValueError.

    "hang" raises only after all other ranks have failed.
    """
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
    raise ValueError("as user code may raise")
