"""Starts each cell (one system that trains one workload) in a separate process, if possible in a memory cgroup."""

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
# The largest number of characters in the error of a failed cell. Its "output" may have 20 times as many.
_ERROR_CHARACTERS = 600
_PR_SET_PDEATHSIG = 1
_LEAVES_TRIES, _LEAVES_SECONDS = 500, 0.01


class Launcher:
    """Starts cells that use one storage folder.

    Args:
        storage: a folder on the disk to measure.
        deepspeed: an interpreter that has DeepSpeed. If it is None, DeepSpeed's cells are not run, and their error says
            how to install DeepSpeed.
        seconds: the largest number of seconds that a cell may take.
        within: the seconds in which a cell should answer. After its first measured step, the cell makes no step that
            might end too late for this. None means that a cell makes all steps.
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
        """Runs a cell; returns its answer, or {"error": reason}.

        With "error", the returned dict may also have one of these keys:

        - "missing": DeepSpeed is not installed, or this process cannot make the cgroup for `limit`.
        - "killed": SIGKILL ended the cell.
        - "output": the end of the output of a cell that ended without an answer.

        Args:
            work: the workload to train.
            system: a name of `SYSTEMS`.
            steps: the number of measured steps, or fewer if the launcher's `within` does not suffice.
            warm: the number of steps before the measured steps.
            settings: settings that override the settings of the system.
            limit: the limit of the cell's cgroup in bytes; None means no limit.
            seconds: the largest number of seconds that the cell may take; None means the launcher's `seconds`.
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
                    return {
                        "error": "could not make a memory cgroup: run as root, with writable cgroups",
                        "missing": True,
                    }
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
            # When the launcher's process dies, by any signal, the kernel kills the cell.
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
            printed, _ = cell.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            _end(cell)
            return {"error": f"not done after {seconds:.0f} s"}
        except BaseException:
            _end(cell)
            raise
        for line in reversed(printed.splitlines()):
            if line.startswith(ANSWER):
                answer: dict[str, Any] = json.loads(line.removeprefix(ANSWER))
                return answer
        if cell.returncode == -signal.SIGKILL:
            return {"error": "killed by SIGKILL: probably out of memory", "killed": True}
        return {"error": _last_words(printed, cell.returncode), "output": printed[-20 * _ERROR_CHARACTERS :]}


def _end(cell: subprocess.Popen[str]) -> None:
    """Kills the process group of the cell: the cell, and processes that it has started, such as a compiler."""
    os.killpg(cell.pid, signal.SIGKILL)
    if cell.stdout is not None:
        cell.stdout.close()
    cell.wait()


def _last_words(printed: str, status: int) -> str:
    """Returns the last line of `printed` that names an error, otherwise the last line, otherwise the exit status.

    Peers may print more lines after the line that names the error.
    """
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line.partition(":")[0] and not line.startswith("File ")]
    return (errors or lines or [f"exit status {status}"])[-1][:_ERROR_CHARACTERS]


@contextmanager
def memory_cgroup() -> Iterator[Path | None]:
    """Yields a memory cgroup for one cell (cgroup version 1 or 2); None if this process cannot make one."""
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
        # The cgroup can be removed only after its last process has left it. That takes a moment, while the kernel frees
        # the memory of the cell.
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
    # Limit swap, too, if the kernel counts it: a cell could exceed the limit by swapping pages out. In version 1 of
    # cgroups, this second limit is for memory and swap together. In version 2, the cell gets no swap.
    for name, value in (("memory.memsw.limit_in_bytes", str(nbytes)), ("memory.swap.max", "0")):
        if (group / name).exists():
            (group / name).write_text(value)
