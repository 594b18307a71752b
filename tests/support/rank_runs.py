"""Trains on several gloo ranks, with a fault on one of them; what each rank met is returned as JSON.

A store alone, with updates by numbers; or, where it is `whole`, a model under `memascend.offload()`.

`run(options)` is called in a process of its own (see the fixture `loaded`): it forks the ranks, and none outlives it.
"""

import ctypes
import hashlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

DEFAULTS = {
    "world": 2,
    "steps": 5,
    "existing": "resume",
    "durability": "step",
    "timeout": 20.0,
    # The rank that has the fault, what it is, the step and where in it.
    "faulty": 1,
    "fault": None,
    "at": 3,
    "point": None,
    # Seconds until the faulty rank is killed, wherever it is then: after the first commit, or after all have begun.
    "kill_after": None,
    "kill_from": "committed",
    # Micro-batches of a step on all ranks; None: one on each.
    "micro": None,
    # Where all ranks save at the end.
    "save": None,
    "seconds": 90,
    "paths": {},
    "retry": False,
    # A model under `offload()`, and what is given to it.
    "whole": False,
    "given": {},
}


def run(folder, **given):
    """What each rank met: its exit status, and the words that it wrote."""
    options = {**DEFAULTS, **given}
    folder = Path(folder)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    meeting.mkdir(parents=True)
    if options["whole"]:
        # Once for all that are forked.
        for name in ("torch.distributed.fsdp", "memascend"):
            importlib.import_module(name)
    pids = [_forked(folder, meeting, rank, options) for rank in range(options["world"])]
    try:
        if options["kill_after"] is not None:
            _kill_later(meeting, pids[options["faulty"]], options)
        ends = _ends(pids, options)
    finally:
        for pid in pids:
            # Reaped or not, it was ours: none is left where this fails.
            _end(pid)
    words = [(meeting / f"words-{rank}") for rank in range(options["world"])]
    return [
        {"status": end, **(json.loads(one.read_text()) if one.exists() else {})}
        for end, one in zip(ends, words, strict=True)
    ]


def _forked(folder, meeting, rank, options):
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        torch.set_num_threads(1)
        (_whole_rank if options["whole"] else _rank)(folder, meeting, rank, options)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _ends(pids, options):
    ends, deadline = {}, time.monotonic() + options["seconds"]
    while len(ends) < len(pids):
        for pid in pids:
            if pid not in ends:
                found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
                if found and os.WIFSTOPPED(status):
                    # One that hangs is ended once the others have.
                    if len(ends) == len(pids) - 1:
                        os.kill(pid, signal.SIGKILL)
                elif found:
                    ends[pid] = os.waitstatus_to_exitcode(status)
        left = [pid for pid in pids if pid not in ends]
        if options["fault"] == "stop" and left == [pids[options["faulty"]]]:
            os.kill(left[0], signal.SIGKILL)
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(left)} ranks came to no end")
        time.sleep(0.005)
    return [ends[pid] for pid in pids]


def _end(pid):
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _kill_later(meeting, pid, options):
    names = ["committed"] if options["kill_from"] == "committed" else [f"begun-{r}" for r in range(options["world"])]
    until = time.monotonic() + 60
    while not all((meeting / name).exists() for name in names) and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(options["kill_after"])
    os.kill(pid, signal.SIGKILL)


# --- a rank ----------------------------------------------------------------------------


def _rank(folder, meeting, rank, options):
    from torch import distributed

    from memascend import engine as engines
    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.opening import choose
    from memascend.errors import MemascendError

    told = {"opened": None, "committed": None, "error": None, "seconds": None, "digests": {}, "ranks": []}
    meet = distributed.FileStore(str(meeting / "meet"), options["world"])
    distributed.init_process_group("gloo", store=meet, rank=rank, world_size=options["world"])
    (meeting / f"begun-{rank}").touch()
    _watch_groups(options, rank)
    began = time.monotonic()
    store = None
    try:
        exchange = Exchange(options["timeout"])
        path = options["paths"].get(str(rank), str(folder / f"rank-{rank}"))
        opening = choose(path, exchange, options["existing"])
        make = {"durability": options["durability"], "fill": False}
        store, agreement = opening.open(
            lambda existing: engines.Store.create(path, _entries(rank), existing=existing, **make)
        )
        with engines.Engine(store) as engine:
            if store.created:
                with agreement.step():
                    for entry in _entries(rank):
                        store.stage(entry.name, entry.values, entry.state, step=0)
                    store.commit(0)
            told["opened"] = told["committed"] = store.step
            told["digests"][store.step] = _digest(agreement, store)
            began = _train(agreement, store, engine, rank, options, meeting, told)
        _fault(options, rank, options["at"], "close")
        store.close()
        told["closed"] = True
    except MemascendError as error:
        told |= {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", []))}
        told["notes"] = getattr(error, "__notes__", [])
        told["seconds"] = time.monotonic() - began
        if store is not None:
            store.close()
    _tell(meeting, rank, told)


def _tell(meeting, rank, told):
    """Write a rank's words at once: it may be killed at any moment."""
    ready = meeting / f"words-{rank}.new"
    ready.write_text(json.dumps(told))
    ready.rename(meeting / f"words-{rank}")


def _whole_rank(folder, meeting, rank, options):
    from torch import distributed

    from memascend.errors import MemascendError

    told = {"opened": None, "committed": None, "error": None, "seconds": None, "digests": {}, "ranks": []}
    meet = distributed.FileStore(str(meeting / "meet"), options["world"])
    distributed.init_process_group("gloo", store=meet, rank=rank, world_size=options["world"])
    (meeting / f"begun-{rank}").touch()
    _watch_groups(options, rank)
    began = first = time.monotonic()
    optimizer = None
    try:
        model, optimizer = _offloaded(folder, options)
        agreement = optimizer._session.run.resources.store._shared
        told["opened"] = told["committed"] = optimizer.steps
        told["digests"][optimizer.steps] = _digest_of_rows(optimizer)
        _watch(agreement, options, rank)
        while optimizer.steps < options["steps"]:
            step = optimizer.steps + 1
            began = time.monotonic()
            _fault(options, rank, step, "begin")
            micros = options["micro"] or options["world"]
            for micro in range(rank, micros, options["world"]):
                loss = _loss(model, step, micro) / micros
                _fault(options, rank, step, "between")
                loss.backward()
            optimizer.user_state = {"step": step, "rank": rank}
            optimizer.step()
            optimizer.zero_grad()
            told["committed"] = step
            told["digests"][step] = _digest_of_rows(optimizer)
            (meeting / "committed").touch()
        if options["save"] is not None:
            optimizer.save(folder / options["save"])
        _fault(options, rank, options["at"], "close")
        optimizer.close()
        told["closed"] = True
        told["life"] = time.monotonic() - first
    except MemascendError as error:
        told |= {"error": f"{type(error).__name__}: {error}", "ranks": list(getattr(error, "ranks", []))}
        told["seconds"] = time.monotonic() - began
        if optimizer is not None:
            optimizer.close()
    _tell(meeting, rank, told)


def _offloaded(folder, options):
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    import memascend

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 32)).to(torch.bfloat16)
    for module in (model[0], model[1], model[3], model):
        fully_shard(module).set_gradient_divide_factor(1.0)
    return memascend.offload(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        storage=folder,
        **{name: options[name] for name in ("existing", "durability", "timeout")},
        **options["given"],
    )


def _loss(model, step, micro):
    generator = torch.Generator().manual_seed(100 * step + micro)
    tokens = torch.randint(0, 32, (2, 6), generator=generator)
    return torch.nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


def _digest_of_rows(optimizer):
    store = optimizer._session.run.resources.store
    digest = hashlib.sha256(json.dumps([store.step, store.user_state]).encode())
    for entry in store.entries():
        values, state = store.read(entry["name"])
        for tensor in (values, *state.values()):
            digest.update(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def _entries(rank):
    from memascend import engine as engines

    # Rows differ from rank to rank, in number too.
    weight = torch.linspace(-1, 1, (40 + rank) * 64).reshape(40 + rank, 64) * (rank + 1)
    counted = torch.zeros(3000, dtype=torch.float32)
    return [
        engines.Entry(name="weight", values=weight, state=engines.adam_state(weight)),
        engines.Entry(name="counted", values=counted, state={}),
    ]


def _train(agreement, store, engine, rank, options, meeting, told):
    from memascend import engine as engines
    from memascend.errors import RankError

    _watch(agreement, options, rank)
    began = time.monotonic()
    while store.step < options["steps"]:
        step = store.step + 1
        began = time.monotonic()
        try:
            with agreement.step():
                _fault(options, rank, step, "begin")
                shape = store.read("weight")[0].shape
                gradient = torch.sin(torch.arange(shape.numel(), dtype=torch.float32) + step + rank).reshape(shape)
                engine.update("weight", gradient, engines.Adam(lr=1e-2, step=step))
                store.stage("counted", torch.full((3000,), float(step)), step=step)
                engine.commit(step, user_state={"step": step, "rank": rank})
        except RankError as error:
            if not options["retry"] or agreement.exchange.broken is not None:
                raise
            told["tried"] = str(error)
            engine.discard()
            continue
        except Exception as error:
            if not options["retry"] or agreement.exchange.broken is not None:
                raise
            told["tried"] = str(error)
            engine.discard()
            _mend(options)
            continue
        told["committed"] = step
        told["digests"][step] = _digest(agreement, store)
        (meeting / "committed").touch()
    return began


def _digest(agreement, store):
    """Of every byte that the rank has; where one is damaged the others hear of it."""
    with agreement.step():
        digest = hashlib.sha256(json.dumps([store.step, store.user_state]).encode())
        for name in ("weight", "counted"):
            values, state = store.read(name)
            for tensor in (values, *state.values()):
                digest.update(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist()))
    return digest.hexdigest()


def _watch(agreement, options, rank):
    """Have the fault happen before or after the ranks have agreed."""
    ask = agreement._ask

    def watched(phase, number, remedy):
        # The first commit made the store.
        _fault(options, rank, number - 1, f"before {phase}")
        ask(phase, number, remedy)
        _fault(options, rank, number - 1, f"after {phase}")

    agreement._ask = watched


def _watch_groups(options, rank):
    """Have the fault happen before the ranks look for each other, or once they did and begin to meet."""
    from memascend.distributed import groups

    missing = groups._missing

    def watched(*asked):
        _fault(options, rank, options["at"], "before groups")
        found = missing(*asked)
        _fault(options, rank, options["at"], "in groups")
        return found

    groups._missing = watched


def _fault(options, rank, step, point):
    if rank != options["faulty"] or options["fault"] is None or (step, point) != (options["at"], options["point"]):
        return
    if options["fault"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif options["fault"] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif options["fault"] == "full":
        _control(options, {"write": {"errno": 28}})


def _mend(options):
    _control(options, {})
    options["fault"] = None


def _control(options, faults):
    control = Path(options["control"])
    ready = control.with_suffix(".new")
    ready.write_text(json.dumps(faults))
    ready.rename(control)
