"""Finds by trial the smallest number of swap buffers with which DeepSpeed works.

The numbers in DeepSpeed's documentation often fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.systems import SYSTEMS

if TYPE_CHECKING:
    from benchmarks.train.cell.workload import Workload
    from benchmarks.train.measure import Bench

__all__ = ["tuned"]

# The largest number of buffers to try. All models of this benchmark need fewer buffers.
_BUFFERS_MAX = 16
# The number of tokens in a trial. It may be small, because the buffers depend on the parameters, not on the batch.
_TRIAL_LENGTH = 16
# The largest number of layers in a trial. It may be small, because the buffers depend on the size of a block, not on
# the number of blocks.
_TRIAL_LAYERS = 12
# If an error has one of these words, there may have been too few buffers. For other errors, more buffers do not help.
_TOO_FEW = ("AssertionError", "IndexError", "buffer")


def tuned(bench: Bench, work: Workload, system: str, *, lean: bool = False) -> dict[str, Any]:
    """Returns the settings with which a system works: {"error": ...} if none work, {} if the system needs none.

    Args:
        bench: runs the trials, and stores the result of the search.
        work: the workload. The settings depend on whether it recomputes blocks, but not on its batch and length.
        system: a name of `SYSTEMS`.
        lean: True means that the model is never in memory as a whole while it is made. This needs a different number of
            buffers.
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
        # The search for `state_buffers` begins with 3, because Adam's state has three tensors. With "pipelined", it
        # begins with 9, because DeepSpeed's pipeline has failed with 8.
        first = 9 if settings.get("pipelined") else 3
        return _fewest(bench, trial, system, "state_buffers", first, found)

    words = [*(["recomputed"] if work.checkpoint else []), *(["lean"] if lean else [])]
    name = "-".join([f"{trial.layers}x{work.hidden}-{work.dtype}", *words])
    return bench.get(f"{name}--{system}--buffers", {"model": trial.to_dict(), "settings": {**settings, **way}}, measure)


def _fewest(
    bench: Bench, trial: Workload, system: str, name: str, first: int, others: dict[str, Any]
) -> dict[str, Any]:
    """Returns the settings `others`, and `name`: the smallest number of buffers with which DeepSpeed makes two steps.

    The search begins with `first` buffers. If no trial succeeds, returns the answer of the last trial, which has
    "error". If a setting in `others` is `_BUFFERS_MAX`, it is only for the trials, and the result does not have it.
    """
    answer: dict[str, Any] = {"error": "no number of buffers was tried"}
    for count in range(first, _BUFFERS_MAX + 1):
        answer = bench.launcher.run(trial, system, steps=1, warm=1, settings={**others, name: count})
        if "error" not in answer:
            kept = {other: value for other, value in others.items() if value != _BUFFERS_MAX}
            return {**kept, name: count}
        bench.print_line(f"  {name} {count}: {answer['error']}")
        if answer.get("missing") or not any(word in answer["error"] for word in _TOO_FEW):
            break
    return answer
