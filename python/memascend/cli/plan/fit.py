"""Finds the format of the state, the length and the batch that fit a GPU, and what each of them takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from memascend.cli.plan.answer import answer
from memascend.cli.plan.trace import grown, trace
from memascend.errors import ConfigError
from memascend.run.decision import planned

if TYPE_CHECKING:
    from memascend.cli.plan.answer import Answer, Question
    from memascend.cli.plan.trace import Trace
    from memascend.run.decision import Planned

_LENGTHS = (8192, 2048, 512)
_BATCH_MAX = 256
# More sequences are in no step.
_SEQUENCES_MAX = 1 << 20
# Where none is asked for: as torch has it, and what moves fewer bytes.
_STATES: tuple[Literal["bf16", "8bit"] | None, ...] = (None, "bf16", "8bit")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A batch, and what it takes."""

    state: str | None  # the format of the optimizer's state; None: as it has it
    batch: int  # sequences
    length: int  # tokens of each
    answer: Answer  # of the plan

    @property
    def fits(self) -> bool:
        """Whether nothing is too small."""
        return not self.answer.problems

    @property
    def tokens_per_second(self) -> float | None:
        """None where a speed is not known."""
        return None if self.answer.seconds is None else self.batch * self.length / self.answer.seconds


def find(question: Question, length: int | None, *, recomputes: bool) -> list[Candidate]:
    """The largest batch of some lengths, in powers of two, for each format of the state.

    Args:
        question: its trace is replaced; the format that it asks for is the only one.
        length: tokens of a sequence; None: a long, a usual and a short one.
        recomputes: whether blocks are computed again in the backward.
    """
    most = getattr(getattr(question.model, "config", None), "max_position_embeddings", None)
    most = most if isinstance(most, int) else max(_LENGTHS)
    lengths = [length] if length else [one for one in _LENGTHS if one <= most] or [most]
    traces = {
        length: [trace(question.model, batch, length, recomputes=recomputes) for batch in (1, 2)] for length in lengths
    }
    found = []
    for state in _STATES if question.options.state is None else (question.options.state,):
        asked = replace(question, options=replace(question.options, state=state))
        try:
            plan = planned(asked.model, asked.optimizer, asked.options, asked.ranks)
        except ConfigError:
            if state == question.options.state:
                raise
            # What does not go with the optimizer is no choice.
            continue
        found += [_largest(asked, plan, length, one, two) for length, (one, two) in traces.items()]
    return found


@dataclass(frozen=True, kw_only=True)
class Takeover:
    """From how many tokens a step on the GPU takes longer than anything else."""

    tokens: int  # of the step
    seconds: float  # that it takes
    problem: str  # why so many do not fit at once; empty where they do

    @property
    def tokens_per_second(self) -> float:
        """There."""
        return self.tokens / self.seconds


def takes_over(question: Question, length: int, *, recomputes: bool) -> Takeover | None:
    """The fewest sequences of a length that let compute take longest; None where that is not known, or never so."""
    if question.gpu is None or question.drive is None:
        return None
    one, two = (trace(question.model, batch, length, recomputes=recomputes) for batch in (1, 2))
    if isinstance(one, str) or isinstance(two, str):
        return None
    plan = planned(question.model, question.optimizer, question.options, question.ranks)

    def at(batch: int) -> Answer:
        return answer(replace(question, trace=grown(one, two, batch - 1)), plan)

    enough = 1
    while at(enough).bound != "compute":
        enough *= 2
        if enough > _SEQUENCES_MAX:
            return None
    too_few = enough // 2
    while enough - too_few > 1:
        between = (enough + too_few) // 2
        if at(between).bound == "compute":
            enough = between
        else:
            too_few = between
    found = at(enough)
    assert found.seconds is not None
    return Takeover(
        tokens=enough * length * question.options.accumulation_steps * question.ranks,
        seconds=found.seconds,
        problem="; ".join(found.problems),
    )


def _largest(question: Question, plan: Planned, length: int, one: Trace | str, two: Trace | str) -> Candidate:
    """The largest batch of one length that fits; if none does, one sequence.

    Args:
        question: what is asked, with the format.
        plan: what `offload()` would do, which does not depend on the batch.
        length: tokens of a sequence.
        one: what torch takes for one sequence.
        two: for two.
    """

    def candidate(batch: int) -> Candidate:
        # All that a batch takes grows by the same for each sequence.
        traced = one if isinstance(one, str) or isinstance(two, str) else grown(one, two, batch - 1)
        found = answer(replace(question, trace=traced), plan)
        return Candidate(state=question.options.state, batch=batch, length=length, answer=found)

    best = candidate(1)
    if isinstance(one, str) or not best.fits:
        return best
    while best.batch < _BATCH_MAX:
        larger = candidate(2 * best.batch)
        if not larger.fits:
            break
        best = larger
    return best


def described(one: Candidate) -> dict[str, Any]:
    """As JSON values."""
    return {
        "state": one.state,
        "batch": one.batch,
        "length": one.length,
        "fits": one.fits,
        "problems": list(one.answer.problems),
        "device_bytes": one.answer.device_bytes,
        "host_bytes": one.answer.host_bytes,
        "disk_bytes": one.answer.plan.disk_bytes,
        "log_bytes": one.answer.plan.log_bytes,
        "seconds_per_step": one.answer.seconds,
        "bound": one.answer.bound,
        "tokens_per_second": one.tokens_per_second,
    }
