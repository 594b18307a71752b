"""Measures how one system trains one workload (a cell), or reads the stored result."""

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

# The entries of `described()` that affect a measurement. A stored answer is valid only for a machine with the same
# entries.
_PLACE = ("processor", "cores", "memory_bytes", "kernel", "torch")
# If the product of a step's tokens and the model's parameters exceeds this number, a step takes seconds. Then `Bench`
# measures half as many steps.
_LONG = 5e10


class Bench:
    """Measures cells, or reads their stored results.

    Args:
        launcher: starts cells.
        results: stores answers.
        steps: the number of measured steps of a cell; if steps are long (`_LONG`), `cell` measures half as many.
        say: called with each line of progress, such as the name of a cell whose measurement begins.
    """

    def __init__(self, launcher: Launcher, results: Results, steps: int, print_line: Callable[[str], None]) -> None:
        self.launcher, self.results, self.steps, self.print_line = launcher, results, steps, print_line
        self.code = code_hash()
        self._machine = described()

    def cell(self, work: Workload, system: str, settings: dict[str, Any] | None = None) -> dict[str, Any]:
        """Returns the answer of a cell, measured or stored; {"error": ...} if the system cannot train the workload.

        If the system's module is "ours", the answer also has "speeds", the disk's bandwidth right before the cell.

        Args:
            work: the workload.
            system: a name of `SYSTEMS`.
            settings: settings that override the settings found by trial.
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
        """Returns the settings that a system needs for a workload, found by trial.

        Returns {} if the system needs none, and {"error": ...} if no settings work.
        """
        return tuned(self, work, system, lean=lean)

    def get(self, name: str, asked: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Returns the stored answer to `asked` if it was measured with the same code, on a machine with equal `_PLACE`.

        Otherwise calls `measure`. If `results` does not measure, returns {"error": ...}.

        Raises:
            ConfigError: the sources have changed since this `Bench` was made, or the file of `name` has no answer.
        """
        on: dict[str, str | int] = {name: self._machine[name] for name in _PLACE}
        on["code"] = self.code

        def measured() -> dict[str, Any]:
            self.print_line(f"{name} ...")
            answer = measure()
            if code_hash() != self.code:
                raise ConfigError(
                    f"memascend's or the benchmark's sources changed while the benchmark ran, so the result of {name} "
                    "is not stored: run again, and do not change the sources meanwhile"
                )
            return answer

        return self.results.get(name, {**asked, "on": on}, measured)
