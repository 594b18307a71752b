"""Implements `memascend demo`: trains a model in memory and offloaded, and compares losses and parameters.

The demo kills the offloaded run halfway, usually in the middle of a step, and resumes it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.cli.storage import disk_folder
from memascend.errors import MemascendError
from memascend.text import Closing, bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    import argparse

# The default size of the model. Like models that do not fit in memory, the model has many layers compared to its width.
# A step takes 1 to 2 s on one core.
_LAYERS, _WIDTH = 16, 384
# The number of texts in a step, and the bytes of each text that the model reads.
ROWS, LENGTH = 2, 128
_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument("--storage", metavar="FOLDER", type=Path, help="folder for the store, removed at the end")
    parser.add_argument(
        "--steps", metavar="N", type=_from_two, default=_STEPS, help="steps to train (default: %(default)s)"
    )
    parser.add_argument("--layers", metavar="N", type=_from_two, default=_LAYERS, help="of the model (%(default)s)")
    parser.add_argument("--width", metavar="N", type=_width, default=_WIDTH, help="of its layers (%(default)s)")


def _from_two(text: str) -> int:
    number = int(text)
    if number < 2:
        raise ValueError
    return number


def _width(text: str) -> int:
    width = int(text)
    if width < 1 or width % 64:
        raise ValueError
    return width


_print = functools.partial(print, flush=True)


@dataclass(frozen=True)
class Settings:
    """The settings of one of the two runs that the demo compares."""

    layers: int  # the number of blocks in the model
    width: int  # the width of the blocks
    storage: str | None  # the folder of the store; None: the run trains in memory


class Side(Closing):
    """One of the two runs that the demo compares: a child process that runs `side.py`, and trains a step on request."""

    def __init__(self, settings: Settings) -> None:
        """Starts the child process. The first call of `answer()` returns the child's first report."""
        self._settings = settings
        self.peak = 0
        self.start()

    def start(self) -> None:
        """Starts the child process. After `close()`, starts a new child process."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "memascend.cli.demo.side", json.dumps(asdict(self._settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # In a new session, the child process does not receive Ctrl-C. The parent process receives it, and kills the
            # child.
            start_new_session=True,
        )

    def ask(self, word: str) -> dict[str, Any]:
        """Sends the request "step" or "end" to the child process, and returns the child's report."""
        self.request(word)
        return self.answer()

    def request(self, word: str) -> None:
        """Sends the request "step" or "end" to the child process. `answer()` returns the child's report."""
        assert self._process.stdin is not None
        # If the child process has ended, answer() raises the error.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Waits for the next report of the child process, and returns the report.

        Raises:
            MemascendError: the child process reports an error, or has ended.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise MemascendError(
                f"a training process ended with exit code {self._process.wait()}: see its error above; if "
                "there is none, free memory and try again"
            )
        found: dict[str, Any] = json.loads(line)
        if "error" in found:
            raise MemascendError(found["error"])
        self.peak = max(self.peak, found.get("peak", 0))
        return found

    def close(self) -> None:
        """Kills the child process, and waits until the process has ended."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def run(options: argparse.Namespace) -> int:
    """Trains in memory and offloaded, and compares the two runs. Returns exit code 1 if a result differs, else 0."""
    with tempfile.TemporaryDirectory(prefix="memascend-demo-", dir=options.storage or disk_folder()) as folder:
        settings = Settings(options.layers, options.width, folder)
        with Side(replace(settings, storage=None)) as memory, Side(settings) as offloaded:
            return _compare(settings, options.steps, memory, offloaded)


def _compare(settings: Settings, steps: int, memory: Side, offloaded: Side) -> int:
    """Trains the two runs alternately, kills and resumes the offloaded run halfway, and returns the exit code."""
    count = memory.answer()["parameters"] / 1e6
    _print(
        f"A language model of {count:.1f} million parameters ({settings.layers} blocks of width {settings.width}, "
        "float32)\nlearns the bytes of Python sources: once in memory, with torch's fused AdamW, and once "
        "offloaded.\nBoth runs train alternately, each in its own process with torch on one thread. Memory "
        "excludes imports.\n"
    )
    offloaded.answer()
    _print(f"{_line(_HEADS)}\n{'  '.join('-' * width for width in _WIDTHS)}")
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for step in range(1, steps + 1):
        one = memory.ask("step")
        if step == steps // 2 + 1:
            usual = statistics.median(other["seconds"] for _, other in rows)
            other = _killed(offloaded, step, usual / 2, settings.storage)
        else:
            other = offloaded.ask("step")
        rows.append((one, other))
        _print(row_shown(step, one, other))
    return _conclude(rows, memory, offloaded)


def _killed(side: Side, step: int, seconds: float, storage: str | None) -> dict[str, Any]:
    """Kills a run `seconds` after the start of `step`, resumes the run, and returns the report of the step."""
    side.request("step")
    time.sleep(seconds)
    side.close()
    _print(f"      kill -9 of the offloaded training, {seconds_shown(seconds)} into step {step}")
    side.start()
    ready = side.answer()
    _print(f"      resumed from {storage}: the store has {ready['steps']} steps")
    if ready["steps"] == step:
        # The kill came after the step was committed. The commit also stores the loss.
        return {"loss": ready["last_loss"], "seconds": 0.0, "held": 0}
    return side.ask("step")


def _conclude(rows: list[tuple[dict[str, Any], dict[str, Any]]], memory: Side, offloaded: Side) -> int:
    """Ends the two runs, prints the comparison, and returns the exit code."""
    ours, theirs = offloaded.ask("end"), memory.ask("end")
    same = sum(one["loss"] == other["loss"] for one, other in rows)
    equal = theirs["digest"] == ours["digest"]
    peaks = memory.peak, offloaded.peak
    times = [statistics.median(row[side]["seconds"] for row in rows if row[side]["seconds"]) for side in (0, 1)]
    lines = [
        ("loss, from", *(f"{rows[0][side]['loss']:.4f}" for side in (0, 1)), ""),
        ("loss, to", *(f"{rows[-1][side]['loss']:.4f}" for side in (0, 1)), ""),
        ("parameters, SHA-256", theirs["digest"][:12], ours["digest"][:12], "same" if equal else "DIFFERENT"),
        ("memory for training, peak", *map(bytes_shown, peaks), f"{peaks[1] / peaks[0]:.0%}"),
        ("a step, median", *map(seconds_shown, times), f"{times[1] / times[0]:.2f} times"),
        ("on storage", "", bytes_shown(ours["disk"]), ""),
    ]
    _print("\n" + table(("", "in memory", "offloaded", ""), lines))
    fine = equal and same == len(rows)
    verdict = "the kill and the resume changed nothing" if fine else "THIS IS A BUG, please report it"
    _print(f"\n{same} of {len(rows)} losses have the same bits; {verdict}.")
    return 0 if fine else 1


_HEADS = ("step", "loss in memory", "offloaded", "same bits", "in memory takes", "offloaded", "in memory holds",
          "offloaded")  # fmt: skip
_WIDTHS = tuple(max(len(head), 9) for head in _HEADS)


def row_shown(step: int, memory: dict[str, Any], offloaded: dict[str, Any]) -> str:
    """Returns the line of the printed table for one step."""
    sides = (memory, offloaded)
    return _line(
        (
            str(step),
            *(f"{side['loss']:.6f}" for side in sides),
            "yes" if memory["loss"] == offloaded["loss"] else "NO",
            *(seconds_shown(side["seconds"]) if side["seconds"] else "" for side in sides),
            *(bytes_shown(side["held"]) if side["held"] else "" for side in sides),
        )
    )


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
