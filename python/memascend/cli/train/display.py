"""Shows the progress of a run: a bar on a terminal, plain lines in logs, JSON lines for machines."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from memascend.formatting import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is told of a step."""

    step: int  # its number, from 1
    steps: int  # of the run
    epoch: float  # passes over the data so far
    loss: float  # the mean over the tokens that are learnt
    grad_norm: float | None  # of all gradients, before clipping; None where the step was skipped
    lr: float  # the learning rate
    tokens: int  # computed, without padding
    seconds: float  # that the step took
    tokens_per_second: float  # over the last steps
    read_bytes: int  # from storage
    written_bytes: int  # to storage
    seconds_left: float  # to the end of the run, at the speed of the last steps
    skipped: bool = False  # whether gradients overflowed, so that nothing was learnt

    def figures(self) -> str:
        """In a few words."""
        norm = "skipped (overflow)" if self.skipped or self.grad_norm is None else f"norm {self.grad_norm:.3g}"
        moved = bytes_shown(self.read_bytes + self.written_bytes)
        return f"loss {self.loss:.4f}, {norm}, {self.tokens_per_second:,.0f} tokens/s, {moved} moved"


class Display:
    """Where it is told; here nowhere."""

    def tell(self, text: str) -> None:
        """A sentence."""

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Something beside steps: `values` for machines, `text` for people."""

    def step(self, step: Step) -> None:
        """A step was committed."""

    def close(self) -> None:
        """Nothing more comes."""


def open_display(steps: int, first: int, *, as_json: bool, rank: int = 0) -> Display:
    """What fits where the output goes; `first` steps are done. The first rank tells: what all do is the same."""
    if rank:
        return Display()
    if as_json:
        return _JsonLines()
    if sys.stderr is not None and sys.stderr.isatty():
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            return _Bar(tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True))
    return _Lines()


class Log(Display):
    """Another display, and one JSON line for each step and event in a file."""

    def __init__(self, path: Path, shown: Display) -> None:
        """Go on with the file, behind what a killed process may have left of a line."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._shown = shown
        self._file = path.open("ab+", buffering=0)
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                self._file.write(b"\n")

    def tell(self, text: str) -> None:
        """A sentence, which the file does not have."""
        self._shown.tell(text)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        """Something beside steps."""
        self._write({"event": name, **values})
        self._shown.event(name, values, text)

    def step(self, step: Step) -> None:
        """A step was committed."""
        self._write({"event": "step", **asdict(step)})
        self._shown.step(step)

    def close(self) -> None:
        """Nothing more comes."""
        self._shown.close()
        self._file.close()

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values).encode() + b"\n")


class _Lines(Display):
    def tell(self, text: str) -> None:
        print(text, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del name, values
        self.tell(text)

    def step(self, step: Step) -> None:
        self.tell(f"step {step.step}/{step.steps}: {step.figures()}, {time_shown(step.seconds_left)} left")


class _Bar(Display):
    def __init__(self, bar: Any) -> None:
        self._bar = bar

    def tell(self, text: str) -> None:
        self._bar.write(text)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del name, values
        self.tell(text)

    def step(self, step: Step) -> None:
        self._bar.set_postfix_str(step.figures(), refresh=False)
        self._bar.update(1)

    def close(self) -> None:
        self._bar.close()


class _JsonLines(Display):
    """Steps and events on standard output, sentences on standard error."""

    def tell(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def event(self, name: str, values: Mapping[str, Any], text: str) -> None:
        del text
        print(json.dumps({"event": name, **values}), flush=True)

    def step(self, step: Step) -> None:
        self.event("step", asdict(step), "")


def time_shown(seconds: float) -> str:
    """A time to wait, in the two largest units that it has."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"
