"""Finds the fewest swap buffers DeepSpeed runs with, by trial: the counts its documents give fail on many models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.systems import SYSTEMS

if TYPE_CHECKING:
    from benchmarks.train.cell.workload import Workload
    from benchmarks.train.measure import Bench

__all__ = ["tuned"]

# More than any model here needs; trying ends there.
_BUFFERS_MAX = 16
# Tokens of a trial: buffers depend on parameters, not on the batch.
_TRIAL_LENGTH = 16
# And on how large a block is, not on how many there are.
_TRIAL_LAYERS = 12
# How too few buffers show; another error will not go away by more of them.
_TOO_FEW = ("AssertionError", "IndexError", "buffer")


def tuned(bench: Bench, work: Workload, system: str, *, lean: bool = False) -> dict[str, Any]:
    """Settings to run a system with; {"error": ...} where none works. Empty for systems that have none.

    Args:
        bench: tries.
        work: what is trained; whether blocks are recomputed counts, batch and length do not.
        system: a name of `SYSTEMS`.
        lean: the model is made without being in memory as a whole, which takes other buffers.
    """
    settings = SYSTEMS[system].settings
    if "nvme" not in (settings.get("parameters"), settings.get("state")):
        return {}
    plain = replace(work, name="", clip=None, overflow=False, micro_batches=1)
    trial = replace(plain, layers=min(work.layers, _TRIAL_LAYERS), batch=1, length=_TRIAL_LENGTH)
    way = {"lean": True} if lean else {}

    def measure() -> dict[str, Any]:
        found: dict[str, Any] = way
        if settings["parameters"] == "nvme":
            others: dict[str, Any] = {**way, "state_buffers": _BUFFERS_MAX}
            found = _fewest(bench, trial, system, "parameter_buffers", 1, others)
            if "error" in found:
                return found
        # Adam's state has three tensors; pipelined, eight buffers were seen to fail.
        first = 9 if settings.get("pipelined") else 3
        return _fewest(bench, trial, system, "state_buffers", first, found)

    words = [*(["recomputed"] if work.checkpoint else []), *(["lean"] if lean else [])]
    name = "-".join([f"{trial.layers}x{work.hidden}-{work.dtype}", *words])
    return bench.get(f"{name}--{system}--buffers", {"model": trial.to_dict(), "settings": {**settings, **way}}, measure)


def _fewest(
    bench: Bench, trial: Workload, system: str, name: str, first: int, others: dict[str, Any]
) -> dict[str, Any]:
    """The others' settings and the first count that trains two steps; plenty, among the others, was for the trial."""
    answer: dict[str, Any] = {"error": "nothing was tried"}
    for count in range(first, _BUFFERS_MAX + 1):
        answer = bench.launcher.run(trial, system, steps=1, warm=1, settings={**others, name: count})
        if "error" not in answer:
            kept = {other: value for other, value in others.items() if value != _BUFFERS_MAX}
            return {**kept, name: count}
        bench.say(f"  {name} {count}: {answer['error']}")
        if answer.get("missing") or not any(word in answer["error"] for word in _TOO_FEW):
            break
    return answer
