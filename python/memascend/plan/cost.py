"""Estimates the seconds of a step on a machine, and the lifetime of a drive: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memascend.plan.table import LAST_UPDATE, RESIDENT_WINDOW, Traffic
from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.plan.table import Plan, Way
    from memascend.plan.units import Unit


@dataclass(frozen=True)
class Network:
    """The bytes that one rank receives from the others, and sends to them, for one forward and backward."""

    forward: int  # values that are gathered for the forward
    backward: int  # values that are gathered again; parameters outside of blocks stay from the forward
    gradients: int  # shards of gradients
    # Whole parameters and gradients in torch's memory at once: parameters outside of blocks, the values of two blocks,
    # and the gradients of one block with the received shards.
    gathered: int

    @property
    def total(self) -> int:
        """All received bytes."""
        return self.forward + self.backward + self.gradients


_DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class Drive:
    """The speed of storage, all devices together, in bytes a second."""

    read: float  # of reads alone
    write: float  # of writes alone
    # Of alternating reads and writes, counted together; None: they alternate at their own speeds.
    mixed: float | None = None
    processor_seconds: float = 0.0  # of one processor for a byte; 0 where it was not measured

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """The seconds to move both."""
        if self.mixed is None or not read_bytes or not written_bytes:
            return read_bytes / self.read + written_bytes / self.write
        # The larger transfer continues alone when the smaller one is done.
        both = 2 * min(read_bytes, written_bytes)
        rest = max(read_bytes, written_bytes) - both / 2
        return both / self.mixed + rest / (self.read if read_bytes > written_bytes else self.write)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The computation of the model, in seconds of the device that computes."""

    forward: float  # of one forward
    backward: float  # of one backward, with activation checkpointing
    backwards: int = 1  # number of backwards for each step
    # Each unit computes all backwards before the next one: values come once, and gradients leave once.
    by_layer: bool = False
    # Seconds of the network in a forward and in a backward, where several ranks share the model.
    exchanged: tuple[float, float] | None = None
    # Bytes of checkpointed activations of a step that leave a device in its forwards and return in its backwards, and
    # those that files hold in between.
    carried: int = 0
    stored: int = 0


@dataclass(frozen=True, kw_only=True)
class Host:
    """The work of the processors beside the model, in seconds of one of them."""

    update: float  # the arithmetic of a step
    check: float  # the checksum of a byte that is read or written
    # Whether the model computes on all of the same processors: work on one of them delays the model, whose threads wait
    # for each other at the end of each operation.
    shared: bool
    link: float | None = None  # bytes a second between host and device, each way; None where the host computes
    ram_tier_threads: int = 1  # that share the update of the RAM tier; one alone updates what streams


# Defaults of one thread's seconds for AdamW on a parameter, and for the checksum of a byte. Measured on a server's
# processor of 2023 in training: 1.9 ns a parameter for both.
_UPDATE_SECONDS, _CHECK_SECONDS = 1.1e-9, 0.03e-9
# The default number of threads that share the update of the RAM tier. The update moves 26 bytes for a parameter; more
# threads would wait for the memory of a desktop.
_IN_RAM_THREADS = 4


def assumed_host(link: float | None, *, shared: bool = False) -> Host:
    """A processor with default speeds: one updates, beside a device that computes unless it is shared."""
    return Host(
        update=_UPDATE_SECONDS,
        check=_CHECK_SECONDS,
        shared=shared,
        link=link,
        ram_tier_threads=1 if shared else _IN_RAM_THREADS,
    )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a step, whose parts overlap: it takes as long as the longest of them."""

    name: str  # forward and backward, each with the update that runs beside it, and what step() does
    parts: Mapping[str, float]  # seconds by kind: compute, PCIe, disk, update, network
    tail: float = 0.0  # the non-overlapped seconds of storage and update, for the first unit or the last gradient

    @property
    def seconds(self) -> float:
        """The longest part, or the longest part before the tail, and the tail."""
        before = max((took for part, took in self.parts.items() if part not in {"disk", "update"}), default=0.0)
        return max(*self.parts.values(), before + self.tail)

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda part: self.parts[part])


def ways(plan: Plan, work: Work, drive: Drive, host: Host) -> dict[Way, list[Phase]]:
    """The phases of one step, one after the other, for each way in which its updates may run.

    A run takes the fastest; early updates stand while no gradient is clipped or changed.
    """
    if plan.gradients not in ("ssd", "ram"):
        return {"fused": _Step(plan, work, drive, host, "fused").fused()}
    if plan.spared is None:
        return {"at once": _Step(plan, work, drive, host, "at once").at_once()}
    # The first of equally fast ones is taken: it moves fewer bytes.
    return {
        "next forward": _Step(plan, work, drive, host, "next forward").next_forward(),
        "next backward": _Step(plan, work, drive, host, "next backward").next_backward(),
        "early": _Step(plan, work, drive, host, "early").early(),
    }


def fastest(found: Mapping[Way, Sequence[Phase]]) -> Way:
    """The way of the shortest step; "early", which depends on the gradients, only where there is no other."""
    return min(found, key=lambda way: (way == "early", seconds(found[way])))


class _Step:
    """The phases of a step whose updates run in one way."""

    def __init__(self, plan: Plan, work: Work, drive: Drive, host: Host, way: Way) -> None:
        self._plan, self._work, self._drive, self._host = plan, work, drive, host
        self._into, self._back, self._out = through_link(plan)
        traffic = Traffic(plan.read_bytes, plan.written_bytes, plan.ram_tier_part, plan.spared)
        moved = traffic.by(way, evicted=plan.window < RESIDENT_WINDOW)
        # Bytes that each micro-batch reads of values, and what an update reads and writes.
        self._values = plan.read_bytes.get("values, forward", 0), plan.read_bytes.get("values, backward", 0)
        self._first = moved.read.get("values, forward", 0), moved.read.get("values, backward", 0)
        self._spilled = moved.written.get("gradients", 0)
        self._again = moved.read.get(LAST_UPDATE, 0)
        self._read = sum(moved.read.values()) - sum(self._first) - self._again
        self._written = sum(moved.written.values()) - self._spilled
        # The RAM tier waits for step() in every mode, and all threads share its update.
        self._update = host.update * (1 - plan.ram_tier_part)
        late = 0
        if plan.ram_tier_part and plan.spared is not None:
            late = max(0, self._written - plan.spared[0] - moved.read.get("state", 0))
        elif plan.ram_tier_part and not moved.written.get("log", 0):
            late = int(self._written * plan.ram_tier_part)
        self._written -= late
        # Without a log step() writes it, too. A log is written before the commit.
        self._log, self._through = (late, 0) if moved.written.get("log", 0) else (0, late)

    def fused(self) -> list[Phase]:
        """Each gradient's update runs as it appears."""
        disk = self._values[1] * self._rounds + self._read, self._written
        last = self._backward("backward and update", disk, update=self._update)
        return [self._forward("forward"), self._last_update(last), *self._at_step()]

    def at_once(self) -> list[Phase]:
        """All updates run in step()."""
        disk = self._read, self._written
        update = self._phase("update", 0.0, (0, 0), disk, self._update)
        return [self._forward("forward"), self._kept_backward("backward"), update, *self._at_step()]

    def next_forward(self) -> list[Phase]:
        """The first fetch of a unit in the next step makes its update."""
        first, others = self._divided
        name = "forward and last step's update" if not others else "first forward and last step's update"
        disk = self._first[0] + self._read, self._written
        parts = [self._first_update(self._forward(name, disk, update=self._update, count=first))]
        if others:
            parts.append(self._forward("other forwards", count=others))
        return [*parts, self._kept_backward("backwards" if others else "backward"), *self._at_step()]

    def next_backward(self) -> list[Phase]:
        """A forward computes the values of the last step's updates, and the backward after it makes them."""
        first, others = self._divided
        which = "first " if others else ""
        disk = self._first[0] + self._again, 0
        values = self._forward(f"{which}forward and last step's values", disk, update=self._update, count=first)
        disk = self._first[1] + self._read, self._written + self._spilled
        update = self._backward(f"{which}backward and last step's update", disk, update=self._update, count=first)
        parts = [self._first_update(values), self._last_update(update)]
        if others:
            parts.append(self._forward("other forwards", count=others))
            parts.append(self._kept_backward("other backwards", added=others, count=others))
        return [*parts, *self._at_step()]

    def early(self) -> list[Phase]:
        """Each update runs as its gradient, which is stored with it, is whole."""
        last, others = self._divided
        parts = [self._forward("forward")]
        if others:
            parts.append(self._kept_backward("other backwards", added=others - 1, count=others))
        disk = self._values[1] + self._read + (self._spilled if others else 0), self._written + self._spilled
        name = "last backward and update" if others else "backward and update"
        update = self._backward(name, disk, update=self._update, count=last)
        return [*parts, self._last_update(update), *self._at_step()]

    @property
    def _rounds(self) -> int:
        """How often each unit is read for the micro-batches of a step."""
        return 1 if self._work.by_layer else self._work.backwards

    @property
    def _divided(self) -> tuple[int, int]:
        """The number of micro-batches that compute beside an update, and of the others."""
        others = self._rounds - 1
        return self._work.backwards - others, others

    def _kept_backward(self, name: str, *, added: int | None = None, count: int | None = None) -> Phase:
        """Backwards whose gradients are kept; `added` of them read the spilled ones, and add to them.

        `count` is the number of micro-batches; None: all, each of which adds but the first.
        """
        rounds = self._rounds if count is None else count
        added = rounds - 1 if added is None else added
        disk = self._values[1] * rounds + self._spilled * added, self._spilled * rounds
        return self._backward(name, disk, count=count)

    def _forward(
        self, name: str, disk: tuple[int, int] | None = None, *, update: float = 0.0, count: int | None = None
    ) -> Phase:
        """The forwards of some micro-batches, or all; `disk` has the bytes of all of them; None: they read values."""
        work, rounds = self._work, self._rounds if count is None else min(count, self._rounds)
        count = work.backwards if count is None else count
        read, written = (self._values[0] * rounds, 0) if disk is None else disk
        disk = read, written + int(work.stored * count / work.backwards)
        link = self._into * rounds, int(work.carried * count / work.backwards)
        phase = self._phase(name, work.forward * count, link, disk, update)
        return phase if work.exchanged is None else _beside(phase, work.exchanged[0] * rounds)

    def _backward(self, name: str, disk: tuple[int, int], *, update: float = 0.0, count: int | None = None) -> Phase:
        """The backwards of some micro-batches, or all; `disk` has the bytes of all of them."""
        work, rounds = self._work, self._rounds if count is None else min(count, self._rounds)
        count = work.backwards if count is None else count
        disk = disk[0] + int(work.stored * count / work.backwards), disk[1]
        link = self._back * rounds + int(work.carried * count / work.backwards), self._out * rounds
        phase = self._phase(name, work.backward * count, link, disk, update)
        return phase if work.exchanged is None else _beside(phase, work.exchanged[1] * rounds)

    def _first_update(self, phase: Phase) -> Phase:
        """The phase with a unit that waits for its own update, before it computes."""
        return self._apart(phase, self._drive.seconds((self._again or self._read) * self._first_part, 0))

    def _last_update(self, phase: Phase) -> Phase:
        """The phase with an update when it has computed all else: that of the forward's first unit."""
        part = self._first_part
        return self._apart(phase, self._drive.seconds(self._read * part, self._written * part))

    def _apart(self, phase: Phase, disk: float) -> Phase:
        """The phase whose update of the first unit, `disk` seconds of storage, no computation overlaps."""
        update = self._update * self._first_part
        if self._host.shared:
            phase = replace(phase, parts={**phase.parts, "compute": phase.parts["compute"] - update})
        return replace(phase, tail=max(disk, update))

    @property
    def _first_part(self) -> float:
        """The part of the first unit of a forward in all updates that stream."""
        kept = set(self._plan.ram_tier if self._plan.ram_tier_part else ())
        streams = [0.0 if kept.issuperset(unit.parameters) else _trained(unit) for unit in self._plan.units]
        return streams[0] / sum(streams) if any(streams) else 0.0

    def _at_step(self) -> list[Phase]:
        """The log of kept gradients of the RAM tier, and after the commit its update."""
        plan, host = self._plan, self._host
        if not plan.ram_tier_part:
            return []
        log = self._phase("gradient log", 0.0, (0, 0), (0, self._log))
        # Its values are checked before the update, and have new checksums after it.
        checked = 2 * plan.ram_tier_part * sum(unit.nbytes - unit.frozen_bytes for unit in plan.units) * host.check
        parts = {"update": (host.update - self._update + checked) / host.ram_tier_threads}
        if self._through:
            parts["disk"] = self._drive.seconds(0, self._through)
        return [log] * bool(self._log) + [Phase(name="step()", parts=parts)]

    def _phase(
        self, name: str, compute: float, link: tuple[int, int], disk: tuple[int, int], update: float = 0.0
    ) -> Phase:
        """A phase that moves bytes in both directions of the link, and reads and writes bytes."""
        host, drive = self._host, self._drive
        busy = update + sum(disk) * (host.check + drive.processor_seconds)
        parts = {"disk": drive.seconds(*disk)}
        if host.shared:
            # The model's threads are on the same processors, and wait for each other.
            parts["compute"] = compute + busy
        else:
            parts |= {"compute": compute, "update": busy}
        if host.link is not None:
            # The link moves both ways at once.
            parts["PCIe"] = max(link) / host.link
        return Phase(name=name, parts=parts)


def _trained(unit: Unit) -> float:
    return unit.elements * (1 - unit.frozen_bytes / max(1, unit.nbytes))


def _beside(phase: Phase, network: float) -> Phase:
    return replace(phase, parts={**phase.parts, "network": network})


def through_link(plan: Plan) -> tuple[int, int, int]:
    """The bytes that a forward and a backward copy to the device, and those of gradients from it."""
    moving = [unit for unit in plan.units if not unit.pinned]
    into = sum(unit.nbytes for unit in moving)
    back = sum(unit.nbytes for unit in moving if unit.name not in plan.resident)
    return into, back, sum(unit.nbytes - unit.frozen_bytes for unit in plan.units)


def seconds(parts: Sequence[Phase]) -> float:
    """The seconds of a whole step."""
    return sum(part.seconds for part in parts)


def update_seconds(plan: Plan, a_parameter: float) -> float:
    """The seconds of one processor for the whole update."""
    return sum(map(_trained, plan.units)) * a_parameter


def drive_days(written: int, step_seconds: float, endurance: float) -> float | None:
    """Days of continuous training until `endurance` bytes are written; None where a step writes nothing."""
    if not written or not step_seconds:
        return None
    return endurance / written * step_seconds / _DAY_SECONDS


def moves(plan: Plan) -> str:
    """One line about the RAM tier, and the bytes of a step with this and with more memory."""
    moved = f"a step moves {bytes_shown(plan.moved_bytes)}"
    if plan.ram_tier:
        moved = (
            f"{len(plan.ram_tier)} parameters are kept in RAM, and {moved} instead of {bytes_shown(plan.without.total)}"
        )
    more = [f'"{size_option(budget)}": {bytes_shown(other.total)}' for budget, other in plan.larger.items()]
    return f"{moved}; with host_memory={', '.join(more)}" if more else moved
