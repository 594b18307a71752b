"""Trains one workload with one system, and prints the measurements as one line of JSON, after `ANSWER`.

This is the program of a cell's process.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import counters
from benchmarks.train.cell import ANSWER
from benchmarks.train.cell.record import Record
from benchmarks.train.cell.systems import SYSTEMS
from benchmarks.train.cell.workload import OVERFLOW_FACTOR, OVERFLOWING_STEP, Workload, tokens, workload
from memascend.cli import process

if TYPE_CHECKING:
    from benchmarks.train.cell.systems import System

__all__ = ["run"]


def run(order: dict[str, Any]) -> dict[str, Any]:
    """Trains; returns the measurements.

    `order` has these entries:

    - `workload`: the fields of a `Workload`;
    - `system`: a name of `SYSTEMS`;
    - `storage`: a folder on the disk to measure;
    - `warm` and `steps`: the numbers of warm-up steps and of measured steps;
    - `settings`, which override the settings of the system;
    - `until`: the `time.time()` by which the cell should answer, or None for no time limit; see `Record.enough`;
    - `cgroup`: the folder of the memory cgroup in which this process runs, or None if it has no cgroup of its own.
    """
    work = workload(order["workload"])
    way = SYSTEMS[order["system"]]
    storage = Path(order["storage"])
    module = importlib.import_module(f"benchmarks.train.cell.systems.{way.module}")
    libraries = module.ready()
    _limit(work)
    taken = counters.MemoryTaken() if work.device != "cpu" else None
    baseline = process.resident()
    began = counters.counts(storage)
    system = module.begin(work, way.settings | order.get("settings", {}), storage)
    set_up = counters.counts(storage).since(began)
    set_up_peak = process.resident_peak()
    process.restart_peak()
    cgroup = Path(order["cgroup"]) if order.get("cgroup") else None
    cgroup_set_up = _restarted_peak(cgroup)
    record = Record(order, storage, system)
    if hasattr(system, "train"):
        system.train(record)
    else:
        _trained(system, work, record)
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
        **record.values(work.parameters),
        **system.end(),
    }
    answer["versions"] = {library.__name__.split(".")[0]: _version(library) for library in libraries}
    return answer


def _trained(system: System, work: Workload, record: Record) -> None:
    """Makes steps until the record has enough of them."""
    batches = tokens(work)
    while not record.enough:
        at = [record.now()]
        if len(batches) > 1:
            # Each micro-batch has a forward and a backward. The record counts the seconds of all forwards and backwards
            # as "backward", so "forward" is 0.
            at.append(at[0])
            value = float(system.accumulate(batches))
        else:
            loss = system.forward(batches[0])
            value = loss.item()
            at.append(record.now())
            # If the workload has an overflow, the loss of the step OVERFLOWING_STEP is multiplied. The 16-bit gradients
            # of this step then overflow.
            overflows = work.overflow and record.steps == OVERFLOWING_STEP
            system.backward(loss * OVERFLOW_FACTOR if overflows else loss)
            del loss
        at.append(record.now())
        system.update()
        _synchronize(work)
        at.append(record.now())
        record.add(value, at)


def _limit(work: Workload) -> None:
    """Limits torch to `work.card` bytes of a GPU's memory. Does nothing on the CPU or without `work.card`."""
    if work.device != "cpu" and work.card is not None:
        import torch

        total = torch.cuda.get_device_properties(torch.device(work.device)).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, work.card / total))


def _synchronize(work: Workload) -> None:
    """Waits until the device has done all queued work. The time of this work then counts for this step."""
    if work.device != "cpu":
        import torch

        torch.cuda.synchronize()


def _device_peak(work: Workload) -> int | None:
    """Returns the largest number of bytes that torch has allocated on the device; None on the CPU."""
    if work.device == "cpu":
        return None
    import torch

    return torch.cuda.max_memory_allocated()


def _restarted_peak(cgroup: Path | None) -> int | None:
    """Returns the cgroup's memory peak so far. In cgroup version 1, also resets the peak.

    Returns None if `cgroup` is None, or if the kernel does not record the peak of a cgroup.
    """
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
