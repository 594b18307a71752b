"""Entry point of a cell's process: builds the system, trains, and prints the result as its last line."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import counters
from benchmarks.train.cell import ANSWER
from benchmarks.train.cell.systems import SYSTEMS
from benchmarks.train.cell.workload import OVERFLOW_FACTOR, OVERFLOWING_STEP, Workload, tokens, workload
from memascend.cli import process

if TYPE_CHECKING:
    from benchmarks.train.cell.systems import System

__all__ = ["run"]

_PARTS = ("forward", "backward", "update")


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Train, and measure.

    The order: `workload`, `system`, `settings` over those of the system, `storage`, `warm` and `steps`, and `cgroup`,
    the folder of the memory cgroup that this process is in, if it is in one of its own.
    """
    work = workload(order["workload"])
    way = SYSTEMS[order["system"]]
    storage = Path(order["storage"])
    module = importlib.import_module(f"benchmarks.train.cell.systems.{way.module}")
    libraries = module.ready()
    taken = counters.MemoryTaken() if work.device != "cpu" else None
    baseline = process.resident()
    began = counters.counts(storage)
    system = module.begin(work, way.settings | order.get("settings", {}), storage)
    set_up = counters.counts(storage).since(began)
    set_up_peak = process.resident_peak()
    process.restart_peak()
    cgroup = Path(order["cgroup"]) if order.get("cgroup") else None
    cgroup_set_up = _restarted_peak(cgroup)
    trained = _trained(system, work, order, storage)
    answer = {
        "set_up_seconds": set_up["wall"],
        "baseline_bytes": baseline,
        "set_up_peak_bytes": set_up_peak,
        "peak_bytes": process.resident_peak(),
        "cgroup_set_up_peak_bytes": cgroup_set_up,
        "cgroup_peak_bytes": _peak(cgroup),
        "added_bytes": process.resident_peak() - baseline,
        "machine_added_bytes": taken.peak if taken else None,
        "device_peak_bytes": _device_peak(work),
        **trained,
        **system.end(),
    }
    answer["versions"] = {library.__name__.split(".")[0]: _version(library) for library in libraries}
    return answer


def _trained(system: System, work: Workload, order: dict[str, Any], storage: Path) -> dict[str, Any]:
    """Warm steps and measured ones; seconds of each of the latter, means of what is counted over them."""
    batches = tokens(work)
    losses: list[float] = []
    seconds: dict[str, list[float]] = {"step": [], **{part: [] for part in _PARTS}}
    between: list[dict[str, float]] = []
    counted: int | None = None
    for index in range(order["warm"] + order["steps"]):
        if index == order["warm"]:
            counted = system.counted()
        at = [counters.counts(storage)]
        if len(batches) > 1:
            # Each has its forward and its backward; all of it is told as backward.
            at.append(at[0])
            loss = system.accumulate(batches)
            losses.append(float(loss))
        else:
            loss = system.forward(batches[0])
            losses.append(loss.item())
            at.append(counters.counts(storage))
            # A loss that is too large for 16-bit gradients, where the workload wants to see what then happens.
            overflows = work.overflow and index == OVERFLOWING_STEP
            system.backward(loss * OVERFLOW_FACTOR if overflows else loss)
        at.append(counters.counts(storage))
        del loss
        system.update()
        _synchronize(work)
        at.append(counters.counts(storage))
        if not math.isfinite(losses[-1]):
            raise ValueError(f"the loss of step {index} is {losses[-1]}")
        if index >= order["warm"]:
            whole = at[-1].since(at[0])
            between.append(whole)
            seconds["step"].append(whole["wall"])
            for part, first, last in zip(_PARTS, at, at[1:], strict=False):
                seconds[part].append(last.wall - first.wall)
    steps = len(between)
    counted_end = system.counted()
    mean = {name: sum(counts[name] for counts in between) / max(steps, 1) for name in (between or [{}])[0]}
    return {
        "parameters": work.parameters,
        "losses": losses,
        "seconds": seconds,
        "steps": steps,
        "mean": mean,
        "read_per_parameter": mean.get("read", 0) / work.parameters,
        "written_per_parameter": mean.get("written", 0) / work.parameters,
        "counted_per_parameter": None
        if counted is None or counted_end is None
        else (counted_end - counted) / max(steps, 1) / work.parameters,
    }


def _synchronize(work: Workload) -> None:
    """Until a device has done what is queued, which the next step would wait for."""
    if work.device != "cpu":
        import torch

        torch.cuda.synchronize()


def _device_peak(work: Workload) -> int | None:
    """What torch held of a device at once."""
    if work.device == "cpu":
        return None
    import torch

    return torch.cuda.max_memory_allocated()


def _restarted_peak(cgroup: Path | None) -> int | None:
    """The cgroup's peak so far; where the kernel can, it then begins anew."""
    if cgroup is None:
        return None
    peak = _peak(cgroup)
    first = cgroup / "memory.max_usage_in_bytes"
    if first.exists():
        first.write_text("0")
    return peak


def _peak(cgroup: Path | None) -> int | None:
    if cgroup is None:
        return None
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (cgroup / name).exists():
            return int((cgroup / name).read_text())
    return None


def _version(library: Any) -> str:
    return str(getattr(library, "__version__", "") or "here")


if __name__ == "__main__":
    print(f"\n{ANSWER}{json.dumps(run(json.loads(sys.argv[1])))}", flush=True)
