"""Compares the formats of the optimizer's state for one question: rows of a table, or JSON values."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from memascend.cli.plan.answer import disk_seconds, step_seconds
from memascend.planning.format_table import cost_of_format, format_table
from memascend.run.decision import planned_formats

if TYPE_CHECKING:
    from memascend.cli.plan.answer import Question
    from memascend.planning.format_table import FormatCost


def compared(question: Question, budget: int) -> list[FormatCost]:
    """What a step costs in each format that goes with the optimizer, with one budget."""
    elements = {name: parameter.numel() for name, parameter in question.model.named_parameters()}
    found = planned_formats(question.model, question.optimizer, question.options, budget, question.ranks)
    return [
        cost_of_format(state, one.plan, elements, disk_seconds(asked, one.plan), step_seconds(asked, one.plan))
        for state, one in found.items()
        for asked in [replace(question, options=replace(question.options, state=state))]
    ]


def next_format(costs: list[FormatCost], now: str | None) -> FormatCost | None:
    """The one with the next fewer bits than what the optimizer has, or was asked to have; None after the last."""
    names = [cost.state for cost in costs]
    at = names.index(now or "fp32") + 1 if (now or "fp32") in names else len(names)
    return costs[at] if at < len(costs) else None


def shown(costs: list[FormatCost], budget: int) -> str:
    """A table, where there is something to compare."""
    if len(costs) < 2:
        return ""
    return "\n\nOther numerics that move fewer bytes (docs/state-formats.md):\n\n" + format_table(costs, budget)


def values(costs: list[FormatCost]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [asdict(cost) for cost in costs]
