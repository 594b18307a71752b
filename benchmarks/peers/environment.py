"""Finds DeepSpeed's environment, and runs programs in it that obey orders."""

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
MISSING = "there is no environment with DeepSpeed: `make peers` builds one, --deepspeed PYTHON names another"
OPTION_HELP = f"an interpreter that has DeepSpeed (default: {ENVIRONMENT}, which `make peers` builds)"


def found(given: str | None) -> Path | None:
    """Returns the interpreter `given`, or else the one that `make peers` built; None if it was not built.

    Raises:
        ConfigError: `given` does not exist.
    """
    if given is not None and not Path(given).exists():
        raise ConfigError(f"there is no {given}: `make peers` builds {ENVIRONMENT}")
    return Path(given) if given else ENVIRONMENT if ENVIRONMENT.exists() else None


def variables(python: Path, package: Path, device: str = "cpu") -> dict[str, str]:
    """Returns the environment variables for a program in DeepSpeed's interpreter.

    Args:
        python: the interpreter.
        package: an empty folder. This function puts links to these benchmarks and to memascend into it. So the program
            can import their modules, but no other package of our environment: the peer has a torch of its own.
        device: the device that computes, "cpu" or "cuda".
    """
    for own in (benchmarks, memascend):
        (package / own.__name__).symlink_to(Path(str(own.__file__)).parent)
    folder = python.absolute().parent
    return {
        **os.environ,
        "PYTHONPATH": str(package),
        # DeepSpeed builds its extensions with the ninja beside its interpreter, and keeps them in its environment.
        "PATH": f"{folder}:{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),
        "DS_ACCELERATOR": device,
        # DeepSpeed gets huge pages where the kernel has some, which make it a few percent faster.
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


class Peer(Closing):
    """A process of DeepSpeed's interpreter that runs a module.

    The module reads orders, a line each, and answers each with a line that begins with "peer: ".

    Raises:
        ConfigError: the module did not print "peer: ready". The message has the last line of its output.
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
        """Sends an order; returns the answer.

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
            raise ConfigError(f"DeepSpeed ended early: {self.last_words()}")
        return answer

    def last_words(self) -> str:
        """Returns the last line of output that names an error; the last line, if no line names one."""
        errors = [line for line in self._said if "Error" in line.partition(":")[0] and not line.startswith(" ")]
        return (errors or self._said or ["it printed nothing"])[-1]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # The build of DeepSpeed's extensions prints to this stream, too.
            if line.startswith("peer: "):
                return line.removeprefix("peer: ").strip()
            if line.strip():
                self._said = [*self._said[-200:], line.rstrip()]
        return ""

    def close(self) -> None:
        """Ends the process and removes its folder."""
        self._process.communicate()
        self._folder.cleanup()
