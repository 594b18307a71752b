"""Runs each case of a benchmark in a separate process.

The benchmark asks the processes in turn, so that changes of the machine's speed affect all cases.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class Process:
    """The process of a case. It answers each question with one line of JSON."""

    def __init__(self, module: str, work: dict[str, Any]) -> None:
        """Starts `python -m benchmarks.MODULE --work JSON`. This program must answer questions, as `serve` does."""
        words = [sys.executable, "-m", f"benchmarks.{module}", "--work", json.dumps(work)]
        self._peer = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question: Any) -> dict[str, Any]:
        """Sends a question to the process; returns the answer.

        Raises:
            SystemExit: the process ended before it answered.
        """
        assert self._peer.stdin is not None
        assert self._peer.stdout is not None
        print(json.dumps(question), file=self._peer.stdin, flush=True)
        for line in self._peer.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(
            "the process of a case ended without an answer: its error is above; without an error, the kernel may have "
            "killed it because memory ran out"
        )

    def end(self) -> None:
        """Kills the process."""
        self._peer.kill()
        self._peer.wait()


@contextmanager
def at_work(module: str, works: Mapping[str, dict[str, Any]], **first: Any) -> Iterator[dict[str, Process]]:
    """Yields the processes of all cases, and kills them at the end. The keys are the names of the cases.

    A process starts only after the previous process has answered the question `first`.
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
    """Reads questions from standard input, one JSON object in each line.

    Prints the result of `answer` for each question.
    """
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)
