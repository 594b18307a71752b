"""Measures a run: memory by owner, bytes by kind, seconds by stage, from when `offload()` returned."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from memascend.run.report import AllRanks, Owner, Report, TorchBytes

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from memascend.planning.table import Plan
    from memascend.residency.residency import Residency
    from memascend.run.meter import Meter
    from memascend.run.position import Position
    from memascend.run.resources import Resources

_log = logging.getLogger("memascend")


@dataclass(frozen=True)
class _Counters:
    """What engine and store had counted at some moment."""

    engine: dict[str, Any]
    store: dict[str, Any]
    moment: float

    @classmethod
    def of(cls, resources: Resources) -> _Counters:
        return cls(resources.engine.counters(), resources.store.counters(), time.perf_counter())

    def since(self, then: _Counters) -> _Counters:
        return _Counters(_since(self.engine, then.engine), _since(self.store, then.store), self.moment - then.moment)


class Measurements:
    """What a report is made of."""

    def __init__(
        self,
        resources: Resources,
        residency: Residency,
        plan: Plan,
        position: Position,
        meter: Meter,
    ) -> None:
        self._resources = resources
        self._residency = residency
        self._planned = plan
        self._position = position
        self.meter = meter
        # What was counted before is not of the training.
        self._before = _Counters.of(resources)
        self._step_seconds = 0.0
        self._last: Report | None = None
        # As it was told in the last step.
        self._all_ranks: AllRanks | None = None
        self._told_of_log = False

    def log_began(self, plan: Plan) -> None:
        """The plan has the log that the store has room for."""
        self._planned = plan

    @property
    def plan(self) -> Plan:
        """The plan in force: with what was added beside it where nobody gave a budget."""
        arena = self._resources.units.arena
        return self._planned.with_added(arena.added, arena.added_bytes)

    def step_ended(self, began: float) -> None:
        """A step was committed, whose `step()` began then."""
        self._step_seconds += time.perf_counter() - began
        self.meter.step_ended()
        if self._planned.log_steps and not self._told_of_log:
            self._tell_of_log()

    def _tell_of_log(self) -> None:
        """Say once that the log did not take what it is for."""
        unlogged = self._resources.engine.counters()["unlogged"]
        if unlogged:
            self._told_of_log = True
            _log.warning(
                "%d gradients found no room in the log of %d steps: the held entries were written whole, as they are "
                "where that happens again; report() counts them",
                unlogged,
                self._planned.log_steps,
            )

    def told(self) -> list[int]:
        """What a rank tells the others of itself: the peak of host memory, bytes read and written."""
        store = _Counters.of(self._resources).since(self._before).store
        return [sum(owner.peak for owner in self._owners().values()), store["read_bytes"], store["written_bytes"]]

    def hear(self, told: Sequence[Sequence[int]]) -> None:
        """Remember what all ranks have told, so that no report has to ask them."""
        peak, read, written = map(sum, zip(*told, strict=True))
        self._all_ranks = AllRanks(len(told), peak, read, written)

    def report(self, trained: Collection[str]) -> Report:
        """What was measured so far; `trained` are the names that the optimizer owns."""
        return self._last or self._taken(trained)

    def close(self, trained: Collection[str]) -> None:
        """Take a report that can be asked for afterwards, too."""
        self._last = self._taken(trained)

    def _taken(self, trained: Collection[str]) -> Report:
        counted = _Counters.of(self._resources).since(self._before)
        read, written = self._traffic(counted)
        return Report(
            owners=self._owners(),
            budget=self.plan.budget,
            object_bytes=self.plan.object_bytes,
            read=read,
            written=written,
            held=counted.store["held_bytes"],
            log_steps=self.plan.log_steps,
            log_bytes=self.plan.log_bytes,
            log_wanted=self.plan.log_wanted,
            unlogged=counted.engine["unlogged"],
            seconds={
                "wall": counted.moment,
                "waiting for units": counted.store["wait_seconds"] + self._resources.units.wait_seconds,
                "handing on gradients": self.meter.handing_seconds,
                "step()": self._step_seconds,
                **{f"update, {stage}": taken for stage, taken in counted.engine["seconds"].items()},
            },
            steps=self._position.made,
            units=dict(self._residency.units.counters),
            in_memory=self._in_memory(trained),
            samples=tuple(self.meter.samples),
            ranks=self._all_ranks,
            **self._on_device(),
        )

    def _traffic(self, counted: _Counters) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes read and written, by kind."""
        engine, store = counted.engine, counted.store
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
        written["first values"] = self._before.store["written_bytes"]
        activations = self._resources.activations
        if activations is not None:
            read["activations"] = activations.counters["read"]
            written["activations"] = activations.counters["written"]
        return read, written

    def _owners(self) -> dict[str, Owner]:
        resources = self._resources
        info, counters = resources.store.info(), resources.engine.counters()
        # The engine's memory has the room for whole parameters in it, too.
        staging, whole = resources.engine.staging_bytes, self.plan.whole_bytes
        held = {
            **resources.units.host,
            "update staging": max(0, staging - whole),
            "catalog": info["buffer_bytes"],
            "index": info["index_bytes"],
            "unaligned I/O": info["copy_bytes"],
            "whole parameters": min(staging, whole),
            "held entries": 0 if resources.closed else self.plan.host.get("held entries", 0),
            "activations": 0 if resources.activations is None else resources.activations.host_bytes,
        }
        always = (*resources.units.host, "update staging", "catalog", "index")
        owners = {name: Owner(nbytes, nbytes) for name, nbytes in held.items() if nbytes or name in always}
        if "held gradients" in self.plan.host:
            # Where all gradients are kept anyway, these are among them.
            owners["held gradients"] = Owner(counters["waiting"], counters["waiting_peak"])
        if not self.plan.device:
            owners["gradients"] = self._gradients()
        return owners

    def _gradients(self) -> Owner:
        """Those that wait for their update, where they were made."""
        now = self.meter.gradients
        queued = int(self._resources.engine.counters()["queued_peak"])
        return Owner(now, max(now, queued, self.meter.gradients_peak))

    def _on_device(self) -> dict[str, Any]:
        """Memory of the device, where that is not the host."""
        units = self._resources.units
        if units.device is None:
            return {}
        reserved = int(units.arena.stats()["reserved"])
        return {
            "device": {"units": Owner(reserved, reserved), "gradients": self._gradients()},
            "device_budget": self.plan.device_budget,
            "device_torch": Owner(*units.device.allocated()),
            "device_copies": units.unregistered,
        }

    def _in_memory(self, trained: Collection[str]) -> TorchBytes:
        """Values, gradients and state as torch holds them: a compact master counts whole."""
        values = state = gradients = 0
        for entry in self._resources.store.each_entry():
            if entry["buffer"]:
                continue
            nbytes = math.prod(entry["shape"]) * _itemsize(entry["dtype"])
            values += nbytes
            if entry["name"] in trained:
                gradients += nbytes
            for name, dtype, shape in entry["state"]:
                state += math.prod(shape) * (4 if name == "rest" else _itemsize(dtype))
        return TorchBytes(values, state, gradients)


def _itemsize(dtype: str) -> int:
    found: torch.dtype = getattr(torch, dtype)
    return found.itemsize


def _since(now: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """What was counted since then."""
    found: dict[str, Any] = {}
    for name, value in now.items():
        before = then.get(name, 0)
        found[name] = _since(value, before or {}) if isinstance(value, dict) else value - before
    return found
