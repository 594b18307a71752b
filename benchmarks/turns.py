"""Lets cases take turns, each in a process of its own, so that all of them meet the same machine."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Process:
    """A case at work: it answers each question by one line of JSON."""

    def __init__(self, module: str, work: dict[str, Any]) -> None:
        """Run `python -m benchmarks.MODULE --work JSON`, which calls `serve`."""
        words = [sys.executable, "-m", f"benchmarks.{module}", "--work", json.dumps(work)]
        self._peer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question: Any) -> dict[str, Any]:
        """What the case answers."""
        assert self._peer.stdin is not None
        assert self._peer.stdout is not None
        print(json.dumps(question), file=self._peer.stdin, flush=True)
        for line in self._peer.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit("a case ended before its time; what it said is above")

    def end(self) -> None:
        """Kill the process."""
        self._peer.kill()
        self._peer.wait()


@contextmanager
def at_work(module: str, works: Mapping[str, dict[str, Any]], **first: Any) -> Iterator[dict[str, Process]]:
    """A process for each case, ended afterwards. Each is made when the one before has answered a first question."""
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
    """Answer every question that comes on standard input."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
