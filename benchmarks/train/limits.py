"""Finds the limits of a system: the smallest memory cgroup, the longest context, the largest batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from benchmarks.train.search import least, most
from memascend.text import table

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.train.cell.workload import Workload
    from benchmarks.train.measure import Bench

__all__ = ["limits_table", "reach", "reach_table", "smallest_cgroup"]

_MIB = 1 << 20
# The number of steps that a try of `smallest_cgroup` must complete. One step is not enough, because some optimizers
# create their state in the first step.
_STEPS = 3
# The largest number of seconds for a try of `smallest_cgroup`, and for a try of `reach`. If memory is slightly too
# small, the kernel drops pages of programs and reads them again and again. Such a try must fail. With enough memory,
# each system needs less than half of these seconds on two cores.
_STEPS_SECONDS, _REACH_SECONDS = 180, 600
# The first limit that `smallest_cgroup` tries.
_START_BYTES = 1 << 30
_LENGTHS = tuple(128 << power for power in range(10))
_BATCHES = tuple(1 << power for power in range(10))


def smallest_cgroup(bench: Bench, work: Workload, systems: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Finds approximately the smallest memory cgroup in which each system imports its libraries and trains.

    A try makes `_STEPS` steps. The result of a system is {"bytes": ...}, or {"error": ...} if no try succeeds.
    """

    def search(tries: _Tries) -> dict[str, Any]:
        smallest = least(
            lambda megabytes: tries.works(work, megabytes * _MIB, _STEPS, _STEPS_SECONDS), _START_BYTES // _MIB
        )
        return tries.error if smallest is None else {"bytes": smallest * _MIB}

    return _each(bench, work, systems, search)


def reach(bench: Bench, work: Workload, systems: tuple[str, ...], limit: int) -> dict[str, dict[str, Any]]:
    """Finds for each system the longest context and the largest batch that fit in a memory cgroup of `limit` bytes.

    A try makes one step with activation checkpointing. The contexts are `_LENGTHS`, with batch 1. The batches are
    `_BATCHES`, with the context of `work`. The result of a system is {"length": ..., "batch": ...}, or {"error": ...}
    if the try with the first context fails.
    """
    recomputed = replace(work, checkpoint=True)

    def search(tries: _Tries) -> dict[str, Any]:
        def works(batch: int, length: int) -> bool:
            return tries.works(replace(recomputed, batch=batch, length=length), limit, 1, _REACH_SECONDS)

        length = most(lambda length: works(1, length), _LENGTHS)
        batch = most(lambda batch: works(batch, work.length), _BATCHES)
        return tries.error if length is None else {"length": length, "batch": batch or 0}

    return _each(bench, recomputed, systems, search)


def _each(
    bench: Bench, work: Workload, systems: tuple[str, ...], search: Callable[[_Tries], dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Runs `search` for each system; returns the results, by system.

    If `bench.settings` finds no settings with which a system works, the result of this system is {"error": ...}.
    """
    found: dict[str, dict[str, Any]] = {}
    for system in systems:
        settings = bench.settings(work, system, lean=True)
        found[system] = settings if "error" in settings else search(_Tries(bench, system, settings))
    return found


class _Tries:
    """Tries whether one system trains in a memory cgroup. `bench` stores the result of each try in a separate file.

    `error` is {"error": ...} from the last try that failed.
    """

    def __init__(self, bench: Bench, system: str, settings: dict[str, Any]) -> None:
        self.bench, self.system = bench, system
        self.settings = {**settings, "lean": True}
        self.error: dict[str, Any] = {}

    def works(self, work: Workload, limit: int, steps: int, seconds: float) -> bool:
        def measure() -> dict[str, Any]:
            return self.bench.launcher.run(
                work, self.system, steps=steps, warm=0, settings=self.settings, limit=limit, seconds=seconds
            )

        asked = {
            "workload": replace(work, name="").to_dict(),
            "system": self.system,
            "settings": self.settings,
            "limit": limit,
            "steps": steps,
        }
        name = f"{work.layers}x{work.hidden}-{work.batch}x{work.length}-in-{limit // _MIB}-MiB--{self.system}"
        answer = self.bench.get(name, asked, measure)
        if "error" in answer:
            self.error = {"error": answer["error"]}
        return "error" not in answer


def limits_table(work: Workload, found: dict[str, dict[str, Any]]) -> str:
    """Returns the results of `smallest_cgroup` as a table."""
    return _table(
        f"{work.name}: the smallest memory cgroup in which a process starts and makes {_STEPS} steps in at most "
        f"{_STEPS_SECONDS} s",
        found,
        ("system", "MiB"),
        lambda cell: (f"{cell['bytes'] / _MIB:.0f}",),
    )


def reach_table(work: Workload, limit: int, found: dict[str, dict[str, Any]]) -> str:
    """Returns the results of `reach` as a table."""
    return _table(
        f"{work.name}, activation checkpointing, in a memory cgroup of {limit / _MIB:.0f} MiB",
        found,
        ("system", "longest context, batch 1", f"largest batch, context {work.length}"),
        lambda cell: (str(cell["length"]), str(cell["batch"])),
    )


def _table(
    title: str,
    found: dict[str, dict[str, Any]],
    columns: tuple[str, ...],
    cells: Callable[[dict[str, Any]], tuple[str, ...]],
) -> str:
    rows = [(system, *cells(cell)) for system, cell in found.items() if "error" not in cell]
    errors = [f"{system}: {cell['error']}" for system, cell in found.items() if "error" in cell]
    return "\n".join([title, "", *([table(columns, rows)] if rows else []), *errors])
