"""Divides memory between units, update chunks and gradients, and counts what a step then reads."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memascend.pages import whole_pages
from memascend.planning.forward_order import count_reads, forward_order, list_windows
from memascend.planning.held_entries import NOTHING
from memascend.planning.slot_classes import SLOT_BYTES, arena_bytes, arena_classes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.planning.held_entries import Held
    from memascend.planning.requirements import Requirements
    from memascend.planning.units import Unit


@dataclass(frozen=True)
class MemorySplit:
    """One way to divide memory."""

    window: int  # units that follow each other and are in memory at once
    chunks: int  # of the update
    queue_bytes: int  # of gradients that wait
    classes: dict[int, int]  # of the arena that holds the units, as {bytes: count}
    host: dict[str, int]  # host memory by owner
    device: dict[str, int]  # memory of the device by owner; empty where the host computes
    activation_groups: int = 0  # further groups of chunks for activations

    def with_activations(self, groups: int, group_bytes: int) -> MemorySplit:
        """The same with so many groups of chunks for activations."""
        more = (groups - self.activation_groups) * group_bytes
        if not more:
            return self
        host = {**self.host, "activations": self.host["activations"] + more}
        return replace(self, host=host, activation_groups=groups)

    def holding(self, held: Held) -> MemorySplit:
        """The same with entries that are held."""
        return replace(self, host={**self.host, **_owners(held)})

    @property
    def peak(self) -> int:
        """All of it on the host."""
        return sum(self.host.values())

    @property
    def device_peak(self) -> int:
        """All of it on the device."""
        return sum(self.device.values())

    @property
    def units_peak(self) -> int:
        """All of the memory in which units lie."""
        return self.device_peak if self.device else self.peak


@dataclass(frozen=True)
class Reads:
    """Bytes of values that a step reads to compute with, and the units that it reads once at most."""

    forward: int
    backward: int
    resident: frozenset[str]

    @property
    def total(self) -> int:
        """Both together."""
        return self.forward + self.backward


class MemoryPlanner:
    """Makes splits of memory for one run."""

    def __init__(self, run: Requirements, held: Held = NOTHING) -> None:
        """`held` is beside what units, updates and gradients need; units that are held whole need no slot."""
        self.run = run
        self.held = held
        self.order = forward_order(run.units)
        self._all_gradients = max(run.all_gradients, run.largest_gradient) if run.gradients == "ram" else 0
        # With ease: the largest gradient is worked on while those of one block come in.
        counts = Counter(run.bytes_of(unit) for unit in run.units if not unit.pinned)
        block = max(counts.items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]
        self.queue_bytes = max(run.largest_gradient, min(run.largest_gradient + block, run.all_gradients))

    def smallest(self, window: int, chunks: int, queue_bytes: int) -> MemorySplit:
        """The smallest memory that does with this window, these chunks, this queue."""
        held = list_windows(self.run.units, window + self.run.segment - 1)
        contents = [[self.run.bytes_of(unit) for unit in each.values()] for each in held]
        return self._split(window, chunks, queue_bytes, arena_classes(contents))

    def _split(self, window: int, chunks: int, queue_bytes: int, classes: dict[int, int]) -> MemorySplit:
        run, sizes = self.run, self.run.sizes
        # Where all gradients are held, their updates wait in the memory that they have anyway.
        queue_bytes = self._all_gradients or queue_bytes
        staging = arena_bytes({sizes.chunk_bytes: chunks} if sizes.chunk_bytes else {})
        if run.staging is None:
            device = {}
            host = {"units": arena_bytes(classes), "update staging": staging, "gradients": queue_bytes}
        else:
            # Slots there begin on pages, and its arena keeps nothing beside them.
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
        host |= _owners(self.held)
        return MemorySplit(window, chunks, queue_bytes, classes, host, device)

    def _by_class(self, classes: Mapping[int, int]) -> dict[int, tuple[list[Unit], int]]:
        """For each class its units in the order of the forward, and the slots that pinned ones leave them."""
        bounds = sorted(classes)
        members: dict[int, list[Unit]] = {bound: [] for bound in bounds}
        left = dict(classes)

        def class_of(unit: Unit) -> int:
            return bounds[bisect_left(bounds, self.run.bytes_of(unit))]

        for unit in self.run.units:
            if unit.pinned:
                left[class_of(unit)] -= 1
        for unit in self.order:
            if unit.name not in self.held.units:
                members[class_of(unit)].append(unit)
        return {bound: (members[bound], left[bound]) for bound in bounds}

    def count_reads(self, classes: Mapping[int, int]) -> Reads:
        """What a step reads with these slots."""

        def bytes_of(unit: Unit) -> int:
            return max(0, self.run.bytes_of(unit) - self.held.values.get(unit.name, 0))

        # A pinned unit is read anew after a commit that changed it.
        pinned = [unit for unit in self.run.units if unit.pinned]
        forward = sum(bytes_of(unit) for unit in pinned if unit.frozen_bytes < unit.nbytes)
        backward = 0
        resident = {unit.name for unit in pinned} | self.held.units
        for members, slots in self._by_class(classes).values():
            ahead, back = count_reads(members, slots)
            for unit in {unit.name: unit for unit in members}.values():
                forward += ahead[unit.name] * bytes_of(unit)
                backward += back[unit.name] * bytes_of(unit)
                if ahead[unit.name] + back[unit.name] <= 1:
                    resident.add(unit.name)
        return Reads(forward, backward, frozenset(resident))

    def widened(self, split: MemorySplit, budget: int | None) -> MemorySplit:
        """More slots, as long as they save reads and the budget has room; None: as many as save any."""
        classes = split.classes
        options = []
        for bound, (members, slots) in self._by_class(classes).items():
            wanted = len({unit.name for unit in members}) - slots
            if wanted > 0:
                gain = self._saved(members, slots, slots + wanted) / (wanted * bound)
                options.append((gain, bound, members, slots, wanted))
        # The most for its bytes first (frozen units stay from step to step), then the largest.
        for _, bound, members, slots, wanted in sorted(options, key=lambda option: option[:2], reverse=True):
            each = bound + SLOT_BYTES if self.run.staging is None else whole_pages(bound)
            room = wanted if budget is None else (budget - split.units_peak) // each
            count = min(wanted, room)
            if count <= 0 or not self._saved(members, slots, slots + count):
                continue
            wider = self._with_classes(split, {**split.classes, bound: classes[bound] + count})
            # Alignment may take a percent more than the slots themselves.
            while budget is not None and wider.units_peak > budget and count > 0:
                count -= 1
                wider = self._with_classes(split, {**split.classes, bound: classes[bound] + count})
            split = wider
        return split

    def _with_classes(self, split: MemorySplit, classes: dict[int, int]) -> MemorySplit:
        other = self._split(split.window, split.chunks, split.queue_bytes, classes)
        return other.with_activations(split.activation_groups, self.run.group_bytes)

    def _saved(self, members: Sequence[Unit], slots: int, more: int) -> int:
        def total(count: int) -> int:
            ahead, back = count_reads(members, count)
            kinds = {unit.name: unit for unit in members}.values()
            return sum((ahead[unit.name] + back[unit.name]) * self.run.bytes_of(unit) for unit in kinds)

        return total(slots) - total(more)


def _owners(held: Held) -> dict[str, int]:
    owners = {"held entries": held.nbytes, "held gradients": held.gradients}
    return {owner: nbytes for owner, nbytes in owners.items() if nbytes}
