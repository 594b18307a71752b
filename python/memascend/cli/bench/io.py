"""`memascend bench io`: measures the engine's I/O beside fio in one run, with ratios."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memascend import memory, nvme
from memascend.cli.show import bars
from memascend.cli.storage import Speed, blocks, transfer
from memascend.errors import ConfigError
from memascend.text import Progress, bytes_shown, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    import torch


def described() -> dict[str, str | int]:
    """Processor, memory, system, versions and the day."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(": ")[2] for line in lines if line.startswith(("model name", "CPU part"))]
    return {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "processor": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"),
        "kernel": platform.release(),
        "memascend": importlib.metadata.version("memascend"),
        "torch": importlib.metadata.version("torch"),
        "fio": _fio_version(),
    }


def _fio_version() -> str:
    if shutil.which("fio") is None:
        return "none"
    return subprocess.run(["fio", "--version"], check=False, capture_output=True, text=True).stdout.strip()


# Over the file in one measurement, ours and fio's: the start of either is then a small part of it.
PASSES = 2


_FIO_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}


_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


_HUGE_PAGE_BYTES = 2 << 20


@contextmanager
def huge_pages(nbytes: int) -> Iterator[Path | None]:
    """A file on a hugetlbfs for `fio --iomem=mmaphuge:FILE`; None where this process may not make one."""
    with tempfile.TemporaryDirectory(prefix="memascend-huge-") as folder:
        mounted = False
        try:
            before = _HUGE_PAGES.read_text()
            # fio aligns its buffers and rounds up to 4 MiB, and aborts where it finds too few.
            _HUGE_PAGES.write_text(str(int(before) + nbytes // _HUGE_PAGE_BYTES + 4))
        except OSError:
            yield None
            return
        try:
            done = subprocess.run(["mount", "-t", "hugetlbfs", "none", folder], check=False, capture_output=True)
            mounted = done.returncode == 0
            yield Path(folder) / "fio" if mounted else None
        finally:
            if mounted:
                subprocess.run(["umount", folder], check=False, capture_output=True)
            _HUGE_PAGES.write_text(before)


def fio(
    path: Path, pattern: str, block: int, depth: int, nbytes: int, huge: Path | None, *, reads_percent: int = 50
) -> Speed:
    """Run fio with io_uring and direct I/O; its own clock and its own account of processor time."""
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed: apt-get install fio")
    words = [
        "fio",
        "--name=peer",
        f"--filename={path}",
        f"--rw={_FIO_PATTERNS[pattern]}",
        f"--rwmixread={reads_percent}",
        f"--bs={block}",
        f"--iodepth={depth}",
        f"--size={nbytes}",
        f"--loops={PASSES}",
        "--ioengine=io_uring",
        "--direct=1",
        "--allow_mounted_write=1",
        "--output-format=json",
    ]
    if huge is not None:
        words.append(f"--iomem=mmaphuge:{huge}")
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    return Speed(nbytes=moved, seconds=seconds, cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)


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


SUMMARY = "bandwidth and processor time of storage, beside fio"


_MIB = 1 << 20


_PATTERNS = ("read", "write", "mixed")


# What the headline compares: the size and depth at which every disk measured was fastest.
_BLOCK_BYTES, _DEPTH = _MIB, 8


_GRID_BLOCKS = (128 << 10, 256 << 10, _MIB, 4 * _MIB, 16 * _MIB)


_GRID_DEPTHS = (1, 4, 8, 16, 32)


# Hundreds of measurements: more rounds would take an hour.
_GRID_ROUNDS_MAX = 3


# fio's buffers are bounded by the huge pages that a machine can spare.
_FLYING_BYTES_MAX = 256 * _MIB


_Case = Callable[[], Speed]


_Results = dict[str, dict[str, Speed]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--storage", metavar="FOLDER", default=".", help="where the files are made (default: here)")
    parser.add_argument("--size", type=int, metavar="MIB", default=1024, help="of each file, in MiB (default 1024)")
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="medians of so many rounds (default 5)")
    parser.add_argument("--grid", action="store_true", help="also 128 KiB to 16 MiB and depth 1 to 32; takes a while")
    parser.add_argument("--raw", action="store_true", help="also a loop device as a raw one (needs root)")


class Other(Protocol):
    """Another system at the same file, with one of our sizes and depths."""

    name: str

    def run(self, pattern: str) -> Speed:
        """Read or write all of the file."""

    def close(self) -> None:
        """End it."""


def run(options: argparse.Namespace, begin: Callable[[Path, int, int, int], Other] | None = None) -> int:
    """Measure and print; beside what `begin` gives for a file, bytes of a request, a depth and bytes in all."""
    if options.size < 64 or options.rounds < 1:
        raise ConfigError("--size is at least 64 MiB and --rounds at least 1")
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-bench-") as folder, ExitStack() as stack:
        bench = _Bench(Path(folder), options, stack, begin)
        results = {"files": bench.headline()}
        if options.raw:
            results["raw device"] = bench.raw()
        if options.grid:
            results |= bench.grid()
        weights = _medians(weight_cases(Path(folder), stack), options.rounds, "weights")
    if options.json:
        shown = {group: {name: _plain(speed) for name, speed in cases.items()} for group, cases in results.items()}
        about = {
            "machine": described(),
            "size_bytes": bench.nbytes,
            "rounds": options.rounds,
            "left_out": bench.left_out,
        }
        print(
            json.dumps(
                {**about, **shown, "weights": {name: _plain(speed) for name, speed in weights.items()}}, indent=2
            )
        )
    else:
        for group, cases in results.items():
            print(f"\n{group}\n\n{_table(cases)}")
        print(f"\n16-bit weights, 16 MiB each, made durable\n\n{_weight_table(weights)}")
        for line in bench.left_out:
            print(f"\nleft out: {line}")
    if options.picture:
        series = _series(results["files"])
        bars(Path(options.picture), "1 MiB, depth 8, one file unless said", "GB a second", series)
    return 0


class _Bench:
    """What the measurements share: folder, sizes, peers."""

    def __init__(
        self,
        folder: Path,
        options: argparse.Namespace,
        stack: ExitStack,
        begin: Callable[[Path, int, int, int], Other] | None,
    ) -> None:
        self.folder, self.rounds, self.nbytes = folder, options.rounds, options.size * _MIB
        self.stack = stack
        self.left_out: list[str] = []
        self.huge = stack.enter_context(huge_pages(_FLYING_BYTES_MAX if options.grid else _BLOCK_BYTES * _DEPTH))
        if self.huge is None:
            self.left_out.append("fio with huge pages: this process may not mount a hugetlbfs (run as root)")
        self.file = self._made("one")
        self.other: Other | None = None
        if begin is not None:
            self.other = begin(self.file, _BLOCK_BYTES, _DEPTH, min(self.nbytes, 512 * _MIB))
            stack.callback(self.other.close)

    def headline(self) -> dict[str, Speed]:
        """All ways at the size and depth that are best."""
        halves = [self._made(f"half{index}", self.nbytes // 2) for index in range(2)]
        cases: dict[str, _Case] = {}
        for pattern in _PATTERNS:
            cases |= self._pair([self.file], pattern, _BLOCK_BYTES, _DEPTH)
            ours = self._ours
            cases[f"{pattern}: threads"] = ours([self.file], pattern, _BLOCK_BYTES, _DEPTH, backend="threads")
            cases[f"{pattern}: two files, striped"] = ours(halves, pattern, _BLOCK_BYTES, _DEPTH)
            cases[f"{pattern}: unaligned memory"] = ours([self.file], pattern, _BLOCK_BYTES, _DEPTH, first=64)
            shifted = ours([self.file], pattern, _BLOCK_BYTES - 200, _DEPTH, first=100)
            cases[f"{pattern}: unaligned offsets too"] = shifted
            if self.other is not None and pattern != "mixed":
                cases[f"{pattern}: {self.other.name}"] = partial(self.other.run, pattern)
        return _medians(cases, self.rounds, "files")

    def grid(self) -> _Results:
        """Sizes and depths, files and a raw device, one and two, ring and threads, with fio beside each."""
        results = {}
        halves = [self._made(f"grid-half{index}", self.nbytes // 2) for index in range(2)]
        device = self._raw_device()
        for block in _GRID_BLOCKS:
            for depth in _GRID_DEPTHS:
                if block * depth > _FLYING_BYTES_MAX:
                    continue
                name = f"{bytes_shown(block)}, depth {depth}"
                cases: dict[str, _Case] = {}
                for pattern in _PATTERNS:
                    cases |= self._pair([self.file], pattern, block, depth)
                    if self.huge is not None:
                        del cases[f"{pattern}: fio"]
                    ours = self._ours
                    cases[f"{pattern}: threads"] = ours([self.file], pattern, block, depth, backend="threads")
                    cases[f"{pattern}: two files, striped"] = ours(halves, pattern, block, depth)
                    if device is not None:
                        cases[f"{pattern}: raw device"] = ours([device], pattern, block, depth)
                results[name] = _medians(cases, min(self.rounds, _GRID_ROUNDS_MAX), name)
        return results

    def raw(self) -> dict[str, Speed]:
        """A loop device, which is a raw device to us and to fio."""
        device = self._raw_device()
        if device is None:
            return {}
        cases: dict[str, _Case] = {}
        for pattern in _PATTERNS:
            cases |= self._pair([device], pattern, _BLOCK_BYTES, _DEPTH)
        return _medians(cases, self.rounds, "raw")

    def _raw_device(self) -> Path | None:
        try:
            return self.stack.enter_context(_loop(self._made("backing")))
        except ConfigError as error:
            self.left_out.append(f"a raw device: {error}")
            return None

    def _pair(self, paths: list[Path], pattern: str, block: int, depth: int) -> dict[str, _Case]:
        """Ours and both ways of running fio."""
        path, nbytes = paths[0], self.nbytes
        cases: dict[str, _Case] = {
            f"{pattern}: io_uring": self._ours(paths, pattern, block, depth),
            f"{pattern}: fio": partial(fio, path, pattern, block, depth, nbytes, None),
        }
        if self.huge is not None:
            cases[f"{pattern}: fio, huge pages"] = partial(fio, path, pattern, block, depth, nbytes, self.huge)
        return cases

    def _ours(
        self, paths: list[Path], pattern: Any, block: int, depth: int, backend: Any = "auto", first: int = 0
    ) -> _Case:
        """Ours, from memory that begins `first` bytes after an aligned place, one block after the other."""
        size = block + 4096 if first else block
        # Half as many more than the device gets at once: tickets are waited for in the order they began in,
        # and one that is late must not leave the device with less. fio fills whichever place is free.
        count = depth + max(1, depth // 2)
        # The end of a region that is less than a huge page lies on small ones, of which a request becomes many pieces.
        spare = -(-(memory.limits()["huge_page"] or 0) // size)

        def case() -> Speed:
            with (
                nvme.open(paths, queue_depth=max(depth, 1), backend=backend) as volume,
                # Side by side, as fio's buffers lie; room to shift only where it is used.
                blocks(size, count + spare) as tensors,
            ):
                used = [tensor[first : first + block] for tensor in tensors[:count]]
                return transfer(volume, used, pattern, PASSES * self.nbytes)

        return case

    def _made(self, name: str, nbytes: int | None = None) -> Path:
        """A file whose every block was written once: what was only reserved is slower the first time."""
        path = self.folder / name
        with nvme.open(path, size=nbytes or self.nbytes) as volume, blocks(_BLOCK_BYTES, _DEPTH) as tensors:
            transfer(volume, tensors, "write", volume.size)
            volume.flush()
        return path


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


def _medians(cases: dict[str, _Case], rounds: int, what: str) -> dict[str, Speed]:
    """Each case once in every round, shuffled; the medians of bandwidth and of processor time, each by itself."""
    samples: dict[str, list[Speed]] = {name: [] for name in cases}
    with Progress(what, rounds * len(cases), unit="measurements") as progress:
        for index in range(rounds):
            # In another order each time: what a disk still does for the one before is not always borne by the same.
            for name in random.Random(index).sample(list(cases), len(cases)):  # noqa: S311
                samples[name].append(cases[name]())
                progress.add(1)
    return {name: _median(speeds) for name, speeds in samples.items()}


def _median(speeds: list[Speed]) -> Speed:
    nbytes = speeds[0].nbytes
    return Speed(
        nbytes=nbytes,
        seconds=nbytes / 1e9 / statistics.median(speed.gb_per_second for speed in speeds),
        cpu_seconds=nbytes / 1e9 * statistics.median(speed.cpu_ms_per_gb for speed in speeds) / 1e3,
    )


def _table(cases: dict[str, Speed]) -> str:
    """Every case; those with a ring of ours in their pattern are compared with it."""
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
                f"{speed.cpu_ms_per_gb:.1f}",
                f"{ours.cpu_ms_per_gb / speed.cpu_ms_per_gb:.2f}" if speed.cpu_ms_per_gb else "-",
            )
        )
    return table(("pattern", "way", "GB/s", "ours is x as fast", "CPU ms/GB", "ours takes x of it"), rows)


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
            for pattern in _PATTERNS
        }
        for way in ways
    }


def _plain(speed: Speed) -> dict[str, float]:
    return {"gb_per_second": speed.gb_per_second, "cpu_ms_per_gb": speed.cpu_ms_per_gb}
