"""Runs each case in its own process. The cases take turns, so that a drift of the machine affects all of them alike."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Process:
    """The process of a case, which answers each question with one line of JSON."""

    def __init__(self, module: str, work: dict[str, Any]) -> None:
        """Starts `python -m benchmarks.MODULE --work JSON`, which calls `serve`."""
        words = [sys.executable, "-m", f"benchmarks.{module}", "--work", json.dumps(work)]
        self._peer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question: Any) -> dict[str, Any]:
        """Sends a question; returns the answer of the case. Raises SystemExit if the process has ended."""
        assert self._peer.stdin is not None
        assert self._peer.stdout is not None
        print(json.dumps(question), file=self._peer.stdin, flush=True)
        for line in self._peer.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("a case ended early; its output is above")

    def end(self) -> None:
        """Kills the process."""
        self._peer.kill()
        self._peer.wait()


@contextmanager
def at_work(module: str, works: Mapping[str, dict[str, Any]], **first: Any) -> Iterator[dict[str, Process]]:
    """Yields the processes by case, and kills them at the end.

    Each process starts after the previous process has answered the question `first`.
    """
    processes: dict[str, Process] = {}
    try:
        for name, work in works.items():
            processes[name] = Process(module, work)
            processes[name].ask(**first)
        yield processes
    finally:
        for process in processes.values():
            process.end()


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Answers each line of JSON on standard input with the result of `answer`, until standard input ends."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
