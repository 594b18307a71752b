"""Compares what plans cost that differ in the format of the optimizer's state: one table, one row for each format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.formatting import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.planning.table import Plan

# What wear is reckoned by: drives are rated in terabytes written.
_WRITTEN_BYTES = 100 * 10**12


@dataclass(frozen=True, kw_only=True)
class FormatCost:
    """What a step costs with state in one format."""

    state: str  # the format, as the option of `offload()` has it
    bytes_per_parameter: float  # moved in a step
    disk_seconds: float | None  # that the disk takes for a step; None where that is not known
    step_seconds: float | None  # that a step takes; None where that is not known
    steps_per_100_tb: int  # how many steps write 100 TB
    disk_bytes: int  # of the store
    log_bytes: int  # of the log of gradients behind it
    held: float  # the part of the parameters whose state stays in memory with the budget


def cost_of_format(
    state: str,
    plan: Plan,
    elements: Mapping[str, int],
    disk_seconds: float | None = None,
    step_seconds: float | None = None,
) -> FormatCost:
    """The row of one plan; `elements` of all parameters, by name."""
    everything = max(1, sum(elements.values()))
    written = sum(plan.written_bytes.values())
    return FormatCost(
        state=state,
        bytes_per_parameter=(sum(plan.read_bytes.values()) + written) / everything,
        disk_seconds=disk_seconds,
        step_seconds=step_seconds,
        steps_per_100_tb=_WRITTEN_BYTES // max(1, written),
        disk_bytes=plan.disk_bytes,
        log_bytes=plan.log_bytes,
        held=sum(elements.get(name, 0) for name in plan.held) / everything,
    )


def format_table(costs: Sequence[FormatCost], budget: int) -> str:
    """Them below each other; `budget` is the host memory that all plans have."""
    rows = [
        (
            f'state="{cost.state}"',
            f"{cost.bytes_per_parameter:.1f} bytes",
            *("not known" if one is None else seconds_shown(one) for one in (cost.disk_seconds, cost.step_seconds)),
            f"{cost.steps_per_100_tb:,}",
            bytes_shown(cost.disk_bytes + cost.log_bytes),
            f"{cost.held:.0%}",
        )
        for cost in costs
    ]
    heads = (
        "state",
        "moved a parameter",
        "the disk's part of a step",
        "a step",
        "steps write 100 TB",
        "storage",
        f"held in {bytes_shown(budget)}",
    )
    return table(heads, rows)
