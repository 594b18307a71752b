"""How the commands show numbers: byte sizes, durations, plain tables and bar pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["bars", "bytes_shown", "seconds_shown", "table"]

# More names in a row than this run out of the picture.
_LEGEND_COLUMNS = 4
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def bytes_shown(nbytes: int) -> str:
    """A size in the largest binary unit that leaves at least 1, with three digits."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size, unit = size / 1024, unit + 1
    return (
        f"{nbytes} bytes"
        if unit == 0
        else f"{size:.3g} {_UNITS[unit]}"
        if size < 1000
        else f"{size:.0f} {_UNITS[unit]}"
    )


def seconds_shown(seconds: float) -> str:
    """A duration in s, ms, us or ns, with three digits."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their content; those that hold numbers are aligned to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    numeric = [all(row[column][:1].isdigit() for row in rows) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = zip(row, widths, numeric, strict=True)
        return "  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


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
