"""Defines `Plan`, which has all numbers of a planned run, and formats a plan as a table."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from memascend.plan.units import Unit


# When the updates of a step run. "fused": each update runs when its gradient appears. The other ways are for gradients
# that are kept until step(), for example because of clipping. "at once": in step(). "next forward": in the forward of
# the next step. "next backward": in the backward of the next step; the forward of the next step computes the new values
# without writing them. "early": each update runs when its gradient is complete, which is valid only if no gradient is
# clipped or changed.
Way = Literal["fused", "at once", "next forward", "next backward", "early"]


@dataclass(frozen=True)
class Traffic:
    """The bytes that a step reads and writes.

    `make_plan` computes them for updates that run "fused" or "at once"; `by` converts them for other ways.
    """

    read: dict[str, int]  # bytes by kind
    written: dict[str, int]  # bytes by kind
    ram_tier: float = 0.0  # the share of trained values in the RAM tier, which `step()` updates
    # Two numbers: the bytes of values that a forward need not read because deferred updates compute these values, and
    # the bytes that a backward need not read, too, if the way is "next backward". None: updates are not deferred, or
    # `by` has subtracted these bytes.
    spared: tuple[int, int] | None = None

    def by(self, way: Way, *, evicted: bool) -> Traffic:
        """Returns the traffic of a step whose updates run as `way` says.

        `evicted` is True if a unit may be evicted before its update. An early update then reads the values again.
        """
        if self.spared is None or way in ("fused", "at once"):
            return self
        read, (forward, backward) = dict(self.read), self.spared
        update = sum(read.get(kind, 0) for kind in ("values, update", "state", "gradients"))
        if way == "early":
            # An early update does not read its gradient from storage, since the gradient is still in memory. The
            # gradient is written to storage all the same.
            read["gradients"] = 0
            read["values, update"] = read.get("values, update", 0) if evicted else 0
        else:
            read["values, forward"] = max(0, read.get("values, forward", 0) - forward)
        if way == "next backward":
            read["values, backward"] = max(0, read.get("values, backward", 0) - backward)
            read[LAST_UPDATE] = update
        return replace(self, read={kind: nbytes for kind, nbytes in read.items() if nbytes}, spared=None)

    def repeated(self, times: int) -> Traffic:
        """Returns the traffic of a step with `times` more micro-batches, which run one after the other.

        Each further micro-batch reads the values again. If gradients are written to storage, each further micro-batch
        also reads the sums of the gradients, and writes the new sums.
        """
        read = {kind: nbytes * (1 + times * (kind in _OF_BACKWARDS)) for kind, nbytes in self.read.items()}
        sums = times * self.written.get("gradients", 0)
        kind = {"sums of gradients": sums} if sums else {}
        return replace(self, read={**read, **kind}, written={**self.written, **kind})

    @property
    def total(self) -> int:
        """All bytes, read and written."""
        return sum(self.read.values()) + sum(self.written.values())


# The kinds of bytes that each micro-batch of a step reads.
_OF_BACKWARDS = frozenset({"values, forward", "values, backward"})
# The kind of bytes that the forward reads for the way "next backward". From these bytes, the forward computes the
# values that the last step's updates will write in the backward.
LAST_UPDATE = "last step's update, forward"


def with_log(written: Mapping[str, int], logged: tuple[int, int, int], steps: int, before: int = 0) -> dict[str, int]:
    """Returns the bytes that a step writes with a gradient log of `steps` steps; zero steps mean no log.

    `written` has the bytes that a step writes with a log of `before` steps. `logged` has the bytes of the values, the
    state and the gradients of the logged records.
    """
    found = dict(written)
    values, state, gradients = logged
    for kind, nbytes in (("values", values), ("state", state)):
        # With a log of `steps` steps, a step writes 1/`steps` of the logged records whole. Without a log, a step writes
        # all these records whole.
        found[kind] = found.get(kind, 0) + nbytes // (steps or 1) - nbytes // (before or 1)
    found["log"] = found.get("log", 0) + gradients * (bool(steps) - bool(before))
    return found


# If the window is smaller than this number of units, a unit may be evicted before its update is done.
RESIDENT_WINDOW = 2
# Bytes of Python and torch objects for each parameter: module hooks, placeholder, record, index of the store, gradient
# and autograd's nodes. After three steps of Qwen2 models with 24 and 48 blocks, the objects of a parameter took 5 to
# 9.5 KiB.
OBJECT_BYTES = 10 << 10


@dataclass(frozen=True)
class MemorySplit:
    """One way to divide memory among its owners."""

    # The number of consecutive units in memory at once. With 1, a unit is read when it is needed. With 2, a unit is
    # read while the previous unit computes.
    window: int
    chunks: int  # the number of chunks through which optimizer state streams during updates
    queue_bytes: int  # bytes of gradients that may wait for their update
    classes: dict[int, int]  # the slots of the arena for units, {bytes: count}
    host: dict[str, int]  # bytes of host memory by owner
    device: dict[str, int]  # bytes of the device's memory by owner; empty if the host computes
    # The number of further groups of chunks for checkpointed activations. Each group is allocated when it is needed.
    activation_groups: int = 0
    # The part of host["whole parameters"] into which the next parameter is read, or from which the previous parameter
    # is written, while a parameter is updated whole. 0: no parameter is read or written during this update.
    whole_next_bytes: int = 0

    def with_next(self, nbytes: int) -> MemorySplit:
        """Returns the split with `nbytes` of memory for reading the next whole parameter."""
        host = {**self.host, "whole parameters": self.whole_bytes + nbytes - self.whole_next_bytes}
        return replace(self, host=host, whole_next_bytes=nbytes)

    def with_activations(self, groups: int, group_bytes: int) -> MemorySplit:
        """Returns the split with `groups` further groups of chunks for activations, each of `group_bytes`."""
        more = (groups - self.activation_groups) * group_bytes
        if not more:
            return self
        host = {**self.host, "activations": self.host["activations"] + more}
        return replace(self, host=host, activation_groups=groups)

    @property
    def whole_bytes(self) -> int:
        """Bytes of host memory for updates of whole parameters, and for state that is not cut into chunks."""
        return self.host["whole parameters"]

    @property
    def host_peak(self) -> int:
        """The sum of the host memory of all owners, in bytes."""
        return sum(self.host.values())

    @property
    def device_peak(self) -> int:
        """The sum of the device's memory of all owners, in bytes."""
        return sum(self.device.values())

    @property
    def units_peak(self) -> int:
        """`device_peak` if a device computes, else `host_peak`: the memory that units share with other owners."""
        return self.device_peak if self.device else self.host_peak


@dataclass(frozen=True, kw_only=True)
class Plan(MemorySplit):
    """All numbers that are decided before a run. `str()` formats them as a table, and `to_dict()` returns them."""

    units: tuple[Unit, ...]  # in the order of the forward
    gradients: str  # the value of `gradients=`, or "ssd" instead of "auto" if `Options.keeps`
    # The names of the units that a step reads at most once. Trained units stay cached from the forward to the backward,
    # and frozen units stay cached from step to step.
    resident: frozenset[str]
    # The names of the records in the RAM tier. Their values and state are read once and stay in host memory. Their
    # gradients wait in host memory for `step()`.
    ram_tier: tuple[str, ...]
    ram_tier_units: frozenset[str]  # the names of the units whose values are all in the RAM tier
    budget: int  # the limit of host memory for this run
    smallest: int  # the smallest budget that works
    comfortable: int  # the smallest budget that keeps disk and compute busy
    ample: int  # the bytes of `comfortable` and of slots for all units
    all_in_ram: int  # the budget that keeps in RAM all records that may be in the RAM tier
    # These four budgets are for the device's memory: the limit, the smallest, `comfortable` and `ample`. Each is 0 if
    # the host computes.
    device_budget: int
    device_smallest: int
    device_comfortable: int
    device_ample: int
    device_savable_bytes: int  # bytes of reads that a step would save if the budget were `device_ample`
    disk_bytes: int  # bytes of the store, with both slots of each extent
    read_bytes: dict[str, int]  # bytes that a step reads, by kind
    written_bytes: dict[str, int]  # bytes that a step writes, by kind
    ram_tier_part: float  # the share of trained values in the RAM tier
    without: Traffic  # a step's traffic with the budget `comfortable` and no RAM tier
    larger: dict[int, Traffic]  # for each of some larger budgets, up to `all_in_ram`: a step's traffic
    # `logged` has the names of the records in the RAM tier for which a step writes the gradients to the log, instead of
    # values and state, if `log_steps` is not 0. `logged_bytes` has the bytes of these records' values, state and
    # gradients.
    logged: tuple[str, ...] = ()
    logged_bytes: tuple[int, int, int] = (0, 0, 0)
    # The number of steps in the gradient log. Each logged record is written whole once in this number of steps. 0:
    # there is no log, and each step writes the records whole.
    log_steps: int = 0
    log_bytes: int = 0  # bytes of the log, behind the store
    # Bytes of the second places for gradients, which are behind the store. Deferred updates need these places.
    places_bytes: int = 0
    log_wanted: int = 0  # the number of steps that the log would have with enough disk space
    spared: tuple[int, int] | None = None  # `Traffic.spared` of a step's traffic

    @property
    def saved_bytes(self) -> int:
        """How many bytes fewer a step moves than with the budget `comfortable` and no RAM tier; at least 0."""
        return max(0, self.without.total - self.moved_bytes)

    @property
    def object_bytes(self) -> int:
        """Estimated bytes of Python's and torch's objects for all parameters; the budget does not count them."""
        return OBJECT_BYTES * sum(len(unit.parameters) for unit in self.units)

    @property
    def storage_bytes(self) -> int:
        """Bytes of the store, of the second places for gradients behind the store, and of the log."""
        return self.disk_bytes + self.places_bytes + self.log_bytes

    @property
    def moved_bytes(self) -> int:
        """All bytes that a step reads and writes."""
        return sum(self.read_bytes.values()) + sum(self.written_bytes.values())

    def moving(self, traffic: Traffic) -> Plan:
        """Returns the plan with `traffic` as the traffic of a step."""
        return replace(
            self,
            read_bytes=traffic.read,
            written_bytes=traffic.written,
            ram_tier_part=traffic.ram_tier,
            spared=traffic.spared,
        )

    def by(self, way: Way) -> Plan:
        """Returns the plan for steps whose updates run as `way` says. Changes `without` and `larger`, too."""
        return self._with(lambda traffic: traffic.by(way, evicted=self.window < RESIDENT_WINDOW))

    def repeated(self, times: int) -> Plan:
        """Returns the plan for steps with `times` more micro-batches. Changes `without` and `larger`, too.

        Call `repeated` before `by`, because the traffic that `by` computes cannot be repeated.
        """
        return self._with(lambda traffic: traffic.repeated(times))

    def _with(self, of: Callable[[Traffic], Traffic]) -> Plan:
        now = Traffic(self.read_bytes, self.written_bytes, self.ram_tier_part, self.spared)
        larger = {nbytes: of(traffic) for nbytes, traffic in self.larger.items()}
        return replace(self.moving(of(now)), without=of(self.without), larger=larger)

    def larger_budget(self, nbytes: int) -> int:
        """Returns a larger budget for a run that needs more slots at once than planned.

        The returned budget has memory for all units. If the present budget already has this memory, the returned budget
        is `nbytes` larger than the present budget.
        """
        now, most = (self.device_budget, self.device_ample) if self.device else (self.budget, self.all_in_ram)
        return most if most > now else now + nbytes

    def with_added(self, slots: Mapping[int, int], nbytes: int) -> Plan:
        """Returns the plan with the further slots `slots`, {bytes: count}, and a budget larger by their `nbytes`."""
        if not slots:
            return self
        classes = {bound: count + slots.get(bound, 0) for bound, count in self.classes.items()}
        if self.device:
            device = {**self.device, "units": self.device["units"] + nbytes}
            return replace(self, classes=classes, device=device, device_budget=self.device_budget + nbytes)
        host = {**self.host, "units": self.host["units"] + nbytes}
        return replace(self, classes=classes, host=host, budget=self.budget + nbytes)

    def logging(self, steps: int, nbytes: int) -> Plan:
        """Returns the plan with a gradient log of `steps` steps. The log takes `nbytes` of storage."""
        if steps == self.log_steps:
            return self
        written = with_log(self.written_bytes, self.logged_bytes, steps, self.log_steps)
        return replace(self, written_bytes=written, log_steps=steps, log_bytes=nbytes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan's fields, and some sums of them, as JSON values."""
        plain = asdict(self)
        for name in ("host_peak", "device_peak", "whole_bytes", "saved_bytes"):
            plain[name] = getattr(self, name)
        plain["classes"] = [{"bytes": nbytes, "count": count} for nbytes, count in sorted(self.classes.items())]
        plain["ram_tier_units"] = sorted(self.ram_tier_units)
        plain["larger"] = [
            {"budget": nbytes, "moved_bytes": moved.total, "ram_tier_part": moved.ram_tier}
            for nbytes, moved in self.larger.items()
        ]
        plain["without"] = {"moved_bytes": self.without.total}
        plain["resident"] = [unit.name for unit in self.units if unit.name in self.resident]
        return plain

    def __str__(self) -> str:
        return _table(self)


def _table(plan: Plan) -> str:
    elements = sum(unit.elements for unit in plan.units)
    lines = [f"Units, which are read and evicted together: {len(plan.units)}, with {elements:,} parameters"]
    lines += _rows(_unit_rows(plan))
    lines += ["", f"Host memory: {bytes_shown(plan.host_peak)} of a budget of {bytes_shown(plan.budget)}"]
    lines += _rows([(owner, bytes_shown(nbytes), _note(plan, owner)) for owner, nbytes in plan.host.items() if nbytes])
    lines.append(f"  not part of the budget: Python's objects, about {bytes_shown(plan.object_bytes)}")
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
    places = f"; second places for gradients: {bytes_shown(plan.places_bytes)}" if plan.places_bytes else ""
    if plan.log_steps:
        return f"{places}; a gradient log of {plan.log_steps} steps{less}: {bytes_shown(plan.log_bytes)}"
    none = "; no disk space for a gradient log, so parameters kept in RAM are written whole each step" if less else ""
    return f"{places}{none}"


def _unit_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Returns one row for each group of similar units, in the order of the groups' first units.

    All units of a group have the same `_likeness`. The names of these units differ only in numbers, or these units are
    neighbours.
    """
    groups: dict[object, list[Unit]] = {}
    last: object = None
    for unit in plan.units:
        likeness = _likeness(unit)
        key: object = (re.sub(r"\d+", "*", unit.name), likeness)
        # Neighbouring units with the same `_likeness` share a row even if their names differ, for example the
        # projections of an encoder.
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
    """Returns the properties that units of one row have in common."""
    return unit.nbytes, unit.pinned, len(unit.parameters)


def _note(plan: Plan, owner: str) -> str:
    """Returns the last column of the table's row for an owner of memory."""
    if owner == "units":
        slots = ", ".join(f"{count} x {bytes_shown(nbytes)}" for nbytes, count in sorted(plan.classes.items()))
        return f"{plan.window} in use at once; slots: {slots}"
    stay = "pinned chunks, allocated when needed; further activations go to storage"
    through = "chunks through which activations go to storage and come back"
    return {
        "update staging": f"{plan.chunks} chunks through which state streams to its update",
        "catalog": "the description of the store",
        "index": "where each extent lies, and its checksum",
        "gradients": "all of them" if plan.gradients == "ram" else "that wait for their update",
        "activations": stay if plan.activation_groups else through,
        "whole parameters": "one is updated while the next is read" if plan.whole_next_bytes else "",
        "records in RAM": f"{len(plan.ram_tier)} parameters with their state: read once",
        "gradients in RAM": "gradients of these parameters, until step()",
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
                f'{option}="{size_option(comfortable)}" would keep disk and compute busy; '
                f'"{size_option(smallest)}" is the smallest that works'
            )
    saved = f"this budget saves {bytes_shown(plan.saved_bytes)} a step; " if plan.saved_bytes else ""
    if plan.device_savable_bytes:
        ample, saves = plan.device_ample, bytes_shown(plan.device_savable_bytes)
        return f'{saved}device_memory="{size_option(ample)}" would save {saves} of reads a step'
    if not plan.larger:
        return f"{saved}a larger budget would save nothing"
    lines = [
        f'  host_memory="{size_option(nbytes)}": {bytes_shown(moved.total)}' for nbytes, moved in plan.larger.items()
    ]
    return "\n".join([f"{saved}a step moves {bytes_shown(plan.moved_bytes)}; with more memory it would move", *lines])


def _rows(rows: Sequence[tuple[str, ...]]) -> list[str]:
    names = max((len(row[0]) for row in rows), default=0)
    sizes = max((len(row[1]) for row in rows), default=0)
    return [f"  {row[0]:<{names}}  {row[1]:>{sizes}}  {row[2]}".rstrip() for row in rows]
