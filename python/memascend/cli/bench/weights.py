"""Measures 16-bit weights written and read back: one file each through the page cache, against one volume."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING

from memascend import nvme
from memascend.cli.transfer import Speed, blocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import ExitStack
    from pathlib import Path

    import torch

WEIGHT_CASES = ("a file per tensor", "volume")
_WEIGHT_BYTES, _COUNT = 16 << 20, 16


def weight_cases(folder: Path, stack: ExitStack) -> dict[str, Callable[[], Speed]]:
    """As ZeRO-Infinity keeps parameters (a file each), and as we do; both write all, make it durable and read all.

    The page cache is dropped before reading, as a model larger than memory would find it.
    """
    from memascend.tensors import memory_of

    tensors = stack.enter_context(blocks(_WEIGHT_BYTES, _COUNT))
    volume = stack.enter_context(nvme.open(folder / "weights", size=_WEIGHT_BYTES * _COUNT))

    def files() -> None:
        paths = [folder / f"weight{index}" for index in range(_COUNT)]
        for path, tensor in zip(paths, tensors, strict=True):
            with path.open("wb") as file:
                file.write(memory_of(tensor))
                file.flush()
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for path, tensor in zip(paths, tensors, strict=True):
            with path.open("rb", buffering=0) as file:
                _fill(file.fileno(), tensor)

    def engine() -> None:
        for begin in (volume.write, volume.read):
            tickets = [begin(tensor, index * _WEIGHT_BYTES) for index, tensor in enumerate(tensors)]
            for ticket in tickets:
                ticket.wait()
            if begin == volume.write:
                volume.flush()

    return {name: _timed(work) for name, work in zip(WEIGHT_CASES, (files, engine), strict=True)}


def _fill(descriptor: int, tensor: torch.Tensor) -> None:
    from memascend.tensors import memory_of

    view = memory_of(tensor)
    done = 0
    while done < len(view):
        done += os.readv(descriptor, [view[done:]])


def _timed(work: Callable[[], None]) -> Callable[[], Speed]:
    def case() -> Speed:
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        work()
        took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
        return Speed(nbytes=2 * _WEIGHT_BYTES * _COUNT, seconds=took, cpu_seconds=cpu)

    return case
