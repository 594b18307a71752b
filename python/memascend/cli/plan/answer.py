"""Estimates the training of a model on a machine: memory of memascend and torch, seconds, disk space, wear."""

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
# Where the figures of a machine's memory are from.
Source = Literal["here", "given", "assumed"]
# The heap keeps what is freed, with gaps that serve nothing: 0.1 to 0.3 of torch's memory for three kinds of models.
GAPS = 0.2


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine, and the options of a run."""

    subject: Subject  # the model and its optimizer
    options: Options  # of `offload()`
    gpu: Gpu | None = None  # computes; None: the processor does
    processor: float | None = None  # operations a second of this processor, where it computes, in products of matrices
    # Instead, its seconds for a forward and a backward, and its other speeds, for a format of the state.
    measured: Callable[[Plan, str], tuple[float, float, Host]] | None = None
    drive: Drive | None = None  # the speed of storage; None: not known
    drive_assumed: bool = False  # nobody has named or measured it
    speeds: Mapping[str, float] = field(default_factory=dict)  # of storage, in GB/s, where they were measured
    free: int | None = None  # free bytes of storage; None: no storage is named
    machine: HostMemory | None = None  # that computes; None: not known
    machine_is: Source = "here"
    # Bytes that may be written to storage in its life; None: the usual endurance of a drive just large enough.
    endurance: int | None = None
    is_usual: bool = True  # AdamW trains the model in the files' dtype, as `memascend train` does by itself
    ranks: int = 1  # processes that share the model; drive, tokens and memory are of one process
    network: float | None = None  # bytes a second that a rank receives while it sends as many; None: not known
    length: int  # tokens of each sequence
    loss: Loss = "chunked"
    sequences: int = 1  # of a micro-batch
    micro_batches: int = 1  # of a step

    @property
    def ram(self) -> int | None:
        """Bytes of RAM that each process can have; None: not known."""
        return None if self.machine is None else self.machine.available // self.ranks

    def decision(self) -> Decision:
        """The plan as `offload()` makes it; a CPU spares what torch does not take."""
        options = self.options
        if self.on_host and options.spare is not None and options.spare.torch_bytes is None:
            taken = None if isinstance(self.trace, str) else self.torchs + self.gaps
            options = replace(options, host_memory=replace(options.spare, torch_bytes=taken))
        return self.subject.plan(options, self.ranks)

    @property
    def trace(self) -> Trace | str:
        """Of one backward; or the reason why there is none."""
        batch = Batch(sequences=self.sequences, length=self.length, loss=self.loss, on_host=self.on_host)
        return self.subject.trace(batch)

    @property
    def by_layer(self) -> bool:
        """Whether each unit computes all micro-batches before the next unit, as `accumulate()` does if asked to."""
        return self.micro_batches > 1 and self.ranks == 1 and self.options.accumulation_steps == 1

    def one_after_the_other(self) -> Question:
        """The same run in a loop of backwards, each of which reads everything."""
        return replace(self, options=replace(self.options, accumulation_steps=self.micro_batches))

    @property
    def torchs(self) -> int:
        """Peak bytes of torch beside parameters, or 0 without a trace. Each micro-batch keeps its own checkpoints."""
        if isinstance(self.trace, str):
            return 0
        kept = 0 if self.carries else self.trace.kept
        more = kept + self.subject.tied_bytes if self.by_layer else 0
        return self.trace.peak + (self.micro_batches - 1) * more

    @property
    def carries(self) -> bool:
        """Whether checkpointed activations leave the memory of the device that computes."""
        moves = self.options.moves_activations(staged=not self.on_host)
        return moves and not isinstance(self.trace, str) and self.trace.recomputes

    @property
    def carried(self) -> int:
        """Bytes of checkpointed activations of a step that leave that memory."""
        return self.micro_batches * self.trace.kept if self.carries and not isinstance(self.trace, str) else 0

    def scratch(self, plan: Plan) -> int:
        """Bytes of checkpointed activations in files at once."""
        at_once = self.carried if self.by_layer else self.carried // self.micro_batches
        return max(0, at_once - plan.host.get("activations", 0))

    def needs(self, plan: Plan) -> int:
        """Bytes that the drive must have: the store, and files of activations."""
        return plan.disk_bytes + self.scratch(plan)

    def stored(self, plan: Plan) -> int:
        """Bytes of checkpointed activations that a step writes to files, and reads again."""
        return self.scratch(plan) * (1 if self.by_layer else self.micro_batches)

    def work(self, plan: Plan, forward: float, backward: float) -> Work:
        """A step whose forward and backward take so many seconds each."""
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
        """Host bytes between torch's allocations."""
        return int(GAPS * self.torchs) if self.on_host else 0

    @property
    def on_host(self) -> bool:
        """Whether the host computes, whose memory torch then takes."""
        return self.options.computes_on == "cpu"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The estimate for a question."""

    plan: Plan  # memory of memascend, and the bytes of a step
    in_memory: int  # bytes of the same training in memory without activations: values, state, gradients
    host_bytes: int  # of the process: memascend, Python and its libraries, and torch if the host computes
    device_bytes: int  # of the GPU; 0 without one
    # The phases of a step for each way in which its updates may run, and the way that it takes; None: not known.
    ways: Mapping[Way, Sequence[Phase]] | None
    way: Way | None
    disk_bytes: int  # that the drive must have: the store, and files of activations
    read: int  # bytes that a step reads
    written: int  # bytes that it writes
    endurance: int  # bytes written in a drive's life
    days: float | None  # of training in a drive's life; None: the seconds of a step are not known
    tokens: int | None  # of a step on all ranks; None: there is no trace
    problems: tuple[str, ...]  # reasons why it does not fit
    network: Network | None = None  # bytes that one of several ranks sends and receives

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
        """Of all ranks; None: a speed is not known."""
        return None if self.tokens is None or self.seconds is None else self.tokens / self.seconds

    @property
    def bound(self) -> str | None:
        """The part of a step that takes longest, over all phases."""
        if self.phases is None:
            return None
        longest: dict[str, float] = {}
        for phase in self.phases:
            longest[phase.bound] = longest.get(phase.bound, 0.0) + phase.seconds
        return max(longest, key=lambda part: longest[part])


def beside(question: Question, plan: Plan) -> int:
    """Bytes of host memory that the process has beside what memascend plans, and torch's where the host computes."""
    return IMPORTS + (0 if question.on_host else CONTEXT) + plan.object_bytes


def answer(question: Question) -> Answer:
    """Plan as `offload()` does, and estimate the run on the machine."""
    found = question.decision()
    plan, trace = found.plan, question.trace
    # Each of several ranks also has the parameters that torch has gathered.
    gathered = 0 if found.network is None else found.network.gathered
    torchs = gathered + question.torchs
    ours = plan.host_peak + beside(question, plan) + question.gaps
    step = _ways(question, plan, found.network)
    # Where compute is not known, the drive alone decides.
    way = None if question.drive is None else fastest(step or _disk_ways(question, plan))
    plan = plan.repeated(0 if question.by_layer else question.micro_batches - 1)
    plan = plan if way is None else plan.by(way)
    # Drives have whole terabytes.
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
    """Those of the ways that a run of this question has: where nothing is clipped, each early update stands.

    Micro-batches one after the other are planned without: a Trainer does not say which of them is the last one. Of a
    loop that does, by `accumulation_steps=`, this is too slow.
    """
    options = question.options
    if "early" not in found:
        return found
    if options.gradients != "auto" or question.ranks > 1 or (question.micro_batches > 1 and not question.by_layer):
        return {way: steps for way, steps in found.items() if way != "early"}
    return {"early": found["early"]} if options.max_grad_norm is None else found


def _ways(question: Question, plan: Plan, network: Network | None) -> dict[Way, list[Phase]] | None:
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
    """Reasons why it does not fit; `ours` is the host memory without torch's."""
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


# Files that are worth a word, and how many are named.
_LARGE, _LISTED = 1 << 30, 3


def _removable(question: Question) -> str:
    """The largest files beside the store, which the user may not need any more."""
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
    """The bytes of stores with moments in fewer bits."""
    found = []
    for state in ("bf16", "8bit") if question.options.state is None else ():
        with contextlib.suppress(ConfigError, BudgetError):
            other = replace(question, options=replace(question.options, state=state))
            found.append(f"--state {state}, {bytes_shown(other.needs(planned(other)))}")
    return f", or a smaller store ({'; '.join(found)})" if found else ""


def _elsewhere(question: Question) -> str:
    """Advice to keep the checkpoints of several micro-batches off the card."""
    trace, more = question.trace, question.micro_batches - 1
    if not question.by_layer or question.carries or isinstance(trace, str) or not trace.recomputes:
        return ""
    others = f"the other {more} micro-batches keep" if more > 1 else "the other micro-batch keeps"
    return f"; --activations ssd or host moves {bytes_shown(more * trace.kept)} that {others}"


def disk_seconds(question: Question, found: Answer) -> float | None:
    """Seconds of the drive in a step; None: its speed is not known."""
    return None if found.way is None else seconds(_disk_ways(question, planned(question))[found.way])


def planned(question: Question) -> Plan:
    """The plan as `offload()` makes it, before the way of its updates is known."""
    return question.decision().plan


def _disk_ways(question: Question, plan: Plan) -> dict[Way, list[Phase]]:
    assert question.drive is not None
    idle = Host(update=0.0, check=0.0, shared=False)
    return _possible(question, ways(plan, question.work(plan, 0.0, 0.0), question.drive, idle))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The seconds of a step, or else of its drive."""

    now: float  # with the plan as it is
    without: float  # without a RAM tier
    larger: dict[int, float]  # by larger budgets, those of the plan


def forecast_of(question: Question, found: Answer) -> Forecast | None:
    """Seconds with this budget and larger ones; None: not even the drive's are known."""
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
    """Bytes that one rank moves in a step: over the network, through PCIe, from and to storage."""
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
    """The seconds of an answer as JSON values."""
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
    """One pass over a number of examples, each of which is a sequence."""
    steps = -(-examples // (question.sequences * question.micro_batches * question.ranks))
    return Total(
        steps=steps, seconds=None if found.seconds is None else steps * found.seconds, written=steps * found.written
    )


# Steps of more sequences are not proposed: they train otherwise than people expect.
_SEQUENCES_MAX = 256
# By layer is proposed where it takes this part of the time of micro-batches one after the other.
_MUCH_FASTER = 0.9
# A larger step is proposed where it is so much faster.
_FASTER = 1.05


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A larger step that takes less time in all, with micro-batches as large as fit, one after the other."""

    question: Question
    answer: Answer
    by_layer: tuple[Question, Answer] | None  # as many examples a step, where that is much faster


def propose(question: Question, now: Answer) -> Proposal | None:
    """The largest micro-batch that fits, and as few of them as make compute the bound; else as many as help.

    `now` answers the question. None where its run does not fit, where it is bound by compute already, where seconds are
    not known, or where no larger step is faster.
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
    """A step of at most so many examples by layer, where it is much faster than the other; the fewest that are."""
    counts = _doubled(examples // question.sequences)[1:]
    best = _best((replace(question, micro_batches=count) for count in counts), other)
    return best if best is not None and _rate(other) < _MUCH_FASTER * _rate(best[1]) else None


def _doubled(most: int) -> list[int]:
    """The powers of two up to a number."""
    return [1 << power for power in range(most.bit_length())]


def _best(asked: Iterable[Question], than: Answer) -> tuple[Question, Answer] | None:
    """The last of some growing steps that is faster than those before; the first that compute bounds ends them."""
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
    """The question if its run fits, else with checkpointed activations in files; None where neither fits."""
    asked = [question]
    if not question.carries and not isinstance(question.trace, str) and question.trace.recomputes:
        asked.append(replace(question, options=replace(question.options, activations="ssd")))
    for one in asked:
        # The budget, or a raw device without scratch files, may not do for activations in files.
        with contextlib.suppress(ConfigError, BudgetError):
            found = answer(one)
            if not found.problems:
                return one, found
    return None


def _rate(found: Answer) -> float:
    return found.tokens_per_second or 0.0


_LENGTHS = (8192, 2048, 512)
# Without --state: the optimizer's own format, and the formats of fewer bytes.
_STATES: tuple[Literal["bf16", "8bit"] | None, ...] = (None, "bf16", "8bit")


def alternative(question: Question) -> tuple[Question, Answer] | None:
    """The nearest run that fits, where the asked one does not.

    With fewer micro-batches only where fewer sequences at once do not fit, each also with checkpointed activations in
    files; with another format of the state at last.
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
    """The count, and its halves down to 1."""
    return [count >> power for power in range(count.bit_length())]


def find(question: Question, length: int | None) -> list[tuple[Question, Answer]]:
    """The largest batch of some lengths that fits, in powers of two, for each format of the state.

    The question's own batch is ignored; if it names a format, only that one is tried. `length` is that of all
    sequences; None: a long, a usual and a short one.
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
    """The question with the most sequences, in powers of two, that fit at once; with its own where more do not."""
    if question.measured is not None or isinstance(question.trace, str):
        # Of another micro-batch nothing is known.
        return question
    counts = _doubled(_SEQUENCES_MAX // question.sequences)[1:]
    larger = [replace(question, sequences=question.sequences * count) for count in counts]
    # A trace of a model takes seconds, and one that fits leaves room for all that are smaller.
    fits = bisect_left(larger, True, key=lambda one: bool(answer(one).problems))
    return larger[fits - 1] if fits else question


def described_fit(question: Question, found: Answer) -> dict[str, Any]:
    """A batch and the answer for it as JSON values."""
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
