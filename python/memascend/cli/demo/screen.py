"""Draws the demonstration's table while it runs: one row a step."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memascend.formatting import bytes_shown, seconds_shown

if TYPE_CHECKING:
    from typing import TextIO

_HEADS = (
    "step",
    "loss in memory",
    "offloaded",
    "same bits",
    "in memory takes",
    "offloaded",
    "in memory holds",
    "offloaded",
)
_WIDTHS = tuple(max(len(head), 9) for head in _HEADS)


class Screen:
    """On a terminal the row that is being made is drawn anew; elsewhere each row is printed once."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._live = self._stream.isatty()

    def head(self) -> None:
        """The names of the columns."""
        print(_line(_HEADS), file=self._stream)
        print("  ".join("-" * width for width in _WIDTHS), file=self._stream, flush=True)

    def row(self, step: int, memory: dict[str, Any] | None, offloaded: dict[str, Any] | None) -> None:
        """A step's row; what is not known yet is None."""
        same = ""
        if memory and offloaded:
            same = "yes" if memory["loss"] == offloaded["loss"] else "NO"
        cells = [str(step)]
        cells += [f"{side['loss']:.6f}" if side else "..." for side in (memory, offloaded)]
        cells.append(same)
        cells += [seconds_shown(side["seconds"]) if side and side["seconds"] else "" for side in (memory, offloaded)]
        cells += [bytes_shown(side["held"]) if side and side["held"] else "" for side in (memory, offloaded)]
        whole = bool(memory and offloaded)
        if self._live:
            print(f"\r\x1b[K{_line(cells)}", end="\n" if whole else "", file=self._stream, flush=True)
        elif whole:
            print(_line(cells), file=self._stream, flush=True)

    def say(self, text: str) -> None:
        """A line between rows."""
        if self._live:
            print("\r\x1b[K", end="", file=self._stream)
        print(text, file=self._stream, flush=True)


def _line(cells: tuple[str, ...] | list[str]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
