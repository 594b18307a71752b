"""Measures what `memascend bench io` does at more sizes and depths, with DeepSpeed's aio and a raw device beside it."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers import environment
from benchmarks.show import bars
from memascend import nvme
from memascend.cli.bench import io
from memascend.cli.bench.io import BLOCK_BYTES, DEPTH, MIB, PATTERNS, Bench, Case, medians, plain, shown
from memascend.cli.storage import Speed, blocks
from memascend.errors import ConfigError
from memascend.tensors import memory_of
from memascend.text import Closing, bytes_shown, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

_GRID_BLOCKS = (128 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB)
_GRID_DEPTHS = (1, 4, 8, 16, 32)
# Hundreds of measurements: more rounds would take an hour.
_GRID_ROUNDS_MAX = 3
# fio's buffers are bounded by the huge pages that a machine can spare.
_FLYING_BYTES_MAX = 256 * MIB


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


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--picture", metavar="PNG", help="draw the result into this file")
    io.add_arguments(parser)
    parser.add_argument("--grid", action="store_true", help="also 128 KiB to 16 MiB and depth 1 to 32; takes a while")
    parser.add_argument("--raw", action="store_true", help="also a loop device as a raw one (needs root)")
    parser.add_argument("--deepspeed", metavar="PYTHON", help=environment.OPTION_HELP)
    options = parser.parse_args(words)
    io.require_measurable(options)
    python = environment.found(options.deepspeed)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-bench-") as folder, ExitStack() as stack:
        bench = _Grid(Path(folder), options, stack, _FLYING_BYTES_MAX if options.grid else BLOCK_BYTES * DEPTH)
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
        print(json.dumps({**io.about(options, bench), **found}, indent=2))
    else:
        for group, cases in results.items():
            print(f"\n{group}\n\n{shown(cases)}")
        print(f"\n16-bit weights, 16 MiB each, made durable\n\n{_weight_table(weights)}")
        for line in bench.left_out:
            print(f"\nleft out: {line}")
    if options.picture:
        series = _series(results["files"])
        bars(Path(options.picture), "1 MiB, depth 8, one file unless said", "GB a second", series)


class _Grid(Bench):
    """The same measurements at other sizes and depths, and of a raw device."""

    def grid(self) -> dict[str, dict[str, Speed]]:
        """Sizes and depths, files and a raw device, one and two, ring and threads, with fio beside each."""
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
        """A loop device, which is a raw device to us and to fio."""
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
        raise ConfigError(f"no loop device can be had: {done.stderr.strip()}")
    device = done.stdout.strip()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=False)


WEIGHT_CASES = ("a file per tensor", "volume")


_WEIGHT_BYTES, _COUNT = 16 << 20, 16


def weight_cases(folder: Path, stack: ExitStack) -> dict[str, Callable[[], Speed]]:
    """As ZeRO-Infinity keeps parameters (a file each), and as we do; both write all, make it durable and read all.

    The page cache is dropped before reading, as a model larger than memory would find it.
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
    rows = [(name, f"{speed.gb_per_second:.2f}", f"{speed.cpu_ms_per_gb:.1f}") for name, speed in weights.items()]
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
