"""Runs fio, with and without huge pages, to compare its speed with memascend's I/O."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.cli.storage import Speed
from memascend.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

# How often one measurement reads or writes the file. With a second pass, the start of I/O is a smaller part of the
# time.
PASSES = 2
_FIO_PATTERNS = {"read": "read", "write": "write", "mixed": "rw"}
_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
_HUGE_PAGE_BYTES = 2 << 20


@contextmanager
def huge_pages(nbytes: int) -> Iterator[Path | None]:
    """Reserves huge pages for `nbytes` bytes; yields a file on a hugetlbfs for `fio --iomem=mmaphuge:FILE`.

    Yields None if this process may not reserve huge pages, or if no hugetlbfs can be mounted.
    """
    with tempfile.TemporaryDirectory(prefix="memascend-huge-") as folder:
        mounted = False
        try:
            before = _HUGE_PAGES.read_text()
            # fio aligns its buffers and rounds their size up to 4 MiB, so it needs more pages than `nbytes` has. With
            # too few pages, fio aborts.
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
    """Runs fio with io_uring and direct I/O. Returns the speed that fio itself measured."""
    if shutil.which("fio") is None:
        raise ConfigError("fio is not installed: install it, for example with `apt-get install fio`")
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
