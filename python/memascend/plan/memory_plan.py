"""Divides a run's memory budget among its uses, and computes the bytes that a step then reads and writes.

[Note: order of the budget] The working minimum is slots for one unit at a time, two chunks for updates, the largest
gradient (all gradients if gradients="ram"), and buffers of fixed size. A larger budget adds, in this order: two more
chunks, slots for a second unit, a longer queue of gradients, more chunks, memory for reading the next whole parameter,
further chunks for activations, the RAM tier, and last more slots. If a device computes, its slots and gradients have a
separate budget of device memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from memascend import memory
from memascend.errors import BudgetError, ConfigError
from memascend.memory import whole_pages
from memascend.plan.table import RESIDENT_WINDOW, MemorySplit, Plan, Traffic, with_log
from memascend.plan.units import count_reads, forward_order, list_windows
from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from memascend.plan.units import Unit
    from memascend.storage import Sizes


# Heap bytes of an arena besides its slots: for the arena itself, for each class (all slots of one size), for each slot.
_ARENA_BYTES, _CLASS_BYTES, SLOT_BYTES = 16_416, 112, 5


def arena_classes(windows: Sequence[Sequence[int]]) -> dict[int, int]:
    """Returns the slots, {bytes: count}, of the smallest arena into which each of `windows` fits alone.

    A window lists the sizes, in bytes, of leases that must be in memory at the same time. Two sizes that never occur in
    one window, for example the sizes of an embedding and of an LM head, may share slots of the larger size. A lease
    gets a slot of the smallest class that is large enough, so the leases of a window fit in any order.
    """
    # Equal windows are merged. A model of a hundred equal blocks has only a few different windows.
    contents = {tuple(sorted(window)) for window in windows}
    sizes = sorted({size for content in contents for size in content})
    if sizes and sizes[0] < 1:
        raise ConfigError(
            f"a unit must have at least 1 byte, not {sizes[0]}: remove parameters without elements from the model"
        )
    # best[count] is the cheapest choice of classes for the `count` smallest sizes. It has three numbers: the bytes of
    # all slots, the number of sizes that use a smaller class than the largest class, and the number of slots of the
    # largest class.
    best = [(0, 0, 0)]
    for count in range(1, len(sizes) + 1):
        bound = sizes[count - 1]
        ends = [bisect_right(content, bound) for content in contents]
        options = []
        for first in range(count):
            begins = (bisect_left(content, sizes[first]) for content in contents)
            slots = max(end - begin for begin, end in zip(begins, ends, strict=True))
            options.append((best[first][0] + bound * slots, first, slots))
        best.append(min(options))
    classes = {}
    count = len(sizes)
    while count > 0:
        _, first, slots = best[count]
        classes[sizes[count - 1]] = slots
        count = first
    return classes


def arena_bytes(classes: Mapping[int, int]) -> int:
    """Returns the bytes of an arena with these classes, including its tables."""
    if not classes:
        return 0
    tables = _ARENA_BYTES + _CLASS_BYTES * len(classes) + SLOT_BYTES * sum(classes.values())
    return memory.layout(classes).reserved + tables


# The default number of steps in the gradient log. Each record is written whole once in this number of steps. With AdamW
# and bfloat16, a record has 12 bytes for each element, so a step writes 12/16 = 3/4 byte of records for each element. A
# log of 32 steps would save 3/8 byte of this, but would need twice the space and twice the time for a replay.
_STEPS = 16
# On a file system, a log takes at most 1/2 of the free space if the user gives no `log_steps=`.
_SHARE = 2


@dataclass(frozen=True, eq=False)
class Log:
    """The facts from which the length of the gradient log is planned."""

    names: Collection[str]  # the names of the records whose updates can be replayed
    # A function of the names of records and a number of steps, at least 1. It returns the bytes of the log.
    nbytes: Callable[[Sequence[str], int], int]
    asked: int | None = None  # the value of `log_steps=`; None: the default number of steps
    room: int | None = None  # free bytes on storage for the log; None: unknown
    shares: bool = True  # True if other files share the free space

    def wanted(self, names: Sequence[str]) -> int:
        """Returns the number of steps that a log of the records `names` would have with enough free space."""
        return (_STEPS if self.asked is None else self.asked) if names else 0

    def plan(self, names: Sequence[str]) -> tuple[int, int]:
        """Returns the number of steps in the log, as the free space limits it, and the bytes of the log.

        Returns zeros if no step fits, or if no log is wanted.
        """
        wanted = self.wanted(names)
        if not wanted:
            return 0, 0
        first = self.nbytes(names, 1)
        each = self.nbytes(names, 2) - first
        if self.room is not None:
            room = self.room // _SHARE if self.shares and self.asked is None else self.room
            wanted = min(wanted, 1 + (room - first) // each)
        return (wanted, first + (wanted - 1) * each) if wanted > 0 else (0, 0)


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """The facts about a run that `make_plan` needs to divide the run's memory."""

    units: Sequence[Unit]  # in the order of the forward
    sizes: Sizes  # the sizes of the store and its parts
    # The mode of gradients. "ram" needs memory for all gradients. The other modes need memory for the largest gradient.
    gradients: Literal["auto", "fused", "ssd", "ram"]
    gradient_bytes: Mapping[str, int]  # the bytes of each gradient, by the name of its trained parameter
    # Bytes of memory for an optimizer that updates whole parameters, and for state tensors that are not cut into
    # chunks.
    whole_bytes: int = 0
    # Further bytes of memory for an optimizer that updates whole parameters. While the optimizer updates a parameter,
    # the next parameter is read into these bytes, or the previous parameter is written from these bytes.
    whole_next_bytes: int = 0
    # The chunks, {bytes: count}, through which checkpointed activations go to storage.
    activation_chunks: Mapping[int, int] = field(default_factory=dict)
    activation_group: int = 0  # the number of chunks in a group of further chunks for activations; 0: no groups
    activation_groups: int = 0  # the number of these groups if the user gives no budget
    # If a device computes: the chunks of host memory, {bytes: count}, between storage and the device, by owner. Units
    # and gradients are then in the device's memory. None: the host computes.
    staging: Mapping[str, Mapping[int, int]] | None = None
    # Whether updates read the parameters' values from storage. "resident": only if the parameter's unit was evicted.
    # "read": always. "never": updates do not need the values, because they compute with master weights.
    update_values: Literal["resident", "read", "never"] = "resident"
    streamed: Collection[str] = ()  # the names of the parameters that are never kept in the RAM tier
    # The names of the parameters whose updates may be deferred to the next step. Only updates of gradients that stay on
    # storage until step() are deferred.
    deferrable: Collection[str] = ()
    # A function of the names of parameters. Returns the bytes by which the store grows so that updates of these
    # parameters may be deferred. None: the store does not grow.
    places: Callable[[Collection[str]], int] | None = None
    # The names of the parameters that steps do not write while the parameters are in the RAM tier, because steps are
    # not durable.
    applied: Collection[str] = ()
    # The facts about the gradient log of the RAM tier. None: steps are not durable, so there is no log.
    log: Log | None = None

    @property
    def largest_gradient(self) -> int:
        """Bytes of the largest gradient."""
        return max(self.gradient_bytes.values(), default=0)

    @property
    def all_gradients(self) -> int:
        """Bytes of all gradients."""
        return sum(self.gradient_bytes.values())

    @property
    def group_bytes(self) -> int:
        """Bytes of one group of further chunks for activations."""
        return arena_bytes(
            {nbytes: self.activation_group for nbytes in self.activation_chunks if self.activation_group}
        )

    def bytes_of(self, unit: Unit) -> int:
        """Returns the bytes of a unit's values, on storage and in a lease."""
        return self.sizes.unit_bytes.get(unit.name, unit.nbytes)

    def record_bytes(self, name: str) -> tuple[int, int]:
        """Returns the bytes of a record's values, and the bytes of the record's state."""
        return self.sizes.record_bytes.get(name, (0, 0))

    def sum_records(self, names: Iterable[str]) -> tuple[int, int]:
        """Returns the sum of the records' bytes of values, and the sum of the records' bytes of state."""
        sizes = [self.record_bytes(name) for name in names]
        return sum(values for values, _ in sizes), sum(state for _, state in sizes)


@dataclass(frozen=True)
class RamTier:
    """The records of the RAM tier. A run reads their values and state once, and keeps their gradients in memory."""

    names: tuple[str, ...] = ()  # the names of the records
    nbytes: int = 0  # bytes of values and state
    gradients: int = 0  # bytes of gradients that wait for `step()`; 0 with gradients="ram"
    # The names of the units whose values are all in the RAM tier. Modules compute with these values in place, so these
    # units need no slot.
    units: frozenset[str] = frozenset()
    # For each unit, by name, the bytes of the unit's values in the RAM tier. A step need not read these bytes.
    values: Mapping[str, int] = field(default_factory=dict)
    update: int = 0  # bytes of trained values in the RAM tier, which updates need not read from storage
    state: int = 0  # bytes of optimizer state in the RAM tier, which updates need not read from storage
    # `logged` has the names of the records whose gradients go to the gradient log, if the log has steps. `logged_bytes`
    # has the bytes of these records' values, state and gradients.
    logged: tuple[str, ...] = ()
    logged_bytes: tuple[int, int, int] = (0, 0, 0)

    @property
    def room(self) -> int:
        """Bytes of the RAM tier, including `gradients`."""
        return self.nbytes + self.gradients


_NOTHING = RamTier()


def _spread(units: Sequence[Unit], needs: Mapping[str, int], room: int) -> list[str]:
    """Returns the names in `needs` in the order in which records are chosen for the RAM tier.

    The model's first unit comes first if `room` bytes can hold it, since nothing overlaps this unit's fetch. Next come
    units at equal distances in the model, as many as `room` bytes can hold: while such a unit computes, storage reads
    the units that follow it. All other units come last. `needs` has the bytes of each record.
    """
    members = [[name for name in unit.parameters if name in needs] for unit in units]
    whole = [sum(needs[name] for name in names) for names in members]
    taken = [0] if whole and whole[0] <= room else []
    room -= sum(whole[index] for index in taken)
    others, earned = sum(whole[1:]), 0
    for index, nbytes in enumerate(whole[1:], 1):
        earned += nbytes * room
        if earned >= nbytes * others:
            earned -= nbytes * others
            taken.append(index)
    left = [index for index in range(len(units)) if index not in taken]
    return [name for index in (*taken, *left) for name in members[index]]


def choose_in_ram(run: Requirements, room: int | None) -> RamTier:
    """Chooses the records for the RAM tier, within `room` bytes. If `room` is None, chooses all possible records.

    A record in `run.streamed` is never chosen.
    """

    def waits(name: str) -> int:
        # With gradients="ram", the plan already has memory for all gradients.
        return 0 if run.gradients == "ram" else run.gradient_bytes.get(name, 0)

    needs = {
        name: sum(run.record_bytes(name)) + waits(name)
        for unit in run.units
        for name in unit.parameters
        if sum(run.record_bytes(name)) and name not in run.streamed
    }
    chosen: set[str] = set()
    left = sum(needs.values()) if room is None else room
    for name in _spread(run.units, needs, left):
        if needs[name] <= left:
            chosen.add(name)
            left -= needs[name]
    names = [name for name in needs if name in chosen]
    by_unit = {unit.name: run.sum_records(chosen.intersection(unit.parameters))[0] for unit in run.units}
    # If a device computes, modules use units in the device's memory, and never a unit in host memory.
    here = [] if run.staging is not None else run.units
    update, state = run.sum_records(name for name in names if name in run.gradient_bytes)
    logged = () if run.log is None else tuple(name for name in names if name in run.log.names)
    return RamTier(
        names=tuple(names),
        nbytes=sum(run.sum_records(names)),
        gradients=sum(map(waits, names)),
        units=frozenset(unit.name for unit in here if run.bytes_of(unit) <= by_unit[unit.name]),
        values=by_unit,
        update=update,
        state=state,
        logged=logged,
        logged_bytes=(*run.sum_records(logged), sum(run.gradient_bytes.get(name, 0) for name in logged)),
    )


@dataclass(frozen=True)
class Reads:
    """The bytes of values that a step's forward and backward read, and the units that a step reads at most once."""

    forward: int
    backward: int
    resident: frozenset[str]

    @property
    def total(self) -> int:
        """The sum of the bytes that the forward and the backward read."""
        return self.forward + self.backward


class MemoryPlanner:
    """Makes `MemorySplit`s for one run."""

    def __init__(self, run: Requirements, ram_tier: RamTier = _NOTHING) -> None:
        """Each `MemorySplit` includes the memory of `ram_tier`. Units that are whole in the RAM tier use no slot."""
        self.run = run
        self.ram_tier = ram_tier
        self.order = forward_order(run.units)
        # A queue of `queue_bytes` has room for the gradients of one block while the largest gradient's update runs.
        counts = Counter(run.bytes_of(unit) for unit in run.units if not unit.pinned)
        block = max(counts.items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]
        self.queue_bytes = min(run.largest_gradient + block, run.all_gradients)

    def smallest(self, window: int, chunks: int, queue_bytes: int) -> MemorySplit:
        """Returns the smallest split with this window, this number of chunks, and this queue."""
        windows = list_windows(self.run.units, window)
        contents = [[self.run.bytes_of(unit) for unit in each.values()] for each in windows]
        return self._split(window, chunks, queue_bytes, arena_classes(contents))

    def _split(self, window: int, chunks: int, queue_bytes: int, classes: dict[int, int]) -> MemorySplit:
        run, sizes = self.run, self.run.sizes
        if run.gradients == "ram":
            # With gradients="ram", all gradients stay in memory, so a queue needs no further memory.
            queue_bytes = run.all_gradients
        staging = arena_bytes({sizes.chunk_bytes: chunks} if sizes.chunk_bytes else {})
        if run.staging is None:
            device = {}
            host = {"units": arena_bytes(classes), "update staging": staging, "gradients": queue_bytes}
        else:
            # On the device, slots begin on pages, and the arena has no tables.
            units = sum(whole_pages(nbytes) * count for nbytes, count in classes.items())
            device = {"units": units, "gradients": queue_bytes}
            host = {owner: arena_bytes(passed) for owner, passed in run.staging.items()}
            host["update staging"] = staging
        host |= {
            "catalog": sizes.buffer_bytes,
            "index": sizes.index_bytes,
            "whole parameters": run.whole_bytes,
            "activations": arena_bytes(run.activation_chunks),
        }
        host |= _ram_tier_owners(self.ram_tier)
        return MemorySplit(window, chunks, queue_bytes, classes, host, device)

    def _by_class(self, classes: Mapping[int, int]) -> dict[int, tuple[list[Unit], int]]:
        """Returns, for each class, the units that share its slots, and the number of these slots.

        The units are in the order of the forward. Pinned units, the slots that they occupy, and units whose values are
        all in the RAM tier do not count.
        """
        bounds = sorted(classes)
        members: dict[int, list[Unit]] = {bound: [] for bound in bounds}
        left = dict(classes)

        def class_of(unit: Unit) -> int:
            return bounds[bisect_left(bounds, self.run.bytes_of(unit))]

        for unit in self.run.units:
            if unit.pinned:
                left[class_of(unit)] -= 1
        for unit in self.order:
            if unit.name not in self.ram_tier.units:
                members[class_of(unit)].append(unit)
        return {bound: (members[bound], left[bound]) for bound in bounds}

    def count_reads(self, classes: Mapping[int, int]) -> Reads:
        """Returns the reads of a step if the arena has the slots `classes`."""

        def bytes_of(unit: Unit) -> int:
            return max(0, self.run.bytes_of(unit) - self.ram_tier.values.get(unit.name, 0))

        # After a commit has changed a pinned unit, the next forward reads the unit again.
        pinned = [unit for unit in self.run.units if unit.pinned]
        forward = sum(bytes_of(unit) for unit in pinned if unit.frozen_bytes < unit.nbytes)
        backward = 0
        resident = {unit.name for unit in pinned} | self.ram_tier.units
        for members, slots in self._by_class(classes).values():
            ahead, back = count_reads(members, slots)
            for unit in {unit.name: unit for unit in members}.values():
                forward += ahead[unit.name] * bytes_of(unit)
                backward += back[unit.name] * bytes_of(unit)
                if ahead[unit.name] + back[unit.name] <= 1:
                    resident.add(unit.name)
        return Reads(forward, backward, frozenset(resident))

    def widened(self, split: MemorySplit, budget: int | None) -> MemorySplit:
        """Returns the split with more slots, if they save reads and fit into `budget`. None is no limit."""
        classes = split.classes
        options = []
        for bound, (members, slots) in self._by_class(classes).items():
            wanted = len({unit.name for unit in members}) - slots
            if wanted > 0:
                gain = self._saved(members, slots, slots + wanted) / (wanted * bound)
                options.append((gain, bound, members, slots, wanted))
        # Add slots with the largest gain per byte first; at equal gain, slots of the largest class. Slots of frozen
        # units gain most, since frozen units stay in memory from step to step.
        for _, bound, members, slots, wanted in sorted(options, key=lambda option: option[:2], reverse=True):
            each = bound + SLOT_BYTES if self.run.staging is None else whole_pages(bound)
            room = wanted if budget is None else (budget - split.units_peak) // each
            count = min(wanted, room)
            if count <= 0 or not self._saved(members, slots, slots + count):
                continue
            wider = self._with_classes(split, {**split.classes, bound: classes[bound] + count})
            # `room` ignores the alignment of slots, which may take 1 % more memory: remove slots until all slots fit.
            while budget is not None and wider.units_peak > budget and count > 0:
                count -= 1
                wider = self._with_classes(split, {**split.classes, bound: classes[bound] + count})
            split = wider
        return split

    def _with_classes(self, split: MemorySplit, classes: dict[int, int]) -> MemorySplit:
        other = self._split(split.window, split.chunks, split.queue_bytes, classes)
        other = other.with_next(split.whole_next_bytes)
        return other.with_activations(split.activation_groups, self.run.group_bytes)

    def _saved(self, members: Sequence[Unit], slots: int, more: int) -> int:
        """Returns the bytes that a step need not read if the units `members` share `more` slots instead of `slots`."""

        def total(count: int) -> int:
            ahead, back = count_reads(members, count)
            kinds = {unit.name: unit for unit in members}.values()
            return sum((ahead[unit.name] + back[unit.name]) * self.run.bytes_of(unit) for unit in kinds)

        return total(slots) - total(more)


def _ram_tier_owners(ram_tier: RamTier) -> dict[str, int]:
    owners = {"records in RAM": ram_tier.nbytes, "gradients in RAM": ram_tier.gradients}
    return {owner: nbytes for owner, nbytes in owners.items() if nbytes}


# Numbers of chunks for updates. With two chunks, the minimum, reads and arithmetic do not overlap. With four chunks,
# reads and arithmetic overlap, but the drive sometimes idles. More than twelve chunks do not make a step faster.
_CHUNKS_MIN, _CHUNKS_FEW, _CHUNKS = 2, 4, 12


def rungs(planner: MemoryPlanner) -> list[MemorySplit]:
    """Returns splits in the order that [Note: order of the budget] explains.

    The first split is the working minimum. The last split, called comfortable, keeps disk and compute busy.
    """
    run = planner.run
    comfortable = planner.smallest(2, _CHUNKS, planner.queue_bytes).with_next(run.whole_next_bytes)
    return [
        planner.smallest(1, _CHUNKS_MIN, run.largest_gradient),
        planner.smallest(1, _CHUNKS_FEW, run.largest_gradient),
        planner.smallest(2, _CHUNKS_FEW, run.largest_gradient),
        planner.smallest(2, _CHUNKS_FEW, planner.queue_bytes),
        comfortable.with_activations(run.activation_groups, run.group_bytes),
    ]


def choose(planner: MemoryPlanner, steps: Sequence[MemorySplit], budget: int, device_budget: int | None) -> MemorySplit:
    """Returns the best split within `budget` on the host and `device_budget` on the device.

    If `device_budget` is None, the host computes. `steps` is the result of `rungs`. The smallest split in `steps` must
    fit into the budgets. See [Note: order of the budget].
    """
    comfortable = steps[-1]
    limit = budget if device_budget is None else device_budget

    def fits(split: MemorySplit) -> bool:
        return split.host_peak <= budget and (device_budget is None or split.device_peak <= device_budget)

    if fits(comfortable):
        # If the host computes, `make_plan` gives the rest of the budget to the RAM tier before it adds slots.
        return comfortable if device_budget is None else planner.widened(comfortable, limit)
    chosen = [step for step in steps if fits(step)][-1]
    if device_budget is not None:
        # Chunks are in host memory; units and gradients are in the device's memory. So each budget is used separately.
        for step in steps:
            other = planner.smallest(step.window, chosen.chunks, step.queue_bytes)
            chosen = other if fits(other) else chosen
    if device_budget is None or device_budget < comfortable.device_peak:
        # The queue of gradients gets the rest of the budget, up to `planner.queue_bytes`. With gradients="ram", the
        # plan already has memory for all gradients.
        spare = limit - chosen.units_peak if planner.run.gradients != "ram" else 0
        queue_bytes = max(chosen.queue_bytes, min(planner.queue_bytes, chosen.queue_bytes + spare))
        chosen = planner.smallest(chosen.window, chosen.chunks, queue_bytes)
    # Add chunks for updates next.
    for chunks in range(comfortable.chunks, chosen.chunks, -1):
        more = planner.smallest(chosen.window, chunks, chosen.queue_bytes)
        if fits(more):
            chosen = more
            break
    # Then add memory for reading the next whole parameter during an update.
    more = chosen.with_next(comfortable.whole_next_bytes)
    chosen = more if fits(more) else chosen
    if device_budget is not None and device_budget >= comfortable.device_peak:
        return planner.widened(chosen, limit)
    return chosen


# The maximum number of larger budgets for which a plan estimates the traffic. These budgets increase in equal steps up
# to `Plan.all_in_ram`.
_PARTS = 4


def make_plan(run: Requirements, *, budget: int | None = None, device_budget: int | None = None) -> Plan:
    """Makes the memory plan of a run; see [Note: order of the budget].

    If `budget` or `device_budget` is None, the plan uses the smallest budget that keeps disk and compute busy.

    Raises:
        BudgetError: a budget is too small. The error's `smallest` is the smallest budget that works, to the byte.
        ConfigError: a unit has no elements.
    """
    planner = MemoryPlanner(run)
    steps = rungs(planner)
    comfortable, ample = steps[-1], planner.widened(steps[-1], None)
    smallest, device_smallest = _require_room(run, steps, budget, device_budget)
    budget = comfortable.host_peak if budget is None else budget
    device_budget = comfortable.device_peak if device_budget is None else device_budget
    chosen = choose(planner, steps, budget, None if run.staging is None else device_budget)
    if run.group_bytes:
        # Activations get memory from the rest of the budget before the RAM tier does.
        more = (budget - chosen.host_peak) // run.group_bytes
        chosen = chosen.with_activations(chosen.activation_groups + more, run.group_bytes)
    ram_tier, everything = choose_in_ram(run, budget - chosen.host_peak), choose_in_ram(run, None)
    holding, chosen = MemoryPlanner(run, ram_tier), replace(chosen, host={**chosen.host, **_ram_tier_owners(ram_tier)})
    if run.staging is None and chosen.host_peak >= comfortable.host_peak:
        chosen = holding.widened(chosen, budget)
    now = holding.count_reads(chosen.classes)
    moved = _traffic(run, chosen, now, ram_tier)
    log_steps, log_bytes = (0, 0) if run.log is None else run.log.plan(ram_tier.logged)
    larger = [comfortable.host_peak + everything.room * part // _PARTS for part in range(1, _PARTS + 1)]
    return Plan(
        **vars(chosen),
        units=tuple(run.units),
        gradients=run.gradients,
        resident=now.resident,
        ram_tier=ram_tier.names,
        ram_tier_units=ram_tier.units,
        device_budget=0 if run.staging is None else device_budget,
        device_smallest=device_smallest,
        device_comfortable=comfortable.device_peak,
        device_ample=ample.device_peak,
        budget=budget,
        smallest=smallest,
        comfortable=comfortable.host_peak,
        ample=ample.host_peak,
        all_in_ram=comfortable.host_peak + everything.room,
        disk_bytes=run.sizes.total_bytes,
        logged=ram_tier.logged,
        logged_bytes=ram_tier.logged_bytes,
        log_steps=log_steps,
        log_bytes=log_bytes,
        places_bytes=_places_bytes(run, ram_tier.names),
        log_wanted=0 if run.log is None else run.log.wanted(ram_tier.logged),
        read_bytes=moved.read,
        written_bytes=moved.written,
        ram_tier_part=moved.ram_tier,
        spared=moved.spared,
        without=_traffic_with(run, comfortable, _NOTHING),
        larger={
            nbytes: _traffic_with(run, comfortable, choose_in_ram(run, nbytes - comfortable.host_peak))
            for nbytes in larger
            if nbytes > budget
        },
        device_savable_bytes=max(0, now.total - planner.count_reads(ample.classes).total) if run.staging else 0,
    )


def _traffic_with(run: Requirements, comfortable: MemorySplit, ram_tier: RamTier) -> Traffic:
    """Returns the traffic of a step with the split `comfortable` and with `ram_tier`."""
    reads = MemoryPlanner(run, ram_tier).count_reads(comfortable.classes)
    return _traffic(run, comfortable, reads, ram_tier)


def _require_room(
    run: Requirements, steps: Sequence[MemorySplit], budget: int | None, device_budget: int | None
) -> tuple[int, int]:
    """Returns the smallest budgets that work, on the host and on the device.

    Raises:
        BudgetError: `budget` or `device_budget` is smaller than the smallest budget that works.
    """
    smallest = min(step.host_peak for step in steps)
    if budget is not None and budget < smallest:
        largest = max(run.units, key=run.bytes_of)
        note = f"; the largest unit, {largest.name!r}, has {bytes_shown(run.bytes_of(largest))}"
        raise _too_small("host_memory", budget, smallest, f"{_owners_shown(steps[0].host)}{note}")
    device_smallest = min(step.device_peak for step in steps)
    if device_budget is not None and device_budget < device_smallest:
        raise _too_small("device_memory", device_budget, device_smallest, _owners_shown(steps[0].device))
    return smallest, device_smallest


def _too_small(option: str, budget: int, smallest: int, owners: str) -> BudgetError:
    return BudgetError(
        f"{option} {size_option(budget, up=False)} is too small: the smallest budget that works is "
        f"{size_option(smallest)}, of which {owners}",
        smallest=smallest,
    )


def _owners_shown(split: Mapping[str, int]) -> str:
    ranked = sorted(split.items(), key=lambda item: -item[1])
    return ", ".join(f"{owner} {bytes_shown(nbytes)}" for owner, nbytes in ranked if nbytes)


def _places_bytes(run: Requirements, in_ram: Collection[str]) -> int:
    if run.places is None or run.gradients not in ("auto", "ssd"):
        return 0
    return run.places(frozenset(run.deferrable) - frozenset(in_ram))


def _traffic(run: Requirements, chosen: MemorySplit, reads: Reads, ram_tier: RamTier) -> Traffic:
    trained = sum(run.bytes_of(unit) - unit.frozen_bytes for unit in run.units)
    evicted = chosen.window < RESIDENT_WINDOW or run.gradients in ("ssd", "ram")
    updates_read = run.update_values == "read" or (run.update_values == "resident" and evicted)
    state = run.sizes.slot_bytes - sum(run.sizes.unit_bytes.values())
    waiting = sum(run.gradient_bytes.get(name, 0) for name in ram_tier.names)
    spilled = max(0, run.all_gradients - waiting) if run.gradients == "ssd" else 0
    read = {
        "values, forward": reads.forward,
        "values, backward": reads.backward,
        "values, update": trained - ram_tier.update if updates_read else 0,
        "state": state - ram_tier.state,
        "gradients": spilled,
    }
    spared = run.sum_records(name for name in ram_tier.names if name in run.applied)
    whole = {"values": trained - spared[0], "state": state - spared[1], "gradients": spilled}
    written = with_log(whole, ram_tier.logged_bytes, 0 if run.log is None else run.log.plan(ram_tier.logged)[0])
    return Traffic(
        {kind: nbytes for kind, nbytes in read.items() if nbytes},
        {kind: nbytes for kind, nbytes in written.items() if nbytes},
        ram_tier.update / trained if trained else 0.0,
        _spared(run, reads, ram_tier),
    )


def _spared(run: Requirements, reads: Reads, ram_tier: RamTier) -> tuple[int, int] | None:
    """Returns `Traffic.spared`; None if the updates cannot be deferred.

    The first number is the bytes of trained values that are not in the RAM tier. The second number is the part of these
    bytes that a backward reads.
    """
    streaming = run.gradient_bytes.keys() - set(ram_tier.names)
    if run.gradients != "ssd" or not streaming or not streaming <= set(run.deferrable):
        return None
    again = (name for unit in run.units if unit.name not in reads.resident for name in unit.parameters)
    return run.sum_records(streaming)[0], run.sum_records(streaming.intersection(again))[0]
