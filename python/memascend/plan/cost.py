"""Estimates the seconds of a step on a machine, and the lifetime of a drive: arithmetic alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.plan.table import Plan
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
    threads: int  # that share the update of streamed parameters
    # Whether the model computes on all of the same processors: work on one of them delays the model, whose threads wait
    # for each other at the end of each operation.
    shared: bool
    link: float | None = None  # bytes a second between host and device, each way; None where the host computes
    ram_tier_threads: int | None = None  # that share the update of the RAM tier; None: as many


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
        threads=1,
        shared=shared,
        link=link,
        ram_tier_threads=1 if shared else _IN_RAM_THREADS,
    )


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A phase of a step, whose parts overlap: it takes as long as the longest of them."""

    name: str  # forward, backward, or update where gradients wait for all others
    parts: Mapping[str, float]  # seconds by kind: compute, PCIe, disk, update, network
    tail: float = 0.0  # the non-overlapped seconds of storage and update, for the last gradient

    @property
    def seconds(self) -> float:
        """The longest part, or the longest part before the tail, and the tail."""
        before = max((took for part, took in self.parts.items() if part not in {"disk", "update"}), default=0.0)
        return max(*self.parts.values(), before + self.tail)

    @property
    def bound(self) -> str:
        """The longest part."""
        return max(self.parts, key=lambda part: self.parts[part])


def phases(plan: Plan, work: Work, drive: Drive, host: Host) -> list[Phase]:
    """The phases of one step, one after the other, with the bytes of the plan."""
    forward_read = plan.read_bytes.get("values, forward", 0)
    backward_read = plan.read_bytes.get("values, backward", 0)
    spilled = plan.written_bytes.get("gradients", 0)
    update_read = sum(plan.read_bytes.values()) - forward_read - backward_read
    update_written = sum(plan.written_bytes.values()) - spilled
    into, back, out = through_link(plan)
    computed = work.backwards
    times = 1 if work.by_layer else computed
    # Each backward after the first reads the spilled gradients, and adds to them.
    added = spilled * (times - 1)
    back_link, back_read = back * times + work.carried, backward_read * times + work.stored
    # The RAM tier waits for step() in every mode, and all threads share its update.
    streamed = host.update * (1 - plan.ram_tier_part)
    together = host.ram_tier_threads or host.threads
    # Its values are checked before the update, and have new checksums after it.
    checked = 2 * plan.ram_tier_part * sum(unit.nbytes - unit.frozen_bytes for unit in plan.units) * host.check
    in_step = {"update": (host.update - streamed + checked) / together}
    if plan.ram_tier_part and not plan.log_steps:
        # Without a log step() writes it, too.
        through = int(update_written * plan.ram_tier_part)
        update_written -= through
        in_step["disk"] = drive.seconds(0, through)
    at_step = [Phase(name="step()", parts=in_step)] if plan.ram_tier_part else []
    to, fro = (None, None) if work.exchanged is None else (part * times for part in work.exchanged)
    speeds = _Speeds(drive, host)
    link, disk = (into * times, work.carried), (forward_read * times, work.stored)
    forward = _beside(speeds.phase("forward", work.forward * computed, link, disk), to)
    link = (back_link, out * times)
    if plan.gradients in ("ssd", "ram"):
        # Gradients wait for the last of them.
        disk = (back_read + added, spilled * times)
        backward = _beside(speeds.phase("backward", work.backward * computed, link, disk), fro)
        update = speeds.phase("update", 0.0, (0, 0), (update_read, update_written), streamed)
        return [forward, backward, update, *at_step]
    disk = (back_read + update_read, update_written)
    last = speeds.phase("backward and update", work.backward * computed, link, disk, streamed)
    # The gradient of the forward's first unit comes last: its part in all streamed updates.
    streams = [0.0 if unit.name in plan.ram_tier_units else _trained(unit) for unit in plan.units]
    part = streams[0] / sum(streams) if any(streams) else 0.0
    tail = max(drive.seconds(update_read * part, update_written * part), streamed * part / host.threads)
    if host.shared:
        # The model has finished before the tail.
        last = replace(last, parts={**last.parts, "compute": last.parts["compute"] - streamed * part / host.threads})
    return [forward, _beside(replace(last, tail=tail), fro), *at_step]


def _trained(unit: Unit) -> float:
    return unit.elements * (1 - unit.frozen_bytes / max(1, unit.nbytes))


def _beside(phase: Phase, network: float | None) -> Phase:
    return phase if network is None else replace(phase, parts={**phase.parts, "network": network})


def through_link(plan: Plan) -> tuple[int, int, int]:
    """The bytes that a forward and a backward copy to the device, and those of gradients from it."""
    moving = [unit for unit in plan.units if not unit.pinned]
    into = sum(unit.nbytes for unit in moving)
    back = sum(unit.nbytes for unit in moving if unit.name not in plan.resident)
    return into, back, sum(unit.nbytes - unit.frozen_bytes for unit in plan.units)


@dataclass(frozen=True)
class _Speeds:
    drive: Drive
    host: Host

    def phase(
        self, name: str, compute: float, link: tuple[int, int], disk: tuple[int, int], update: float = 0.0
    ) -> Phase:
        """A phase that moves bytes in both directions of the link, and reads and writes bytes."""
        host = self.host
        busy = (update + sum(disk) * (host.check + self.drive.processor_seconds)) / host.threads
        parts = {"disk": self.drive.seconds(*disk)}
        if host.shared:
            # The model's threads are on the same processors, and wait for each other.
            parts["compute"] = compute + busy
        else:
            parts |= {"compute": compute, "update": busy}
        if host.link is not None:
            # The link moves both ways at once.
            parts["PCIe"] = max(link) / host.link
        return Phase(name=name, parts=parts)


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
