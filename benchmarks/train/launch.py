"""Starts each cell in a process of its own and, where possible, in a memory cgroup."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.peers.environment import MISSING, variables
from benchmarks.train.cell import ANSWER
from benchmarks.train.cell.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from benchmarks.train.cell.workload import Workload

__all__ = ["Launcher", "memory_cgroup"]

_BENCHMARKS = Path(__file__).parents[1]
# Of what a failed cell printed, the end is kept.
_ERROR_CHARACTERS = 600
_PR_SET_PDEATHSIG = 1
_LEAVES_TRIES, _LEAVES_SECONDS = 500, 0.01


class Launcher:
    """Starts cells on one storage folder.

    Args:
        storage: a folder on the disk to measure.
        deepspeed: an interpreter that has DeepSpeed; None: the cells of its systems say how to get one.
        seconds: the longest that a cell may take.
        within: the seconds after which it makes no further step, where it has measured one; None: it makes all.
    """

    def __init__(
        self, storage: Path, deepspeed: Path | None, *, seconds: float = 1800, within: float | None = None
    ) -> None:
        self.storage, self.deepspeed, self.seconds, self.within = storage, deepspeed, seconds, within

    def run(
        self,
        work: Workload,
        system: str,
        *,
        steps: int,
        warm: int = 2,
        settings: dict[str, Any] | None = None,
        limit: int | None = None,
        seconds: float | None = None,
    ) -> dict[str, Any]:
        """A cell's answer, or {"error": why there is none}; "missing" too where the environment is not there.

        Args:
            work: what is trained.
            system: a name of `SYSTEMS`.
            steps: so many are measured.
            warm: so many before them are not.
            settings: over those of the system.
            limit: bytes that the cell's cgroup may hold.
            seconds: the longest that it may take, instead of the launcher's.
        """
        way = SYSTEMS[system]
        if way.deepspeed and self.deepspeed is None:
            return {"error": MISSING, "missing": True}
        with (
            tempfile.TemporaryDirectory(dir=self.storage, prefix=".memascend-cell-") as folder,
            memory_cgroup() as group,
        ):
            if limit is not None:
                if group is None:
                    return {"error": "a limit needs root and a memory cgroup", "missing": True}
                _limit(group, limit)
            order = {
                "workload": work.to_dict(),
                "system": system,
                "settings": settings or {},
                "storage": folder,
                "warm": warm,
                "steps": steps,
                "until": None if self.within is None else time.time() + self.within,
                "cgroup": str(group) if group else None,
            }
            found = os.pathsep.join(filter(None, [str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH")]))
            python, environment = Path(sys.executable), {**os.environ, "PYTHONPATH": found}
            if way.deepspeed and self.deepspeed is not None:
                package = Path(folder, "package")
                package.mkdir()
                python, environment = self.deepspeed, variables(self.deepspeed, package, work.device)
            words = [str(python), "-m", "benchmarks.train.cell", json.dumps(order)]
            return self._answer(words, environment, group, self.seconds if seconds is None else seconds)

    def _answer(
        self, words: list[str], environment: dict[str, str], group: Path | None, seconds: float
    ) -> dict[str, Any]:
        libc = ctypes.CDLL(None)

        def enter() -> None:
            # Whoever kills this process need not know of the cell.
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if group is not None:
                (group / "cgroup.procs").write_text(str(os.getpid()))

        cell = subprocess.Popen(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=enter,  # noqa: PLW1509 - no thread of ours holds a lock that writing a file needs
            start_new_session=True,
        )
        try:
            said, _ = cell.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(cell)
            return {"error": f"not done after {seconds:.0f} s"}
        except BaseException:
            _end(cell)
            raise
        for line in reversed(said.splitlines()):
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        if cell.returncode == -signal.SIGKILL:
            return {"error": "killed: out of memory", "killed": True}
        return {"error": _last_words(said, cell.returncode), "output": said[-20 * _ERROR_CHARACTERS :]}


def _end(cell: subprocess.Popen[str]) -> None:
    """The cell with all that it has started: a compiler, for example."""
    os.killpg(cell.pid, signal.SIGKILL)
    if cell.stdout is not None:
        cell.stdout.close()
    cell.wait()


def _last_words(said: str, status: int) -> str:
    """The line that names the error, which peers may follow by much else."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith("File ")]
    return (errors or lines or [f"exit status {status}"])[-1][:_ERROR_CHARACTERS]


@contextmanager
def memory_cgroup() -> Iterator[Path | None]:
    """A memory cgroup for one cell, of whichever version the machine has; None where there can be none."""
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    group = (first if first.is_dir() else second) / f"memascend-bench-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        has_memory = any((group / name).exists() for name in ("memory.max", "memory.limit_in_bytes"))
        yield group if has_memory else None
    finally:
        # The last process may take a moment to leave: its memory is freed.
        for _ in range(_LEAVES_TRIES):
            try:
                group.rmdir()
            except OSError:
                time.sleep(_LEAVES_SECONDS)
            else:
                break


def _limit(group: Path, nbytes: int) -> None:
    for name in ("memory.limit_in_bytes", "memory.max"):
        if (group / name).exists():
            (group / name).write_text(str(nbytes))
    # Memory and swap together, where swap is accounted: what is swapped out is no less needed.
    for name, value in (("memory.memsw.limit_in_bytes", str(nbytes)), ("memory.swap.max", "0")):
        if (group / name).exists():
            (group / name).write_text(value)
