"""Measures a run and reports it: memory by owner, bytes by kind, seconds by stage; as a table, JSON or a plot."""

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


# The keys of `Report.seconds` for the time in which the training loop does not compute: it waits for units, passes
# gradients on (and waits for space in their queue), or is in `step()`.
WAITING = ("waiting for units", "handing on gradients", "step()")
# The number of steps that `Measurements` times, after the first step, to estimate the gain of a larger budget.
_MEASURED_STEPS = 2
_log = logging.getLogger("memascend")
# If `Report.waited` is at least this number, reports say that the drive limits the speed of the run.
_WAITED_MUCH = 1 / 3


@dataclass(frozen=True)
class Owner:
    """The memory of one owner: bytes in use now, and their peak."""

    bytes: int
    peak: int


@dataclass(frozen=True)
class AllRanks:
    """Memory and traffic of all ranks together, as the ranks exchanged them in the last `step()`."""

    count: int  # the number of ranks
    peak: int  # the sum of all ranks' peaks of host memory
    read: int  # bytes read from storage since `offload()` returned
    written: int  # bytes written to storage since `offload()` returned


@dataclass(frozen=True, kw_only=True)
class Report:
    """Memory, traffic and times of a run since `offload()` returned. `str()` returns tables and sentences."""

    owners: dict[str, Owner]  # host memory by owner
    budget: int  # the budget of host memory in force, in bytes
    object_bytes: int  # estimated bytes of the Python and torch objects of all parameters, which no budget limits
    read: dict[str, int]  # bytes read by kind; "other": all other reads, such as those of `save()` and `state_of()`
    written: dict[str, int]  # bytes written by kind; "first values": all bytes that `offload()` wrote
    ram_tier: int  # bytes that were taken from the RAM tier instead of being read from storage
    seconds: dict[str, float]  # seconds by stage; stages overlap, so they do not add up to "wall"
    steps: int  # number of steps committed since `offload()` returned
    units: dict[str, int]  # how often units were read, were cached already, and were evicted
    in_memory: TorchBytes  # bytes of the same training without offloading
    # number of steps whose updates began before `step()`, because recent steps did not clip or change gradients
    early: int = 0
    # number of `early` steps that repeated updates, because they clipped gradients, or changed gradients or options
    anew: int = 0
    # number of steps that left updates to the next step, because the updates needed the norm of all gradients first
    deferred: int = 0
    deferred_to: str = ""  # the part of the next step that now writes deferred updates: "forward" or "backward"
    log_steps: int = 0  # number of steps whose gradients fit into the store's gradient log; 0: the store has no log
    log_bytes: int = 0  # disk space of the gradient log, in bytes
    log_wanted: int = 0  # number of steps that the log would hold with enough disk space
    unlogged: int = 0  # updates for which the log had no space, so that their parameters were written whole
    # These three fields are set only if a device computes the model. They are the device's memory by owner, the budget
    # of this memory, and all memory that torch has on the device (including activations and the user's tensors).
    device: dict[str, Owner] = field(default_factory=dict)
    device_budget: int = 0
    device_torch: Owner | None = None
    device_copies: str | None = None  # the reason why copies to and from the device are slow; None: they are fast
    history: History = field(default_factory=History)  # figures of each step
    # The figures of all ranks together. All other fields are figures of this rank only. None before the first step, and
    # if the run has one process.
    ranks: AllRanks | None = None

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
        """An estimate of the fraction of the run in which training waited for the drive, by the keys of `WAITING`.

        0.0 before the first step, and if the update stages "applying", "computing" and "sealing" together took more
        time than "reading" and "writing" together: then the drive is not the limit.
        """
        taken = self.seconds
        moving = sum(taken.get(f"update, {stage}", 0.0) for stage in ("reading", "writing"))
        working = sum(taken.get(f"update, {stage}", 0.0) for stage in ("applying", "computing", "sealing"))
        if not self.steps or moving < working:
            return 0.0
        return sum(taken.get(stage, 0.0) for stage in WAITING) / max(taken.get("wall", 0.0), 1e-9)

    @property
    def advice(self) -> str:
        """Advice for a run whose speed the drive limits; "" for other runs."""
        if self.waited < _WAITED_MUCH:
            return ""
        return (
            f"The drive bounds this run: training waited for it {self.waited:.0%} of the time. To train on more data "
            "for the same bytes, use larger micro-batches (per_device_train_batch_size of a Trainer; start a new run, "
            "because results change), or compute more micro-batches by layer (optimizer.accumulate(..., "
            "by_layer=True), or gradient_accumulation_steps of a Trainer that computes by layer). To move fewer bytes "
            "in each step, pass a larger host_memory=."
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns figures of the report as JSON values.

        Some keys exist only under a condition. "device": a device computes the model. "ram_tier": reads were saved by
        parameters kept in RAM. "log": the plan has a gradient log. "early": updates began before `step()`. "deferred":
        steps deferred updates to the next step's "forward" or "backward". "ranks": the run has several ranks, and made
        a step. Inside "log", the key "wanted" exists if the log holds fewer steps than planned, and the key "unlogged"
        exists if the log had no space for some updates.
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
        objects = f"in addition, Python objects take about {bytes_shown(self.object_bytes)}"
        budget = f"The budget is {bytes_shown(self.budget)}; {objects}."
        in_memory = f"In memory the same training would hold {bytes_shown(self.in_memory.total)}{saved}."
        parts = [
            _owners_table("host memory", self.owners, total=Owner(self.total, self.peak)),
            f"{budget}\n{in_memory}",
        ]
        if self.device_torch is not None:
            owners = {**self.device, "all that torch holds": self.device_torch}
            text = f"The budget is {bytes_shown(self.device_budget)}, and limits only units and gradients."
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
                f"This is one of {self.ranks.count} ranks. All ranks together held at most "
                f"{bytes_shown(self.ranks.peak)}, read {bytes_shown(self.ranks.read)} and wrote "
                f"{bytes_shown(self.ranks.written)}, up to the last step()."
            )
        parts.append(
            f"{self.steps} steps. Units were read {self.units['fetches']} times and were cached already {cached} times."
        )
        if self.advice:
            parts.append(self.advice)
        if self.early:
            parts.append(f"Updates of {self.early} steps began before step(); {self.anew} of them were made anew.")
        if self.deferred:
            parts.append(
                f"{self.deferred} steps deferred updates of streamed parameters to the next step, which now writes "
                f"these updates in its {self.deferred_to}."
            )
        return "\n\n".join(parts)

    def _kept_in_ram(self) -> list[str]:
        """Returns sentences about the RAM tier and its gradient log, if the run has them."""
        sentences = []
        if self.ram_tier:
            each = f", {bytes_shown(self.ram_tier // self.steps)} for each step" if self.steps else ""
            sentences.append(f"Parameters kept in RAM saved {bytes_shown(self.ram_tier)} of reads{each}.")
        if self.log_steps:
            room = bytes_shown(self.log_bytes)
            less = f" (no disk space for {self.log_wanted})" if self.log_steps < self.log_wanted else ""
            sentences.append(
                f"Gradients of parameters kept in RAM go to a gradient log of {self.log_steps} steps{less}, {room}."
            )
        elif self.log_wanted:
            sentences.append("No disk space for a gradient log: parameters kept in RAM are written whole each step.")
        if self.unlogged:
            sentences.append(f"{self.unlogged} updates found no space in the log: their parameters were written whole.")
        return [" ".join(sentences)] if sentences else []

    def _traffic(self) -> str:
        """Returns the table of bytes read and written by kind, in all and for each step."""
        rows = []
        for direction, kinds in (("read", self.read), ("written", self.written)):
            for kind, nbytes in kinds.items():
                if not nbytes:
                    continue
                once = kind == "first values" or not self.steps
                rows.append((direction, kind, bytes_shown(nbytes), "" if once else bytes_shown(nbytes // self.steps)))
        return table(("storage", "kind", "bytes", "for each step"), rows)

    def plot(self, path: str | os.PathLike[str] = "training.png") -> None:
        """Plots the loss (if a Trainer logs it), seconds and GB/s of each step, and the host memory of each owner.

        Args:
            path: the file of the picture; its suffix gives the format.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        draw(self, path)


def _times(report: Report) -> tuple[float, float]:
    """Returns the seconds since `offload()` returned, and how many of these seconds the training loop waited."""
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
    """Collects the figures of a run and makes reports of them."""

    def __init__(self, run: Run, decision: Decision, *, mentions: bool = False) -> None:
        """`mentions`: log once, after some steps, if a larger budget would make a step much faster."""
        self._run = run
        self._resources = run.resources
        self._planned = decision.plan
        self._in_memory = TorchBytes.of(decision)
        # The counters at the end of `offload()`. Reports subtract these counters from the present counters.
        self._before = self._counted()
        self._step_seconds = 0.0
        # The peak of the bytes of gradients that p.grad keeps until step() under gradients="ram".
        self._kept_peak = 0
        # The final report, once `close` has made it.
        self._last: Report | None = None
        self.history = History()
        # The time of the last step's end, and the number of bytes that the store had moved by then.
        self._ended: tuple[float, int] | None = None
        # The figures of all ranks, from the exchange in the last step.
        self._all_ranks: AllRanks | None = None
        # True if the gain of a larger budget is still to be logged.
        self._mentions = mentions
        # The report after the first step, from which `_mention_larger_budget` measures.
        self._first: Report | None = None

    def _counted(self) -> dict[str, Any]:
        """Returns the present counters of engine and store, and the time."""
        resources = self._resources
        return {
            "engine": resources.engine.counters(),
            "store": resources.store.counters(),
            "seconds": time.perf_counter(),
        }

    @property
    def plan(self) -> Plan:
        """The plan in force; without a given budget, it includes memory that steps have added."""
        arena = self._resources.units.arena
        return self._planned.with_added(arena.added, arena.added_bytes)

    def log_began(self, plan: Plan) -> None:
        """Replaces the plan by `plan`, whose gradient log fits the free disk space."""
        self._planned = plan

    def step_ended(self, began: float) -> None:
        """Records a committed step; `began` is the `perf_counter()` at the beginning of `step()`."""
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
        """Logs the gain of a larger budget at most once. Leaves out the first step, which is not like later steps."""
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
                'pass host_memory="%s", which is free here: a step would take about %s instead of %s',
                size_option(budget), seconds_shown(took), seconds_shown(seconds / steps),
            )  # fmt: skip

    def own_figures(self) -> list[int]:
        """Returns the figures that this rank sends to other ranks: peak of host memory, bytes read, bytes written."""
        store = _since(self._counted(), self._before)["store"]
        return [sum(owner.peak for owner in self._owners().values()), store["read_bytes"], store["written_bytes"]]

    def note_all_ranks(self, count: int, sums: Sequence[int]) -> None:
        """Stores the sums of all ranks' figures, so that `report()` needs no communication."""
        self._all_ranks = AllRanks(count, *sums)

    def report(self) -> Report:
        """Makes a report of the figures so far; after `close`, returns the final report."""
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
        """Makes the final report, which `report` returns from then on."""
        self._last = self.report()

    def _traffic(self, engine: dict[str, Any], store: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
        """Returns bytes read and bytes written, by kind, from the counters of engine and store."""
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
        """Returns memascend's host memory by owner. Leaves out owners of `sizes` without memory, unless in `always`."""
        resources = self._resources
        info, counters = resources.store.info(), resources.engine.counters()
        # `staging_bytes` includes the engine's buffer for whole parameters.
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
            # This entry counts the gradients of the RAM tier that wait for step(). With gradients="ram" the plan does
            # not have this entry: the entry "gradients" then counts all kept gradients.
            owners["gradients in RAM"] = Owner(counters["waiting"], counters["waiting_peak"])
        if not self.plan.device:
            owners["gradients"] = self._gradients()
        return owners

    def _gradients(self) -> Owner:
        """Returns the memory, on the device that computes the model, of gradients that wait for their update."""
        engine, parts = self._resources.engine, self._run.residency.stages
        sums = parts.nbytes if isinstance(parts, PartialSums) else 0
        # Take the maximum, not the sum: under "ram", p.grad and the engine's queue share the memory of a gradient.
        now = max(engine.queued_bytes + sums, self._kept())
        return Owner(now, max(now, int(engine.counters()["queued_peak"]), self._kept_peak))

    def _kept(self) -> int:
        """Returns the bytes of the gradients that p.grad keeps in memory until step(); 0 unless the mode is "ram"."""
        if self._run.gradients.loop.mode != "ram":
            return 0
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            places = [kept.place for kept in self._run.gradients.by_name.values()]
            return sum(place.nothing.nbytes for place in places if place.parameter.grad is not None)

    def _on_device(self) -> dict[str, Any]:
        """Returns the fields of a report about the device's memory; an empty dict if the CPU computes the model."""
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
    """Subtracts the counters `then` from `now`, also in nested dicts; a counter that `then` does not have is 0."""
    return {
        name: _since(value, then.get(name, {})) if isinstance(value, dict) else value - then.get(name, 0)
        for name, value in now.items()
    }
