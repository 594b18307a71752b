"""Finds DeepSpeed's environment and runs programs in it that wait for orders."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import benchmarks
import memascend
from memascend.errors import ConfigError
from memascend.text import Closing

# What `make peers` builds.
ENVIRONMENT = Path(".venv-deepspeed/bin/python")
MISSING = "there is no environment with DeepSpeed: `make peers` builds one, --deepspeed PYTHON names another"
OPTION_HELP = f"an interpreter that has DeepSpeed (default: {ENVIRONMENT}, which `make peers` builds)"


def found(given: str | None) -> Path | None:
    """The interpreter to use: the one that was named, or the one that was built here, if it was.

    Raises:
        ConfigError: the one that was named is not there.
    """
    if given is not None and not Path(given).exists():
        raise ConfigError(f"there is no {given}: `make peers` builds {ENVIRONMENT}")
    return Path(given) if given else ENVIRONMENT if ENVIRONMENT.exists() else None


def variables(python: Path, package: Path, device: str = "cpu") -> dict[str, str]:
    """The environment of a program in DeepSpeed's interpreter.

    Args:
        python: the interpreter.
        package: an empty folder. It gets links to these benchmarks and to memascend, so that the program can import
            their modules, without what is installed beside them here: the peer has a torch of its own.
        device: what computes, "cpu" or "cuda".
    """
    for own in (benchmarks, memascend):
        (package / own.__name__).symlink_to(Path(str(own.__file__)).parent)
    folder = python.absolute().parent
    return {
        **os.environ,
        "PYTHONPATH": str(package),
        # It calls ninja, which lies beside its Python, for its extensions; these are kept there, too.
        "PATH": f"{folder}:{os.environ.get('PATH', '')}",
        "TORCH_EXTENSIONS_DIR": str(folder.parent / "torch_extensions"),
        "DS_ACCELERATOR": device,
        # Huge pages, as far as it can get them: they gain it some percent.
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


class Peer(Closing):
    """A module run by DeepSpeed's interpreter: it gets lines, and answers by lines that begin "peer: ".

    Raises:
        ConfigError: it did not say that it is ready; the end of what it said is in the message.
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
        """Its answer to an order.

        Raises:
            ConfigError: it ended instead.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{order}\n")
            self._process.stdin.flush()
            answer = self._answer()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise ConfigError(f"DeepSpeed ended before its time: {self.last_words()}")
        return answer

    def last_words(self) -> str:
        """The line that names its error, as far as one does."""
        errors = [line for line in self._said if "Error" in line.partition(":")[0] and not line.startswith(" ")]
        return (errors or self._said or ["it said nothing"])[-1]

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # The build of its extensions prints there too.
            if line.startswith("peer: "):
                return line.removeprefix("peer: ").strip()
            if line.strip():
                self._said = [*self._said[-200:], line.rstrip()]
        return ""

    def close(self) -> None:
        """End it."""
        self._process.communicate()
        self._folder.cleanup()
