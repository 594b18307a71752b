"""Puts together what training a model on a machine takes: memory of ours and of torch, seconds, room, wear."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.cli.plan.machine import ENDURANCE_PER_TB, IMPORTS
from memascend.cli.storage import speeds_at
from memascend.formatting import bytes_shown
from memascend.planning.costs import (
    Drive,
    Host,
    Phase,
    Work,
    assumed_host,
    drive_days,
    phases,
    seconds,
    storage_seconds,
    through_link,
    update_seconds,
)
from memascend.planning.forecast import Forecast, forecast
from memascend.run.decision import planned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch

    from memascend.cli.plan.cards import Gpu
    from memascend.cli.plan.trace import Trace
    from memascend.planning.network import Network
    from memascend.planning.options import Options
    from memascend.planning.table import Plan
    from memascend.run.decision import Planned

_MORE = 16 << 30
_TB = 10**12


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine, and what is asked of them."""

    model: torch.nn.Module  # on "meta"
    optimizer: torch.optim.Optimizer  # made for it
    options: Options  # of `offload()`
    trace: Trace | str  # what torch takes for one backward; or why that is not known
    gpu: Gpu | None = None  # that computes; None: the processor does
    measured: Callable[[Plan], tuple[Work, Host]] | None = None  # what the processor takes; None: nobody measured it
    drive: Drive | None = None  # as fast as storage is; None where that is not known
    free: int | None = None  # bytes that storage has; None where none was named
    # Bytes that may be written to storage in its life; None: what is usual for as large a drive as the store needs.
    endurance: int | None = None
    ranks: int = 1  # how many processes share the model; drive, tokens and memory are those of one
    # Bytes a second that a rank receives while it sends as many; None where that is not known.
    network: float | None = None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What it takes."""

    plan: Plan  # of memory, and what a step moves
    in_memory: int  # bytes that the same training holds in memory, but for activations: values, state, gradients
    # Of the process: the budget's use, Python and its libraries, and what torch takes where it computes.
    host_bytes: int
    device_bytes: int  # of the GPU; 0 where there is none
    phases: tuple[Phase, ...] | None  # of a step; None where a speed is not known
    endurance: int  # bytes written in a drive's life
    days: float | None  # of training until then; None where the seconds are not known
    problems: tuple[str, ...]  # why it does not fit; empty where it does
    network: Network | None = None  # what one of several ranks sends and receives

    @property
    def seconds(self) -> float | None:
        """Of a step; None where a speed is not known."""
        return None if self.phases is None else seconds(self.phases)

    @property
    def bound(self) -> str | None:
        """What takes longest, over all phases."""
        if self.phases is None:
            return None
        longest: dict[str, float] = {}
        for phase in self.phases:
            longest[phase.bound] = longest.get(phase.bound, 0.0) + phase.seconds
        return max(longest, key=lambda part: longest[part])


def answer(question: Question, found: Planned | None = None) -> Answer:
    """Plan as `offload()` would, and reckon what that takes on the machine.

    Args:
        question: what is asked.
        found: what `offload()` would do, where that is known already.

    Raises:
        ConfigError: `offload()` would refuse; the message says why.
        BudgetError: the budget is too small; `smallest` is what works.
    """
    found = found or planned(question.model, question.optimizer, question.options, question.ranks)
    plan, trace = found.plan, question.trace
    # With several ranks each holds what torch has gathered, too, and in memory its part of all of it.
    gathered = 0 if found.network is None else found.network.gathered
    torchs = gathered + (0 if isinstance(trace, str) else trace.peak)
    ours = plan.host_peak + plan.object_bytes + IMPORTS
    steps = _phases(question, plan, found.network)
    endurance = question.endurance or _usual_endurance(plan.storage_bytes)
    return Answer(
        plan=plan,
        in_memory=_in_memory(question) + found.state_bytes,
        host_bytes=ours + (torchs if question.gpu is None else 0),
        device_bytes=0 if question.gpu is None else plan.device_peak + torchs,
        phases=None if steps is None else tuple(steps),
        endurance=endurance,
        days=None if steps is None else drive_days(plan, seconds(steps), endurance),
        problems=tuple(_problems(question, plan, torchs)),
        network=found.network,
    )


def _in_memory(question: Question) -> int:
    """Values and gradients, as training in memory holds them; of several ranks one's part."""
    parameters = list(question.model.parameters())
    nbytes = sum(one.nbytes for one in parameters) + sum(one.nbytes for one in parameters if one.requires_grad)
    return -(-nbytes // question.ranks)


def _phases(question: Question, plan: Plan, network: Network | None) -> list[Phase] | None:
    trace, drive = question.trace, question.drive
    if drive is None or isinstance(trace, str):
        return None
    kept = plan.gradients in ("ssd", "ram")
    if question.gpu is not None:
        flops = question.gpu.flops
        work = Work(forward=trace.forward.flops / flops, backward=trace.backward.flops / flops)
        host = assumed_host(question.gpu.link)
    elif question.measured is not None:
        work, host = question.measured(plan)
    else:
        return None
    work = replace(work, backwards=question.options.accumulation_steps)
    if network is not None and question.network is not None:
        backward = network.backward + network.gradients
        work = replace(work, exchanged=(network.forward / question.network, backward / question.network))
    return phases(plan, work, drive, replace(host, update=update_seconds(plan, host.update)), kept=kept)


def _problems(question: Question, plan: Plan, torchs: int) -> list[str]:
    found = []
    gpu = question.gpu
    if gpu is not None and plan.device_peak + torchs > gpu.usable:
        found.append(
            f"the {gpu.name} has {bytes_shown(gpu.usable)} for tensors, and {bytes_shown(plan.device_peak + torchs)} "
            "are needed: fewer tokens at once (--tokens) take less, and --fit finds how many fit"
        )
    if question.free is not None and question.free < plan.disk_bytes:
        found.append(
            f"the store needs {bytes_shown(plan.disk_bytes)}, and {bytes_shown(question.free)} are free: not enough"
        )
    return found


def step_seconds(question: Question, plan: Plan, network: Network | None = None) -> float | None:
    """What a step of a plan takes; None where a speed is not known."""
    steps = _phases(question, plan, network)
    return None if steps is None else seconds(steps)


def disk_seconds(question: Question, plan: Plan) -> float | None:
    """What the drive takes of a step, if nothing else took longer; None where its speed is not known."""
    if question.drive is None:
        return None
    idle = Host(update=0.0, check=0.0, threads=1, shared=False)
    return storage_seconds(plan, question.drive, idle, backwards=question.options.accumulation_steps)


def _usual_endurance(nbytes: int) -> int:
    """Of a drive of whole terabytes that holds so much."""
    return -(-nbytes // _TB) * ENDURANCE_PER_TB * _TB


def larger(question: Question, now: Answer) -> Answer:
    """The same with 16 GiB more of host memory."""
    return answer(replace(question, options=replace(question.options, host_memory=now.plan.budget + _MORE)))


def forecast_of(question: Question, plan: Plan, network: Network | None = None) -> Forecast | None:
    """Seconds of a step with this and with larger budgets: of all of it, or else of the drive; None: not known."""

    def reckon(plan: Plan) -> float | None:
        whole = step_seconds(question, plan, network)
        return disk_seconds(question, plan) if whole is None else whole

    return forecast(plan, reckon)


def drive_at(paths: Sequence[Path]) -> tuple[Drive | None, dict[str, float]]:
    """Storage as fast as it was measured: all devices together, and the figures in GB/s.

    Raises:
        StorageError: a path cannot hold a store; the message says why.
    """
    # Several devices are measured one after the other, and work at once; the slowest sets the pace of all.
    each = [speeds_at(path) for path in paths]
    slowest = {pattern: min(speed[pattern].gb_per_second for speed in each) for pattern in (each[0] if each else ())}
    speeds = {pattern: len(each) * slow for pattern, slow in slowest.items()}
    if "mixed" not in speeds:
        return None, speeds
    busy = sum(speed["mixed"].cpu_seconds for speed in each) / sum(speed["mixed"].nbytes for speed in each)
    read, write, mixed = (speeds[pattern] * 1e9 for pattern in ("read", "write", "mixed"))
    return Drive(read=read, write=write, mixed=mixed, processor_seconds=busy), speeds


def free_bytes(paths: Sequence[Path]) -> int | None:
    """Room for a store there; None where no path is named."""
    return sum(map(_free, paths)) if paths else None


def _free(path: Path) -> int:
    if path.is_block_device():
        with path.open("rb") as device:
            return device.seek(0, os.SEEK_END)
    room = os.statvfs(path if path.is_dir() else path.parent)
    return room.f_bavail * room.f_frsize


def moved(question: Question, found: Answer) -> dict[str, int]:
    """Bytes that one rank moves in a step, by way: received and sent, through PCIe, from and to storage."""
    plan, network = found.plan, found.network
    assert network is not None
    times = question.options.accumulation_steps
    into, out = 0, 0
    if question.options.where.type != "cpu":
        forward, backward, out = through_link(plan)
        into = forward + backward
    return {
        "received_bytes": network.total * times,
        "sent_bytes": network.total * times,
        "to_device_bytes": into * times,
        "from_device_bytes": out * times,
        "read_bytes": sum(plan.read_bytes.values()),
        "written_bytes": sum(plan.written_bytes.values()),
        "gathered_bytes": network.gathered,
    }


def described(one: Answer) -> dict[str, Any]:
    """The seconds of an answer as JSON values."""
    return {
        "seconds_per_step": one.seconds,
        "bound": one.bound,
        "phases": None if one.phases is None else [{**asdict(phase), "seconds": phase.seconds} for phase in one.phases],
    }
