"""Lives of a run on replicas, which torchrun started, with faults that a rank meets at a moment of its life.

Imports take longer than most of what a life does, so each process of torchrun forks its ranks, one for each life. It
reads what to do in a file, and a rank writes what it met into one, since torchrun ends ranks before they say it.
"""

import hashlib
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from functools import partial
from itertools import count
from pathlib import Path

import torch
from support.bits import as_bytes
from support.rank_models import adamw, loss_of, model, shard, without_mean
from torch import distributed

import memascend
from memascend.distributed import reduce
from memascend.distributed.control_plane import Agreement
from memascend.distributed.replicas import Refill

__all__ = ["made", "rows_digest", "whole_of"]

POLL_SECONDS = 0.02
WAIT_SECONDS = 300


def made():
    """A model with buffers in no order."""
    trained = model(torch.bfloat16)
    trained[2].register_buffer("second", torch.arange(7.0))
    trained[2].register_buffer("first", torch.ones(3, dtype=torch.int32))
    return trained


def whole_of(trained, optimizer):
    """Values and state of all parameters, under `fully_shard` this rank's rows, and buffers."""
    return [
        *(
            [getattr(one, "to_local", lambda one=one: one)().detach().clone(), *optimizer.state_of(one).values()]
            for one in trained.parameters()
        ),
        *([torch.empty(0), buffer] for buffer in trained.buffers()),
    ]


def rows_digest(tensors, shard=0, shards=1):
    """A digest of the rows that one of several shards has of what `whole_of` returned."""
    digest = hashlib.blake2b(digest_size=8)
    for values, *state in tensors:
        rows = -(-values.shape[0] // shards)
        for one in (values, *state):
            own = one[shard * rows : (shard + 1) * rows] if one.shape == values.shape else one
            digest.update(as_bytes(own).numpy().tobytes())
    return digest.hexdigest()


class Life:
    """One life of a rank."""

    def __init__(self, place, rank, task):
        self.rank = rank
        self.task = task
        self._faults = [one for one in task["faults"] if one["rank"] == rank]
        (place / f"process-{rank}").write_text(str(os.getpid()))
        self._file = (place / f"rank-{rank}").open("a")

    def say(self, what, **more):
        """Write an event."""
        self._file.write(json.dumps({"what": what, "at": time.time(), **more}) + "\n")
        self._file.flush()

    def reach(self, moment):
        """Meet the faults of this moment whose turn it is."""
        for fault in self._faults:
            if fault["at"] == moment:
                fault["turn"] -= 1
                if fault["turn"] == 0:
                    self._meet(fault["do"])

    def _meet(self, do):
        self.say("fault", do=do)
        if do == "raise":
            raise ValueError("as a user's code may")
        if do == "full":
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, limits[1]))
        else:
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[do])

    def live(self):
        """Resume, take some steps, and close."""
        self._watch()
        store = next(distributed.rendezvous("env://"))[0]
        size = self.task["mesh"][0] * self.task["mesh"][1]
        store = distributed.PrefixStore(f"life-{self.task['life']}", store)
        distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=size)
        mesh = distributed.init_device_mesh("cpu", tuple(self.task["mesh"]), mesh_dim_names=("replicate", "shard"))
        trained = shard(made(), mesh)
        without_mean(trained)
        trained[2][1].register_forward_hook(lambda *_: self.reach("forward"))
        for fault in self._faults:
            if fault["at"] == "time":
                timer = threading.Timer(fault["turn"], self._meet, [fault["do"]])
                timer.daemon = True
                timer.start()
        try:
            self.say("offload")
            self.reach("opening")
            trained, optimizer = memascend.offload(
                trained, adamw(trained.parameters()), existing="resume", **self.task["options"]
            )
            with optimizer:
                self._train(trained, optimizer)
        except Exception as error:
            self.say("error", kind=type(error).__name__, ranks=getattr(error, "ranks", None), words=str(error)[:1500])
            traceback.print_exc()
            return
        self.say("closed")
        distributed.destroy_process_group()

    def _train(self, trained, optimizer):
        self.say("opened", step=optimizer.steps, rows=rows_digest(whole_of(trained, optimizer)))
        size, micros = distributed.get_world_size(), self.task["micros"]
        until = optimizer.steps + self.task["steps"]
        while optimizer.steps < until:
            step, losses = optimizer.steps, {}
            for micro in range(self.rank, micros, size):
                loss = loss_of(trained, step, micro) / micros
                self.reach("loss")
                loss.backward()
                losses[micro] = loss.item()
            optimizer.step()
            optimizer.zero_grad()
            self.say("step", step=step + 1, losses=losses)
            self.say("rows", step=step + 1, rows=rows_digest(whole_of(trained, optimizer)))

    def _watch(self):
        """Reach moments within what a rank does; report warnings."""
        reduce._sum_up = partial(self._before, "sum", reduce._sum_up)
        Refill._meet = self._method("fill", Refill._meet)
        own = Agreement.commit

        def commit(agreement, make):
            def between(of_rank, agree):
                def agreed():
                    agree()
                    self.reach("agreed")

                made = make(of_rank, agreed)
                self.reach("written")
                return made

            self.reach("commit")
            return own(agreement, between)

        Agreement.commit = commit
        handler = logging.Handler()
        handler.emit = lambda record: self.say("warning", words=record.getMessage())
        logging.getLogger("memascend").addHandler(handler)

    def _before(self, moment, do, *arguments, **more):
        self.reach(moment)
        return do(*arguments, **more)

    def _method(self, moment, own):
        def reached(*arguments):
            time.sleep(self.task["fill_seconds"])
            return self._before(moment, own, *arguments)

        return reached


def main(folder, first):
    """Fork a rank for each life, until there are no more."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    for life in count(first):
        place = folder / f"life-{life}"
        until = time.monotonic() + WAIT_SECONDS
        while not (place / "task").exists():
            if time.monotonic() > until:
                sys.exit("nobody tells what to do: the test has ended")
            time.sleep(POLL_SECONDS)
        task = json.loads((place / "task").read_text())
        if task is None:
            return
        if rank >= task["mesh"][0] * task["mesh"][1]:
            continue
        process = os.fork()
        if not process:
            Life(place, rank, task).live()
            return
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        (place / f"end-{rank}").write_text(str(status))


if __name__ == "__main__":
    # torchrun ends the other ranks once one is dead, often before they can say anything.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    main(Path(sys.argv[1]), int(sys.argv[2]))
