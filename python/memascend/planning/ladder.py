"""Chooses how a budget is divided: the last rung of a ladder that it allows, then more of each part."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.planning.memory_split import MemoryPlanner, MemorySplit

# Staging chunks: fewer do not overlap at all; four do, but the disk runs dry while one is computed; more gain nothing.
_CHUNKS_MIN, _CHUNKS_FEW, _CHUNKS = 2, 4, 12


def rungs(planner: MemoryPlanner) -> list[MemorySplit]:
    """From the smallest split to the comfortable one, in the order of what it gains: two chunks more cost little."""
    run = planner.run
    return [
        planner.smallest(1, _CHUNKS_MIN, run.largest_gradient),
        planner.smallest(1, _CHUNKS_FEW, run.largest_gradient),
        planner.smallest(2, _CHUNKS_FEW, run.largest_gradient),
        planner.smallest(2, _CHUNKS_FEW, planner.queue_bytes),
        planner.smallest(2, _CHUNKS, planner.queue_bytes).with_activations(run.activation_groups, run.group_bytes),
    ]


def choose(planner: MemoryPlanner, steps: Sequence[MemorySplit], budget: int, device_budget: int | None) -> MemorySplit:
    """The best split within `budget` on the host and, where units lie there, `device_budget` on a device.

    Args:
        planner: makes others than the rungs.
        steps: the rungs.
        budget: at least the smallest rung's.
        device_budget: likewise; None: units lie on the host.
    """
    comfortable = steps[-1]
    limit = budget if device_budget is None else device_budget

    def fits(split: MemorySplit) -> bool:
        return split.peak <= budget and (device_budget is None or split.device_peak <= device_budget)

    if fits(comfortable):
        # What the host has beyond that holds entries first.
        return comfortable if device_budget is None else planner.widened(comfortable, limit)
    chosen = [step for step in steps if fits(step)][-1]
    if device_budget is not None:
        # The host's budget is for chunks, the device's for all else: too little of one leaves the other what it has.
        for step in steps:
            other = planner.smallest(step.window, chosen.chunks, step.queue_bytes)
            chosen = other if fits(other) else chosen
    if device_budget is None or device_budget < comfortable.device_peak:
        # Gradients get what is left, up to what they would have with ease; where all are held, they have it.
        spare = limit - chosen.units_peak if planner.run.gradients != "ram" else 0
        queue_bytes = max(chosen.queue_bytes, min(planner.queue_bytes, chosen.queue_bytes + spare))
        chosen = planner.smallest(chosen.window, chosen.chunks, queue_bytes)
    # And then chunks.
    for chunks in range(comfortable.chunks, chosen.chunks, -1):
        more = planner.smallest(chosen.window, chunks, chosen.queue_bytes)
        if fits(more):
            chosen = more
            break
    if device_budget is not None and device_budget >= comfortable.device_peak:
        return planner.widened(chosen, limit)
    return chosen
