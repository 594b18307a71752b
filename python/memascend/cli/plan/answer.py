"""Estimates the training of a model on a machine: memory of memascend and torch, seconds, disk space, drive wear."""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from memascend.cli.plan.subject import Batch
from memascend.errors import BudgetError, ConfigError
from memascend.plan.cost import (
    Drive,
    Host,
    Phase,
    Work,
    assumed_host,
    drive_days,
    fastest,
    seconds,
    through_link,
    update_seconds,
    ways,
)
from memascend.plan.decision import TorchBytes, file_of, nearest
from memascend.plan.hardware import ENDURANCE_PER_TB, REACHED
from memascend.plan.spare import CONTEXT, IMPORTS
from memascend.text import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memascend.cli.plan.subject import Loss, Subject, Trace
    from memascend.plan.cost import Network
    from memascend.plan.decision import Decision
    from memascend.plan.hardware import Gpu
    from memascend.plan.options import Options
    from memascend.plan.spare import HostMemory
    from memascend.plan.table import Plan, Way


_TB = 10**12
# Where the size of the machine's memory comes from. "here": measured on this machine. "given": from --ram, or the size
# is not known. "assumed": a default size.
Source = Literal["here", "given", "assumed"]
# The bytes of gaps between torch's allocations in the heap, as a share of the bytes of torch's tensors. Measurements
# with three kinds of models gave shares from 0.1 to 0.3.
GAPS = 0.2


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine, and the options of a run."""

    subject: Subject  # the model and its optimizer
    options: Options  # the options of `offload()`
    gpu: Gpu | None = None  # the GPU that computes; None: the CPU computes, or the GPU is not named
    # The operations per second that the CPU reaches in matrix products. None: not measured.
    processor: float | None = None
    slowdown: float = 1.0  # how many times longer the CPU takes for products in the model's dtype than in float32
    # A function that measures this machine. It takes a plan and a format of the state, and returns the seconds of a
    # forward, the seconds of a backward, and the speeds of the host. None: there is no such measurement.
    measured: Callable[[Plan, str], tuple[float, float, Host]] | None = None
    drive: Drive | None = None  # the speed of storage; None: not known
    drive_assumed: bool = False  # True if `drive` is `ASSUMED_DRIVE`, because no drive is named or measured
    speeds: Mapping[str, float] = field(default_factory=dict)  # measured speeds of storage in GB/s
    free: int | None = None  # free bytes of storage; None: the user named no storage
    machine: HostMemory | None = None  # the RAM of the machine that computes; None: not known
    machine_is: Source = "here"
    # Bytes that may be written to the drive in its life. None: the usual endurance of a drive that is just large enough
    # for the run.
    endurance: int | None = None
    is_usual: bool = True  # True if `memascend train` can do the run: AdamW, in the dtype of the model's files
    ranks: int = 1  # the number of processes that shard the model; drive and micro-batches are those of one process
    # The bytes a second that a rank receives while it sends the same number of bytes. None: not known.
    network: float | None = None
    length: int  # tokens of each sequence
    loss: Loss = "chunked"
    sequences: int = 1  # sequences in a micro-batch
    micro_batches: int = 1  # micro-batches in a step

    @property
    def ram(self) -> int | None:
        """Bytes of available RAM for each process; None: not known."""
        return None if self.machine is None else self.machine.available // self.ranks

    def decision(self) -> Decision:
        """Plans the run in the same way as `offload()`.

        If the CPU computes and the budget is the machine's spare memory, the budget leaves room for torch's memory.
        """
        options = self.options
        if self.on_host and options.spare is not None and options.spare.torch_bytes is None:
            taken = None if isinstance(self.trace, str) else self.torchs + self.gaps
            options = replace(options, host_memory=replace(options.spare, torch_bytes=taken))
        return self.subject.plan(options, self.ranks)

    @property
    def trace(self) -> Trace | str:
        """The trace of one micro-batch, or the reason why the model cannot be traced."""
        batch = Batch(sequences=self.sequences, length=self.length, loss=self.loss, on_host=self.on_host)
        return self.subject.trace(batch)

    @property
    def by_layer(self) -> bool:
        """True if each unit computes all micro-batches before the next unit begins: `accumulate(by_layer=True)`."""
        return self.micro_batches > 1 and self.ranks == 1 and self.options.accumulation_steps == 1

    def one_after_the_other(self) -> Question:
        """Returns the same run, but its micro-batches run one after the other."""
        return replace(self, options=replace(self.options, accumulation_steps=self.micro_batches))

    @property
    def torchs(self) -> int:
        """The peak of torch's own memory in bytes, without parameters; 0 if the model cannot be traced.

        If micro-batches are computed by layer, each micro-batch keeps its own gradients of tied parameters, and, unless
        `carries`, its own activations.
        """
        if isinstance(self.trace, str):
            return 0
        kept = 0 if self.carries else self.trace.kept
        more = kept + self.subject.tied_bytes if self.by_layer else 0
        return self.trace.peak + (self.micro_batches - 1) * more

    @property
    def carries(self) -> bool:
        """True if checkpointed activations leave the memory of the device that computes."""
        moves = self.options.moves_activations(staged=not self.on_host)
        return moves and not isinstance(self.trace, str) and self.trace.recomputes

    @property
    def carried(self) -> int:
        """Bytes of checkpointed activations that leave the device's memory in a step."""
        return self.micro_batches * self.trace.kept if self.carries and not isinstance(self.trace, str) else 0

    def scratch(self, plan: Plan) -> int:
        """Returns the largest number of bytes of checkpointed activations that are in files at the same time."""
        at_once = self.carried if self.by_layer else self.carried // self.micro_batches
        return max(0, at_once - plan.host.get("activations", 0))

    def needs(self, plan: Plan) -> int:
        """Returns the bytes of disk space that a run needs for the store and for files of activations."""
        return plan.disk_bytes + self.scratch(plan)

    def stored(self, plan: Plan) -> int:
        """Returns the bytes of checkpointed activations that a step writes to files, and later reads."""
        return self.scratch(plan) * (1 if self.by_layer else self.micro_batches)

    def work(self, plan: Plan, forward: float, backward: float) -> Work:
        """Returns the `Work` of a step. `forward` and `backward` are the seconds of one micro-batch."""
        return Work(
            forward=forward,
            backward=backward,
            backwards=self.micro_batches,
            by_layer=self.by_layer,
            carried=self.carried,
            stored=self.stored(plan),
        )

    @property
    def gaps(self) -> int:
        """Bytes of gaps between torch's allocations in host memory; 0 if a GPU computes."""
        return int(GAPS * self.torchs) if self.on_host else 0

    @property
    def on_host(self) -> bool:
        """True if the CPU computes. torch's memory is host memory then."""
        return self.options.computes_on == "cpu"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The estimate for a question."""

    plan: Plan  # the memory of memascend, and the bytes that a step moves
    in_memory: int  # bytes of values, state and gradients that the same training takes without memascend
    host_bytes: int  # host memory of the process: memascend, Python, its libraries, and torch if the CPU computes
    device_bytes: int  # GPU memory of parameters, gradients and torch; 0 if the CPU computes
    # `ways` has the phases of a step for each way in which the updates may run; None: the seconds are not known. `way`
    # is the way that `fastest()` chooses. If `ways` is None, `fastest()` compares only the seconds of the drive. `way`
    # is None if the drive's speed is not known.
    ways: Mapping[Way, Sequence[Phase]] | None
    way: Way | None
    disk_bytes: int  # disk space of the store and of files of activations
    read: int  # bytes that a step reads
    written: int  # bytes that a step writes
    endurance: int  # bytes that may be written in the drive's life
    days: float | None  # days of training in the drive's life; None: the seconds of a step are not known
    tokens: int | None  # tokens of a step on all ranks; None: the model has no trace
    problems: tuple[str, ...]  # reasons why the run does not fit
    network: Network | None = None  # bytes that one of several ranks sends and receives; None: there is one rank

    @property
    def phases(self) -> Sequence[Phase] | None:
        """The phases of a step; None: their seconds are not known."""
        return None if self.ways is None or self.way is None else self.ways[self.way]

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None: not known."""
        return None if self.phases is None else seconds(self.phases)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on all ranks; None: not known."""
        return None if self.tokens is None or self.seconds is None else self.tokens / self.seconds

    @property
    def bound(self) -> str | None:
        """The kind of work, such as "disk", that limits the most seconds of a step; None: not known."""
        if self.phases is None:
            return None
        longest: dict[str, float] = {}
        for phase in self.phases:
            longest[phase.bound] = longest.get(phase.bound, 0.0) + phase.seconds
        return max(longest, key=lambda part: longest[part])


def beside(question: Question, plan: Plan) -> int:
    """Returns the bytes of host memory that libraries and Python's objects take in the process."""
    return IMPORTS + (0 if question.on_host else CONTEXT) + plan.object_bytes


def answer(question: Question) -> Answer:
    """Plans the run in the same way as `offload()`, and estimates its memory, seconds and disk space."""
    found = question.decision()
    plan, trace = found.plan, question.trace
    # With several ranks, torch also holds gathered parameters.
    gathered = 0 if found.network is None else found.network.gathered
    torchs = gathered + question.torchs
    ours = plan.host_peak + beside(question, plan) + question.gaps
    step = _ways(question, plan, found.network)
    # If the speed of compute is not known, choose the way that is fastest for the drive.
    way = None if question.drive is None else fastest(step or _disk_ways(question, plan))
    plan = plan.repeated(0 if question.by_layer else question.micro_batches - 1)
    plan = plan if way is None else plan.by(way)
    # Without a given endurance, assume a drive just large enough for the run, in whole terabytes.
    scratch = question.scratch(plan)
    endurance = question.endurance or -(-(plan.storage_bytes + scratch) // _TB) * ENDURANCE_PER_TB * _TB
    read, written = (sum(moved.values()) + question.stored(plan) for moved in (plan.read_bytes, plan.written_bytes))
    now = Answer(
        plan=plan,
        in_memory=TorchBytes.of(found).total,
        host_bytes=ours + (torchs if question.on_host else 0),
        device_bytes=0 if question.on_host else plan.device_peak + torchs,
        ways=step,
        way=way,
        disk_bytes=question.needs(plan),
        read=read,
        written=written,
        endurance=endurance,
        days=None,
        tokens=None if isinstance(trace, str) else trace.tokens * question.micro_batches * question.ranks,
        problems=tuple(_problems(question, plan, torchs, ours)),
        network=found.network,
    )
    return now if now.seconds is None else replace(now, days=drive_days(written, now.seconds, endurance))


def _possible(question: Question, found: dict[Way, list[Phase]]) -> dict[Way, list[Phase]]:
    """Returns the ways in which this run can make its updates, and the phases of each way.

    Excludes "early" if `gradients` is not "auto", if there are several ranks, or if several micro-batches run one after
    the other. In the last case, a Trainer does not tell `offload()` which micro-batch is the last; a training loop that
    passes `accumulation_steps=` does, and may be faster than the estimate. If `found` contains "early", "early" is not
    excluded, and nothing is clipped, returns only "early".
    """
    options = question.options
    if "early" not in found:
        return found
    if options.gradients != "auto" or question.ranks > 1 or (question.micro_batches > 1 and not question.by_layer):
        return {way: steps for way, steps in found.items() if way != "early"}
    return {"early": found["early"]} if options.max_grad_norm is None else found


def _ways(question: Question, plan: Plan, network: Network | None) -> dict[Way, list[Phase]] | None:
    """Returns the phases of a step for each way in which its updates may run; None if their seconds are not known.

    The seconds are not known if the speed of the drive or of compute is not known, or if the model has no trace.
    """
    trace, drive = question.trace, question.drive
    if drive is None or isinstance(trace, str):
        return None
    if question.gpu is not None:
        flops = question.gpu.flops
        forward, backward = trace.forward / flops, trace.backward / flops
        host = assumed_host(question.gpu.link)
    elif question.measured is not None:
        forward, backward, host = question.measured(plan, question.options.state or "fp32")
    elif question.processor is not None:
        flops = question.processor * REACHED
        forward, backward, host = trace.forward / flops, trace.backward / flops, assumed_host(None, shared=True)
    else:
        return None
    work = question.work(plan, forward, backward)
    if network is not None and question.network is not None:
        backward = network.backward + network.gradients
        work = replace(work, exchanged=(network.forward / question.network, backward / question.network))
    host = replace(host, update=update_seconds(plan, host.update))
    return _possible(question, ways(plan, work, drive, host))


def _problems(question: Question, plan: Plan, torchs: int, ours: int) -> list[str]:
    """Returns the reasons why the run does not fit.

    `torchs` is the bytes of torch's memory. `ours` is the bytes of all other host memory of the process.
    """
    found = []
    gpu = question.gpu
    if gpu is not None and plan.device_peak + torchs > gpu.usable:
        found.append(
            f"the {gpu.name} has {bytes_shown(gpu.usable)} for tensors, but the run needs "
            f"{bytes_shown(plan.device_peak + torchs)}: use a smaller --tokens (--fit finds the largest number that "
            f"fits){_elsewhere(question)}"
        )
    needed = ours + (torchs if question.on_host else 0)
    if question.ram is not None and needed > question.ram:
        is_here = question.machine_is == "here"
        owner = (
            f"each of {question.ranks} ranks" if question.ranks > 1 else "this machine" if is_here else "the machine"
        )
        fewer = "a smaller --tokens, " if question.on_host else ""
        free, more = (" free", "free some memory") if is_here else ("", "give a larger --ram")
        found.append(
            f"{owner} has {bytes_shown(question.ram)} of{free} RAM, but the run needs {bytes_shown(needed)}: use "
            f"{fewer}a smaller --host-memory, or {more}"
        )
    needed = question.needs(plan)
    if question.free is not None and question.free < needed:
        found.append(
            f"the run needs {bytes_shown(needed)} of disk space, but only {bytes_shown(question.free)} are free: free "
            f"another {bytes_shown(needed - question.free)}{_removable(question)}, or use a larger drive"
            f"{_smaller(question)}"
        )
    return found


# `_removable()` names only files with at least 1 GiB, and at most 3 files.
_LARGE, _LISTED = 1 << 30, 3


def _removable(question: Question) -> str:
    """Returns a text that names the largest files beside the store; "" if no large file is found.

    The user may be able to remove a large file, so that the store fits.
    """
    own = {file_of(path) for path in question.options.paths or ()}
    folders = {nearest(file).resolve() for file in own}
    files = []
    with contextlib.suppress(OSError):
        for folder in {one if one.is_dir() else one.parent for one in folders}:
            files += [(one.stat().st_size, one) for one in folder.iterdir() if one.is_file() and one not in own]
    named = [
        f"{file} has {bytes_shown(size)}" for size, file in sorted(files, reverse=True)[:_LISTED] if size >= _LARGE
    ]
    return f" (for example, {', '.join(named)})" if named else ""


def _smaller(question: Question) -> str:
    """Suggests state formats with fewer bits, and the disk space that each needs.

    Returns "" if the user chose a format, or if the run cannot use another format.
    """
    found = []
    for state in ("bf16", "8bit") if question.options.state is None else ():
        with contextlib.suppress(ConfigError, BudgetError):
            other = replace(question, options=replace(question.options, state=state))
            found.append(f"--state {state} needs {bytes_shown(other.needs(planned(other)))}")
    return f", or make the store smaller ({'; '.join(found)})" if found else ""


def _elsewhere(question: Question) -> str:
    """Suggests moving checkpointed activations off the GPU; "" if this does not help."""
    trace, more = question.trace, question.micro_batches - 1
    if not question.by_layer or question.carries or isinstance(trace, str) or not trace.recomputes:
        return ""
    others = f"the other {more} micro-batches" if more > 1 else "the other micro-batch"
    return f", or use --activations ssd or host, which moves {bytes_shown(more * trace.kept)} of {others} off the GPU"


def disk_seconds(question: Question, found: Answer) -> float | None:
    """Returns the seconds that the drive works in a step; None if the drive's speed is not known."""
    return None if found.way is None else seconds(_disk_ways(question, planned(question))[found.way])


def planned(question: Question) -> Plan:
    """Returns the plan that `offload()` makes. The plan's traffic is for updates that run "fused" or "at once"."""
    return question.decision().plan


def _disk_ways(question: Question, plan: Plan) -> dict[Way, list[Phase]]:
    """Returns the phases like `_ways()`, but assumes that computation takes no time: only the drive takes time."""
    assert question.drive is not None
    idle = Host(update=0.0, check=0.0, shared=False)
    return _possible(question, ways(plan, question.work(plan, 0.0, 0.0), question.drive, idle))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The seconds of a step with each budget; only the drive's seconds if the speed of compute is not known."""

    now: float  # seconds with the plan's budget
    without: float  # seconds without a RAM tier
    larger: dict[int, float]  # seconds for each budget in `Plan.larger`


def forecast_of(question: Question, found: Answer) -> Forecast | None:
    """Estimates the seconds of a step for several memory budgets; None if the drive's speed is not known."""
    if question.drive is None:
        return None
    plan = planned(question)

    def estimated(other: Plan) -> float:
        steps = _ways(question, other, found.network) or _disk_ways(question, other)
        return seconds(steps[fastest(steps)])

    return Forecast(
        now=estimated(plan),
        without=estimated(plan.moving(plan.without)),
        larger={budget: estimated(plan.moving(traffic)) for budget, traffic in plan.larger.items()},
    )


def moved(question: Question, found: Answer) -> dict[str, int]:
    """Returns the bytes that one rank moves in a step over the network, over PCIe, and from and to storage.

    "gathered_bytes" is the memory of gathered parameters.
    """
    plan, network = found.plan, found.network
    assert network is not None
    times = question.micro_batches
    into, out = 0, 0
    if question.options.computes_on != "cpu":
        forward, backward, out = through_link(plan)
        into = forward + backward
    return {
        "received_bytes": network.total * times,
        "sent_bytes": network.total * times,
        "to_device_bytes": into * times,
        "from_device_bytes": out * times,
        "read_bytes": found.read,
        "written_bytes": found.written,
        "gathered_bytes": network.gathered,
    }


def described(one: Answer) -> dict[str, Any]:
    """Returns the figures of time in an answer as JSON values."""
    return {
        "seconds_per_step": one.seconds,
        "tokens_per_second": one.tokens_per_second,
        "bound": one.bound,
        "updates": one.way,
        "updates_seconds": None if one.ways is None else {way: seconds(steps) for way, steps in one.ways.items()},
        "phases": None if one.phases is None else [{**asdict(phase), "seconds": phase.seconds} for phase in one.phases],
    }


@dataclass(frozen=True, kw_only=True)
class Total:
    """The figures of a whole run."""

    steps: int
    seconds: float | None  # None: the seconds of a step are not known
    written: int  # bytes written to storage


def total(question: Question, found: Answer, examples: int) -> Total:
    """Estimates one pass over the data. Each of the `examples` is one sequence."""
    steps = -(-examples // (question.sequences * question.micro_batches * question.ranks))
    return Total(
        steps=steps, seconds=None if found.seconds is None else steps * found.seconds, written=steps * found.written
    )


# The largest number of sequences in a proposed step. Larger steps change how a model learns.
_SEQUENCES_MAX = 256
# `_by_layer()` returns a step only if `other` has less than 0.9 times the tokens per second of this step.
_MUCH_FASTER = 0.9
# A larger step is proposed only if it computes more than 1.05 times the tokens per second of the present step.
_FASTER = 1.05


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A larger step that takes less time per token than the present step."""

    question: Question
    answer: Answer
    # A step that computes micro-batches by layer, and has at most as many examples as the step in `question`. None:
    # `propose()` found no step by layer that is much faster than the step in `question`.
    by_layer: tuple[Question, Answer] | None


def propose(question: Question, now: Answer) -> Proposal | None:
    """Proposes a larger step that is faster per token; None if there is no such step. `now` answers `question`.

    The proposed step has the micro-batch that `_largest()` returns. `_best()` chooses the number of these
    micro-batches, which run one after the other, from the powers of two. If `_best()` returns None, proposes the step
    by layer that `_by_layer()` returns.

    Returns None, too, if the run of `question` does not fit, has several ranks, or runs several micro-batches one after
    the other; or if compute is already the longest part of its step, or its seconds are not known.
    """
    if now.problems or now.bound in (None, "compute"):
        return None
    if question.ranks > 1 or question.options.accumulation_steps > 1:
        return None
    largest = _largest(replace(question, micro_batches=1))
    counts = _doubled(_SEQUENCES_MAX // largest.sequences)
    best = _best((replace(largest, micro_batches=count).one_after_the_other() for count in counts), now)
    examples = best[0].sequences * best[0].micro_batches if best else _SEQUENCES_MAX
    layered = _by_layer(question, examples, best[1] if best else now)
    first = best or layered
    return None if first is None else Proposal(question=first[0], answer=first[1], by_layer=layered)


def _by_layer(question: Question, examples: int, other: Answer) -> tuple[Question, Answer] | None:
    """Returns a step by layer with at most `examples` examples, and with the micro-batch of `question`.

    Returns None if `_best()` chooses no such step, or if this step is not much faster than `other`.
    """
    counts = _doubled(examples // question.sequences)[1:]
    best = _best((replace(question, micro_batches=count) for count in counts), other)
    return best if best is not None and _rate(other) < _MUCH_FASTER * _rate(best[1]) else None


def _doubled(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def _best(asked: Iterable[Question], than: Answer) -> tuple[Question, Answer] | None:
    """Returns the step in `asked` that is the best in the end; None if no step becomes the best.

    A step becomes the best if it has more than `_FASTER` times the tokens per second of the best so far, which is
    `than` at the beginning. Stops at the first step that does not fit, and after the first step whose bound is compute.
    The caller passes steps of increasing size.
    """
    best: tuple[Question, Answer] | None = None
    for one in asked:
        found = _fitting(one)
        if found is None:
            break
        if _rate(found[1]) > _FASTER * _rate(best[1] if best else than):
            best = found
        if found[1].bound == "compute":
            break
    return best


def _fitting(question: Question) -> tuple[Question, Answer] | None:
    """Returns `question` if it fits, else the same question with activations="ssd" if this fits, else None.

    Tries activations="ssd" only if checkpointed activations stay in the memory of the device that computes.
    """
    asked = [question]
    if not question.carries and not isinstance(question.trace, str) and question.trace.recomputes:
        asked.append(replace(question, options=replace(question.options, activations="ssd")))
    for one in asked:
        # activations="ssd" is an error if the budget is too small, or if the storage is a raw device without scratch=.
        with contextlib.suppress(ConfigError, BudgetError):
            found = answer(one)
            if not found.problems:
                return one, found
    return None


def _rate(found: Answer) -> float:
    return found.tokens_per_second or 0.0


_LENGTHS = (8192, 2048, 512)
# The formats of the state that are tried if the user gives no --state. None is the optimizer's own format. The other
# formats have fewer bits.
_STATES: tuple[Literal["bf16", "8bit"] | None, ...] = (None, "bf16", "8bit")


def alternative(question: Question) -> tuple[Question, Answer] | None:
    """Returns a run that fits and is similar to a run that does not fit; None if no similar run fits.

    Tries fewer sequences first, then fewer micro-batches, then other formats of the state. For each combination,
    `_fitting()` may also try checkpointed activations in files.
    """
    options = question.options
    for state in _STATES if options.state is None else (options.state,):
        for micro_batches in _halved(question.micro_batches):
            for sequences in _halved(question.sequences):
                one = replace(
                    question,
                    options=replace(options, state=state),
                    sequences=sequences,
                    micro_batches=micro_batches,
                )
                if options.accumulation_steps > 1:
                    one = replace(one, options=replace(one.options, accumulation_steps=micro_batches))
                if (found := _fitting(one)) is not None:
                    return found
    return None


def _halved(count: int) -> list[int]:
    """Returns a list of `count`, half of it, a quarter of it, and so on, down to 1."""
    return [count >> power for power in range(count.bit_length())]


def find(question: Question, length: int | None) -> list[tuple[Question, Answer]]:
    """Finds, for each sequence length and each format of the state, the largest number of sequences that fits.

    Each number is a power of two up to `_SEQUENCES_MAX`. A number is 1 if no number fits, or if the model cannot be
    traced. If the question names a format of the state, tries only this format, else the formats in `_STATES` that the
    optimizer has. If `length` is given, tries only this length, else the lengths in `_LENGTHS` that the model allows,
    or only the model's maximum if it allows none of them. Ignores the number of sequences in `question`.
    """
    most = question.subject.longest or max(_LENGTHS)
    lengths = [length] if length else [one for one in _LENGTHS if one <= most] or [most]
    found = []
    for state in _STATES if question.options.state is None else (question.options.state,):
        asked = replace(question, options=replace(question.options, state=state))
        try:
            asked.decision()
        except ConfigError:
            if state == question.options.state:
                raise
            # The optimizer does not have this format.
            continue
        for one in lengths:
            largest = _largest(replace(asked, length=one, sequences=1))
            found.append((largest, answer(largest)))
    return found


def _largest(question: Question) -> Question:
    """Multiplies `question.sequences` by the largest power of two with which the run fits.

    Returns `question` itself if no larger micro-batch fits, or if it is not known whether a larger one fits. Tries no
    micro-batch of more than `_SEQUENCES_MAX` sequences.
    """
    if question.measured is not None or isinstance(question.trace, str):
        # Measurements are valid only for the micro-batch of `question`, and without a trace the memory is not known.
        return question
    counts = _doubled(_SEQUENCES_MAX // question.sequences)[1:]
    larger = [replace(question, sequences=question.sequences * count) for count in counts]
    # Bisect, because each trace takes seconds. If a micro-batch fits, all smaller micro-batches fit.
    fits = bisect_left(larger, True, key=lambda one: bool(answer(one).problems))
    return larger[fits - 1] if fits else question
