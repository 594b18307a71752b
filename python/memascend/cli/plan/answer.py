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
# The source of the figures of a machine's memory: read on this machine, given by --ram, or assumed.
Source = Literal["here", "given", "assumed"]
# Gaps between torch's allocations in the heap, as a share of torch's memory. Measured for three kinds of models: 0.1 to
# 0.3.
GAPS = 0.2


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine, and the options of a run."""

    subject: Subject  # the model and its optimizer
    options: Options  # the options of `offload()`
    gpu: Gpu | None = None  # the GPU that computes; None: the CPU computes
    processor: float | None = None  # this CPU's operations per second in products of matrices, if it computes
    # Measurements that replace `processor`: (plan, format of the state) -> seconds of a forward, seconds of a backward,
    # speeds of the host.
    measured: Callable[[Plan, str], tuple[float, float, Host]] | None = None
    drive: Drive | None = None  # the speed of storage; None: not known
    drive_assumed: bool = False  # True if `drive` is `ASSUMED_DRIVE`, neither named nor measured
    speeds: Mapping[str, float] = field(default_factory=dict)  # measured speeds of storage in GB/s
    free: int | None = None  # free bytes of storage; None: no storage is named
    machine: HostMemory | None = None  # the RAM of the machine that computes; None: not known
    machine_is: Source = "here"
    # Bytes that may be written to storage in its life; None: the usual endurance of a drive that is just large enough.
    endurance: int | None = None
    is_usual: bool = True  # True for AdamW in the files' dtype, the defaults of `memascend train`
    ranks: int = 1  # processes that shard the model; drive, tokens and memory are those of one process
    network: float | None = None  # bytes a second that a rank receives while it sends as many; None: not known
    length: int  # tokens of each sequence
    loss: Loss = "chunked"
    sequences: int = 1  # sequences in a micro-batch
    micro_batches: int = 1  # micro-batches in a step

    @property
    def ram(self) -> int | None:
        """Bytes of available RAM for each process; None: not known."""
        return None if self.machine is None else self.machine.available // self.ranks

    def decision(self) -> Decision:
        """Plans as `offload()` does. If the CPU computes, a spare budget leaves room for torch's memory."""
        options = self.options
        if self.on_host and options.spare is not None and options.spare.torch_bytes is None:
            taken = None if isinstance(self.trace, str) else self.torchs + self.gaps
            options = replace(options, host_memory=replace(options.spare, torch_bytes=taken))
        return self.subject.plan(options, self.ranks)

    @property
    def trace(self) -> Trace | str:
        """The trace of one micro-batch, or the reason why the model has none."""
        batch = Batch(sequences=self.sequences, length=self.length, loss=self.loss, on_host=self.on_host)
        return self.subject.trace(batch)

    @property
    def by_layer(self) -> bool:
        """True if each unit computes all micro-batches before the next unit: `accumulate(by_layer=True)`."""
        return self.micro_batches > 1 and self.ranks == 1 and self.options.accumulation_steps == 1

    def one_after_the_other(self) -> Question:
        """Returns the same run with micro-batches one after the other: each of them reads all units."""
        return replace(self, options=replace(self.options, accumulation_steps=self.micro_batches))

    @property
    def torchs(self) -> int:
        """Peak bytes of torch's own memory, without parameters; 0 without a trace.

        By layer, each micro-batch keeps its own checkpointed activations.
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
        """Returns the most bytes of checkpointed activations in files at one time."""
        at_once = self.carried if self.by_layer else self.carried // self.micro_batches
        return max(0, at_once - plan.host.get("activations", 0))

    def needs(self, plan: Plan) -> int:
        """Returns the disk space that a run needs: the store, and files of activations."""
        return plan.disk_bytes + self.scratch(plan)

    def stored(self, plan: Plan) -> int:
        """Returns the bytes of checkpointed activations that a step writes to files and reads again."""
        return self.scratch(plan) * (1 if self.by_layer else self.micro_batches)

    def work(self, plan: Plan, forward: float, backward: float) -> Work:
        """Returns the work of a step whose forward and backward take these seconds."""
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
        """True if the CPU computes: then torch's memory is host memory."""
        return self.options.computes_on == "cpu"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The estimate for a question."""

    plan: Plan  # memory of memascend, and the bytes of a step
    in_memory: int  # bytes of the same training in memory, without activations: values, state, gradients
    host_bytes: int  # host memory of the process: memascend, Python, its libraries, and torch if the CPU computes
    device_bytes: int  # GPU memory: parameters, gradients and torch's memory; 0 without a GPU
    # `ways`: the phases of a step for each possible way of updating; `way`: the fastest way. None: not known.
    ways: Mapping[Way, Sequence[Phase]] | None
    way: Way | None
    disk_bytes: int  # disk space: the store, and files of activations
    read: int  # bytes that a step reads
    written: int  # bytes that a step writes
    endurance: int  # bytes that may be written in the drive's life
    days: float | None  # days of training in the drive's life; None: the seconds of a step are not known
    tokens: int | None  # tokens of a step on all ranks; None: the model has no trace
    problems: tuple[str, ...]  # reasons why the run does not fit
    network: Network | None = None  # bytes that one of several ranks sends and receives; None for one rank

    @property
    def phases(self) -> Sequence[Phase] | None:
        """The phases of a step; None: a speed is not known."""
        return None if self.ways is None or self.way is None else self.ways[self.way]

    @property
    def seconds(self) -> float | None:
        """Seconds of a step; None: a speed is not known."""
        return None if self.phases is None else seconds(self.phases)

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second on all ranks; None: a speed is not known."""
        return None if self.tokens is None or self.seconds is None else self.tokens / self.seconds

    @property
    def bound(self) -> str | None:
        """The kind of work that bounds a step longest, summed over its phases; None: a speed is not known."""
        if self.phases is None:
            return None
        longest: dict[str, float] = {}
        for phase in self.phases:
            longest[phase.bound] = longest.get(phase.bound, 0.0) + phase.seconds
        return max(longest, key=lambda part: longest[part])


def beside(question: Question, plan: Plan) -> int:
    """Returns the host memory of the process besides memascend's plan and torch's tensors: libraries and objects."""
    return IMPORTS + (0 if question.on_host else CONTEXT) + plan.object_bytes


def answer(question: Question) -> Answer:
    """Plans as `offload()` does, and estimates the run on the machine."""
    found = question.decision()
    plan, trace = found.plan, question.trace
    # With several ranks, torch also holds gathered parameters.
    gathered = 0 if found.network is None else found.network.gathered
    torchs = gathered + question.torchs
    ours = plan.host_peak + beside(question, plan) + question.gaps
    step = _ways(question, plan, found.network)
    # Without the speed of compute, choose the way that is fastest for the drive.
    way = None if question.drive is None else fastest(step or _disk_ways(question, plan))
    plan = plan.repeated(0 if question.by_layer else question.micro_batches - 1)
    plan = plan if way is None else plan.by(way)
    # Round up to a drive of whole terabytes.
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
    """Returns the ways of updating that a run of this question can take.

    Without clipping, "early" updates never have to be repeated, so a run takes no other way. Micro-batches one after
    the other are planned without "early", since a Trainer does not tell which micro-batch is the last. A loop that
    tells it by `accumulation_steps=` is faster than this estimate.
    """
    options = question.options
    if "early" not in found:
        return found
    if options.gradients != "auto" or question.ranks > 1 or (question.micro_batches > 1 and not question.by_layer):
        return {way: steps for way, steps in found.items() if way != "early"}
    return {"early": found["early"]} if options.max_grad_norm is None else found


def _ways(question: Question, plan: Plan, network: Network | None) -> dict[Way, list[Phase]] | None:
    """Returns the phases of a step for each possible way of its updates; None if a speed is not known."""
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

    `torchs`: bytes of torch's memory; `ours`: all other host memory of the process.
    """
    found = []
    gpu = question.gpu
    if gpu is not None and plan.device_peak + torchs > gpu.usable:
        found.append(
            f"the {gpu.name} has {bytes_shown(gpu.usable)} for tensors, and {bytes_shown(plan.device_peak + torchs)} "
            f"are needed: give fewer tokens at once (--tokens), or --fit to find how many fit{_elsewhere(question)}"
        )
    needed = ours + (torchs if question.on_host else 0)
    if question.ram is not None and needed > question.ram:
        is_here = question.machine_is == "here"
        owner = (
            f"each of {question.ranks} ranks" if question.ranks > 1 else "this machine" if is_here else "the machine"
        )
        fewer = "fewer tokens at once (--tokens) or " if question.on_host else ""
        free, more = (" free", "free memory") if is_here else ("", "more --ram")
        found.append(
            f"{owner} has {bytes_shown(question.ram)} of RAM{free}, and {bytes_shown(needed)} are needed: give "
            f"{fewer}a smaller --host-memory, or {more}"
        )
    needed = question.needs(plan)
    if question.free is not None and question.free < needed:
        found.append(
            f"the store needs {bytes_shown(needed)}, and {bytes_shown(question.free)} are free: not enough by "
            f"{bytes_shown(needed - question.free)}{_removable(question)}: free so many, or give a larger drive"
            f"{_smaller(question)}"
        )
    return found


# `_removable()` names files with at least this many bytes, and at most this many files.
_LARGE, _LISTED = 1 << 30, 3


def _removable(question: Question) -> str:
    """Names the largest files beside the store, which the user may be able to remove; "" if all are small."""
    own = {file_of(path) for path in question.options.paths or ()}
    folders = {nearest(file).resolve() for file in own}
    files = []
    with contextlib.suppress(OSError):
        for folder in {one if one.is_dir() else one.parent for one in folders}:
            files += [(one.stat().st_size, one) for one in folder.iterdir() if one.is_file() and one not in own]
    named = [
        f"{file} has {bytes_shown(size)}" for size, file in sorted(files, reverse=True)[:_LISTED] if size >= _LARGE
    ]
    return f" ({', '.join(named)})" if named else ""


def _smaller(question: Question) -> str:
    """Suggests state formats with fewer bits, each with the size of its store; "" if the user chose a format."""
    found = []
    for state in ("bf16", "8bit") if question.options.state is None else ():
        with contextlib.suppress(ConfigError, BudgetError):
            other = replace(question, options=replace(question.options, state=state))
            found.append(f"--state {state}, {bytes_shown(other.needs(planned(other)))}")
    return f", or a smaller store ({'; '.join(found)})" if found else ""


def _elsewhere(question: Question) -> str:
    """Suggests moving checkpointed activations of other micro-batches off the GPU; "" if that does not help."""
    trace, more = question.trace, question.micro_batches - 1
    if not question.by_layer or question.carries or isinstance(trace, str) or not trace.recomputes:
        return ""
    others = f"the other {more} micro-batches keep" if more > 1 else "the other micro-batch keeps"
    return f"; --activations ssd or host moves {bytes_shown(more * trace.kept)} that {others}"


def disk_seconds(question: Question, found: Answer) -> float | None:
    """Returns the seconds of the drive in a step; None if its speed is not known."""
    return None if found.way is None else seconds(_disk_ways(question, planned(question))[found.way])


def planned(question: Question) -> Plan:
    """Returns the plan as `offload()` makes it, before a way of updating is chosen."""
    return question.decision().plan


def _disk_ways(question: Question, plan: Plan) -> dict[Way, list[Phase]]:
    """Returns the phases of a step as `_ways()` does, for the drive alone: all computation takes no time."""
    assert question.drive is not None
    idle = Host(update=0.0, check=0.0, shared=False)
    return _possible(question, ways(plan, question.work(plan, 0.0, 0.0), question.drive, idle))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The seconds of a step under several budgets; only the drive's seconds if the speed of compute is not known."""

    now: float  # with the plan's budget
    without: float  # without a RAM tier
    larger: dict[int, float]  # larger budgets, those of `Plan.larger` -> seconds


def forecast_of(question: Question, found: Answer) -> Forecast | None:
    """Estimates the seconds of a step with this budget and larger ones; None if the drive's speed is not known."""
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
    """Returns the bytes that one rank moves in a step: over the network, through PCIe, from and to storage."""
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
    """Returns the seconds of an answer as JSON values."""
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
    written: int  # bytes


def total(question: Question, found: Answer, examples: int) -> Total:
    """Estimates one pass over the data, where each example is one sequence."""
    steps = -(-examples // (question.sequences * question.micro_batches * question.ranks))
    return Total(
        steps=steps, seconds=None if found.seconds is None else steps * found.seconds, written=steps * found.written
    )


# The most sequences in a proposed step: larger steps change how a model learns.
_SEQUENCES_MAX = 256
# A step by layer is proposed if the best other step has less than this share of its tokens per second.
_MUCH_FASTER = 0.9
# A larger step is proposed if it has more than this many times the tokens per second of the present step.
_FASTER = 1.05


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A larger step that takes less time per token, with micro-batches as large as fit, one after the other."""

    question: Question
    answer: Answer
    by_layer: tuple[Question, Answer] | None  # a step by layer of at most as many examples; None: it is not much faster


def propose(question: Question, now: Answer) -> Proposal | None:
    """Proposes the largest micro-batch that fits, and the fewest micro-batches a step that make compute the bound.

    If compute never becomes the bound, takes as many micro-batches as make a step faster. `now` is the answer to
    `question`. Returns None if the run of `question` does not fit, is already bound by compute or has unknown seconds,
    or if no larger step is faster.
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
    """Returns the fastest step by layer of at most `examples`, if it is much faster than `other`; otherwise None."""
    counts = _doubled(examples // question.sequences)[1:]
    best = _best((replace(question, micro_batches=count) for count in counts), other)
    return best if best is not None and _rate(other) < _MUCH_FASTER * _rate(best[1]) else None


def _doubled(most: int) -> list[int]:
    """Returns the powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def _best(asked: Iterable[Question], than: Answer) -> tuple[Question, Answer] | None:
    """Returns the last step of `asked` that is faster than `than` and all earlier steps; None if no step is faster.

    The steps grow. Stops at the first step that does not fit or that compute bounds.
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
    """Returns the question, or the question with activations="ssd", whichever fits first; None if neither fits."""
    asked = [question]
    if not question.carries and not isinstance(question.trace, str) and question.trace.recomputes:
        asked.append(replace(question, options=replace(question.options, activations="ssd")))
    for one in asked:
        # A small budget, or a raw device without scratch=, does not allow activations in files.
        with contextlib.suppress(ConfigError, BudgetError):
            found = answer(one)
            if not found.problems:
                return one, found
    return None


def _rate(found: Answer) -> float:
    return found.tokens_per_second or 0.0


_LENGTHS = (8192, 2048, 512)
# The formats that are tried without --state: the optimizer's own (None), and the formats of fewer bits.
_STATES: tuple[Literal["bf16", "8bit"] | None, ...] = (None, "bf16", "8bit")


def alternative(question: Question) -> tuple[Question, Answer] | None:
    """Returns the nearest run that fits, for a question that does not fit, or None.

    Tries fewer sequences first, then fewer micro-batches, then other formats of the state; each also with checkpointed
    activations in files.
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
    """Returns the count and its halves, down to 1."""
    return [count >> power for power in range(count.bit_length())]


def find(question: Question, length: int | None) -> list[tuple[Question, Answer]]:
    """Finds the largest number of sequences that fits, a power of two, for each length and format of the state.

    Ignores the question's own batch; tries only its format of the state if it names one. `length`: the only length to
    try; None: `_LENGTHS`.
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
    """Returns the question with as many sequences in a micro-batch as fit: a power of two times its own number."""
    if question.measured is not None or isinstance(question.trace, str):
        # The measurements hold only for a micro-batch of this size, or the model has no trace.
        return question
    counts = _doubled(_SEQUENCES_MAX // question.sequences)[1:]
    larger = [replace(question, sequences=question.sequences * count) for count in counts]
    # Bisect, since a trace takes seconds: if a micro-batch fits, all smaller ones fit.
    fits = bisect_left(larger, True, key=lambda one: bool(answer(one).problems))
    return larger[fits - 1] if fits else question


def described_fit(question: Question, found: Answer) -> dict[str, Any]:
    """Returns a batch and its answer as JSON values."""
    return {
        "state": question.options.state,
        "batch": question.sequences,
        "length": question.length,
        "fits": not found.problems,
        "problems": list(found.problems),
        "device_bytes": found.device_bytes,
        "host_bytes": found.host_bytes,
        "disk_bytes": found.plan.disk_bytes,
        "log_bytes": found.plan.log_bytes,
        **described(found),
    }
