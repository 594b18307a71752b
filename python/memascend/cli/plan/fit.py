"""Finds the length and the batch that fit a GPU, and what each of them takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memascend.cli.plan.answer import answer
from memascend.cli.plan.trace import grown, trace

if TYPE_CHECKING:
    from memascend.cli.plan.answer import Answer, Question

__all__ = ["Candidate", "described", "find"]

_LENGTHS = (8192, 2048, 512)
_BATCH_MAX = 256


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A batch, and what it takes.

    Attributes:
        batch: sequences.
        length: tokens of each.
        answer: of the plan.
    """

    batch: int
    length: int
    answer: Answer

    @property
    def fits(self) -> bool:
        """Whether nothing is too small."""
        return not self.answer.problems

    @property
    def tokens_per_second(self) -> float | None:
        """None where a speed is not known."""
        return None if self.answer.seconds is None else self.batch * self.length / self.answer.seconds


def find(question: Question, length: int | None, *, recomputes: bool) -> list[Candidate]:
    """The largest batch of some lengths, in powers of two.

    Args:
        question: its trace is replaced.
        length: tokens of a sequence; None: a long, a usual and a short one.
        recomputes: whether blocks are computed again in the backward.
    """
    most = getattr(getattr(question.model, "config", None), "max_position_embeddings", None)
    most = most if isinstance(most, int) else max(_LENGTHS)
    lengths = [length] if length else [one for one in _LENGTHS if one <= most] or [most]
    return [_largest(question, one, recomputes=recomputes) for one in lengths]


def _largest(question: Question, length: int, *, recomputes: bool) -> Candidate:
    """The largest batch of one length that fits; if none does, one sequence."""
    one, two = (trace(question.model, batch, length, recomputes=recomputes) for batch in (1, 2))

    def candidate(batch: int) -> Candidate:
        # All that a batch takes grows by the same for each sequence.
        traced = one if isinstance(one, str) or isinstance(two, str) else grown(one, two, batch - 1)
        return Candidate(batch=batch, length=length, answer=answer(replace(question, trace=traced)))

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
        "batch": one.batch,
        "length": one.length,
        "fits": one.fits,
        "problems": list(one.answer.problems),
        "device_bytes": one.answer.device_bytes,
        "host_bytes": one.answer.host_bytes,
        "disk_bytes": one.answer.plan.disk_bytes,
        "seconds_per_step": one.answer.seconds,
        "bound": one.answer.bound,
        "tokens_per_second": one.tokens_per_second,
    }
