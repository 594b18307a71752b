"""Measures what `memascend bench io` does, with DeepSpeed's aio beside it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from benchmarks.peers import environment
from memascend.cli.bench import io
from memascend.cli.storage import Speed
from memascend.text import Closing

if TYPE_CHECKING:
    from pathlib import Path


class Aio(Closing):
    """DeepSpeed's aio with its own pinned buffer, in a Python of its own that waits for orders."""

    name = "DeepSpeed aio"

    def __init__(self, python: Path, path: Path, block: int, depth: int, nbytes: int) -> None:
        self._peer = environment.Peer(python, "benchmarks.peers.aio", path, block, depth, nbytes)

    def run(self, pattern: str) -> Speed:
        """One pass over the file."""
        nbytes, seconds, cpu_seconds = self._peer.ask(pattern).split()
        return Speed(nbytes=int(nbytes), seconds=float(seconds), cpu_seconds=float(cpu_seconds))

    def close(self) -> None:
        """End its process."""
        self._peer.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the result into this file")
    io.add_arguments(parser)
    parser.add_argument("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)
    options = parser.parse_args()
    python = environment.required(options.deepspeed)
    io.run(options, lambda path, block, depth, nbytes: Aio(python, path, block, depth, nbytes))


if __name__ == "__main__":
    main()
