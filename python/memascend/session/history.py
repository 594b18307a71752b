"""Records loss, seconds and bytes of each step of a run, and plots these figures and the host memory of each owner."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.text import IN_MEMORY, OURS, bytes_shown, open_pyplot

if TYPE_CHECKING:
    import os
    from typing import Any

    from memascend.session.report import Report

_MIB = 1 << 20
# The largest number of steps for which a `History` keeps `seconds` and `moved`. When it has more steps, `add` drops
# every second step.
_POINTS_MAX = 10_000


@dataclass
class History:
    """Figures of committed steps; the lists have one item for each recorded step."""

    steps: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # seconds since the end of the previous step
    moved: list[int] = field(default_factory=list)  # bytes read and written since the end of the previous step
    losses: dict[int, float] = field(default_factory=dict)  # losses that a Trainer logged, by step

    def add(self, step: int, seconds: float, moved: int) -> None:
        """Appends the figures of a committed step."""
        self.steps.append(step)
        self.seconds.append(seconds)
        self.moved.append(moved)
        if len(self.steps) > _POINTS_MAX:
            del self.steps[::2], self.seconds[::2], self.moved[::2]


def draw(report: Report, path: str | os.PathLike[str]) -> None:
    """Plots a report into the file `path`: loss, seconds and GB/s of each step, and the peak host memory of each owner.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = open_pyplot()
    history = report.history
    lines = [
        ("loss", [*history.losses], [*history.losses.values()]),
        ("seconds a step", history.steps, history.seconds),
        ("drive, GB/s", history.steps, [n / 1e9 / s for n, s in zip(history.moved, history.seconds, strict=True)]),
    ]
    lines = [line for line in lines if line[1]]
    figure, axes = plt.subplots(len(lines) + 1, 1, figsize=(8, 2 * len(lines) + 3), layout="constrained")
    panels = [axes] if not lines else list(axes)
    try:
        for axis, (label, steps, values) in zip(panels, lines, strict=False):
            axis.plot(steps, values, color=OURS, marker="." if len(steps) < 50 else "")
            axis.set_ylabel(label)
            axis.set_xlabel("step")
            if label != "loss":
                axis.set_ylim(bottom=0)
        _draw_memory(panels[-1], report)
        where = Path(path).expanduser()
        where.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(where, dpi=110)
    finally:
        plt.close(figure)


def _draw_memory(axis: Any, report: Report) -> None:
    """Draws a bar of the peak host memory by owner, and a bar of the same training without offloading ("in memory").

    The bar "in memory" does not include activations. A dotted line shows the budget.
    """
    bars = {
        "in memory": {f"{name}, in memory": nbytes for name, nbytes in asdict(report.in_memory).items()},
        "memascend": {name: owner.peak for name, owner in report.owners.items()},
    }
    for bar, parts in bars.items():
        left = 0.0
        for name, nbytes in parts.items():
            if nbytes:
                axis.barh(bar, nbytes / _MIB, left=left, label=f"{name}: {bytes_shown(nbytes)}", height=0.6)
                left += nbytes / _MIB
    axis.axvline(report.budget / _MIB, color=IN_MEMORY, linestyle=":", label=f"budget: {bytes_shown(report.budget)}")
    axis.set_xlabel("MiB of host memory")
    axis.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize="small")
