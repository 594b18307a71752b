"""Forecasts the seconds of a step with a plan's budget, with nothing held and with larger budgets, and says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.formatting import bytes_shown, seconds_shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from memascend.planning.table import Plan


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds of a step."""

    now: float  # with the plan as it is
    without: float  # with nothing held
    larger: Mapping[int, float]  # by larger budgets, those of the plan


def forecast(plan: Plan, reckon: Callable[[Plan], float | None]) -> Forecast | None:
    """What a step takes; `reckon` says it of one plan, or None where that is not known."""
    now, without = reckon(plan), reckon(plan.moving(plan.without))
    larger = {budget: reckon(plan.moving(traffic)) for budget, traffic in plan.larger.items()}
    if now is None or without is None:
        return None
    known = {budget: seconds for budget, seconds in larger.items() if seconds is not None}
    return Forecast(now=now, without=without, larger=known)


def said(plan: Plan, seconds: Forecast | None) -> str:
    """In one line what is held, what a step moves and takes, and what more memory would buy."""
    moves = f"a step moves {bytes_shown(plan.moved_bytes)}"
    if plan.held:
        moves = (
            f"{len(plan.held)} parameters are held in memory, and {moves} instead of {bytes_shown(plan.without.total)}"
        )
    more = []
    for budget, traffic in plan.larger.items():
        took = "" if seconds is None else f", {seconds_shown(seconds.larger[budget])}"
        more.append(f"{budget} ({bytes_shown(budget)}): {bytes_shown(traffic.total)}{took}")
    instead = f"; with host_memory={', '.join(more)}" if more else ""
    if seconds is None:
        return f"{moves}{instead}"
    took = f"which takes storage and the update about {seconds_shown(seconds.now)}"
    if plan.held:
        took += f" instead of {seconds_shown(seconds.without)}"
    return f"{moves}, {took}{instead}"
