"""Compares measured cells: whether losses agree, the lower bound of a step, ratios."""

from __future__ import annotations

import math
import statistics
from typing import Any

__all__ = ["LOSS_TOLERANCE", "bound", "judged", "loss_difference"]

# Largest relative difference of any step's loss from in-memory torch's. Systems round in different places (16-bit or
# 32-bit gradients and norms), so bits may differ; a system that did not train would be off by far more.
LOSS_TOLERANCE = 0.01

_REFERENCE = "torch"


def judged(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The cells of one workload, by system, each with what it means beside the others.

    A cell whose losses are off loses its figures and gets an error; one without a reference to compare with is marked.
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
    """The largest relative difference of any step that both have; infinite where there is nothing to compare."""
    pairs = list(zip(losses, reference, strict=False))
    # Of losses that do not fall, every system has the same.
    if len(pairs) < 2 or not _falls([expected for _, expected in pairs]):
        return math.inf
    differences = [abs(found - expected) / abs(expected) for found, expected in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _falls(losses: list[float]) -> bool:
    """By so much that a system that does nothing is found out."""
    return losses[0] - min(losses) > 2 * LOSS_TOLERANCE * abs(losses[0])


def bound(
    compute: dict[str, float], read: dict[str, int], written: dict[str, int], speeds: dict[str, float]
) -> dict[str, float]:
    """Seconds that a step would take if compute and disk overlapped without loss.

    Args:
        compute: seconds of forward and backward, as measured in memory.
        read: bytes that the plan reads, by kind.
        written: bytes that it writes.
        speeds: GB/s of our engine on the same disk in the same run: "read" and "mixed".
    """
    read, written = dict(read), dict(written)
    forward = max(compute["forward"], read.pop("values, forward", 0) / speeds["read"] / 1e9)
    kept = written.pop("gradients", 0)
    # Gradients that wait for their norm put the update behind the backward.
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
    # Of micro-batches forward and backward are not told apart.
    if "plan" in cell and "speeds" in cell and compute["forward"]:
        plan = cell["plan"]
        result["bound"] = bound(compute, plan["read"], plan["written"], cell["speeds"])
        result["of_bound"] = result["seconds"]["step"] / result["bound"]["step"]


def _beside_peers(found: dict[str, dict[str, Any]]) -> None:
    """How many times as fast ours is, and what part of a peer's memory it adds.

    A peer's cell has that of memascend at its default, a cell of ours that of itself against ZeRO-Infinity with its
    fewest buffers.
    """
    good = {system: result for system, result in found.items() if "error" not in result}
    for system, result in good.items():
        mine = system.startswith("memascend")
        ours, theirs = (result, good.get("zero-infinity")) if mine else (good.get("memascend"), result)
        if ours is not None and theirs is not None:
            result["ours_faster"] = theirs["seconds"]["step"] / ours["seconds"]["step"]
            # A driver's pinned memory is none of the process'.
            pinned = theirs["machine_added_bytes"] and ours["machine_added_bytes"]
            of = "machine_added_bytes" if pinned else "added_bytes"
            result["ours_of_memory"] = ours[of] / theirs[of]
