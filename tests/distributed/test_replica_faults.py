"""Random faults of ranks, hosts, links and drives in runs of replicas over three hosts: no step is ever lost."""

import json
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import suppress

import pytest
from support import torchrun_lives
from support.bits import as_bytes
from support.rank_models import adamw, loss_of
from support.torchrun import Hosts
from support.torchrun_lives import rows_digest, whole_of

import memascend
from memascend.distributed.reshard import file_of_rank

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(1500)]

HOSTS = 3
RANKS_OF_HOST = 2
RANKS = HOSTS * RANKS_OF_HOST
TIMEOUT = 12.0
# For an error to reach all ranks on a machine that does ten other things.
LATE_SECONDS = 8.0
# More than six ranks take on a machine that does other things: it ends a life that is stuck.
LIFE_SECONDS = 450.0
# By moment, the highest number of times that a life of two steps reaches it.
TURNS = {"opening": 1, "loss": 2, "forward": 2, "sum": 20, "commit": 2, "agreed": 2, "written": 2, "fill": 60}
# 40 faults.
KINDS = {
    "kill": 8, "kill_opening": 3, "kill_filling": 3, "stop": 5, "raises": 2, "full": 3, "host": 3, "host_gone": 1,
    "link": 3, "lost_store": 1, "lost_after_kill": 2, "lost_host": 2, "flip": 2, "flip_source": 2,
}  # fmt: skip
RUNS = [
    {"mesh": [3, 2], "micros": 12, "options": {"gradients": "ssd", "max_grad_norm": 0.5}},
    {"mesh": [2, 3], "micros": 6, "options": {"gradients": "ram"}},
    {"mesh": [3, 2], "micros": 6, "options": {"gradients": "ram", "max_grad_norm": 0.5}},
    {"mesh": [2, 3], "micros": 12, "options": {"gradients": "ssd"}},
]


class Alone:
    """The same run in one process, as far as it is asked for."""

    def __init__(self, folder, micros, options):
        self._micros = micros
        self._model = torchrun_lives.made()
        self._model, self._optimizer = memascend.offload(
            self._model, adamw(self._model.parameters()), storage=folder, **options
        )
        self._losses = {}
        self._values = [whole_of(self._model, self._optimizer)]

    def close(self):
        self._optimizer.close()

    def values(self, step):
        """Values and state after so many steps."""
        while len(self._values) <= step:
            at = len(self._values) - 1
            for micro in range(self._micros):
                loss = loss_of(self._model, at, micro) / self._micros
                loss.backward()
                self._losses[at + 1, micro] = loss.item()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._values.append(whole_of(self._model, self._optimizer))
        return self._values[step]

    def loss(self, step, micro):
        """Of a micro-batch of the step that had this number once it was done."""
        self.values(step)
        return self._losses[step, micro]


class Drill:
    """Hosts with a run, its faults, and what came of them."""

    def __init__(self, hosts, seed):
        self.random = random.Random(seed)
        self.hosts = hosts
        self.fills = []
        self.waits = []
        self.life = 0
        self._running = []
        self.start()

    def start(self):
        """Start torchrun on all hosts; they run until they are told to end."""
        port = 29500 + self.life
        line = (
            f"exec torchrun --nnodes {HOSTS} --node-rank {{}} --master-addr host0 --master-port {port} "
            f"--nproc-per-node {RANKS_OF_HOST} {torchrun_lives.__file__} /mnt/shared {self.life}"
        )
        self._running = [self.hosts.start(host, line.format(host)) for host in range(HOSTS)]

    def end(self):
        """Tell all hosts to end."""
        self._write_task(None)
        for one in self._running:
            status, output = one.ended()
            assert status == 0, output

    def begin(self, number, folder):
        """Begin a run with new stores."""
        run = RUNS[number % len(RUNS)]
        self.mesh, self.micros = run["mesh"], run["micros"]
        self.options = {**run["options"], "timeout": TIMEOUT}
        self.storage = f"run-{self.life}"
        self.alone = Alone(folder / f"alone-{self.life}", self.micros, run["options"])
        self.hosts.callback(self.alone.close)
        # The last step that a rank reported to be committed.
        self.done = 0

    # --- a life --------------------------------------------------------------------------

    def live(self, faults=(), *, steps=2, mesh=None, meanwhile=None, fill_seconds=0):
        """One life of all ranks; the events of each rank."""
        mesh = mesh or self.mesh
        task = {
            "life": self.life, "mesh": mesh, "micros": self.micros, "steps": steps, "faults": faults,
            "fill_seconds": fill_seconds,
            "options": {**self.options, "storage": f"/mnt/nvme0/{self.storage}"},
        }  # fmt: skip
        place = self._write_task(task)
        ranks, gone = range(mesh[0] * mesh[1]), set()
        if meanwhile is not None:
            self._wait(lambda: all(self._said(place, rank, "offload") for rank in ranks), place)
            gone = meanwhile() or set()
        hang = {one["rank"] for one in faults if one["do"] == "stop"}
        try:
            self._wait(lambda: all(self._has_ended(place, rank) for rank in set(ranks) - hang - gone), place)
        finally:
            for rank in set(ranks) - gone:
                if not self._has_ended(place, rank):
                    with suppress(ProcessLookupError, FileNotFoundError):
                        os.kill(self.process(rank), signal.SIGKILL)
            self._wait(lambda: all(self._has_ended(place, rank) for rank in set(ranks) - gone), place)
            self.life += 1
        events = [_events(place, rank) for rank in ranks]
        self._check(events, mesh)
        return events

    def _write_task(self, task):
        place = self.hosts.folder_of(0, "shared") / f"life-{self.life}"
        place.mkdir()
        (place / "unfinished").write_text(json.dumps(task))
        (place / "unfinished").rename(place / "task")
        return place

    def _wait(self, until, place):
        last = time.monotonic() + LIFE_SECONDS
        while not until():
            assert time.monotonic() < last, f"no end: {self.words(place)}"
            time.sleep(0.02)

    def words(self, place):
        """What each rank said last, and what torchrun printed."""
        said = {rank: _events(place, rank)[-2:] for rank in range(RANKS)}
        return "\n".join([f"life {self.life}: {said}", *(one.output()[-3000:] for one in self._running)])

    def _said(self, place, rank, what):
        return any(one["what"] == what for one in _events(place, rank))

    def _has_ended(self, place, rank):
        with suppress(FileNotFoundError):
            return bool((place / f"end-{rank}").read_text())
        return False

    def _check(self, events, mesh):
        """Each life resumes where all were, and has the bits of one process."""
        opened = {one["step"] for each in events for one in each if one["what"] == "opened"}
        assert len(opened) <= 1, events
        assert all(self.done <= step <= self.done + 1 for step in opened), (self.done, opened)
        for rank, each in enumerate(events):
            for one in each:
                if "rows" in one:
                    expected = rows_digest(self.alone.values(one["step"]), rank % mesh[1], mesh[1])
                    assert one["rows"] == expected, (rank, one)
                for micro, loss in one.get("losses", {}).items():
                    assert loss == self.alone.loss(one["step"], int(micro)), (rank, one)
                if one["what"] in ("opened", "step"):
                    self.done = max(self.done, one["step"])

    # --- what ranks must have met -----------------------------------------------------------

    def whole(self, **more):
        """A life without a fault."""
        events = self.live(**more)
        for rank, each in enumerate(events):
            assert [one["what"] for one in each][-1] == "closed", (rank, each[-1])
        return events

    def faulty(self, faults, victims, **more):
        """A life in which these ranks have faults, which the others name in time."""
        events = self.live(faults, **more)
        self.judge(events, set(victims))
        return events

    def judge(self, events, victims, since=None, own=()):
        """Each rank but the victims names some of these, in time; `own`: errors that a victim may have itself."""
        begun = [one["at"] for each in events for one in each if one["what"] == "fault"]
        since = since or (min(begun) if begun else None)
        for rank, each in enumerate(events):
            last = each[-1] if each else {}
            if rank in victims:
                assert not own or last["kind"] in own, (rank, last)
                continue
            if last["what"] == "closed":
                # The fault came after its last commit, or never.
                continue
            assert last["what"] == "error", (rank, last)
            named = set(last["ranks"] or ())
            assert last["kind"] in ("RankError", "ConfigError"), (rank, last)
            assert named <= victims, (rank, last, victims)
            assert named or re.search(r"rank \d|store of the process group", last["words"]), (rank, last)
            waited = last["at"] - since
            assert waited < TIMEOUT + LATE_SECONDS, (rank, waited, last)
            self.waits.append(waited)

    # --- faults -----------------------------------------------------------------------------

    def fault(self, do, moment, rank=None):
        """A fault of a random rank at a moment, at a random one of the times that a life reaches it."""
        turn = self.random.uniform(0.2, 3.0) if moment == "time" else self.random.randint(1, TURNS[moment])
        rank = self.random.randrange(RANKS) if rank is None else rank
        return {"do": do, "at": moment, "turn": turn, "rank": rank}

    def one(self, do, moment):
        fault = self.fault(do, moment)
        self.faulty([fault], [fault["rank"]])
        return fault

    def kill(self):
        return self.one("kill", self.random.choice(["loss", "forward", "sum", "commit", "agreed", "written", "time"]))

    def kill_opening(self):
        """Before a rank begins to open its store, or while it does."""
        if self.random.random() < 0.3:
            return self.one("kill", "opening")
        fault = self.fault("kill", "time")
        fault["turn"] /= 4
        self.faulty([fault], [fault["rank"]])
        return fault

    def kill_filling(self):
        lost = self.lose_store()
        fault = self.fault("kill", "fill", self.random.choice([lost, min(set(self.peers(lost)) - {lost})]))
        self.faulty([fault], [fault["rank"]])
        self.filled({lost})
        return fault

    def stop(self):
        return self.one(
            "stop", self.random.choice(["opening", "forward", "sum", "commit", "agreed", "written", "time"])
        )

    def raises(self):
        fault = self.fault("raise", "loss")
        events = self.live([fault])
        self.judge(events, {fault["rank"]}, own=("ValueError",))
        return fault

    def full(self):
        """The drive of a host takes no more."""
        host = self.random.randrange(HOSTS)
        moment = self.random.choice(["loss", "commit", "opening"])
        faults = [{**self.fault("full", moment, rank), "turn": 1} for rank in ranks_of(host)]
        if moment == "opening":
            self.lose_host(host)
        events = self.live(faults)
        self.judge(events, set(ranks_of(host)))
        kinds = {events[rank][-1].get("kind") for rank in ranks_of(host)}
        assert kinds <= {"StorageError", "OSError", "RankError"}, kinds
        assert kinds != {"RankError"}, [events[rank][-1] for rank in ranks_of(host)]
        return {"host": host, "at": moment}

    def later(self, strike):
        """A random host, what strikes it within three seconds, the moment of that once it has, and the facts."""
        host, seconds, since = self.random.randrange(HOSTS), self.random.uniform(0, 3), []

        def wait_and_strike():
            time.sleep(seconds)
            since.append(time.time())
            return strike(host)

        return host, wait_and_strike, since, {"host": host, "seconds": seconds}

    def host(self):
        """All ranks of a host are killed at once."""

        def kill(host):
            for rank in ranks_of(host):
                with suppress(ProcessLookupError):
                    os.kill(self.process(rank), signal.SIGKILL)

        host, meanwhile, since, facts = self.later(kill)
        self.judge(self.live(steps=100, meanwhile=meanwhile), set(ranks_of(host)), *since)
        return facts

    def process(self, rank):
        """The process of a rank in this life."""
        return int((self.hosts.folder_of(0, "shared") / f"life-{self.life}/process-{rank}").read_text())

    def host_gone(self):
        """All that runs on a host is killed, torchrun as well."""

        def kill(host):
            self.hosts.kill(host)
            return set(ranks_of(host))

        host, meanwhile, since, facts = self.later(kill)
        try:
            events = self.live(steps=100, meanwhile=meanwhile)
        finally:
            for each in range(HOSTS):
                self.hosts.kill(each)
            self.start()
        self.judge(events, set(ranks_of(host)), *since)
        return facts

    def link(self):
        """The cable of a host is pulled, and plugged in once all ranks have ended."""
        host, meanwhile, since, facts = self.later(lambda host: self.hosts.connect(host, "down"))
        try:
            events = self.live(steps=100, meanwhile=meanwhile)
        finally:
            self.hosts.connect(host, "up")
        own = set(ranks_of(host))
        others = set(range(RANKS)) - own
        # Each side may only see that the other one is gone.
        self.judge(events, own, *since)
        turned = [[] if rank in others else each for rank, each in enumerate(events)]
        self.judge(turned, others, *since)
        return facts

    # --- drives -------------------------------------------------------------------------------

    def folder(self, host):
        return self.hosts.folder_of(host, "nvme0") / self.storage

    def store(self, rank):
        """The file of a rank's store."""
        return file_of_rank(str(self.folder(rank // RANKS_OF_HOST)), rank, self.mesh[1])

    def lose_host(self, host):
        shutil.rmtree(self.folder(host))

    def lose_store(self):
        rank = self.random.randrange(RANKS)
        self.store(rank).unlink()
        return rank

    def filled(self, ranks, **more):
        """A life in which the stores of these ranks are filled."""
        events = self.whole(**more)
        for rank, each in enumerate(events):
            seconds = [
                float(match[1])
                for one in each
                if one["what"] == "warning" and (match := re.search(r"it was filled .* in ([\d.]+) s", one["words"]))
            ]
            assert len(seconds) == (rank in ranks), (rank, each)
            self.fills += seconds

    def lost_store(self):
        rank = self.lose_store()
        self.filled({rank})
        return {"rank": rank}

    def lost_after_kill(self):
        """The ranks may be one commit apart when a store is lost."""
        self.one("kill", self.random.choice(["agreed", "written"]))
        return self.lost_store()

    def lost_host(self):
        host = self.random.randrange(HOSTS)
        self.lose_host(host)
        self.filled(set(ranks_of(host)))
        return {"host": host}

    def flip(self):
        """A byte of a store is another one; without that store, all is well."""
        rank = self.random.randrange(RANKS)
        self._flip(rank)
        self._recover(rank, {rank})
        return {"rank": rank}

    def flip_source(self):
        """The same of a store that another one is filled from: a third replica has all that both had."""
        lost = self.lose_store()
        rank = min(set(self.peers(lost)) - {lost})
        self._flip(rank)
        self._recover(rank, {rank, lost} if self.mesh[0] > 2 else None)
        return {"rank": rank, "lost": lost}

    def peers(self, rank):
        """The ranks with the same rows."""
        return range(rank % self.mesh[1], RANKS, self.mesh[1])

    def _flip(self, rank):
        file = self.store(rank)
        with memascend.engine.Store.open(file) as store:
            names = [one["name"] for one in store.each_record() if one["shape"][0] and not one["buffer"]]
            values, state = store.read(self.random.choice(names))
        held = bytearray(file.read_bytes())
        each = [as_bytes(tensor).numpy().tobytes() for tensor in (values, *state.values())]
        # Not what the file has in several places, such as the values of the commit before.
        each = [values for values in each if held.count(values) == 1]
        values = self.random.choice(each)
        self._flipped = held.find(values) + self.random.randrange(len(values))
        held[self._flipped] ^= 1
        file.write_bytes(held)

    def _recover(self, rank, filled):
        """Each opening names the damaged store; without it these are filled (None: once it is mended, its peers)."""
        for _ in range(2):
            events = self.live()
            self.judge(events, {rank}, events[rank][-1]["at"], own=("CorruptionError",))
        file = self.store(rank)
        if filled is None:
            held = bytearray(file.read_bytes())
            held[self._flipped] ^= 1
            file.write_bytes(held)
        else:
            file.unlink()
        self.filled(filled or set(self.peers(rank)) - {rank})

    # --- other numbers of replicas ---------------------------------------------------------------

    def resized(self):
        """Fewer replicas, and as many as before: those that were left behind are filled."""
        replicas, shards = self.mesh
        fits = [fewer for fewer in range(1, replicas) if self.micros % (fewer * shards) == 0]
        fewer = self.random.choice(fits)
        self.whole(mesh=[fewer, shards])
        behind = set(range(fewer * shards, RANKS))
        if any(self.store(rank).exists() for rank in behind):
            for each in self.live():
                assert "move away the stores of a replica" in each[-1]["words"], each[-1]
        for rank in behind:
            self.store(rank).unlink(missing_ok=True)
        self.filled(behind)
        return {"replicas": fewer}

    def reshaped(self):
        """Another division of rows, and the first one again."""
        self.whole(mesh=self.mesh[::-1])
        self.whole()

    def slow_fill(self):
        """A store takes longer to fill than ranks wait for one another."""
        self.filled({self.lose_store()}, fill_seconds=0.3)


def ranks_of(host):
    return range(host * RANKS_OF_HOST, (host + 1) * RANKS_OF_HOST)


def _events(place, rank):
    with suppress(FileNotFoundError):
        # A rank that was killed may have written half a line.
        lines = (place / f"rank-{rank}").read_text().split("\n")[:-1]
        return [json.loads(line) for line in lines]
    return []


def drill(folder, seed, kinds):
    """Faults of these kinds, by turns over runs of both meshes; a report."""
    per_run = -(-len(kinds) // len(RUNS))
    failures = []
    (folder / "hosts").mkdir()
    with Hosts(folder / "hosts", HOSTS) as hosts:
        all_of_it = Drill(hosts, seed)
        for number, kind in enumerate(kinds):
            if number % per_run == 0:
                all_of_it.begin(number // per_run, folder)
                all_of_it.whole()
            began, life = time.monotonic(), all_of_it.life
            try:
                detail = getattr(all_of_it, kind)()
            except (AssertionError, LookupError, OSError) as error:
                detail = f"FAILED: {error!r}"
                failures.append(f"fault {number}, {kind}, from life {life}: {error!r}")
                # What it left says nothing about other faults.
                all_of_it.begin(number // per_run, folder)
                all_of_it.whole()
            print(
                f"{number}: {kind} {detail}, lives {life} to {all_of_it.life - 1}: step {all_of_it.done}, "
                f"{time.monotonic() - began:.1f} s",
                flush=True,
            )
        all_of_it.whole()
        all_of_it.end()
    counted = ", ".join(f"{kind} {count}" for kind, count in Counter(kinds).items())
    print(
        f"seed {seed}, {all_of_it.life} lives: {counted}; filled in {sorted(all_of_it.fills)} s, "
        f"the longest wait for an error {max(all_of_it.waits, default=0):.1f} s"
    )
    assert not failures, "\n".join([f"seed {seed}", *failures])


def test_a_killed_rank_a_lost_host_a_pulled_cable_and_a_slow_fill(tmp_path):
    drill(tmp_path, 1, ["kill", "lost_host", "link", "slow_fill"])


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_forty_random_faults(tmp_path):
    seed = int(os.environ.get("MEMASCEND_SEED", time.time()))
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    random.Random(seed).shuffle(kinds)
    for number, kind in enumerate(["resized", "reshaped", "resized", "reshaped"]):
        kinds.insert(11 * number + 5, kind)
    drill(tmp_path, seed, kinds)
