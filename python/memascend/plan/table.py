"""Defines the figures of a plan, and prints them as a table."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.text import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.plan.units import Unit


@dataclass(frozen=True)
class Traffic:
    """The bytes that a step moves."""

    read: dict[str, int]  # by kind
    written: dict[str, int]  # by kind
    held: float = 0.0  # the part of trained values in the RAM tier: updated in `step()`, and not as they stream

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.read.values()) + sum(self.written.values())


def with_log(
    written: Mapping[str, int], logged: tuple[int, int, int], steps: int, *, back: bool = False
) -> dict[str, int]:
    """The writes of a step with so many bytes of values, state and gradients in a log; `back` takes the log out."""
    found = dict(written)
    if not steps:
        return found
    values, state, gradients = logged
    sign = -1 if back else 1
    for kind, nbytes in (("values", values), ("state", state)):
        # Each step writes one part of them whole.
        found[kind] = found.get(kind, 0) - sign * (nbytes - nbytes // steps)
    found["log"] = found.get("log", 0) + sign * gradients
    return found


# Measured at rest after three steps of Qwen2 models of 24 and 48 blocks: 5 to 9.5 KiB for each parameter. They are the
# module's hooks, the placeholder, the record of the store and its index, the gradient's record and autograd's nodes.
OBJECT_BYTES = 10 << 10


@dataclass(frozen=True)
class Plan:
    """The decisions before a run. `str()` is a table.

    Attributes:
        units: in the order of the forward.
        order: their names as a forward uses them, tied ones more than once, pinned ones not at all.
        classes: of the arena that holds them, as {bytes: count}.
        window: consecutive units that may be in memory at once. 1: the next unit is read when it is needed; 2: while
            the previous one computes.
        segment: units that a checkpoint segment has in memory together.
        chunks: staging chunks of the update.
        activation_groups: groups of chunks for checkpointed activations, each allocated when it is needed.
        gradients: the option `gradients`.
        queue_bytes: of gradients that may wait for their update.
        resident: units that a step reads at most once, as they stay from the forward to the backward; frozen ones from
            step to step.
        held: the names of the records in the RAM tier. Their values and state stay in host memory and are read once;
            their gradients wait there for `step()`.
        held_units: the units whose values are all in the RAM tier: modules compute with them in place.
        whole_bytes: for optimizers that update whole parameters.
        whole_next_bytes: of these, for the next one, which is read while one is updated; 0: one after the other.
        host: host memory by owner; its sum `host_peak` is within the budget.
        device: memory of the device by owner, where the host does not compute; its sum is `device_peak`.
        device_budget: the limit in force there; 0 where the host computes.
        device_smallest: the smallest that works there.
        device_comfortable: the smallest there that keeps disk and compute busy.
        device_ample: the budget there above which more memory saves nothing.
        budget: the limit in force.
        smallest: the smallest budget that works.
        comfortable: the smallest budget that keeps disk and compute busy.
        ample: the comfortable budget with a slot for every unit; such a budget fills the RAM tier first.
        all_held: the budget that keeps all records in RAM, above which more memory saves nothing.
        disk_bytes: the store, with both slots.
        logged: the names of the records in the RAM tier whose gradients go to the log, instead of their values and
            state each step.
        logged_bytes: their values, state and gradients.
        log_steps: steps of gradients in the log. Each of these records is written whole once in as many steps; 0: in
            each step.
        log_bytes: the space of the log behind the store.
        log_wanted: the steps that the log would have with enough space.
        read_bytes: per step, by kind.
        written_bytes: per step, by kind.
        held_part: the part of trained values in the RAM tier.
        saved_bytes: bytes of a step that this budget saves, compared with the comfortable one.
        without: bytes that a step moves without a RAM tier.
        larger: bytes that a step moves, by larger budgets, up to the one that keeps all records in RAM.
        device_savable_bytes: reads of a step that the device's ample budget would save in addition.
    """

    units: tuple[Unit, ...]
    order: tuple[str, ...]
    classes: dict[int, int]
    window: int
    segment: int
    chunks: int
    activation_groups: int
    gradients: str
    queue_bytes: int
    resident: frozenset[str]
    held: tuple[str, ...]
    held_units: frozenset[str]
    whole_bytes: int
    whole_next_bytes: int
    host: dict[str, int]
    host_peak: int
    device: dict[str, int]
    device_peak: int
    device_budget: int
    device_smallest: int
    device_comfortable: int
    device_ample: int
    budget: int
    smallest: int
    comfortable: int
    ample: int
    all_held: int
    disk_bytes: int
    read_bytes: dict[str, int]
    written_bytes: dict[str, int]
    held_part: float
    saved_bytes: int
    without: Traffic
    larger: dict[int, Traffic]
    device_savable_bytes: int
    logged: tuple[str, ...] = ()
    logged_bytes: tuple[int, int, int] = (0, 0, 0)
    log_steps: int = 0
    log_bytes: int = 0
    log_wanted: int = 0

    @property
    def object_bytes(self) -> int:
        """About the bytes of Python's and torch's objects for each parameter, which are outside of the budget."""
        return OBJECT_BYTES * sum(len(unit.parameters) for unit in self.units)

    @property
    def storage_bytes(self) -> int:
        """The store, and the log behind it."""
        return self.disk_bytes + self.log_bytes

    @property
    def moved_bytes(self) -> int:
        """All bytes that a step reads and writes."""
        return sum(self.read_bytes.values()) + sum(self.written_bytes.values())

    def moving(self, traffic: Traffic) -> Plan:
        """The plan with other traffic."""
        return replace(self, read_bytes=traffic.read, written_bytes=traffic.written, held_part=traffic.held)

    def larger_budget(self, nbytes: int) -> int:
        """A budget that works where the model binds more units at once than planned: with memory for all units.

        A plan that has that already gets `nbytes` more, for memory that user code keeps beyond the units.
        """
        now, most = (self.device_budget, self.device_ample) if self.device else (self.budget, self.all_held)
        return most if most > now else now + nbytes

    def with_added(self, slots: Mapping[int, int], nbytes: int) -> Plan:
        """The plan with more slots for units, {bytes: count}, of `nbytes` together."""
        if not slots:
            return self
        where, budget = ("device", "device_budget") if self.device else ("host", "budget")
        owners, peak = getattr(self, where), f"{where}_peak"
        changed: dict[str, Any] = {
            "classes": {bound: count + slots.get(bound, 0) for bound, count in self.classes.items()},
            where: {**owners, "units": owners["units"] + nbytes},
            **{total: getattr(self, total) + nbytes for total in (peak, budget)},
        }
        return replace(self, **changed)

    def logging(self, steps: int, nbytes: int) -> Plan:
        """The plan with a log of another number of steps."""
        if steps == self.log_steps:
            return self
        whole = with_log(self.written_bytes, self.logged_bytes, self.log_steps, back=True)
        written = with_log(whole, self.logged_bytes, steps)
        return replace(self, written_bytes=written, log_steps=steps, log_bytes=nbytes)

    def to_dict(self) -> dict[str, Any]:
        """All figures as JSON values."""
        plain = asdict(self)
        plain["classes"] = [{"bytes": nbytes, "count": count} for nbytes, count in sorted(self.classes.items())]
        plain["held_units"] = sorted(self.held_units)
        plain["larger"] = [
            {"budget": nbytes, "moved_bytes": moved.total, "held_part": moved.held}
            for nbytes, moved in self.larger.items()
        ]
        plain["without"] = {"moved_bytes": self.without.total}
        plain["resident"] = [unit.name for unit in self.units if unit.name in self.resident]
        return plain

    def __str__(self) -> str:
        return _table(self)


def _table(plan: Plan) -> str:
    """The decisions of a plan, and their costs."""
    elements = sum(unit.elements for unit in plan.units)
    lines = [f"Units, which are read and evicted together: {len(plan.units)}, with {elements:,} parameters"]
    lines += _rows(_unit_rows(plan))
    lines += ["", f"Host memory: {bytes_shown(plan.host_peak)} of a budget of {bytes_shown(plan.budget)}"]
    lines += _rows([(owner, bytes_shown(nbytes), _note(plan, owner)) for owner, nbytes in plan.host.items() if nbytes])
    lines.append(f"  beside it Python's objects: about {bytes_shown(plan.object_bytes)}")
    if plan.device:
        lines += [
            "",
            f"Device memory: {bytes_shown(plan.device_peak)} of a budget of {bytes_shown(plan.device_budget)}",
        ]
        lines += _rows([(owner, bytes_shown(nbytes), _note(plan, owner)) for owner, nbytes in plan.device.items()])
    lines += ["", f"Storage: {bytes_shown(plan.disk_bytes)}{_log_shown(plan)}"]
    lines += ["", "Each step moves" + (", in bytes for each parameter" if elements else "")]
    rows = []
    for verb, kinds in (("read", plan.read_bytes), ("written", plan.written_bytes)):
        for kind, nbytes in (*kinds.items(), ("in all", sum(kinds.values()))):
            rows.append((f"{verb}: {kind}", bytes_shown(nbytes), f"{nbytes / elements:.2f}" if elements else ""))
    lines += [*_rows(rows), "", _advice(plan)]
    return "\n".join(lines)


def _log_shown(plan: Plan) -> str:
    less = f" (no disk space for {plan.log_wanted})" if plan.log_steps < plan.log_wanted else ""
    if plan.log_steps:
        return f"; behind it a gradient log of {plan.log_steps} steps{less}: {bytes_shown(plan.log_bytes)}"
    return "; no disk space for a gradient log, so parameters kept in RAM are written whole each step" if less else ""


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    """One row for alike units, in the order of the first: units with one name but for numbers, or neighbours."""
    groups: dict[object, list[Unit]] = {}
    last: object = None
    for unit in plan.units:
        likeness = _likeness(unit)
        key: object = (re.sub(r"\d+", "*", unit.name), likeness)
        # Alike neighbours with other names (an encoder's projections) are in the same row.
        if key not in groups and last is not None and likeness == _likeness(groups[last][-1]):
            key = last
        groups.setdefault(key, []).append(unit)
        last = key
    rows: list[tuple[str, ...]] = []
    for group in groups.values():
        first = group[0]
        name = first.name if len(group) == 1 else f"{first.name} .. {group[-1].name} ({len(group)})"
        stays = sum(member.name in plan.resident for member in group)
        what = (
            "always in memory (pinned)" if first.pinned else f"{stays} stay from forward to backward" if stays else ""
        )
        rows.append((name, bytes_shown(first.nbytes), what))
    return rows


def _likeness(unit: Unit) -> tuple[int, bool, int]:
    return unit.nbytes, unit.pinned, len(unit.parameters)


def _note(plan: Plan, owner: str) -> str:
    if owner == "units":
        slots = ", ".join(f"{count} x {bytes_shown(nbytes)}" for nbytes, count in sorted(plan.classes.items()))
        return f"{plan.window} in use at once; slots: {slots}"
    stay = "pinned, taken as they are needed; activations beyond them go to storage"
    through = "chunks through which they go to storage and come back"
    return {
        "update staging": f"{plan.chunks} chunks through which state streams to its update",
        "catalog": "the description of the store",
        "index": "where each extent lies, and its checksum",
        "gradients": "all of them" if plan.gradients == "ram" else "that wait for their update",
        "activations": stay if plan.activation_groups else through,
        "whole parameters": "one is updated while the next is read" if plan.whole_next_bytes else "",
        "held entries": f"{len(plan.held)} parameters with their state: read once",
        "held gradients": "of those, until step()",
        "unit staging": "pinned, on the way to the device",
        "gradient windows": "pinned, on the way from the device",
    }.get(owner, "")


def _advice(plan: Plan) -> str:
    for option, budget, smallest, comfortable in (
        ("host_memory", plan.budget, plan.smallest, plan.comfortable),
        ("device_memory", plan.device_budget, plan.device_smallest, plan.device_comfortable),
    ):
        if budget < comfortable:
            return (
                f"{option}={comfortable} ({bytes_shown(comfortable)}) would keep disk and compute busy; "
                f"{smallest} is the smallest that works"
            )
    saved = f"the budget saves {bytes_shown(plan.saved_bytes)} of that; " if plan.saved_bytes else ""
    if plan.device_savable_bytes:
        ample, saves = plan.device_ample, bytes_shown(plan.device_savable_bytes)
        return f"{saved}device_memory={ample} ({bytes_shown(ample)}) would save {saves} of reads a step"
    if not plan.larger:
        return f"{saved}a larger budget would save nothing"
    lines = [
        f"  host_memory={nbytes} ({bytes_shown(nbytes)}): {bytes_shown(moved.total)}"
        for nbytes, moved in plan.larger.items()
    ]
    return "\n".join([f"{saved}a step moves {bytes_shown(plan.moved_bytes)}, and would move with", *lines])


def _rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    names = max((len(row[0]) for row in rows), default=0)
    sizes = max((len(row[1]) for row in rows), default=0)
    return [f"  {row[0]:<{names}}  {row[1]:>{sizes}}  {row[2]}".rstrip() for row in rows]
