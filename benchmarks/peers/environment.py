"""Finds an interpreter that has DeepSpeed, and runs modules of the benchmarks in it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import benchmarks
import memascend
from memascend.errors import ConfigError
from memascend.text import Closing

# The interpreter that `make peers` builds.
ENVIRONMENT = Path(".venv-deepspeed/bin/python")
MISSING = (
    "DeepSpeed was not measured. A measurement needs an interpreter that has DeepSpeed: run `make peers`, or pass "
    "--deepspeed PYTHON. bench_update also needs --state own or --state fp32"
)
OPTION_HELP = f"an interpreter that has DeepSpeed (default: {ENVIRONMENT}, which `make peers` builds)"


def found(given: str | None) -> Path | None:
    """Returns the interpreter `given`.

    If `given` is None, returns the interpreter that `make peers` built, or None if it was not built.

    Raises:
        ConfigError: `given` does not exist.
    """
    if given is not None and not Path(given).exists():
        raise ConfigError(
            f"--deepspeed {given} does not exist: pass another path, or run `make peers` and omit the option"
        )
    return Path(given) if given else ENVIRONMENT if ENVIRONMENT.exists() else None


def variables(python: Path, package: Path, device: str = "cpu") -> dict[str, str]:
    """Returns the environment variables for a program in DeepSpeed's interpreter.

    Args:
        python: the interpreter.
        package: an empty folder, into which this function puts links to the packages `benchmarks` and `memascend`. The
            program can import these two packages, but no other package of this environment. It imports the torch of
            DeepSpeed's environment.
        device: the device that computes, "cpu" or "cuda".
    """
    for own in (benchmarks, memascend):
        (package / own.__name__).symlink_to(Path(str(own.__file__)).parent)
    folder = python.absolute().parent
    return {
        **os.environ,
        "PYTHONPATH": str(package),
        # DeepSpeed builds its extensions with the program ninja of DeepSpeed's environment. This environment also
        # stores the extensions.
        "PATH": f"{folder}:{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),
        "DS_ACCELERATOR": device,
        # These two settings let DeepSpeed use huge pages, if the kernel has some. They make DeepSpeed a few percent
        # faster.
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


class Peer(Closing):
    """A process of DeepSpeed's interpreter that runs a module.

    The module reads orders from standard input, one in each line. It answers each order with a line that begins with
    "peer: ".

    Raises:
        ConfigError: the first answer of the module was not "peer: ready". The message has `last_words()`.
    """

    def __init__(self, python: Path, module: str, *arguments: object) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="memascend-peer-")
        words = [str(python), "-m", module, *map(str, arguments)]
        self._said: list[str] = []
        self._process = subprocess.Popen(
            words,
            env=variables(python, Path(self._folder.name)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        if self._answer() != "ready":
            self.close()
            raise ConfigError(f"DeepSpeed did not start: {self.last_words()}")

    def ask(self, order: str) -> str:
        """Sends an order to the process; returns the answer.

        Raises:
            ConfigError: the process ended without an answer.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ConfigError(f"DeepSpeed ended without an answer: {self.last_words()}")
        return answer

    def last_words(self) -> str:
        """Returns the last error line of the output; the last line if no line names an error.

        If the output has no line, returns a text that says so.
        """
        errors = [line for line in self._said if "Error" in line.partition(":")[0] and not line.startswith(" ")]
        return (errors or self._said or ["it printed nothing"])[-1]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # DeepSpeed also prints lines that are not answers, for example while it builds its extensions.
            if line.startswith("peer: "):
                return line.removeprefix("peer: ").strip()
            if line.strip():
                self._said = [*self._said[-200:], line.rstrip()]
        return ""

    def close(self) -> None:
        """Closes the standard input of the process, waits until the process ends, and removes its folder."""
        self._process.communicate()
        self._folder.cleanup()
