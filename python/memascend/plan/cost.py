"""Estimates the seconds of a step on a machine, and the lifetime of a drive. Measures nothing."""

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
    """The bytes that one rank receives from the other ranks in one forward and backward.

    Each rank also sends this number of bytes.
    """

    forward: int  # bytes of values that are gathered for the forward
    # Bytes of values that are gathered again for the backward. Parameters outside of blocks stay gathered from the
    # forward to the backward.
    backward: int
    gradients: int  # bytes of the received shards of gradients
    # An estimate of the most bytes that gathered parameters and their gradients take in torch's memory: the values of
    # two blocks and of all parameters outside of blocks, the gradients of one gather (a block, or all parameters
    # outside of blocks), and the shards of these gradients that the rank receives.
    gathered: int

    @property
    def total(self) -> int:
        """Bytes that a rank receives in one forward and backward."""
        return self.forward + self.backward + self.gradients


_DAY_SECONDS = 86_400


@dataclass(frozen=True, kw_only=True)
class Drive:
    """The speed of storage, all devices together, in bytes a second."""

    read: float  # while nothing is written
    write: float  # while nothing is read
    # The speed of reads and writes together while they alternate. None: reads have the speed `read`, and writes have
    # the speed `write`.
    mixed: float | None = None
    processor_seconds: float = 0.0  # seconds of one processor to move a byte; 0: not measured

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Returns the seconds to read `read_bytes` and to write `written_bytes`."""
        if self.mixed is None or not read_bytes or not written_bytes:
            return read_bytes / self.read + written_bytes / self.write
        # The larger transfer continues alone when the smaller one is done.
        both = 2 * min(read_bytes, written_bytes)
        rest = max(read_bytes, written_bytes) - both / 2
        return both / self.mixed + rest / (self.read if read_bytes > written_bytes else self.write)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The seconds of the model's computation and network traffic, and the bytes of its checkpointed activations."""

    forward: float  # seconds of one forward
    backward: float  # seconds of one backward, including activations that it computes again
    backwards: int = 1  # the number of backwards in a step
    # True if each unit computes all micro-batches before the next unit begins. A step then reads the values once for
    # all forwards and once for all backwards, and writes gradients only once.
    by_layer: bool = False
    # The seconds that the network takes in a forward, and in a backward. None: one rank has the whole model, or the
    # network's speed is unknown.
    exchanged: tuple[float, float] | None = None
    # Bytes of checkpointed activations that leave the memory of the computing device in the forwards of a step. The
    # same number of bytes returns in the backwards.
    carried: int = 0
    # Bytes of checkpointed activations that the forwards of a step write to files, and that the backwards read.
    stored: int = 0


@dataclass(frozen=True, kw_only=True)
class Host:
    """The speed of the host: the seconds that one processor takes for updates and checksums, and the link's speed."""

    update: float  # seconds for the arithmetic of all updates of a step
    check: float  # seconds for the checksum of one byte that is read or written
    # True if the model computes on all processors of the host. Other work on one processor then delays the whole model,
    # because the model's threads wait for each other at the end of each operation.
    shared: bool
    link: float | None = None  # bytes a second between host and device, in each direction; None: the host computes
    # The number of threads that update the RAM tier. All other state is updated by a single thread.
    ram_tier_threads: int = 1


# The default seconds of one thread for the AdamW update of one element, and for the checksum of one byte. In training
# on a server processor of 2023, update and checksums together took 1.9 ns for each element.
_UPDATE_SECONDS, _CHECK_SECONDS = 1.1e-9, 0.03e-9
# The default number of threads that update the RAM tier if a device computes. The update moves 26 bytes for each
# element. More threads would not help, because a desktop's memory would be too slow for them.
_IN_RAM_THREADS = 4


def assumed_host(link: float | None, *, shared: bool = False) -> Host:
    """Returns a host with default speeds. `shared` is True if the model computes on all processors of the host.

    `update` of the returned host is the seconds of one element: replace it by the result of `update_seconds`.
    """
    return Host(
        update=_UPDATE_SECONDS,
        check=_CHECK_SECONDS,
        shared=shared,
        link=link,
        ram_tier_threads=1 if shared else _IN_RAM_THREADS,
    )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a step. The parts of a phase run at the same time, except a tail in which only an update runs."""

    name: str  # what runs in the phase, for example "backward and update"
    parts: Mapping[str, float]  # the seconds of each part: compute, PCIe, disk, update, network
    tail: float = 0.0  # the seconds in which only one unit's update, with its reads and writes, can run

    @property
    def seconds(self) -> float:
        """The seconds of the phase: the larger of two times.

        The first time is the longest part. The second time is the tail plus the longest part that is neither disk nor
        update.
        """
        before = max((took for part, took in self.parts.items() if part not in {"disk", "update"}), default=0.0)
        return max(*self.parts.values(), before + self.tail)

    @property
    def bound(self) -> str:
        """The name of the longest part."""
        return max(self.parts, key=lambda part: self.parts[part])


def ways(plan: Plan, work: Work, drive: Drive, host: Host) -> dict[Way, list[Phase]]:
    """Returns the phases of one step, in order, for each way in which the step's updates may run.

    A run measures which of "next forward" and "next backward" is faster. "early" is valid only if no gradient is
    clipped or changed.
    """
    if plan.gradients not in ("ssd", "ram"):
        return {"fused": _Step(plan, work, drive, host, "fused").fused()}
    if plan.spared is None:
        return {"at once": _Step(plan, work, drive, host, "at once").at_once()}
    # If two ways are equally fast, `fastest` chooses the first of them. So "next forward" is before "next backward",
    # which moves more bytes.
    return {
        "next forward": _Step(plan, work, drive, host, "next forward").next_forward(),
        "next backward": _Step(plan, work, drive, host, "next backward").next_backward(),
        "early": _Step(plan, work, drive, host, "early").early(),
    }


def fastest(found: Mapping[Way, Sequence[Phase]]) -> Way:
    """Returns the fastest way; "early" only if there is no other way, since "early" is invalid with clipping."""
    return min(found, key=lambda way: (way == "early", seconds(found[way])))


class _Step:
    """Computes the phases of a step, with one method for each way in which the updates may run."""

    def __init__(self, plan: Plan, work: Work, drive: Drive, host: Host, way: Way) -> None:
        self._plan, self._work, self._drive, self._host = plan, work, drive, host
        self._into, self._back, self._out = through_link(plan)
        traffic = Traffic(plan.read_bytes, plan.written_bytes, plan.ram_tier_part, plan.spared)
        moved = traffic.by(way, evicted=plan.window < RESIDENT_WINDOW)
        # Bytes of values that a micro-batch reads, in its forward and in its backward. `_first` is for the micro-batch
        # that computes while updates run, and `_values` is for each other micro-batch.
        self._values = plan.read_bytes.get("values, forward", 0), plan.read_bytes.get("values, backward", 0)
        self._first = moved.read.get("values, forward", 0), moved.read.get("values, backward", 0)
        # `_spilled`: bytes of gradients that a backward writes to storage. `_again`: bytes that the forward reads to
        # compute updated values, if the updates run in the "next backward". `_read`, `_written`: all other bytes that
        # the updates read and write.
        self._spilled = moved.written.get("gradients", 0)
        self._again = moved.read.get(LAST_UPDATE, 0)
        self._read = sum(moved.read.values()) - sum(self._first) - self._again
        self._written = sum(moved.written.values()) - self._spilled
        # The seconds of updates outside the RAM tier. step() updates the RAM tier, whatever the way.
        self._update = host.update * (1 - plan.ram_tier_part)
        late = 0
        if plan.ram_tier_part and plan.spared is not None:
            late = max(0, self._written - plan.spared[0] - moved.read.get("state", 0))
        elif plan.ram_tier_part and not moved.written.get("log", 0):
            late = int(self._written * plan.ram_tier_part)
        self._written -= late
        # step() writes the `late` bytes. With a gradient log, these bytes are gradients for the log and records that
        # are written whole, all before the commit; `late` is then 0 unless updates are deferred. Without a log, these
        # bytes are records of the RAM tier, and are written after the commit.
        self._log, self._through = (late, 0) if moved.written.get("log", 0) else (0, late)

    def fused(self) -> list[Phase]:
        """Returns the phases if the update of each gradient runs as soon as the gradient appears."""
        disk = self._values[1] * self._rounds + self._read, self._written
        last = self._backward("backward and update", disk, update=self._update)
        return [self._forward("forward"), self._last_update(last), *self._at_step()]

    def at_once(self) -> list[Phase]:
        """Returns the phases if all updates run in step()."""
        disk = self._read, self._written
        update = self._phase("update", 0.0, (0, 0), disk, self._update)
        return [self._forward("forward"), self._kept_backward("backward"), update, *self._at_step()]

    def next_forward(self) -> list[Phase]:
        """Returns the phases if each unit's updates run in the next step, when the forward first fetches the unit."""
        first, others = self._divided
        name = "forward and last step's update" if not others else "first forward and last step's update"
        disk = self._first[0] + self._read, self._written
        parts = [self._first_update(self._forward(name, disk, update=self._update, count=first))]
        if others:
            parts.append(self._forward("other forwards", count=others))
        return [*parts, self._kept_backward("backwards" if others else "backward"), *self._at_step()]

    def next_backward(self) -> list[Phase]:
        """Returns the phases if the updates run in the next step's backward.

        The next step's forward only computes the updated values.
        """
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
        """Returns the phases if each update runs as soon as its gradient is complete.

        The backward also writes each gradient to storage.
        """
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
        """How often the forwards of a step read all units, and how often the backwards do.

        Both do so once if the step computes by layer, else once for each micro-batch.
        """
        return 1 if self._work.by_layer else self._work.backwards

    @property
    def _divided(self) -> tuple[int, int]:
        """The number of micro-batches that compute while updates run, and the number of other micro-batches."""
        others = self._rounds - 1
        return self._work.backwards - others, others

    def _kept_backward(self, name: str, *, added: int | None = None, count: int | None = None) -> Phase:
        """Returns the phase of backwards that write gradients to storage.

        `count` is the number of these backwards. If `count` is None, the phase has all backwards of a step. `added` is
        the number of backwards that read stored gradients and add to them. If `added` is None, all backwards except the
        first do this, and none if the step computes by layer.
        """
        rounds = self._rounds if count is None else count
        added = rounds - 1 if added is None else added
        disk = self._values[1] * rounds + self._spilled * added, self._spilled * rounds
        return self._backward(name, disk, count=count)

    def _forward(
        self, name: str, disk: tuple[int, int] | None = None, *, update: float = 0.0, count: int | None = None
    ) -> Phase:
        """Returns the phase of the forwards of `count` micro-batches, or of all micro-batches if `count` is None.

        `disk` has the bytes that these forwards read and write, without activations. If `disk` is None, the forwards
        only read values.
        """
        work, rounds = self._work, self._rounds if count is None else min(count, self._rounds)
        count = work.backwards if count is None else count
        read, written = (self._values[0] * rounds, 0) if disk is None else disk
        disk = read, written + int(work.stored * count / work.backwards)
        link = self._into * rounds, int(work.carried * count / work.backwards)
        phase = self._phase(name, work.forward * count, link, disk, update)
        return phase if work.exchanged is None else _with_network(phase, work.exchanged[0] * rounds)

    def _backward(self, name: str, disk: tuple[int, int], *, update: float = 0.0, count: int | None = None) -> Phase:
        """Returns the phase of the backwards of `count` micro-batches, or of all micro-batches if `count` is None.

        `disk` has the bytes that these backwards read and write, without activations.
        """
        work, rounds = self._work, self._rounds if count is None else min(count, self._rounds)
        count = work.backwards if count is None else count
        disk = disk[0] + int(work.stored * count / work.backwards), disk[1]
        link = self._back * rounds + int(work.carried * count / work.backwards), self._out * rounds
        phase = self._phase(name, work.backward * count, link, disk, update)
        return phase if work.exchanged is None else _with_network(phase, work.exchanged[1] * rounds)

    def _first_update(self, phase: Phase) -> Phase:
        """Returns the phase with a tail: the first unit can compute only after its own update."""
        return self._apart(phase, self._drive.seconds((self._again or self._read) * self._first_part, 0))

    def _last_update(self, phase: Phase) -> Phase:
        """Returns the phase with a tail: a backward ends with the first unit, so this unit's update runs alone."""
        part = self._first_part
        return self._apart(phase, self._drive.seconds(self._read * part, self._written * part))

    def _apart(self, phase: Phase, disk: float) -> Phase:
        """Returns the phase with a tail for the first unit's update. `disk`: the seconds of the update's I/O."""
        update = self._update * self._first_part
        if self._host.shared:
            phase = replace(phase, parts={**phase.parts, "compute": phase.parts["compute"] - update})
        return replace(phase, tail=max(disk, update))

    @property
    def _first_part(self) -> float:
        """The first unit's share, from 0 to 1, of all updates outside the RAM tier."""
        kept = set(self._plan.ram_tier if self._plan.ram_tier_part else ())
        streams = [0.0 if kept.issuperset(unit.parameters) else _trained(unit) for unit in self._plan.units]
        return streams[0] / sum(streams) if any(streams) else 0.0

    def _at_step(self) -> list[Phase]:
        """Returns the phases of step() for the RAM tier; none if no trained parameter is in the RAM tier.

        If step() writes the gradient log, it does so in the first phase. In the last phase, after the commit, step()
        updates the RAM tier.
        """
        plan, host = self._plan, self._host
        if not plan.ram_tier_part:
            return []
        log = self._phase("gradient log", 0.0, (0, 0), (0, self._log))
        # Values in the RAM tier are verified before their update, and get new checksums after the update.
        checked = 2 * plan.ram_tier_part * sum(unit.nbytes - unit.frozen_bytes for unit in plan.units) * host.check
        parts = {"update": (host.update - self._update + checked) / host.ram_tier_threads}
        if self._through:
            parts["disk"] = self._drive.seconds(0, self._through)
        return [log] * bool(self._log) + [Phase(name="step()", parts=parts)]

    def _phase(
        self, name: str, compute: float, link: tuple[int, int], disk: tuple[int, int], update: float = 0.0
    ) -> Phase:
        """Returns a phase. `link`: bytes to the device, bytes from the device. `disk`: bytes read, bytes written."""
        host, drive = self._host, self._drive
        busy = update + sum(disk) * (host.check + drive.processor_seconds)
        parts = {"disk": drive.seconds(*disk)}
        if host.shared:
            # The update and the model use the same processors, so their times add up.
            parts["compute"] = compute + busy
        else:
            parts |= {"compute": compute, "update": busy}
        if host.link is not None:
            # The link moves bytes in both directions at once.
            parts["PCIe"] = max(link) / host.link
        return Phase(name=name, parts=parts)


def _trained(unit: Unit) -> float:
    """Estimates the number of trained elements of a unit from its bytes."""
    return unit.elements * (1 - unit.frozen_bytes / max(1, unit.nbytes))


def _with_network(phase: Phase, network: float) -> Phase:
    return replace(phase, parts={**phase.parts, "network": network})


def through_link(plan: Plan) -> tuple[int, int, int]:
    """Returns the bytes over the link between host and device, as three numbers.

    They are: values to the device in a forward, values to the device in a backward, and gradients from the device.
    """
    moving = [unit for unit in plan.units if not unit.pinned]
    into = sum(unit.nbytes for unit in moving)
    back = sum(unit.nbytes for unit in moving if unit.name not in plan.resident)
    return into, back, sum(unit.nbytes - unit.frozen_bytes for unit in plan.units)


def seconds(parts: Sequence[Phase]) -> float:
    """Returns the seconds of a whole step."""
    return sum(part.seconds for part in parts)


def update_seconds(plan: Plan, a_parameter: float) -> float:
    """Returns the seconds of one processor for all updates of a step, if one element takes `a_parameter` seconds."""
    return sum(map(_trained, plan.units)) * a_parameter


def drive_days(written: int, step_seconds: float, endurance: float) -> float | None:
    """Returns the days of training after which `endurance` bytes are written, if each step writes `written` bytes.

    Returns None if a step writes nothing, or takes 0 seconds.
    """
    if not written or not step_seconds:
        return None
    return endurance / written * step_seconds / _DAY_SECONDS


def moves(plan: Plan) -> str:
    """Returns a line for the log about the bytes that a step moves, with this budget and with larger budgets."""
    moved = f"a step moves {bytes_shown(plan.moved_bytes)}"
    if plan.ram_tier:
        moved = (
            f"{len(plan.ram_tier)} parameters are kept in RAM, and {moved} instead of {bytes_shown(plan.without.total)}"
        )
    more = [f'"{size_option(budget)}": {bytes_shown(other.total)}' for budget, other in plan.larger.items()]
    return f"{moved}; with host_memory={', '.join(more)}" if more else moved
