"""Trains a store on each of several gloo ranks, with a fault on one of them; what each rank met is returned as JSON.

`run(options)` is called in a process of its own (see the fixture `loaded`): it forks the ranks, and none outlives it.
"""

import ctypes
import hashlib
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
    # Seconds after the first commit until the faulty rank is killed, wherever it is then.
    "kill_after": None,
    "seconds": 90,
    "paths": {},
    "retry": False,
}


def run(folder, **given):
    """What each rank met: its exit status, and the words that it wrote."""
    options = {**DEFAULTS, **given}
    folder = Path(folder)
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    meeting.mkdir(parents=True)
    pids = [_forked(folder, meeting, rank, options) for rank in range(options["world"])]
    try:
        if options["kill_after"] is not None:
            _kill_later(meeting, pids[options["faulty"]], options["kill_after"])
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
        _rank(folder, meeting, rank, options)
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


def _kill_later(meeting, pid, seconds):
    until = time.monotonic() + 60
    while not (meeting / "committed").exists() and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)


# --- a rank ----------------------------------------------------------------------------


def _rank(folder, meeting, rank, options):
    from torch import distributed

    from memascend import engine as engines
    from memascend.errors import MemascendError
    from memascend.ranks.exchange import Exchange
    from memascend.ranks.opening import choose

    told = {"opened": None, "committed": None, "error": None, "seconds": None, "digests": {}, "ranks": []}
    meet = distributed.FileStore(str(meeting / "meet"), options["world"])
    distributed.init_process_group("gloo", store=meet, rank=rank, world_size=options["world"])
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
    (meeting / f"words-{rank}").write_text(json.dumps(told))


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

    def watched(phase, number, error):
        # The first commit made the store.
        _fault(options, rank, number - 1, f"before {phase}")
        ask(phase, number, error)
        _fault(options, rank, number - 1, f"after {phase}")

    agreement._ask = watched


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
