"""Starts a side of the demonstration, tells it when to step, and draws its answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memascend.errors import MemascendError
from memascend.text import Closing, bytes_shown, seconds_shown

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


@dataclass(frozen=True)
class Settings:
    """What to train, and where."""

    layers: int  # blocks of the model
    width: int  # of its layers
    rows: int  # pieces of text in a step
    length: int  # bytes in each
    storage: str | None  # a folder; None trains in memory
    picture: str | None  # a file for the picture of the report
    host_memory: str | None = None  # the budget of the offloaded training; None: the smallest that is fast


class Side(Closing):
    """A process that trains when it is told to."""

    def __init__(self, settings: Settings) -> None:
        """Start it; `ready` has its first answer."""
        self._settings = settings
        self.peak = 0
        self.start()

    def start(self) -> None:
        """Start it, again after a `kill`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memascend.cli.demo.side", json.dumps(asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the one who tells.
            start_new_session=True,
        )

    def answer(self) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            MemascendError: it said why it could not go on, or ended without a word.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MemascendError(
                f"the training ended with exit code {self._process.wait()}, so nothing can be "
                "compared: see its output above"
            )
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise MemascendError(found["error"])
        self.peak = max(self.peak, found.get("peak", 0))
        return found

    def tell(self, word: str) -> None:
        """Tell it to do something; `answer` has what came of it."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def kill_in(self, seconds: float) -> None:
        """Kill it so much later, without a warning."""
        time.sleep(seconds)
        self.close()

    def close(self) -> None:
        """Kill it, if it lives, and see it gone."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
