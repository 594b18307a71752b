"""Draws bars and curves as PNG files. A system that `_SYSTEMS` names has the same colour in every picture."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from memascend.text import IN_MEMORY, OURS, open_pyplot

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# The sizes of letters in most pictures, in points. They can be read on a telephone, which shows a picture 400 pixels
# wide.
_FONT = {"font.size": 11, "axes.titlesize": 12}
# The style of a page's main picture. Its lines and letters are larger, so that it is readable at a glance.
_HEADLINE = {
    "font.size": 14, "axes.titlesize": 16, "axes.titleweight": "bold", "lines.linewidth": 3.5, "lines.markersize": 9,
    "axes.titlepad": 14,
}  # fmt: skip
_LEGEND_COLUMNS = 2
# The smallest distance between two names at the ends of curves, as a fraction of the axes' height.
_APART = 0.16
# The largest number of letters in a line of a title.
_TITLE = 52
# The words and the colour for each known system.
_SYSTEMS = {
    "memascend": ("memascend", OURS),
    "memascend-smallest": ("memascend, smallest budget", "#7fb3e6"),
    "memascend-bf16": ("memascend, moments of 16 bits", "#4c97dd"),
    "memascend-8bit": ("memascend, moments of 8 bits", "#a9cdf0"),
    "memascend-held-60": ("memascend, 60 % kept in RAM", "#0b57a4"),
    "memascend-held": ("memascend, all kept in RAM", "#084a8c"),
    "memascend-held-none": ("memascend, all kept in RAM, no log", "#042b52"),
    "torch": ("torch, all in memory", IN_MEMORY),
    "peer": ("torch", IN_MEMORY),
    "zero-infinity": ("ZeRO-Infinity, tuned for memory", "#d9822b"),
    "zero-infinity-pipelined": ("ZeRO-Infinity, pipelined", "#f0b775"),
    "zero-infinity-params-in-ram": ("ZeRO-Infinity, parameters in memory", "#a05a12"),
    "zero-offload": ("ZeRO-Offload, all in memory", "#8250df"),
    "io_uring": ("memascend, io_uring", OURS),
    "threads": ("memascend, threads", "#7fb3e6"),
    "two files, striped": ("memascend, two files, striped", "#084a8c"),
    "unaligned memory": ("memascend, unaligned memory", "#a9cdf0"),
    "unaligned offsets too": ("memascend, unaligned offsets", "#d3e5f7"),
    "fio": ("fio", IN_MEMORY),
    "fio, huge pages": ("fio, huge pages", "#24292f"),
    "arena": ("memascend's arena", OURS),
    "per shape": ("a pool for each shape", IN_MEMORY),
    "one size": ("slots of the largest tensor's size", "#f0b775"),
    "DeepSpeed aio": ("DeepSpeed's aio", "#d9822b"),
    "one size, rounded": ("slots of the next power of two", "#d9822b"),
}
# The colours for systems that are not in `_SYSTEMS`. They differ from all colours in `_SYSTEMS`.
_OTHERS = ("#1a7f37", "#bf3989", "#9a6700", "#2da3b8", "#cf222e", "#6e7781")


def bars(path: Path, title: str, unit: str, series: Mapping[str, Mapping[str, float | None]]) -> None:
    """Draws groups of bars as a PNG file. The axis begins at zero.

    There is one group for each key of the first series. Each series has one colour. Each bar has its value above it. If
    a value is missing or None, the text "not measured" is at the place of its bar.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = open_pyplot()
    groups = list(next(iter(series.values())))
    width = 0.84 / len(series)
    plt.rcParams.update(_FONT)
    figure, axes = plt.subplots(
        figsize=(min(16, max(6, len(groups) * (0.3 + 0.4 * len(series)))), 4.2), layout="constrained"
    )
    drawn = _styled(series)
    for index, (name, words, colour) in enumerate(drawn):
        places = [place + (index - (len(series) - 1) / 2) * width for place in range(len(groups))]
        values = [series[name].get(group) for group in groups]
        axes.bar(places, [value or 0.0 for value in values], 0.92 * width, label=words, color=colour)
        for place, value in zip(places, values, strict=True):
            _labelled(axes, place, value, colour)
    axes.set_xticks(range(len(groups)), groups)
    if max(map(len, groups)) * len(groups) > 110:
        axes.tick_params("x", rotation=20)
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _saved(path, title, figure, len(series))


def _labelled(axes: Any, place: float, value: float | None, colour: str) -> None:
    """Writes the value above its bar. If the value is None, writes "not measured" at the place of the bar."""
    if value is None:
        axes.text(place, 0, " not measured", rotation=90, ha="center", va="bottom", fontsize=9, color=colour)
        return
    shown = f"{value:.0f}" if value >= 100 else f"{value:.{3 if value >= 1 else 2}g}"
    axes.annotate(shown, (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=9)


def lines(
    path: Path,
    title: str,
    units: tuple[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    spread: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> None:
    """Draws curves through points as a PNG file. Both axes begin at zero, and `units` are their labels.

    Each curve has its name and its last value at its end. `spread` has the smallest and the largest measured value of
    each point, which are drawn as a vertical bar. If `spread` is None, there are no such bars.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = open_pyplot()
    plt.rcParams.update(_FONT)
    figure, axes = plt.subplots(figsize=(6.4, 4), layout="constrained")
    ends: list[tuple[float, str, str]] = []
    for name, words, colour in _styled(series):
        points = series[name]
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=colour)
        if between := (spread or {}).get(name):
            axes.vlines([x for x, _ in points], *zip(*between, strict=True), color=colour, alpha=0.5, linewidth=3)
        if points:
            ends.append((points[-1][1], words.replace(", ", ",\n") + f": {points[-1][1]:.3g}", colour))
    axes.set_xlabel(units[0])
    axes.set_ylabel(units[1])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    _named_at_the_end(axes, ends)
    _saved(path, title, figure, 0)


def headline(
    path: Path, title: str, units: tuple[str, str], series: Mapping[str, Sequence[tuple[float, float]]]
) -> None:
    """Draws a few curves as the main picture of a page, in a PNG file. Both axes begin at zero.

    Each curve has its system's name and its last value at its end. The letters are larger than in other pictures.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    plt = open_pyplot()
    with plt.rc_context(_HEADLINE):
        figure, axes = plt.subplots(figsize=(6.4, 3.9), layout="constrained")
        ends: list[tuple[float, str, str]] = []
        for name, words, colour in _styled(series):
            places, values = zip(*series[name], strict=True)
            axes.plot(places, values, marker="o", color=colour, clip_on=False)
            ends.append((values[-1], f"{words.partition(',')[0]}\n{values[-1]:.2g} {units[1]}", colour))
        axes.set_title(title, loc="left")
        axes.set_xlabel(units[0])
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        _named_at_the_end(axes, ends)
        _saved(path, "", figure, 0)


def _named_at_the_end(axes: Any, ends: list[tuple[float, str, str]]) -> None:
    """Writes the words of each (value, words, colour) to the right of the curves.

    The words are at the height of the value, or as near to it as the other words allow.
    """
    ends = sorted(ends)
    heights = [value / axes.get_ylim()[1] for value, _, _ in ends]
    for at in range(1, len(heights)):
        heights[at] = max(heights[at], heights[at - 1] + _APART)
    highest = 1.0
    for at in reversed(range(len(heights))):
        heights[at] = min(heights[at], highest)
        highest = heights[at] - _APART
    for height, (_, words, colour) in zip(heights, ends, strict=True):
        axes.text(1.03, height, words, color=colour, va="center", transform=axes.transAxes)


def _styled(series: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns each series as (name, words, colour)."""
    spare = iter(_OTHERS * (1 + len(series) // len(_OTHERS)))
    return [(name, *(_SYSTEMS.get(name) or (name, next(spare)))) for name in series]


def _saved(path: Path, title: str, figure: Any, series: int) -> None:
    if title:
        figure.suptitle(textwrap.fill(title, _TITLE), fontsize=_FONT["axes.titlesize"])
    if series:
        figure.legend(loc="outside lower center", ncols=min(series, _LEGEND_COLUMNS), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)
    open_pyplot().close(figure)
