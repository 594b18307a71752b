"""Measures what the host spends on a device besides copying, with copies that do nothing; needs no GPU.

The way in, for each 4 MiB part of a unit: the thread that begins copies, and the checksums that were its own work and
are that of threads beside it. The way out: how often the engine's thread asks Python for a window of gradients in a
step of a model of 7 B parameters, and what that takes. Ratios are to the way that it was before.
"""

from __future__ import annotations

import argparse
import math
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from memascend.device.transfer import CHECKERS, CHUNKS, WINDOWS, DeviceEngine, Staging
from memascend.engine import CHUNK_ELEMENTS, Checksum

if TYPE_CHECKING:
    from collections.abc import Callable

_BEFORE_WINDOW = 1 << 20
_ROUNDS = 9


class Nothing:
    """A device whose copies are over when they are asked for."""

    torch_device = torch.device("meta")

    def done(self) -> bool:
        """See `Copy`."""
        return True

    def wait(self) -> None:
        """See `Copy`, and of a part: it is there."""

    order = enter_thread = require_no_capture = wait

    def stream(self) -> Any:
        """See `Device`."""

    def mark(self, _: Any) -> Nothing:
        """See `Device`."""
        return self

    def bring(self, *_: Any) -> Nothing:
        """See `Device`."""
        return self

    take = bring


class Parts:
    """A unit whose parts are there as soon as they are asked for."""

    def __init__(self, count: int, nbytes: int) -> None:
        self._places = [(index * nbytes, nbytes) for index in range(count)]

    def places(self) -> list[tuple[int, int]]:
        """See `store.UnitParts`."""
        return self._places

    def begin(self, _index: int, _into: torch.Tensor) -> Nothing:
        """See `store.UnitParts`."""
        return Nothing()


def gradients_of_7b() -> list[int]:
    """Elements of each parameter of Qwen2-7B."""
    width, inner, heads, vocabulary = 3584, 18944, 512, 152_064
    layer = [width * width, width, width * heads, heads, width * heads, heads, width * width]
    layer += [width * inner] * 3 + [width] * 2
    return [vocabulary * width, *(layer * 28), width, vocabulary * width]


def windows(window_bytes: int) -> tuple[int, float]:
    """Calls of a step, and seconds that they take, with windows of this size."""
    engine: Any = None
    memory = [torch.empty(window_bytes, dtype=torch.uint8) for _ in range(2)]
    lent: Any = DeviceEngine(engine, Nothing(), memory)  # type: ignore[arg-type]
    # A slice of it is made for each window, and nothing is there.
    calls, seconds = 0, 0.0
    for elements in gradients_of_7b():
        gradient = torch.empty(elements, dtype=torch.bfloat16, device="meta")
        source = lent._lent(gradient).window  # noqa: SLF001
        nbytes, first, count = elements * 2, 0, 0
        began = time.perf_counter()
        for start in range(0, nbytes, 2 * CHUNK_ELEMENTS):
            wanted = min(2 * CHUNK_ELEMENTS, nbytes - start)
            # The extension asks only for what is not in the window that it has.
            if not (first <= start and start + wanted <= first + count):
                _, first, count = source(start, wanted)
                calls += 1
        seconds += time.perf_counter() - began
    return calls, seconds


def python_of_a_part() -> float:
    """Seconds of the thread that begins copies, for each part."""
    ((nbytes, count),) = CHUNKS.items()
    parts = 512
    chunks = [torch.empty(nbytes, dtype=torch.uint8) for _ in range(count)]
    staging = Staging(Nothing(), chunks, lambda *_: Parts(parts, nbytes), lambda _: [])  # type: ignore[arg-type]
    base = torch.empty(0, dtype=torch.uint8).expand(0)
    found = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        staging.begin("unit", base).wait()
        found.append((time.perf_counter() - began) / parts)
    staging.close()
    # Others may use the processors, too.
    return min(found)


def checked_bytes_a_second(threads: int) -> float:
    """Checksums of parts, by so many threads at once."""
    ((nbytes, _),) = CHUNKS.items()
    parts = [torch.randint(0, 255, (nbytes,), dtype=torch.uint8) for _ in range(threads)]
    rounds = 64

    def check(part: torch.Tensor) -> None:
        for _ in range(rounds):
            checksum = Checksum()
            checksum.update(part)

    found = []
    for _ in range(_ROUNDS):
        running = [threading.Thread(target=check, args=(part,)) for part in parts]
        began = time.perf_counter()
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        found.append(rounds * threads * nbytes / (time.perf_counter() - began))
    return max(found)


def _row(what: str, before: float, now: float, unit: str, ratio: Callable[[float, float], float]) -> None:
    print(f"{what:<58}  {before:>12,.3f}  {now:>12,.3f} {unit:<8}  {ratio(before, now):>6.2f}")


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    ((nbytes, _),) = CHUNKS.items()
    ((window_bytes, _),) = WINDOWS.items()
    print(f"{'':<58}  {'before':>12}  {'now':>12} {'':<8}  {'ratio':>6}")
    python = python_of_a_part()
    alone, together = checked_bytes_a_second(1), checked_bytes_a_second(CHECKERS)
    _row("way in: checksums, 1 thread, then beside", alone / 1e9, together / 1e9, "GB/s", lambda a, b: b / a)
    serial = python + nbytes / alone
    beside = max(python, nbytes / together)
    _row("way in: host's time for a part", serial * 1e6, beside * 1e6, "us", lambda a, b: a / b)
    _row("way in: of these, Python", python * 1e6, python * 1e6, "us", lambda a, b: a / b)
    _row("way in: at most", nbytes / serial / 1e9, nbytes / beside / 1e9, "GB/s", lambda a, b: b / a)
    (calls_before, took_before), (calls, took) = windows(_BEFORE_WINDOW), windows(window_bytes)
    _row("way out: calls of Python in a step of 7 B parameters", calls_before, calls, "", lambda a, b: a / b)
    _row("way out: seconds that they take in a step", took_before, took, "s", lambda a, b: a / b)
    least = math.ceil(sum(gradients_of_7b()) * 2 / window_bytes)
    print(
        f"\n{sum(gradients_of_7b()) / 1e9:.2f} B parameters; windows of {window_bytes >> 20} MiB: {least:,} at least."
    )


if __name__ == "__main__":
    main()
