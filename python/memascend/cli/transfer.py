"""Moves bytes through a volume at full speed, for measurements: equal blocks, a fixed number in flight."""

from __future__ import annotations

import resource
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memascend import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from memascend.nvme import Ticket, Volume

Pattern = Literal["read", "write", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a transfer took."""

    nbytes: int
    seconds: float
    cpu_seconds: float

    @property
    def gb_per_second(self) -> float:
        """Bandwidth in 10**9 bytes per second."""
        return self.nbytes / self.seconds / 1e9

    @property
    def cpu_ms_per_gb(self) -> float:
        """Processor time, of all threads and the kernel for them, in ms per 10**9 bytes."""
        return self.cpu_seconds * 1e3 / (self.nbytes / 1e9)


@contextmanager
def blocks(nbytes: int, count: int) -> Iterator[list[torch.Tensor]]:
    """Tensors of `nbytes` on huge pages, filled with bytes that no device can compress."""
    import torch

    plan = {nbytes: count}
    with memory.Region(memory.layout(plan).reserved, owner="measurement") as region:
        arena = memory.Arena(region, plan)
        tensors = [arena.lease(nbytes).tensor(nbytes, torch.uint8) for _ in range(count)]
        tensors[0].random_(256)
        for tensor in tensors[1:]:
            # Turned by a little, so that no two are equal to a device that looks for that.
            tensor.copy_(tensors[0].roll(4099))
        yield tensors


def transfer(
    volume: Volume, tensors: list[torch.Tensor], pattern: Pattern, nbytes: int, seconds: float | None = None
) -> Speed:
    """Move at least `nbytes`, or for at least `seconds`, from the volume's beginning on and round again.

    As many operations are in flight as there are tensors. "mixed" reads and writes in turn, each one block after the
    other from the beginning on, as fio does.
    """
    block = tensors[0].nbytes
    places = max(1, volume.size // block)
    streams = 2 if pattern == "mixed" else 1
    flying: deque[Ticket] = deque()
    began, cpu = time.perf_counter(), _cpu_seconds()
    index = 0
    while index * block < nbytes and (seconds is None or time.perf_counter() - began < seconds):
        if len(flying) == len(tensors):
            flying.popleft().wait()
        tensor, offset = tensors[index % len(tensors)], index // streams % places * block
        writes = pattern == "write" or (pattern == "mixed" and index % 2 == 1)
        flying.append(volume.write(tensor, offset) if writes else volume.read(tensor, offset))
        index += 1
    for ticket in flying:
        ticket.wait()
    took = time.perf_counter() - began
    return Speed(nbytes=index * block, seconds=took, cpu_seconds=_cpu_seconds() - cpu)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
