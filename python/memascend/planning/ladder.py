"""Chooses how a budget is divided between units, update chunks and gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Held", "choose"]


class Held(Protocol):
    """One way to divide memory: with units and gradients on the host, or on a device of its own."""

    @property
    def window(self) -> int:
        """Units that follow each other and are in memory at once."""

    @property
    def chunks(self) -> int:
        """Of the update."""

    @property
    def queue_bytes(self) -> int:
        """Of gradients that wait."""

    @property
    def peak(self) -> int:
        """On the host."""

    @property
    def device_peak(self) -> int:
        """On the device."""

    @property
    def units_peak(self) -> int:
        """Of the memory in which units lie."""


_Held = TypeVar("_Held", bound=Held)


class Planner(Protocol[_Held]):
    """What makes such ways."""

    queue_bytes: int

    def settled(self, window: int, chunks: int, queue_bytes: int) -> _Held:
        """The smallest memory that does with these."""

    def widened(self, held: _Held, budget: int | None) -> _Held:
        """More slots, within the memory in which units lie."""


def choose(
    planner: Planner[_Held], rungs: Sequence[_Held], budget: int, device_budget: int | None, *, spares: bool
) -> _Held:
    """The best way within `budget` on the host and, where units lie there, `device_budget` on a device.

    Args:
        planner: makes others than the rungs.
        rungs: from the smallest to the comfortable one.
        budget: at least the smallest rung's.
        device_budget: likewise; None: units lie on the host.
        spares: gradients may take what is left over.
    """
    comfortable = rungs[-1]
    limit = budget if device_budget is None else device_budget

    def fits(held: _Held) -> bool:
        return held.peak <= budget and (device_budget is None or held.device_peak <= device_budget)

    if fits(comfortable):
        return planner.widened(comfortable, limit)
    chosen = [rung for rung in rungs if fits(rung)][-1]
    if device_budget is not None:
        # The host's budget is for chunks, the device's for all else: too little of one leaves the other what it has.
        for rung in rungs:
            other = planner.settled(rung.window, chosen.chunks, rung.queue_bytes)
            chosen = other if fits(other) else chosen
    if device_budget is None or device_budget < comfortable.device_peak:
        # Gradients get what is left, up to what they would have with ease.
        spare = limit - chosen.units_peak if spares else 0
        queue_bytes = max(chosen.queue_bytes, min(planner.queue_bytes, chosen.queue_bytes + spare))
        chosen = planner.settled(chosen.window, chosen.chunks, queue_bytes)
    # And then chunks.
    for chunks in range(comfortable.chunks, chosen.chunks, -1):
        more = planner.settled(chosen.window, chunks, chosen.queue_bytes)
        if fits(more):
            chosen = more
            break
    if device_budget is not None and device_budget >= comfortable.device_peak:
        return planner.widened(chosen, limit)
    return chosen
