"""Measures cells, and keeps what was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.cli.bench.cell.systems import SYSTEMS
from memascend.cli.bench.machine import described
from memascend.cli.bench.train.speeds import disk_speeds
from memascend.cli.bench.train.tuning import tuned

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.cli.bench.cell.workload import Workload
    from memascend.cli.bench.train.launch import Launcher
    from memascend.cli.bench.train.results import Results

__all__ = ["Bench"]

# A step of more tokens times parameters takes seconds: half as many are measured.
_LONG = 5e10


class Bench:
    """What the parts of the benchmark share.

    Args:
        launcher: starts cells.
        results: keeps them.
        steps: so many of a cell are measured.
        say: told what is measured next.
    """

    def __init__(self, launcher: Launcher, results: Results, steps: int, say: Callable[[str], None]) -> None:
        self.launcher, self.results, self.steps, self.say = launcher, results, steps, say
        self._machine = described()

    def cell(self, work: Workload, system: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """One cell, measured or read; with the disk's bandwidth at that time where the system is ours."""
        found = self.settings(work, system)
        if "error" in found:
            return found
        found = {**found, **(settings or {})}
        steps = max(1, self.steps // 2) if work.batch * work.length * work.parameters > _LONG else self.steps

        def measure() -> dict[str, Any]:
            speeds = disk_speeds(self.launcher.storage) if SYSTEMS[system].module == "ours" else None
            answer = self.launcher.run(work, system, steps=steps, settings=found)
            if speeds is not None and "error" not in answer:
                answer["speeds"] = speeds
            return {**answer, "machine": described()}

        named = "".join(f"-{name}-{value}" for name, value in (settings or {}).items())
        asked = {"workload": work.to_dict(), "system": system, "settings": found, "steps": steps}
        return self.get(f"{work.name}--{system}{named}", asked, measure)

    def settings(self, work: Workload, system: str, *, lean: bool = False) -> dict[str, Any]:
        """Of a system for a model, as trying found them; {"error": ...} where it runs with none."""
        return tuned(self, work, system, lean=lean)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The kept answer, if it was measured on a machine like this one, or a new one."""
        on = {name: self._machine[name] for name in ("processor", "cores", "memory_bytes", "kernel")}

        def measured() -> dict[str, Any]:
            self.say(f"{name} ...")
            return measure()

        return self.results.get(name, {**asked, "on": on}, measured)
