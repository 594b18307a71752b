"""`memascend demo`: runs the same training in memory and offloaded, side by side, and kills one in the middle."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.cli.demo.turns import Screen, Settings, Side
from memascend.cli.storage import disk_folder
from memascend.text import bytes_shown, seconds_shown, table

if TYPE_CHECKING:
    import argparse

# Deep and narrow, as the models are that do not fit; a step takes a second or two on one core.
_LAYERS, _WIDTH = 16, 384
_ROWS, _LENGTH = 2, 128
_STEPS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what may be changed."""
    parser.add_argument("--storage", metavar="FOLDER", type=Path, help="where the offloaded training lives meanwhile")
    parser.add_argument("--host-memory", metavar="B", help='budget, as "200MiB"; default: the smallest that is fast')
    parser.add_argument("--picture", metavar="PNG", type=Path, help="the picture of host memory over a step")
    parser.add_argument("--steps", metavar="N", type=_from_two, default=_STEPS, help="how many (default: %(default)s)")
    parser.add_argument("--layers", metavar="N", type=_from_two, default=_LAYERS, help="of the model (%(default)s)")
    parser.add_argument("--width", metavar="N", type=_width, default=_WIDTH, help="of its layers (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Train, kill, resume, compare. 1 where anything differs."""
    picture: Path = options.picture or Path(tempfile.gettempdir()) / "memascend-demo.png"
    with tempfile.TemporaryDirectory(prefix="memascend-demo-", dir=options.storage or disk_folder()) as folder:
        settings = Settings(
            layers=options.layers,
            width=options.width,
            rows=_ROWS,
            length=_LENGTH,
            storage=folder,
            picture=str(picture.absolute()),
            host_memory=options.host_memory,
        )
        return _Demonstration(settings, options.steps).run()


class _Demonstration:
    """Both sides, and what came of them."""

    def __init__(self, settings: Settings, steps: int) -> None:
        self._settings = settings
        self._steps = steps
        self._screen = Screen()
        self._rows: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._held, self._parameters = 0, 1

    def run(self) -> int:
        with ExitStack() as stack:
            memory = stack.enter_context(Side(replace(self._settings, storage=None)))
            offloaded = stack.enter_context(Side(self._settings))
            self._introduce(memory.answer()["parameters"])
            self._tell_held(offloaded.answer())
            self._screen.head()
            killed_at = self._steps // 2 + 1
            for step in range(1, self._steps + 1):
                one = self._step(memory, step, None)
                other = self._killed(offloaded, step, one) if step == killed_at else self._step(offloaded, step, one)
                self._rows.append((one, other))
            ends = []
            for side in (memory, offloaded):
                side.tell("end")
                ends.append(side.answer())
            return self._conclude(ends[0], ends[1], memory.peak, offloaded.peak)

    def _introduce(self, parameters: int) -> None:
        settings = self._settings
        self._screen.say(
            f"A language model of {parameters / 1e6:.1f} million parameters ({settings.layers} blocks of width "
            f"{settings.width}, float32)\nlearns the bytes of Python's own sources: once in memory, with torch's fused "
            "AdamW, and once offloaded.\nThey take turns, each in a process of its own on one thread. "
            "What each holds is without its imports.\n"
        )

    def _tell_held(self, ready: dict[str, Any]) -> None:
        self._held, self._parameters = ready["in_memory"], ready["parameters"]
        if self._held:
            part = self._held / self._parameters
            self._screen.say(
                f"Of the offloaded parameters {part:.0%} are kept in RAM with their state: they are read once.\n"
            )

    def _step(self, side: Side, step: int, before: dict[str, Any] | None) -> dict[str, Any]:
        """One step of one side; `before` is what the other side answered, if it went first."""
        self._screen.row(step, before, None)
        side.tell("step")
        answer: dict[str, Any] = side.answer()
        self._screen.row(step, before or answer, answer if before else None)
        return answer

    def _killed(self, side: Side, step: int, one: dict[str, Any]) -> dict[str, Any]:
        """Kill a side in the middle of this step, resume it, and let it do the step."""
        usual = statistics.median(row[1]["seconds"] for row in self._rows)
        side.tell("step")
        side.kill_in(usual / 2)
        self._screen.say(f"      kill -9 of the offloaded training, {seconds_shown(usual / 2)} into step {step}")
        side.start()
        ready = side.answer()
        self._screen.say(f"      resumed from {self._settings.storage}: {ready['steps']} steps are there")
        if ready["steps"] == step:
            # It had committed the step already, and its loss with it.
            other = {"loss": ready["last_loss"], "seconds": 0.0, "held": 0}
            self._screen.row(step, one, other)
            return other
        return self._step(side, step, one)

    def _conclude(self, memory: dict[str, Any], offloaded: dict[str, Any], *peaks: int) -> int:
        same = sum(one["loss"] == other["loss"] for one, other in self._rows)
        equal = memory["digest"] == offloaded["digest"]
        times = [
            statistics.median(row[side]["seconds"] for row in self._rows if row[side]["seconds"]) for side in (0, 1)
        ]
        imported = [self._rows[-1][side]["imported"] for side in (0, 1)]
        report = offloaded["report"]
        moved = [sum(n for kind, n in report[way].items() if kind != "first values") for way in ("read", "written")]
        steps = max(1, report["steps"])
        counted = offloaded["counted"]
        rows = [
            ("loss, from", *(f"{self._rows[0][side]['loss']:.4f}" for side in (0, 1)), ""),
            ("loss, to", *(f"{self._rows[-1][side]['loss']:.4f}" for side in (0, 1)), ""),
            ("parameters, SHA-256", memory["digest"][:12], offloaded["digest"][:12], "same" if equal else "DIFFERENT"),
            ("memory for training, peak", *map(bytes_shown, peaks), f"{peaks[1] / peaks[0]:.0%}"),
            ("  of it parameters, state, gradients", *map(bytes_shown, counted.values()), "in the picture"),
            ("whole process, peak", *(bytes_shown(a + b) for a, b in zip(peaks, imported, strict=True)), ""),
            ("a step, median", *map(seconds_shown, times), f"{times[1] / times[0]:.2f} times"),
            ("held in memory", "", f"{self._held / self._parameters:.0%}", "of the parameters, with their state"),
            ("on storage", "", bytes_shown(offloaded["disk"]), ""),
            ("read for each step", "", bytes_shown(moved[0] // steps), ""),
            ("written for each step", "", bytes_shown(moved[1] // steps), ""),
        ]
        self._screen.say("\n" + table(("", "in memory", "offloaded", ""), rows))
        verdict = "the kill and the resume changed nothing" if equal and same == len(self._rows) else "THIS IS A BUG"
        self._screen.say(f"\n{same} of {len(self._rows)} losses have the same bits; {verdict}.")
        if offloaded["picture"]:
            self._screen.say(f"Parameters, state and gradients over a step, by owner: {offloaded['picture']}")
        else:
            self._screen.say("For a picture of host memory over a step: pip install 'memascend[plot]'")
        return 0 if equal and same == len(self._rows) else 1


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
