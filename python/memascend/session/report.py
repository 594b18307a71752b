"""Measures a run and reports it: memory by owner, bytes by kind, seconds by stage; a table and a picture."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.grads.microbatches import PartialSums
from memascend.plan.decision import TorchBytes
from memascend.plan.spare import Spare, faster
from memascend.session.history import History, draw
from memascend.text import bytes_shown, seconds_shown, size_option, table

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from memascend.plan.decision import Decision
    from memascend.plan.table import Plan
    from memascend.session.run import Run


# Stages in which the training loop waits for units, for space for gradients, and for the rest of a step.
WAITING = ("waiting for units", "handing on gradients", "step()")
# The steps by which the gain of a larger budget is estimated.
_MEASURED_STEPS = 2
_log = logging.getLogger("memascend")
# The drive bounds a run that waits for it in this part of its time.
_WAITED_MUCH = 1 / 3


@dataclass(frozen=True)
class Owner:
    """Memory of one kind: bytes in use now, and the most that were in use."""

    bytes: int
    peak: int


@dataclass(frozen=True)
class AllRanks:
    """Memory and traffic of all ranks together, as exchanged at the beginning of the last `step()`."""

    count: int  # the number of ranks
    peak: int  # the sum of their peaks of host memory
    read: int  # bytes read from storage since `offload()` returned
    written: int  # bytes written to it since then


@dataclass(frozen=True, kw_only=True)
class Report:
    """Memory, traffic and times of a run since `offload()` returned. `str()` is a table."""

    owners: dict[str, Owner]  # host memory
    budget: int  # the limit in force, in bytes
    object_bytes: int  # about the bytes of Python's and torch's objects for each parameter, which no budget limits
    read: dict[str, int]  # bytes by kind; "other" is the catalog, and values that were read out
    written: dict[str, int]  # bytes by kind; "first values" were written by `offload()` itself
    ram_tier: int  # bytes that were taken from the RAM tier instead of being read
    seconds: dict[str, float]  # by stage; stages overlap, so they do not add up to "wall"
    steps: int  # committed since `offload()` returned
    units: dict[str, int]  # how often a unit was read, was cached already, and was evicted
    in_memory: TorchBytes
    early: int = 0  # steps whose updates began before `step()`, since few of their gradients are clipped or changed
    anew: int = 0  # of these, the steps whose gradients were clipped or changed, so that their updates were repeated
    # Steps that left updates to the next one, since the norm of all gradients came first; and where that wrote them.
    deferred: int = 0
    deferred_to: str = ""
    log_steps: int = 0  # steps of gradients that fit into the store's gradient log; 0: there is no log
    log_bytes: int = 0  # its space on storage
    log_wanted: int = 0  # the steps that it would have with enough space
    unlogged: int = 0  # updates that it had no space for, so that their parameters were written whole
    # Where the host does not compute: the device's memory, its budget, all memory that torch has there (the owners',
    # activations and the user's own tensors), and why copies are slower than possible (None: they are not).
    device: dict[str, Owner] = field(default_factory=dict)
    device_budget: int = 0
    device_torch: Owner | None = None
    device_copies: str | None = None
    history: History = field(default_factory=History)  # of each step
    ranks: AllRanks | None = None  # of all ranks; all other figures are this rank's. None before the first step

    @property
    def total(self) -> int:
        """Bytes of host memory that are in use now."""
        return sum(owner.bytes for owner in self.owners.values())

    @property
    def peak(self) -> int:
        """The sum of the owners' peaks, an upper bound of the bytes that were in use at once."""
        return sum(owner.peak for owner in self.owners.values())

    @property
    def waited(self) -> float:
        """The part of the run in which training waited for the drive; 0.0 where it waited for updates to compute."""
        taken = self.seconds
        moving = sum(taken.get(f"update, {stage}", 0.0) for stage in ("reading", "writing"))
        working = sum(taken.get(f"update, {stage}", 0.0) for stage in ("applying", "computing", "sealing"))
        if not self.steps or moving < working:
            return 0.0
        return sum(taken.get(stage, 0.0) for stage in WAITING) / max(taken.get("wall", 0.0), 1e-9)

    @property
    def advice(self) -> str:
        """What to change where the drive bounds the run; "" where it does not."""
        if self.waited < _WAITED_MUCH:
            return ""
        return (
            f"The drive bounds this run: training waited for it {self.waited:.0%} of the time. A step moves the same "
            "bytes with larger micro-batches (per_device_train_batch_size of a Trainer, as far as memory goes; in a "
            "new run, as results differ), or with more of them by layer (optimizer.accumulate(..., by_layer=True); "
            "gradient_accumulation_steps of a Trainer that goes by layer), and fewer with a larger host_memory=."
        )

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values. Some keys appear only where they apply.

        "device": the host does not compute. "ram_tier" and "log": some parameters are kept in RAM. "early": updates
        began before `step()`. "deferred": steps left updates to the next one's "forward" or "backward". "ranks":
        there are several. "log" has "wanted" where it is shorter, and "unlogged" where that is not 0.
        """
        found = {
            "host": _as_json(self.owners, self.budget),
            "read": dict(self.read),
            "written": dict(self.written),
            "seconds": dict(self.seconds),
            "steps": self.steps,
            "beside": {"Python objects": self.object_bytes},
        }
        if self.device_torch is not None:
            found["device"] = {**_as_json(self.device, self.device_budget), "torch": asdict(self.device_torch)}
        if self.ram_tier:
            found["ram_tier"] = self.ram_tier
        if self.early:
            found["early"] = {"steps": self.early, "anew": self.anew}
        if self.deferred:
            found["deferred"] = {"steps": self.deferred, "to": self.deferred_to}
        if self.ranks is not None:
            found["ranks"] = asdict(self.ranks)
        if self.log_wanted:
            found["log"] = log = {"steps": self.log_steps, "bytes": self.log_bytes}
            if self.log_steps < self.log_wanted:
                log["wanted"] = self.log_wanted
            if self.unlogged:
                log["unlogged"] = self.unlogged
        return found

    def __str__(self) -> str:
        saved = f", {self.in_memory.total / self.peak:.1f} times as much" if self.peak else ""
        cached = self.units["hits"] + self.units["adopted"]
        beside = f"beside it Python's objects take about {bytes_shown(self.object_bytes)}"
        budget = f"The budget is {bytes_shown(self.budget)}; {beside}."
        in_memory = f"In memory the same training would hold {bytes_shown(self.in_memory.total)}{saved}."
        parts = [
            _owners_table("host memory", self.owners, total=Owner(self.total, self.peak)),
            f"{budget}\n{in_memory}",
        ]
        if self.device_torch is not None:
            owners = {**self.device, "all that torch holds": self.device_torch}
            text = f"The budget is {bytes_shown(self.device_budget)}, for all but what else torch holds."
            if self.device_copies is not None:
                text += f"\nCopies are slower than they could be: {self.device_copies}."
            parts += [_owners_table("device memory", owners), text]
        parts += [
            self._traffic(),
            *self._kept_in_ram(),
            table(("stage", "time"), [(name, seconds_shown(taken)) for name, taken in self.seconds.items()]),
        ]
        if self.ranks is not None:
            parts.append(
                f"This is one of {self.ranks.count} ranks. Together they held at most {bytes_shown(self.ranks.peak)}, "
                f"read {bytes_shown(self.ranks.read)} and wrote {bytes_shown(self.ranks.written)}, up to the last "
                "step()."
            )
        parts.append(
            f"{self.steps} steps. Units were read {self.units['fetches']} times and were there already {cached} times."
        )
        if self.advice:
            parts.append(self.advice)
        if self.early:
            parts.append(f"Updates of {self.early} steps began before step(); {self.anew} of them were made anew.")
        if self.deferred:
            parts.append(
                f"{self.deferred} steps deferred updates of streamed parameters to the next one, which now writes them "
                f"in its {self.deferred_to}."
            )
        return "\n\n".join(parts)

    def _kept_in_ram(self) -> list[str]:
        """Sentences about the RAM tier and its gradient log, where there are any."""
        said = []
        if self.ram_tier:
            each = f", {bytes_shown(self.ram_tier // self.steps)} for each step" if self.steps else ""
            said.append(f"Parameters kept in RAM saved {bytes_shown(self.ram_tier)} of reads{each}.")
        if self.log_steps:
            room = bytes_shown(self.log_bytes)
            less = f" (no disk space for {self.log_wanted})" if self.log_steps < self.log_wanted else ""
            said.append(
                f"Gradients of parameters kept in RAM go to a gradient log of {self.log_steps} steps{less}, {room}."
            )
        elif self.log_wanted:
            said.append("No disk space for a gradient log: parameters kept in RAM are written whole each step.")
        if self.unlogged:
            said.append(f"{self.unlogged} updates found no space in it: their parameters were written whole.")
        return [" ".join(said)] if said else []

    def _traffic(self) -> str:
        rows = []
        for direction, kinds in (("read", self.read), ("written", self.written)):
            for kind, nbytes in kinds.items():
                if not nbytes:
                    continue
                once = kind == "first values" or not self.steps
                rows.append((direction, kind, bytes_shown(nbytes), "" if once else bytes_shown(nbytes // self.steps)))
        return table(("storage", "kind", "bytes", "for each step"), rows)

    def plot(self, path: str | os.PathLike[str] = "training.png") -> None:
        """Draw the loss (where a Trainer logs it), seconds and GB/s of each step, and the host memory of each owner.

        Args:
            path: of the picture; its suffix gives the format.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        draw(self, path)


def _times(report: Report) -> tuple[float, float]:
    """Seconds since `offload()` returned, and those in which the training loop waited."""
    return report.seconds["wall"], sum(report.seconds[stage] for stage in WAITING)


def _as_json(owners: Mapping[str, Owner], budget: int) -> dict[str, Any]:
    return {
        "total": sum(owner.bytes for owner in owners.values()),
        "peak": sum(owner.peak for owner in owners.values()),
        "budget": budget,
        "owners": {name: asdict(owner) for name, owner in owners.items()},
    }


def _owners_table(title: str, owners: Mapping[str, Owner], total: Owner | None = None) -> str:
    rows = [*owners.items(), *([] if total is None else [("all", total)])]
    shown = [(name, bytes_shown(owner.bytes), bytes_shown(owner.peak)) for name, owner in rows]
    return table((title, "now", "peak"), shown)


class Measurements:
    """Collects the figures of a report."""

    def __init__(self, run: Run, decision: Decision, *, mentions: bool = False) -> None:
        """`mentions`: the log says once how much faster a step would be with the memory that is free."""
        self._run = run
        self._resources = run.resources
        self._planned = decision.plan
        self._in_memory = TorchBytes.of(decision)
        # Earlier counts do not belong to the training.
        self._before = self._counted()
        self._step_seconds = 0.0
        # The most that was kept in p.grad until step().
        self._kept_peak = 0
        self._last: Report | None = None
        self.history = History()
        # The end of the last step, and the bytes that were moved until then.
        self._ended: tuple[float, int] | None = None
        # As exchanged in the last step.
        self._all_ranks: AllRanks | None = None
        # Whether a larger budget is to be mentioned; and the report after the first step.
        self._mentions = mentions
        self._first: Report | None = None

    def _counted(self) -> dict[str, Any]:
        resources = self._resources
        return {
            "engine": resources.engine.counters(),
            "store": resources.store.counters(),
            "seconds": time.perf_counter(),
        }

    @property
    def plan(self) -> Plan:
        """The plan in force, with the memory that was added where no budget was given."""
        arena = self._resources.units.arena
        return self._planned.with_added(arena.added, arena.added_bytes)

    def log_began(self, plan: Plan) -> None:
        """The plan in force is this one, with the gradient log that the store has space for."""
        self._planned = plan

    def step_ended(self, began: float) -> None:
        """A step was committed, whose `step()` began then."""
        now = time.perf_counter()
        self._step_seconds += now - began
        store = self._resources.store.counters()
        before, self._ended = self._ended, (now, store["read_bytes"] + store["written_bytes"])
        if before is not None:
            self.history.add(self._run.metadata.step, now - before[0], self._ended[1] - before[1])
        self._kept_peak = max(self._kept_peak, self._kept())
        if self._mentions:
            self._mention_larger_budget()

    def _mention_larger_budget(self) -> None:
        """Log the gain of a larger budget, measured from the second step on: the first detects the loop's habits."""
        report = self.report()
        if self._first is None:
            self._first = report
            return
        steps = report.steps - self._first.steps
        if steps < _MEASURED_STEPS:
            return
        self._mentions = False
        seconds, waited = (now - then for now, then in zip(_times(report), _times(self._first), strict=True))
        if report.waited < _WAITED_MUCH:
            return
        on_host = self._resources.units.device is None
        free = self.plan.budget + Spare().budget(on_host=on_host)
        found = faster(self.plan, free, seconds / steps, waited / steps)
        if found is not None:
            budget, took = found
            _log.info(
                'host_memory="%s", which is free here, would make a step about %s instead of %s',
                size_option(budget), seconds_shown(took), seconds_shown(seconds / steps),
            )  # fmt: skip

    def own_figures(self) -> list[int]:
        """The figures that a rank sends to the others: the peak of host memory, bytes read and written."""
        store = _since(self._counted(), self._before)["store"]
        return [sum(owner.peak for owner in self._owners().values()), store["read_bytes"], store["written_bytes"]]

    def note_all_ranks(self, count: int, sums: Sequence[int]) -> None:
        """Remember the sums of the figures of all ranks, so that a report needs no communication."""
        self._all_ranks = AllRanks(count, *sums)

    def report(self) -> Report:
        """The figures so far, or at the end."""
        if self._last is not None:
            return self._last
        counted = _since(self._counted(), self._before)
        engine, store = counted["engine"], counted["store"]
        read, written = self._traffic(engine, store)
        return Report(
            owners=self._owners(),
            budget=self.plan.budget,
            object_bytes=self.plan.object_bytes,
            read=read,
            written=written,
            ram_tier=store["ram_tier_bytes"],
            log_steps=self.plan.log_steps,
            log_bytes=self.plan.log_bytes,
            log_wanted=self.plan.log_wanted,
            unlogged=engine["unlogged"],
            seconds={
                "wall": counted["seconds"],
                "waiting for units": store["wait_seconds"] + self._resources.units.wait_seconds,
                "handing on gradients": self._run.gradients.handing_seconds,
                "step()": self._step_seconds,
                **{f"update, {stage}": taken for stage, taken in engine["seconds"].items()},
            },
            steps=self._run.metadata.made,
            early=self._run.gradients.speculation.early,
            anew=self._run.gradients.speculation.anew,
            deferred=self._run.residency.units.settling.steps,
            deferred_to=self._run.residency.units.settling.way,
            units=dict(self._run.residency.units.counters),
            in_memory=self._in_memory,
            history=self.history,
            ranks=self._all_ranks,
            **self._on_device(),
        )

    def close(self) -> None:
        """Make the report that is returned from now on."""
        self._last = self.report()

    def _traffic(self, engine: dict[str, Any], store: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes read and written, by kind, from the counters of engine and store."""
        read = {
            "values": store["fetched_bytes"],
            "values, update": engine["values_read"],
            "state": engine["state_read"],
            "gradients": engine["spill_read"],
        }
        written = {
            "values": engine["values_written"],
            "state": engine["state_written"],
            "gradients": engine["spill_written"],
            "log": engine["log_written"],
        }
        read["other"] = max(0, store["read_bytes"] - sum(read.values()))
        written["other"] = max(0, store["written_bytes"] - sum(written.values()))
        written["first values"] = self._before["store"]["written_bytes"]
        activations = self._resources.activations
        if activations is not None:
            read["activations"] = activations.counters["read"]
            written["activations"] = activations.counters["written"]
        return read, written

    def _owners(self) -> dict[str, Owner]:
        resources = self._resources
        info, counters = resources.store.info(), resources.engine.counters()
        # The engine's memory includes the buffer for whole parameters.
        staging, whole = resources.engine.staging_bytes, self.plan.whole_bytes
        sizes = {
            **resources.units.host,
            "update staging": max(0, staging - whole),
            "catalog": info["buffer_bytes"],
            "index": info["index_bytes"],
            "unaligned I/O": info["copy_bytes"],
            "whole parameters": min(staging, whole),
            "records in RAM": 0 if resources.closed else self.plan.host.get("records in RAM", 0),
            "activations": 0 if resources.activations is None else resources.activations.host_bytes,
        }
        always = (*resources.units.host, "update staging", "catalog", "index")
        owners = {name: Owner(nbytes, nbytes) for name, nbytes in sizes.items() if nbytes or name in always}
        if "gradients in RAM" in self.plan.host:
            # In "ram" mode these gradients are among all those that are kept.
            owners["gradients in RAM"] = Owner(counters["waiting"], counters["waiting_peak"])
        if not self.plan.device:
            owners["gradients"] = self._gradients()
        return owners

    def _gradients(self) -> Owner:
        """The memory of gradients that wait for their update, where the model computes."""
        engine, parts = self._resources.engine, self._run.residency.stages
        sums = parts.nbytes if isinstance(parts, PartialSums) else 0
        # Gradients that are kept until step() wait for the engine in that same memory.
        now = max(engine.queued_bytes + sums, self._kept())
        return Owner(now, max(now, int(engine.counters()["queued_peak"]), self._kept_peak))

    def _kept(self) -> int:
        """Bytes of the gradients that are in memory until step()."""
        if self._run.gradients.loop.mode != "ram":
            return 0
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            places = [kept.place for kept in self._run.gradients.by_name.values()]
            return sum(place.nothing.nbytes for place in places if place.parameter.grad is not None)

    def _on_device(self) -> dict[str, Any]:
        """The fields of a report about the device's memory, where the host does not compute."""
        units = self._resources.units
        if units.device is None:
            return {}
        reserved = units.arena.reserved_bytes
        return {
            "device": {"units": Owner(reserved, reserved), "gradients": self._gradients()},
            "device_budget": self.plan.device_budget,
            "device_torch": Owner(*units.device.allocated()),
            "device_copies": units.unregistered,
        }


def _since(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _since(value, then.get(name, {})) if isinstance(value, dict) else value - then.get(name, 0)
        for name, value in now.items()
    }
