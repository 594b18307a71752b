"""Draws a plan: host memory by owner beside training in memory, and the bytes that a step moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.drawing import IN_MEMORY, OURS, open_pyplot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from memascend.cli.plan.answer import Answer

_GIB = 1 << 30


def draw(path: Path, found: Answer) -> None:
    """Draw it.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = open_pyplot()
    plan = found.plan
    figure, axes = plt.subplots(1, 3, figsize=(14, 5), layout="constrained")
    beside, owners, moved = axes
    beside.bar(["in memory", "memascend"], [found.in_memory / _GIB, plan.host_peak / _GIB], color=[IN_MEMORY, OURS])
    beside.set_title("Host memory, but for activations")
    _stacked(owners, "of host memory", {name: nbytes for name, nbytes in plan.host.items() if nbytes})
    owners.axhline(plan.budget / _GIB, color=IN_MEMORY, linestyle=":", label="budget")
    owners.set_title("memascend, by owner")
    for direction, kinds in (("read", plan.read_bytes), ("written", plan.written_bytes)):
        _stacked(moved, direction, {f"{direction}: {kind}": nbytes for kind, nbytes in kinds.items()})
    moved.set_title("What a step moves")
    for axis in axes:
        axis.set_ylabel("GiB")
        axis.grid(axis="y", alpha=0.3)
    for axis in (owners, moved):
        axis.margins(x=0.3)
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    finally:
        plt.close(figure)


def _stacked(axis: Any, where: str, parts: Mapping[str, int]) -> None:
    bottom = 0.0
    for name, nbytes in parts.items():
        axis.bar([where], [nbytes / _GIB], 0.6, bottom=bottom, label=name)
        bottom += nbytes / _GIB
