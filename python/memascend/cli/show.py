"""How the commands show numbers: sizes, durations and tables as elsewhere, and bar pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import ConfigError
from memascend.shown import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["bars", "bytes_shown", "seconds_shown", "table"]

# More names in a row than this run out of the picture.
_LEGEND_COLUMNS = 4


def bars(path: Path, title: str, unit: str, series: Mapping[str, Mapping[str, float]], *, log: bool = False) -> None:
    """Draw grouped bars as a PNG: one group for each key of the inner mappings, one colour for each series.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'memascend[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = list(next(iter(series.values())))
    width = 0.8 / len(series)
    figure, axes = plt.subplots(figsize=(max(8, 1.2 * len(groups)), 5), layout="constrained")
    for index, (name, values) in enumerate(series.items()):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(places, [values[group] for group in groups], width, label=name)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_ylabel(unit)
    if log:
        axes.set_yscale("log")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=min(len(series), _LEGEND_COLUMNS))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
