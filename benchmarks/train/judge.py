"""Compares measured cells: checks their losses, and computes ratios and the lower bound of a step's time."""

from __future__ import annotations

import math
import statistics
from typing import Any

__all__ = ["LOSS_TOLERANCE", "bound", "judged", "loss_difference"]

# The largest allowed relative difference between a step's loss and the loss of in-memory torch. Systems round in
# different places (gradients and norms have 16 or 32 bits), so their losses may differ a little. If a system does not
# train at all, its losses differ by more, because `_falls` checks that torch's losses fall enough.
LOSS_TOLERANCE = 0.01

_REFERENCE = "torch"


def judged(cells: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the cells of one workload with ratios to in-memory torch and to peers. The keys are the systems.

    If the losses of a cell differ too much from in-memory torch's losses, an error replaces the values of the cell. If
    in-memory torch was not run or failed, the other cells have a note that their losses were not compared, and no
    ratios to in-memory torch.
    """
    reference = cells.get(_REFERENCE, {"error": "not run"})
    found: dict[str, dict[str, Any]] = {}
    for system, cell in cells.items():
        if "error" in cell:
            found[system] = {"error": cell["error"]}
            continue
        result: dict[str, Any] = {
            "seconds": {part: statistics.median(taken) for part, taken in cell["seconds"].items() if taken},
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
                found[system] = {
                    "error": f"its losses differ by {difference:.2%} from the losses of in-memory torch (inf%: the "
                    "losses of torch fall too little to compare them)"
                }
                continue
            _compare_with_memory(result, cell, reference)
        found[system] = result
    _compare_with_peers(found)
    return found


def loss_difference(losses: list[float], reference: list[float]) -> float:
    """Returns the largest relative difference between `losses` and `reference`, over the steps that both lists have.

    Returns infinity if there are fewer than two such steps, if `reference` falls too little to show whether a system
    trains, or if a difference is not finite.
    """
    pairs = list(zip(losses, reference, strict=False))
    # If the losses of the reference do not fall, a system that does not train would have the same losses.
    if len(pairs) < 2 or not _falls([expected for _, expected in pairs]):
        return math.inf
    differences = [abs(found - expected) / abs(expected) for found, expected in pairs]
    return max(differences) if all(map(math.isfinite, differences)) else math.inf


def _falls(losses: list[float]) -> bool:
    """True if the losses fall so much that a system that does not train would have clearly different losses."""
    return losses[0] - min(losses) > 2 * LOSS_TOLERANCE * abs(losses[0])


def bound(
    compute: dict[str, float], read: dict[str, int], written: dict[str, int], speeds: dict[str, float]
) -> dict[str, float]:
    """Returns the lower bound of the seconds of a step ("step") and of its parts ("forward", "backward", "update").

    The bound assumes that computation and disk transfers overlap perfectly in each part.

    Args:
        compute: the seconds of in-memory torch ("forward" and "backward").
        read: the bytes that the plan reads, by kind.
        written: the bytes that the plan writes, by kind.
        speeds: the GB/s ("read" and "mixed") of memascend's engine on the same disk in the same run.
    """
    read, written = dict(read), dict(written)
    forward = max(compute["forward"], read.pop("values, forward", 0) / speeds["read"] / 1e9)
    kept = written.pop("gradients", 0)
    # If gradients wait on storage for their norm, the update begins only after the backward.
    first = read.pop("values, backward", 0) + kept
    rest = (sum(read.values()) + sum(written.values())) / speeds["mixed"] / 1e9
    in_backward = first / speeds["mixed"] / 1e9 + (0.0 if kept else rest)
    backward = max(compute["backward"], in_backward)
    update = rest if kept else 0.0
    return {"forward": forward, "backward": backward, "update": update, "step": forward + backward + update}


def _compare_with_memory(result: dict[str, Any], cell: dict[str, Any], reference: dict[str, Any]) -> None:
    compute = {part: statistics.median(taken) for part, taken in reference["seconds"].items()}
    result["of_memory_seconds"] = result["seconds"]["step"] / compute["step"]
    result["of_memory_bytes"] = cell["added_bytes"] / reference["added_bytes"]
    # If there are several micro-batches, "forward" is 0, because forward and backward are not measured separately. Then
    # there is no bound.
    if "plan" in cell and "speeds" in cell and compute["forward"]:
        plan = cell["plan"]
        result["bound"] = bound(compute, plan["read"], plan["written"], cell["speeds"])
        result["of_bound"] = result["seconds"]["step"] / result["bound"]["step"]


def _compare_with_peers(found: dict[str, dict[str, Any]]) -> None:
    """Adds to cells the ratios of speed and memory between memascend and a peer.

    "ours_faster" is the seconds of the peer's step, divided by the seconds of memascend's step. "ours_of_memory" is
    memascend's memory, divided by the peer's memory. The cell of a peer is compared with the cell "memascend". A cell
    of memascend is compared with the cell "zero-infinity". If either cell is missing or has an error, no ratios are
    added.
    """
    good = {system: result for system, result in found.items() if "error" not in result}
    for system, result in good.items():
        mine = system.startswith("memascend")
        ours, theirs = (result, good.get("zero-infinity")) if mine else (good.get("memascend"), result)
        if ours is not None and theirs is not None:
            result["ours_faster"] = theirs["seconds"]["step"] / ours["seconds"]["step"]
            # The memory of a process does not include memory that a driver pins. If both cells have
            # "machine_added_bytes", the memory taken from the whole machine, these bytes are compared instead.
            pinned = theirs["machine_added_bytes"] and ours["machine_added_bytes"]
            of = "machine_added_bytes" if pinned else "added_bytes"
            result["ours_of_memory"] = ours[of] / theirs[of]
