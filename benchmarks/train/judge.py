"""Compares measured cells: checks that losses agree, computes the lower bound of a step, and ratios."""

from __future__ import annotations

import math
import statistics
from typing import Any

__all__ = ["LOSS_TOLERANCE", "bound", "judged", "loss_difference"]

# The largest relative difference of a step's loss from in-memory torch's. Systems round in different places (16-bit or
# 32-bit gradients and norms), so bits may differ; the losses of a system that does not train differ by far more.
LOSS_TOLERANCE = 0.01

_REFERENCE = "torch"


def judged(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the cells of one workload, by system, with ratios to in-memory torch and to peers.

    An error replaces the values of a cell whose losses are too far from in-memory torch's. If torch was not run, each
    cell says that its losses were not compared.
    """
    reference = cells.get(_REFERENCE, {"error": "not run"})
    found: dict[str, dict[str, Any]] = {}
    for system, cell in cells.items():
        if "error" in cell:
            found[system] = {"error": cell["error"]}
            continue
        result: dict[str, Any] = {
            "seconds": {part: statistics.median(taken) for part, taken in cell["seconds"].items()},
            "spread": [min(cell["seconds"]["step"]), max(cell["seconds"]["step"])],
            "mean": cell["mean"],
            "added_bytes": cell["added_bytes"],
            "peak_bytes": max(cell["peak_bytes"], cell["set_up_peak_bytes"]),
            "cgroup_peak_bytes": cell["cgroup_peak_bytes"],
            "machine_added_bytes": cell.get("machine_added_bytes"),
            "device_peak_bytes": cell.get("device_peak_bytes"),
            "moved_per_parameter": cell["read_per_parameter"] + cell["written_per_parameter"],
            "counted_per_parameter": cell["counted_per_parameter"],
        }
        if "machine" in cell:
            result["machine"] = cell["machine"]
        if "error" in reference:
            result["losses"] = "not compared: no in-memory run"
        else:
            difference = loss_difference(cell["losses"], reference["losses"])
            result["loss_difference"] = difference
            if not difference <= LOSS_TOLERANCE:
                found[system] = {"error": f"its losses differ by {difference:.2%} from in-memory torch's"}
                continue
            _beside_memory(result, cell, reference)
        found[system] = result
    _beside_peers(found)
    return found


def loss_difference(losses: list[float], reference: list[float]) -> float:
    """Returns the largest relative difference of `losses` from `reference`, over the steps that both lists have.

    Returns infinity if the losses prove nothing.
    """
    pairs = list(zip(losses, reference, strict=False))
    # If the losses do not fall, a system that does not train has the same losses.
    if len(pairs) < 2 or not _falls([expected for _, expected in pairs]):
        return math.inf
    differences = [abs(found - expected) / abs(expected) for found, expected in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _falls(losses: list[float]) -> bool:
    """True if the losses fall so far that the losses of a system that does not train differ."""
    return losses[0] - min(losses) > 2 * LOSS_TOLERANCE * abs(losses[0])


def bound(
    compute: dict[str, float], read: dict[str, int], written: dict[str, int], speeds: dict[str, float]
) -> dict[str, float]:
    """Returns the seconds of a step whose compute and disk transfers overlap without loss.

    Args:
        compute: seconds of forward and backward, as measured in memory.
        read: bytes that the plan reads, by kind.
        written: bytes that the plan writes, by kind.
        speeds: GB/s of our engine on the same disk in the same run: "read" and "mixed".
    """
    read, written = dict(read), dict(written)
    forward = max(compute["forward"], read.pop("values, forward", 0) / speeds["read"] / 1e9)
    kept = written.pop("gradients", 0)
    # If gradients wait on storage for their norm, the update comes after the backward.
    first = read.pop("values, backward", 0) + kept
    rest = (sum(read.values()) + sum(written.values())) / speeds["mixed"] / 1e9
    in_backward = first / speeds["mixed"] / 1e9 + (0.0 if kept else rest)
    backward = max(compute["backward"], in_backward)
    update = rest if kept else 0.0
    return {"forward": forward, "backward": backward, "update": update, "step": forward + backward + update}


def _beside_memory(result: dict[str, Any], cell: dict[str, Any], reference: dict[str, Any]) -> None:
    compute = {part: statistics.median(taken) for part, taken in reference["seconds"].items()}
    result["of_memory_seconds"] = result["seconds"]["step"] / compute["step"]
    result["of_memory_bytes"] = cell["added_bytes"] / reference["added_bytes"]
    # With several micro-batches, forward and backward are not measured apart, and "forward" is 0.
    if "plan" in cell and "speeds" in cell and compute["forward"]:
        plan = cell["plan"]
        result["bound"] = bound(compute, plan["read"], plan["written"], cell["speeds"])
        result["of_bound"] = result["seconds"]["step"] / result["bound"]["step"]


def _beside_peers(found: dict[str, dict[str, Any]]) -> None:
    """Adds to each cell how many times as fast memascend is, and its memory as a fraction of the peer's.

    A peer's cell is compared with the cell of memascend's default. A cell of memascend is compared with the cell of
    ZeRO-Infinity, which has the fewest buffers that work.
    """
    good = {system: result for system, result in found.items() if "error" not in result}
    for system, result in good.items():
        mine = system.startswith("memascend")
        ours, theirs = (result, good.get("zero-infinity")) if mine else (good.get("memascend"), result)
        if ours is not None and theirs is not None:
            result["ours_faster"] = theirs["seconds"]["step"] / ours["seconds"]["step"]
            # The memory of a process does not include memory that a driver pins, so the machine's memory is compared.
            pinned = theirs["machine_added_bytes"] and ours["machine_added_bytes"]
            of = "machine_added_bytes" if pinned else "added_bytes"
            result["ours_of_memory"] = ours[of] / theirs[of]
