"""Measures cells and stores the results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.machine import described
from benchmarks.train.cell.systems import SYSTEMS
from benchmarks.train.code import code_hash, commit
from benchmarks.train.speeds import disk_speeds
from benchmarks.train.tuning import tuned
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.train.cell.workload import Workload
    from benchmarks.train.launch import Launcher
    from benchmarks.train.results import Results

__all__ = ["Bench"]

# The facts of a machine that affect a measurement.
_PLACE = ("processor", "cores", "memory_bytes", "kernel", "torch")
# If the product of a step's tokens and the model's parameters exceeds this number, a step takes seconds. Then half as
# many steps are measured.
_LONG = 5e10


class Bench:
    """Measures cells for all parts of the benchmark, or reads their stored results.

    Args:
        launcher: starts cells.
        results: stores the answers of cells.
        steps: the number of measured steps of a cell.
        say: called with a line when a measurement begins.
    """

    def __init__(self, launcher: Launcher, results: Results, steps: int, say: Callable[[str], None]) -> None:
        self.launcher, self.results, self.steps, self.say = launcher, results, steps, say
        self.code = code_hash()
        self._machine = described()

    def cell(self, work: Workload, system: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns a cell. It is measured, or read from the stored results.

        A cell of memascend also has the disk's bandwidth, which is measured right before the cell.
        """
        found = self.settings(work, system)
        if "error" in found:
            return found
        found = {**found, **(settings or {})}
        products = work.micro_batches * work.batch * work.length * work.parameters
        steps = max(1, self.steps // 2) if products > _LONG else self.steps

        def measure() -> dict[str, Any]:
            speeds = disk_speeds(self.launcher.storage) if SYSTEMS[system].module == "ours" else None
            answer = self.launcher.run(work, system, steps=steps, settings=found)
            if speeds is not None and "error" not in answer:
                answer["speeds"] = speeds
            return {**answer, "machine": described() | {"commit": commit()}}

        named = "".join(f"-{name}-{value}" for name, value in (settings or {}).items())
        asked = {"workload": work.to_dict(), "system": system, "settings": found, "steps": steps}
        return self.get(f"{work.name}--{system}{named}", asked, measure)

    def settings(self, work: Workload, system: str, *, lean: bool = False) -> dict[str, Any]:
        """Returns a system's settings for a model, which are found by trial.

        Returns {"error": ...} if no settings work.
        """
        return tuned(self, work, system, lean=lean)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the stored answer if it was measured with the same code, on a machine like this one.

        Otherwise measures.
        """
        on: dict[str, str | int] = {name: self._machine[name] for name in _PLACE}
        on["code"] = self.code

        def measured() -> dict[str, Any]:
            self.say(f"{name} ...")
            answer = measure()
            if code_hash() != self.code:
                raise ConfigError(f"the sources changed while {name} was measured: do not change them, and run again")
            return answer

        return self.results.get(name, {**asked, "on": on}, measured)
