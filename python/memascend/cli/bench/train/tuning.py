"""The fewest swap buffers with which DeepSpeed runs, found by trying: its documents' counts fail on many models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memascend.cli.bench.train.systems import SYSTEMS

if TYPE_CHECKING:
    from memascend.cli.bench.train.launch import Launcher
    from memascend.cli.bench.train.results import Results
    from memascend.cli.bench.train.workload import Workload

__all__ = ["tuned"]

# More than any model here needs; trying ends there.
_BUFFERS_MAX = 24
# Tokens of a trial: buffers depend on parameters, not on the batch.
_TRIAL_LENGTH = 16


def tuned(launcher: Launcher, results: Results, work: Workload, system: str) -> dict[str, Any]:
    """Settings to run a system with; {"error": ...} where none works. Empty for systems that have none."""
    settings = SYSTEMS[system].settings
    if "nvme" not in (settings.get("parameters"), settings.get("state")):
        return {}
    trial = replace(work, batch=1, length=_TRIAL_LENGTH, clip=None, overflow=False, checkpoint=False)

    def measure() -> dict[str, Any]:
        found: dict[str, Any] = {}
        if settings["parameters"] == "nvme":
            found = _fewest(launcher, trial, system, "parameter_buffers", 1, {"state_buffers": _BUFFERS_MAX})
            if "error" in found:
                return found
        # Adam's state has three tensors.
        return _fewest(launcher, trial, system, "state_buffers", 3, found)

    name = f"{work.name.split('-')[0]}--{system}--buffers"
    return results.get(name, {"model": replace(trial, name="").to_dict(), "settings": settings}, measure)


def _fewest(
    launcher: Launcher, trial: Workload, system: str, name: str, first: int, others: dict[str, Any]
) -> dict[str, Any]:
    """The others' settings with the first count that trains two steps; without a name of `others` that was plenty."""
    answer: dict[str, Any] = {"error": "nothing was tried"}
    for count in range(first, _BUFFERS_MAX + 1):
        answer = launcher.run(trial, system, steps=1, warm=1, settings={**others, name: count})
        if "error" not in answer:
            kept = {other: value for other, value in others.items() if value != _BUFFERS_MAX}
            return {**kept, name: count}
        if answer.get("missing"):
            break
    return answer
