"""Plans a run within a budget: units in memory, sizes of slots, and the bytes that a step moves."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from memascend.errors import BudgetError, ConfigError
from memascend.pages import whole_pages
from memascend.planning.forward_order import forward_order, reads, windows
from memascend.planning.ladder import choose
from memascend.planning.slot_classes import SLOT_BYTES, arena_classes, reserved
from memascend.planning.table import Plan, readable

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from typing import Literal

    from memascend.planning.units import Unit

__all__ = ["Plan", "arena_classes", "make_plan"]

# Staging chunks: fewer do not overlap at all; four do, but the disk runs dry while one is computed; more gain nothing.
_CHUNKS_MIN, _CHUNKS_FEW, _CHUNKS = 2, 4, 12


class Sizes(Protocol):
    """What a store takes, as `engine.sizes()` says."""

    @property
    def total_bytes(self) -> int:
        """On storage."""

    @property
    def slot_bytes(self) -> int:
        """One slot of all values and state."""

    @property
    def index_bytes(self) -> int:
        """The index in memory."""

    @property
    def buffer_bytes(self) -> int:
        """Memory that a commit writes from."""

    @property
    def chunk_bytes(self) -> int:
        """One staging chunk."""

    @property
    def unit_bytes(self) -> Mapping[str, int]:
        """What a lease for the values of each unit takes."""


def make_plan(
    units: Sequence[Unit],
    sizes: Sizes,
    *,
    gradients: Literal["auto", "fused", "ssd", "ram"],
    largest_gradient: int,
    all_gradients: int,
    whole_bytes: int = 0,
    activation_chunks: Mapping[int, int] | None = None,
    activation_group: int = 0,
    activation_groups: int = 0,
    staging: Mapping[str, Mapping[int, int]] | None = None,
    device_budget: int | None = None,
    budget: int | None = None,
    segment: int = 1,
    update_values: Literal["resident", "read", "never"] = "resident",
    by_rows: Collection[str] = (),
    rows_bytes: int = 0,
) -> Plan:
    """Decide what lies in memory, within `budget` bytes of host memory.

    Args:
        units: in the order of the forward.
        sizes: of the store that holds them.
        gradients: how they are kept: "ram" needs memory for all of them, the others for the largest.
        largest_gradient: bytes of it.
        all_gradients: bytes of all of them.
        whole_bytes: what an optimizer needs that updates whole parameters.
        activation_chunks: {bytes: count} of those through which checkpointed activations go to storage.
        activation_group: further ones, so many at a time, in which they stay where there is room; 0: all go.
        activation_groups: how many of these keep the disk out of it, as far as anybody can say beforehand.
        staging: where a device computes, the chunks, {bytes: count}, that lie between it and storage, by owner; units
            and gradients are then in its memory.
        device_budget: the limit there; None: the smallest that keeps disk and compute busy.
        budget: the limit; None: the smallest that keeps disk and compute busy. Of a larger one, units stay resident.
        segment: units that a checkpoint segment recomputes together.
        update_values: whether an update reads the values: "resident" where their unit was evicted (the compact state),
            "read" always (values of 32 bits), "never" (the state has a master of its own).
        by_rows: units that are embeddings of which a forward reads the rows that it needs: they have no memory.
        rows_bytes: what those are read through, and their gradients made in.

    Raises:
        BudgetError: a budget is too small; `smallest` is the one that works, to the byte.
    """
    if segment < 1:
        raise ConfigError(f"a checkpoint segment has at least one unit, not {segment}")
    planner = _Planner(
        units, sizes, gradients, largest_gradient, all_gradients, whole_bytes, segment, activation_chunks or {}, staging
    )
    planner.leave_out(by_rows, rows_bytes)
    group_bytes = reserved({nbytes: activation_group for nbytes in activation_chunks or {} if activation_group})
    # From the smallest plan to the comfortable one, in the order of what it gains: two chunks more cost little.
    rungs = [
        planner.settled(1, _CHUNKS_MIN, largest_gradient),
        planner.settled(1, _CHUNKS_FEW, largest_gradient),
        planner.settled(2, _CHUNKS_FEW, largest_gradient),
        planner.settled(2, _CHUNKS_FEW, planner.queue_bytes),
        planner.settled(2, _CHUNKS, planner.queue_bytes).with_activations(activation_groups, group_bytes),
    ]
    smallest = min(rung.peak for rung in rungs)
    comfortable = rungs[-1].peak
    if budget is not None and budget < smallest:
        largest = max(units, key=planner.bytes_of)
        raise BudgetError(
            f"host_memory {readable(budget)} is too small: the smallest budget that works is {smallest} bytes "
            f"({readable(smallest)}), of which {_owners(rungs[0].host)}; the largest unit, {largest.name!r}, has "
            f"{readable(planner.bytes_of(largest))}",
            smallest=smallest,
        )
    device_smallest = min(rung.device_peak for rung in rungs)
    if device_budget is not None and device_budget < device_smallest:
        raise BudgetError(
            f"device_memory {readable(device_budget)} is too small: the smallest budget that works is "
            f"{device_smallest} bytes ({readable(device_smallest)}), of which {_owners(rungs[0].device)}",
            smallest=device_smallest,
        )
    budget = comfortable if budget is None else budget
    device_budget = rungs[-1].device_peak if device_budget is None else device_budget
    chosen = choose(planner, rungs, budget, None if staging is None else device_budget, spares=gradients != "ram")
    ample = planner.widened(rungs[-1], None)
    if group_bytes:
        # What is left, from here on.
        chosen = chosen.with_activations(chosen.activation_groups + (budget - chosen.peak) // group_bytes, group_bytes)
    now = planner.reads(chosen.classes)
    base = planner.reads(rungs[-1].classes)
    best = planner.reads(ample.classes)
    # Below the comfortable window, a unit may have made room before its update is done.
    evicted = update_values == "read" or (
        update_values == "resident" and (chosen.window < 2 or gradients in ("ssd", "ram"))
    )
    trained = sum(planner.stored_bytes(unit) - unit.frozen_bytes for unit in units)
    apart = [unit for unit in units if unit.name in by_rows]
    never_resident = sum(planner.stored_bytes(unit) - unit.frozen_bytes for unit in apart)
    state = sizes.slot_bytes - sum(sizes.unit_bytes.values())
    spilled = all_gradients if gradients == "ssd" else 0
    read = {
        # Of embeddings by rows, at most all of them.
        "values, forward": now.forward + sum(map(planner.stored_bytes, apart)),
        "values, backward": now.backward,
        "values, update": trained if evicted else never_resident if update_values == "resident" else 0,
        "state": state,
        "gradients": spilled,
    }
    return Plan(
        units=tuple(units),
        order=tuple(unit.name for unit in planner.order),
        classes=chosen.classes,
        window=chosen.window,
        segment=segment,
        chunks=chosen.chunks,
        activation_groups=chosen.activation_groups,
        gradients=gradients,
        queue_bytes=chosen.queue_bytes,
        resident=now.resident,
        by_rows=tuple(unit.name for unit in apart),
        whole_bytes=whole_bytes,
        host=chosen.host,
        host_peak=chosen.peak,
        device=chosen.device,
        device_peak=chosen.device_peak,
        device_budget=0 if staging is None else device_budget,
        device_smallest=device_smallest,
        device_comfortable=rungs[-1].device_peak,
        device_ample=ample.device_peak,
        budget=budget,
        smallest=smallest,
        comfortable=comfortable,
        ample=ample.peak,
        disk_bytes=sizes.total_bytes,
        read_bytes={kind: nbytes for kind, nbytes in read.items() if nbytes},
        written_bytes={
            kind: nbytes for kind, nbytes in (("values", trained), ("state", state), ("gradients", spilled)) if nbytes
        },
        saved_bytes=max(0, base.total - now.total),
        savable_bytes=max(0, now.total - best.total),
    )


@dataclass(frozen=True)
class _Held:
    """One way to divide memory."""

    window: int
    chunks: int
    queue_bytes: int
    classes: dict[int, int]
    host: dict[str, int]
    # Empty where the host computes.
    device: dict[str, int]
    activation_groups: int = 0

    def with_activations(self, groups: int, group_bytes: int) -> _Held:
        """The same with so many groups of chunks for activations."""
        more = (groups - self.activation_groups) * group_bytes
        if not more:
            return self
        host = {**self.host, "activations": self.host["activations"] + more}
        return replace(self, host=host, activation_groups=groups)

    @property
    def peak(self) -> int:
        return sum(self.host.values())

    @property
    def device_peak(self) -> int:
        return sum(self.device.values())

    @property
    def units_peak(self) -> int:
        """Of the memory in which units lie."""
        return self.device_peak if self.device else self.peak


def _owners(held: Mapping[str, int]) -> str:
    ranked = sorted(held.items(), key=lambda item: -item[1])
    return ", ".join(f"{owner} {readable(nbytes)}" for owner, nbytes in ranked if nbytes)


@dataclass(frozen=True)
class _Reads:
    """Bytes of values that a step reads to compute with."""

    forward: int
    backward: int
    resident: frozenset[str]

    @property
    def total(self) -> int:
        return self.forward + self.backward


class _Planner:
    """What the parts of a plan have in common."""

    def __init__(
        self,
        units: Sequence[Unit],
        sizes: Sizes,
        gradients: str,
        largest_gradient: int,
        all_gradients: int,
        whole_bytes: int,
        segment: int,
        activation_chunks: Mapping[int, int],
        staging: Mapping[str, Mapping[int, int]] | None,
    ) -> None:
        self.units, self.sizes, self.segment = units, sizes, segment
        self.leave_out((), 0)
        self.kept_bytes = max(all_gradients, largest_gradient) if gradients == "ram" else 0
        self.whole_bytes = whole_bytes
        self.activation_bytes = reserved(activation_chunks)
        self.staging = staging
        # With ease: the largest gradient is worked on while those of one block come in.
        counts = Counter(self.bytes_of(unit) for unit in units if not unit.pinned)
        block = max(counts.items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]
        self.queue_bytes = max(largest_gradient, min(largest_gradient + block, all_gradients))

    def leave_out(self, units: Collection[str], rows_bytes: int) -> None:
        """Embeddings that are read by rows."""
        self.by_rows, self.rows_bytes = frozenset(units), rows_bytes
        self.order = [unit for unit in forward_order(self.units) if self.bytes_of(unit)]

    def stored_bytes(self, unit: Unit) -> int:
        return self.sizes.unit_bytes.get(unit.name, unit.nbytes)

    def bytes_of(self, unit: Unit) -> int:
        """In memory."""
        return 0 if unit.name in self.by_rows else self.stored_bytes(unit)

    def settled(self, window: int, chunks: int, queue_bytes: int) -> _Held:
        """The smallest memory that does with this window, these chunks, this queue."""
        held = windows(self.units, window + self.segment - 1)
        contents = [[self.bytes_of(unit) for unit in content.values() if self.bytes_of(unit)] for content in held]
        return self._held(window, chunks, queue_bytes, arena_classes([content for content in contents if content]))

    def _held(self, window: int, chunks: int, queue_bytes: int, classes: dict[int, int]) -> _Held:
        if self.kept_bytes:
            # Their updates wait in the memory that they have anyway.
            queue_bytes = self.kept_bytes
        chunked = {self.sizes.chunk_bytes: chunks} if self.sizes.chunk_bytes else {}
        device: dict[str, int] = {}
        here = {"units": reserved(classes), "update staging": reserved(chunked), "gradients": queue_bytes}
        if self.staging is not None:
            # Slots there begin on pages, and its arena keeps nothing beside them.
            units = sum(whole_pages(nbytes) * count for nbytes, count in classes.items())
            device = {"units": units, "gradients": queue_bytes}
            here = {owner: reserved(passed) for owner, passed in self.staging.items()}
            here["update staging"] = reserved(chunked)
        host = {
            **here,
            "catalog": self.sizes.buffer_bytes,
            "index": self.sizes.index_bytes,
            "whole parameters": self.whole_bytes,
            "activations": self.activation_bytes,
        }
        if self.rows_bytes:
            host["embedding rows"] = self.rows_bytes
        return _Held(window, chunks, queue_bytes, classes, host, device)

    def _by_class(self, classes: Mapping[int, int]) -> dict[int, tuple[list[Unit], int]]:
        """For each class its units in the order of the forward, and the slots that pinned ones leave them."""
        bounds = sorted(classes)
        members: dict[int, list[Unit]] = {bound: [] for bound in bounds}
        left = dict(classes)
        for unit in self.units:
            if unit.pinned and self.bytes_of(unit):
                left[bounds[bisect_left(bounds, self.bytes_of(unit))]] -= 1
        for unit in self.order:
            members[bounds[bisect_left(bounds, self.bytes_of(unit))]].append(unit)
        return {bound: (members[bound], left[bound]) for bound in bounds}

    def reads(self, classes: Mapping[int, int]) -> _Reads:
        """What a step reads with these slots."""
        # A pinned unit is read anew after a commit that changed it.
        pinned = [unit for unit in self.units if unit.pinned]
        forward = sum(self.bytes_of(unit) for unit in pinned if unit.frozen_bytes < unit.nbytes)
        backward = 0
        resident = {unit.name for unit in pinned}
        for members, slots in self._by_class(classes).values():
            ahead, back = reads(members, slots)
            for unit in {unit.name: unit for unit in members}.values():
                forward += ahead[unit.name] * self.bytes_of(unit)
                backward += back[unit.name] * self.bytes_of(unit)
                if ahead[unit.name] + back[unit.name] <= 1:
                    resident.add(unit.name)
        return _Reads(forward, backward, frozenset(resident))

    def widened(self, held: _Held, budget: int | None) -> _Held:
        """More slots, as long as they save reads and the budget has room; None: as many as save any."""
        classes = held.classes
        options = []
        for bound, (members, slots) in self._by_class(classes).items():
            wanted = len({unit.name for unit in members}) - slots
            if wanted > 0:
                gain = self._saved(members, slots, slots + wanted) / (wanted * bound)
                options.append((gain, bound, members, slots, wanted))
        # The most for its bytes first (frozen units stay from step to step), then the largest.
        for _, bound, members, slots, wanted in sorted(options, key=lambda option: option[:2], reverse=True):
            each = bound + SLOT_BYTES if self.staging is None else whole_pages(bound)
            room = wanted if budget is None else (budget - held.units_peak) // each
            count = min(wanted, room)
            if count <= 0 or not self._saved(members, slots, slots + count):
                continue
            wider = self._wider(held, {**held.classes, bound: classes[bound] + count})
            # Alignment may take a percent more than the slots themselves.
            while budget is not None and wider.units_peak > budget and count > 0:
                count -= 1
                wider = self._wider(held, {**held.classes, bound: classes[bound] + count})
            held = wider
        return held

    def _wider(self, held: _Held, classes: dict[int, int]) -> _Held:
        wider = self._held(held.window, held.chunks, held.queue_bytes, classes)
        activations = {"activations": held.host["activations"]}
        return replace(wider, host={**wider.host, **activations}, activation_groups=held.activation_groups)

    def _saved(self, members: Sequence[Unit], slots: int, more: int) -> int:
        def total(count: int) -> int:
            ahead, back = reads(members, count)
            kinds = {unit.name: unit for unit in members}.values()
            return sum((ahead[unit.name] + back[unit.name]) * self.bytes_of(unit) for unit in kinds)

        return total(slots) - total(more)
