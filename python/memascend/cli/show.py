"""Formats what commands print: sizes, durations, tables and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.errors import ConfigError
from memascend.formatting import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["bars", "bytes_shown", "lines", "seconds_shown", "table"]

# More names in a row than this run out of the picture.
_LEGEND_COLUMNS = 4


def bars(path: Path, title: str, unit: str, series: Mapping[str, Mapping[str, float]], *, log: bool = False) -> None:
    """Draw grouped bars as a PNG: one group for each key of the inner mappings, one colour for each series.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = _pyplot()
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
    axes.grid(axis="y", alpha=0.3)
    _saved(path, title, figure, axes, len(series))


def lines(
    path: Path,
    title: str,
    units: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    log: bool = False,
) -> None:
    """Draw curves through points as a PNG, `units` being the names of the axes; with `log` both are logarithmic.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
    axes.set_xlabel(units[0])
    axes.set_ylabel(units[1])
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    _saved(path, title, figure, axes, len(series))


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib: pip install 'memascend[plot]'") from error
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _saved(path: Path, title: str, figure: Any, axes: Any, series: int) -> None:
    axes.set_title(title)
    figure.legend(loc="outside upper center", ncols=min(series, _LEGEND_COLUMNS))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    _pyplot().close(figure)
