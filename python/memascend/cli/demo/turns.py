"""Starts a side of the demonstration, tells it when to step, and reads its answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from memascend.closing import Closing
from memascend.errors import MemascendError


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
            raise MemascendError(f"the training ended with status {self._process.wait()}; what it said is above")
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
