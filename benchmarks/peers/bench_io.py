"""Compares the speed of memascend's I/O with fio and with DeepSpeed's aio, in the same run."""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.machine import described
from benchmarks.peers import environment
from benchmarks.peers.fio import PASSES, fio, huge_pages
from benchmarks.show import bars
from memascend import memory, nvme
from memascend.cli.storage import Speed, blocks, transfer
from memascend.errors import ConfigError
from memascend.tensors import memory_of
from memascend.text import Closing, Progress, bytes_shown, table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

MIB = 1 << 20
PATTERNS = ("read", "write", "mixed")
# The block size and the queue depth with which memascend was fastest on every measured disk.
BLOCK_BYTES, DEPTH = MIB, 8
Case = Callable[[], Speed]

_GRID_BLOCKS = (128 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB)
_GRID_DEPTHS = (1, 4, 8, 16, 32)
# The largest number of rounds for the grid. The grid has hundreds of measurements, so more rounds would take an hour.
_GRID_ROUNDS_MAX = 3
# The largest number of bytes that the grid has in flight. `huge_pages` reserves huge pages for as many bytes.
_FLYING_BYTES_MAX = 256 * MIB


class Aio(Closing):
    """Runs DeepSpeed's aio in a process of DeepSpeed's interpreter. The process uses a pinned buffer of aio."""

    name = "DeepSpeed aio"

    def __init__(self, python: Path, path: Path, block: int, depth: int, nbytes: int) -> None:
        self._peer = environment.Peer(python, "benchmarks.peers.aio", path, block, depth, nbytes)

    def run(self, pattern: str) -> Speed:
        """Reads or writes `nbytes` bytes of the file once; returns the speed."""
        nbytes, seconds, cpu_seconds = self._peer.ask(pattern).split()
        return Speed(nbytes=int(nbytes), seconds=float(seconds), cpu_seconds=float(cpu_seconds))

    def close(self) -> None:
        """Ends the process."""
        self._peer.close()


def main(words: Sequence[str] | None = None) -> None:
    """Measures all cases; prints tables or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the result into this file")
    parser.add_argument("--storage", metavar="FOLDER", default=".", help="where the files are made (default: here)")
    parser.add_argument("--size", type=int, metavar="MIB", default=1024, help="size of a file in MiB (default 1024)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", default=5, help="rounds, whose medians are shown (default 5)"
    )
    parser.add_argument("--grid", action="store_true", help="also blocks of 128 KiB to 16 MiB, depths 1 to 32")
    parser.add_argument("--raw", action="store_true", help="also measure a loop device as a raw device (needs root)")
    parser.add_argument("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)
    options = parser.parse_args(words)
    if options.size < 64 or options.rounds < 1:
        # With smaller files, a measurement would consist mostly of the start of the program.
        parser.error("--size must be at least 64 (MiB), and --rounds at least 1")
    python = environment.found(options.deepspeed)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-bench-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), options, stack, _FLYING_BYTES_MAX if options.grid else BLOCK_BYTES * DEPTH)
        others: dict[str, Case] = {}
        if python is None:
            bench.left_out.append(environment.MISSING)
        else:
            aio = stack.enter_context(Aio(python, bench.file, BLOCK_BYTES, DEPTH, min(bench.nbytes, 512 * MIB)))
            others = {f"{pattern}: {aio.name}": partial(aio.run, pattern) for pattern in ("read", "write")}
        results = {"files": bench.headline(others)}
        if options.raw:
            results["raw device"] = bench.raw()
        if options.grid:
            results |= bench.grid()
        weights = medians(weight_cases(Path(folder), stack), options.rounds, "weights")
    if options.json:
        found = {group: {name: plain(speed) for name, speed in cases.items()} for group, cases in results.items()}
        found["weights"] = {name: plain(speed) for name, speed in weights.items()}
        print(json.dumps({**_about(options, bench), **found}, indent=2))
    else:
        for group, cases in results.items():
            print(f"\n{group}\n\n{shown(cases)}")
        print(f"\n16-bit weights, 16 MiB each, made durable\n\n{_weight_table(weights)}")
        for line in bench.left_out:
            print(f"\nleft out: {line}")
    if options.picture:
        series = _series(results["files"])
        bars(Path(options.picture), "1 MiB, depth 8, one file unless said", "GB a second", series)


def _about(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """Returns the conditions of the measurement as JSON values."""
    return {
        "machine": described(),
        "size_bytes": bench.nbytes,
        "rounds": options.rounds,
        "left_out": bench.left_out,
    }


class Bench:
    """Makes the files and cases of the measurements, and runs the cases."""

    def __init__(
        self,
        folder: Path,
        options: argparse.Namespace,
        stack: ExitStack,
        flying: int,
    ) -> None:
        """Makes the file to measure.

        `flying` is the largest number of bytes that fio has in flight. `huge_pages` reserves pages for them if it may.
        """
        self.folder, self.rounds, self.nbytes = folder, options.rounds, options.size * MIB
        self.stack = stack
        self.left_out: list[str] = []
        self.huge = stack.enter_context(huge_pages(flying))
        if self.huge is None:
            self.left_out.append(
                "fio with huge pages: this process could not reserve huge pages or mount a hugetlbfs. Run it as root"
            )
        self.file = self.made("one")

    def headline(self, others: dict[str, Case]) -> dict[str, Speed]:
        """Measures all cases of memascend and fio, and the cases `others`, at the best block size and depth."""
        halves = [self.made(f"half{index}", self.nbytes // 2) for index in range(2)]
        cases: dict[str, Case] = {}
        for pattern in PATTERNS:
            cases |= self.pair([self.file], pattern, BLOCK_BYTES, DEPTH)
            ours = self.ours
            cases[f"{pattern}: threads"] = ours([self.file], pattern, BLOCK_BYTES, DEPTH, backend="threads")
            cases[f"{pattern}: two files, striped"] = ours(halves, pattern, BLOCK_BYTES, DEPTH)
            cases[f"{pattern}: unaligned memory"] = ours([self.file], pattern, BLOCK_BYTES, DEPTH, first=64)
            shifted = ours([self.file], pattern, BLOCK_BYTES - 200, DEPTH, first=100)
            cases[f"{pattern}: unaligned offsets too"] = shifted
        return medians({**cases, **others}, self.rounds, "files")

    def pair(self, paths: list[Path], pattern: str, block: int, depth: int) -> dict[str, Case]:
        """Returns a case of memascend's I/O, and a case of fio.

        Adds a case of fio with huge pages if the machine has them.
        """
        path, nbytes = paths[0], self.nbytes
        cases: dict[str, Case] = {
            f"{pattern}: io_uring": self.ours(paths, pattern, block, depth),
            f"{pattern}: fio": partial(fio, path, pattern, block, depth, nbytes, None),
        }
        if self.huge is not None:
            cases[f"{pattern}: fio, huge pages"] = partial(fio, path, pattern, block, depth, nbytes, self.huge)
        return cases

    def ours(
        self, paths: list[Path], pattern: Any, block: int, depth: int, backend: Any = "auto", first: int = 0
    ) -> Case:
        """Returns a case of memascend's sequential I/O.

        Each buffer begins `first` bytes after an aligned address.
        """
        size = block + 4096 if first else block
        # There are one and a half times as many buffers as the queue has places. `transfer` waits for tickets in order,
        # so a late ticket would otherwise leave the device idle. fio does not need more buffers, because it refills any
        # free place of its queue.
        count = depth + max(1, depth // 2)
        # All tensors of `blocks` are in one region of memory. The last bytes of the region may be in small pages,
        # because they do not fill a huge page. Small pages split requests. So the last tensors of the region are spare:
        # the case does not use them.
        spare = -(-(memory.limits()["huge_page"] or 0) // size)

        def case() -> Speed:
            with (
                nvme.open(paths, queue_depth=max(depth, 1), backend=backend) as volume,
                # As in fio, the buffers are adjacent in memory.
                blocks(size, count + spare) as tensors,
            ):
                used = [tensor[first : first + block] for tensor in tensors[:count]]
                return transfer(volume, used, pattern, PASSES * self.nbytes)

        return case

    def made(self, name: str, nbytes: int | None = None) -> Path:
        """Returns a new file whose blocks are all written.

        The first access to a block that is only reserved would be slower.
        """
        path = self.folder / name
        with nvme.open(path, size=nbytes or self.nbytes) as volume, blocks(BLOCK_BYTES, DEPTH) as tensors:
            transfer(volume, tensors, "write", volume.size)
            volume.flush()
        return path

    def grid(self) -> dict[str, dict[str, Speed]]:
        """Measures each block size with each depth, except pairs with more than `_FLYING_BYTES_MAX` in flight.

        For each pair, the cases are: one file, two files, threads, a raw device if one can be made, and fio.
        """
        results = {}
        halves = [self.made(f"grid-half{index}", self.nbytes // 2) for index in range(2)]
        device = self._raw_device()
        for block in _GRID_BLOCKS:
            for depth in _GRID_DEPTHS:
                if block * depth > _FLYING_BYTES_MAX:
                    continue
                name = f"{bytes_shown(block)}, depth {depth}"
                cases: dict[str, Case] = {}
                for pattern in PATTERNS:
                    cases |= self.pair([self.file], pattern, block, depth)
                    if self.huge is not None:
                        del cases[f"{pattern}: fio"]
                    ours = self.ours
                    cases[f"{pattern}: threads"] = ours([self.file], pattern, block, depth, backend="threads")
                    cases[f"{pattern}: two files, striped"] = ours(halves, pattern, block, depth)
                    if device is not None:
                        cases[f"{pattern}: raw device"] = ours([device], pattern, block, depth)
                results[name] = medians(cases, min(self.rounds, _GRID_ROUNDS_MAX), name)
        return results

    def raw(self) -> dict[str, Speed]:
        """Measures a loop device. memascend and fio both use it as a raw device.

        Returns an empty dict if no loop device can be made.
        """
        device = self._raw_device()
        if device is None:
            return {}
        cases: dict[str, Case] = {}
        for pattern in PATTERNS:
            cases |= self.pair([device], pattern, BLOCK_BYTES, DEPTH)
        return medians(cases, self.rounds, "raw")

    def _raw_device(self) -> Path | None:
        try:
            return self.stack.enter_context(_loop(self.made("backing")))
        except ConfigError as error:
            self.left_out.append(f"a raw device: {error}")
            return None


@contextmanager
def _loop(backing: Path) -> Iterator[Path]:
    words = ["losetup", "--find", "--show", "--direct-io=on", str(backing)]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"losetup could not make a loop device, which needs root: {done.stderr.strip()}")
    device = done.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


def _cpu_ms(speed: Speed) -> float:
    """Returns the processor time of a measurement in ms per 10**9 bytes.

    It is the time of all threads, in user code and in the kernel.
    """
    return speed.cpu_seconds * 1e3 / (speed.nbytes / 1e9)


def medians(cases: dict[str, Case], rounds: int, what: str) -> dict[str, Speed]:
    """Runs each case once in every round. Returns for each case the median bandwidth and the median processor time."""
    samples: dict[str, list[Speed]] = {name: [] for name in cases}
    with Progress(what, rounds * len(cases), unit="measurements") as progress:
        for index in range(rounds):
            # The order of cases is shuffled in each round, because a disk may still do work for the previous case.
            for name in random.Random(index).sample(list(cases), len(cases)):  # noqa: S311
                samples[name].append(cases[name]())
                progress.add(1)
    return {name: _median(speeds) for name, speeds in samples.items()}


def _median(speeds: list[Speed]) -> Speed:
    nbytes = speeds[0].nbytes
    return Speed(
        nbytes=nbytes,
        seconds=nbytes / 1e9 / statistics.median(speed.gb_per_second for speed in speeds),
        cpu_seconds=nbytes / 1e9 * statistics.median(_cpu_ms(speed) for speed in speeds) / 1e3,
    )


def shown(cases: dict[str, Speed]) -> str:
    """Returns a table of all cases. Ratios compare each case with memascend's io_uring in the same pattern."""
    rows = []
    for name, speed in cases.items():
        pattern, _, way = name.partition(": ")
        ours = cases[f"{pattern}: io_uring"]
        rows.append(
            (
                pattern,
                way,
                f"{speed.gb_per_second:.2f}",
                f"{ours.gb_per_second / speed.gb_per_second:.2f}",
                f"{_cpu_ms(speed):.1f}",
                f"{_cpu_ms(ours) / _cpu_ms(speed):.2f}" if _cpu_ms(speed) else "-",
            )
        )
    return table(("pattern", "way", "GB/s", "ours is x as fast", "CPU ms/GB", "ours takes x of it"), rows)


def plain(speed: Speed) -> dict[str, float]:
    """Returns a measurement as JSON values."""
    return {"gb_per_second": speed.gb_per_second, "cpu_ms_per_gb": _cpu_ms(speed)}


WEIGHT_CASES = ("a file per tensor", "volume")


_WEIGHT_BYTES, _COUNT = 16 << 20, 16


def weight_cases(folder: Path, stack: ExitStack) -> dict[str, Callable[[], Speed]]:
    """Returns two cases that write weights, flush them and read them.

    One case writes a file for each weight, as ZeRO-Infinity does. The other case writes all weights into one volume.

    The first case removes its files from the page cache before it reads them. A model that is larger than memory would
    not be in the page cache either.
    """
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


def _weight_table(weights: dict[str, Speed]) -> str:
    pages, ours = (weights[name] for name in WEIGHT_CASES)
    ratio = ours.gb_per_second / pages.gb_per_second
    rows = [(name, f"{speed.gb_per_second:.2f}", f"{_cpu_ms(speed):.1f}") for name, speed in weights.items()]
    return f"{table(('way', 'GB/s', 'CPU ms/GB'), rows)}\n\nours is {ratio:.2f} times as fast"


def _series(cases: dict[str, Speed]) -> dict[str, dict[str, float | None]]:
    ways = list(dict.fromkeys(name.partition(": ")[2] for name in cases))
    return {
        way: {
            pattern: cases[name].gb_per_second if (name := f"{pattern}: {way}") in cases else None
            for pattern in PATTERNS
        }
        for way in ways
    }


if __name__ == "__main__":
    main()
