"""`memascend bench io`: measures the engine's I/O beside fio in one run, with ratios."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend import memory, nvme
from memascend.cli.storage import Speed, blocks, transfer
from memascend.errors import ConfigError
from memascend.text import Progress, table

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator


def described() -> dict[str, str | int]:
    """The machine, versions and the date."""
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


# Passes over the file in one measurement, so that the start takes a small part of it.
PASSES = 2
_FIO_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}
_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
_HUGE_PAGE_BYTES = 2 << 20


@contextmanager
def huge_pages(nbytes: int) -> Iterator[Path | None]:
    """A file on a hugetlbfs for `fio --iomem=mmaphuge:FILE`; None: this process may not make one."""
    with tempfile.TemporaryDirectory(prefix="memascend-huge-") as folder:
        mounted = False
        try:
            before = _HUGE_PAGES.read_text()
            # fio aligns its buffers, rounds up to 4 MiB, and aborts if there are too few pages.
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
    """Run fio with io_uring and direct I/O; the times are fio's own."""
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed: apt-get install fio")
    what = f"--rw={_FIO_PATTERNS[pattern]} --rwmixread={reads_percent} --bs={block} --iodepth={depth} --size={nbytes}"
    how = f"--loops={PASSES} --ioengine=io_uring --direct=1 --allow_mounted_write=1 --output-format=json"
    words = ["fio", "--name=peer", f"--filename={path}", *what.split(), *how.split()]
    if huge is not None:
        words.append(f"--iomem=mmaphuge:{huge}")
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ConfigError(f"fio failed: {done.stderr.strip() or done.stdout.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = job["read"]["io_bytes"] + job["write"]["io_bytes"]
    seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
    return Speed(nbytes=moved, seconds=seconds, cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds)


SUMMARY = "bandwidth and processor time of storage, beside fio"
MIB = 1 << 20
PATTERNS = ("read", "write", "mixed")
# The size and depth that were fastest on every measured disk.
BLOCK_BYTES, DEPTH = MIB, 8
Case = Callable[[], Speed]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--storage", metavar="FOLDER", default=".", help="where the files are made (default: here)")
    parser.add_argument("--size", type=int, metavar="MIB", default=1024, help="of each file, in MiB (default 1024)")
    parser.add_argument("--rounds", type=int, metavar="N", default=5, help="medians of so many rounds (default 5)")


def require_measurable(options: argparse.Namespace) -> None:
    """Reject sizes at which the start dominates the measurement.

    Raises:
        ConfigError: --size or --rounds is too small.
    """
    if options.size < 64 or options.rounds < 1:
        raise ConfigError("--size is at least 64 MiB and --rounds at least 1")


def about(options: argparse.Namespace, bench: Bench) -> dict[str, Any]:
    """The conditions of the measurement as JSON values."""
    return {
        "machine": described(),
        "size_bytes": bench.nbytes,
        "rounds": options.rounds,
        "left_out": bench.left_out,
    }


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    require_measurable(options)
    with tempfile.TemporaryDirectory(dir=options.storage, prefix=".memascend-bench-") as folder, ExitStack() as stack:
        bench = Bench(Path(folder), options, stack)
        found = bench.headline()
    if options.json:
        files = {name: plain(speed) for name, speed in found.items()}
        print(json.dumps({**about(options, bench), "files": files}, indent=2))
        return 0
    print(shown(found))
    for line in bench.left_out:
        print(f"\nleft out: {line}")
    return 0


class Bench:
    """The folder, sizes and baselines of the measurements."""

    def __init__(
        self,
        folder: Path,
        options: argparse.Namespace,
        stack: ExitStack,
        flying: int = BLOCK_BYTES * DEPTH,
    ) -> None:
        """`flying`: the maximum of bytes in flight, for which fio gets huge pages."""
        self.folder, self.rounds, self.nbytes = folder, options.rounds, options.size * MIB
        self.stack = stack
        self.left_out: list[str] = []
        self.huge = stack.enter_context(huge_pages(flying))
        if self.huge is None:
            self.left_out.append("fio with huge pages: this process may not mount a hugetlbfs (run as root)")
        self.file = self.made("one")

    def headline(self, others: dict[str, Case] | None = None) -> dict[str, Speed]:
        """All cases at the best size and depth, beside `others`."""
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
        return medians({**cases, **(others or {})}, self.rounds, "files")

    def pair(self, paths: list[Path], pattern: str, block: int, depth: int) -> dict[str, Case]:
        """Our I/O beside fio with and without huge pages."""
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
        """Our I/O, sequential, with memory that begins `first` bytes after an aligned address."""
        size = block + 4096 if first else block
        # Half as many more than the queue depth: tickets are awaited in order, and a late one must not leave the
        # device idle. fio refills any free place.
        count = depth + max(1, depth // 2)
        # The end of a region that is less than a huge page lies on small pages, which split requests.
        spare = -(-(memory.limits()["huge_page"] or 0) // size)

        def case() -> Speed:
            with (
                nvme.open(paths, queue_depth=max(depth, 1), backend=backend) as volume,
                # Adjacent like fio's buffers.
                blocks(size, count + spare) as tensors,
            ):
                used = [tensor[first : first + block] for tensor in tensors[:count]]
                return transfer(volume, used, pattern, PASSES * self.nbytes)

        return case

    def made(self, name: str, nbytes: int | None = None) -> Path:
        """A file with every block written, since reserved blocks are slower the first time."""
        path = self.folder / name
        with nvme.open(path, size=nbytes or self.nbytes) as volume, blocks(BLOCK_BYTES, DEPTH) as tensors:
            transfer(volume, tensors, "write", volume.size)
            volume.flush()
        return path


def medians(cases: dict[str, Case], rounds: int, what: str) -> dict[str, Speed]:
    """Run each case once in every round; return separate medians of bandwidth and of processor time."""
    samples: dict[str, list[Speed]] = {name: [] for name in cases}
    with Progress(what, rounds * len(cases), unit="measurements") as progress:
        for index in range(rounds):
            # Shuffled, since a disk may still work for the case before.
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


def shown(cases: dict[str, Speed]) -> str:
    """All cases, compared with our io_uring in the same pattern."""
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


def plain(speed: Speed) -> dict[str, float]:
    """A measurement as JSON values."""
    return {"gb_per_second": speed.gb_per_second, "cpu_ms_per_gb": speed.cpu_ms_per_gb}
