"""Checks storage for the commands: io_uring, file system or device, and free space. Measures the speed of storage."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from memascend import memory, nvme
from memascend.errors import MemascendError, StorageError
from memascend.text import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from memascend.nvme import Ticket, Volume


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of one check of the machine."""

    subject: str  # the name of the check, for the user
    found: str  # the result of the check, for the user
    verdict: Literal["fine", "slower", "fails"] = "fine"
    advice: str = ""  # the reason for the verdict, what the user can do, or both; always "" if the verdict is "fine"


Pattern = Literal["read", "write", "mixed"]


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The bytes and the time of a measured transfer."""

    nbytes: int
    seconds: float
    cpu_seconds: float  # user and system time of the whole process

    @property
    def gb_per_second(self) -> float:
        """Bandwidth in 10**9 bytes per second."""
        return self.nbytes / self.seconds / 1e9


@contextmanager
def blocks(nbytes: int, count: int) -> Iterator[list[torch.Tensor]]:
    """Yields `count` tensors, each with `nbytes` random bytes. A drive cannot compress random bytes.

    The tensors are on huge pages where the system provides huge pages.
    """
    import torch

    plan = {nbytes: count}
    with memory.Region(memory.layout(plan).reserved, owner="measurement") as region:
        arena = memory.Arena(region, plan)
        tensors = [arena.lease(nbytes).tensor(nbytes, torch.uint8) for _ in range(count)]
        tensors[0].random_(256)
        for index, tensor in enumerate(tensors[1:], 1):
            # Rotate the bytes: a drive that removes duplicates must not find equal blocks.
            tensor.copy_(tensors[0].roll(4099 * index))
        yield tensors


def transfer(
    volume: Volume,
    tensors: list[torch.Tensor],
    pattern: Pattern,
    nbytes: int,
    seconds: float | None = None,
    *,
    span: int | None = None,
) -> Speed:
    """Reads or writes the volume from its beginning to its end, repeatedly, until `nbytes` or `seconds` are reached.

    With `span`, reads or writes only the first `span` bytes of the volume. Keeps one operation for each tensor in
    flight. The pattern "mixed" alternates between one read and one write. The reads, and also the writes, are
    sequential.
    """
    block = tensors[0].nbytes
    places = max(1, min(volume.size, span or volume.size) // block)
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


# The largest size of the trial file. It is larger than a small drive's cache, and a drive writes it in seconds.
_TRIAL_BYTES = 512 << 20
_TRIAL_SECONDS = 1.5
# The block size and the queue depth that were the fastest on every measured disk.
_BLOCK_BYTES, _DEPTH = 1 << 20, 8
# At a lower speed than this, a step of a small model takes minutes.
_SLOW_GB_PER_SECOND = 0.5
# File systems that keep their files in RAM.
_MEMORY = {"tmpfs", "ramfs"}


def examine_ring() -> Iterator[Finding]:
    """Checks whether this process may use io_uring."""
    why_not = nvme.io_uring_why_not()
    if why_not is None:
        yield Finding(subject="io_uring", found="available")
    else:
        advice = (
            f"{why_not}; memascend uses threads instead, which are a little slower and take several times the "
            "processor time"
        )
        yield Finding(subject="io_uring", found="not available", verdict="slower", advice=advice)


def examine_storage(path: Path) -> Iterator[Finding]:
    """Checks `path`: a folder, a file or a raw device. Never changes existing data."""
    if path.is_block_device():
        yield from _device(path)
        return
    problem = _unusable(path)
    if problem is not None:
        yield Finding(subject="storage", found=str(path), verdict="fails", advice=problem)
        return
    folder = _folder_of(path)
    new = "" if path.exists() else f" (does not exist yet, on the drive of {mount_point(folder)})"
    free = bytes_shown(_space(folder)[0])
    yield Finding(subject="storage", found=f"{path}{new}, {file_system(folder)}, {free} free")
    try:
        with _trial(folder) as volume:
            yield from _volume(volume, ("write", "read"))
    except MemascendError as error:
        yield Finding(subject="storage trial", found="failed", verdict="fails", advice=str(error))


def _folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _unusable(path: Path) -> str | None:
    """Returns the reason why no store can be made at `path`, and what to do; None if a store can be made."""
    folder = _folder_of(path)
    if not folder.is_dir():
        return f"{folder} does not exist: create this folder"
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        return f"{folder} is on a read-only file system: choose another folder, or remount the file system"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"this user may not write to {folder}: change the folder's owner or mode, or choose another folder"
    kind = file_system(folder)
    if kind in _MEMORY:
        return f"{folder} is on a {kind}, which keeps files in RAM and so saves no memory: choose a folder on a disk"
    free, trial = _space(folder)
    if trial:
        return None
    full = f"is on a full disk ({bytes_shown(free)} are free): free disk space, or choose another disk"
    none = f"is on a {kind}, which holds no files of users: choose a folder on a disk"
    return f"{folder} {full if os.statvfs(folder).f_blocks else none}"


@contextmanager
def _trial(folder: Path) -> Iterator[Volume]:
    """Opens a temporary file in `folder` as a volume, and removes the file at the end."""
    with (
        tempfile.NamedTemporaryFile(dir=folder, prefix=".memascend-trial-") as file,
        nvme.open(file.name, size=_space(folder)[1]) as volume,
    ):
        yield volume


def _space(folder: Path) -> tuple[int, int]:
    """Returns the free bytes of a folder's file system, and the size that a trial file may have there."""
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    return free, min(_TRIAL_BYTES, free // 4) // _BLOCK_BYTES * _BLOCK_BYTES


def _device(path: Path) -> Iterator[Finding]:
    try:
        with nvme.open(path) as volume:
            yield Finding(subject="storage", found=f"{path}, a raw device of {bytes_shown(volume.size)}, free to use")
            yield from _volume(volume, ("read",))
            yield Finding(subject="sequential write", found="not tried: writing would overwrite the device's data")
    except MemascendError as error:
        yield Finding(subject="storage", found=str(path), verdict="fails", advice=str(error))


def _volume(volume: Volume, patterns: Sequence[Pattern]) -> Iterator[Finding]:
    """Checks the volume's direct I/O and backend, and measures its speeds."""
    (device,) = volume.devices()
    if volume.direct:
        yield Finding(subject="direct I/O", found=f"yes, aligned to {volume.alignment} bytes")
    else:
        advice = f"{device['why_buffered']}; every byte goes through the page cache, which is slower and takes memory"
        yield Finding(subject="direct I/O", found="no", verdict="slower", advice=advice)
    yield Finding(subject="I/O backend", found=volume.backend, verdict="slower" if volume.why_not else "fine")
    faster = "each step moves about 28 bytes for each parameter, so use a faster disk, or several disks"
    for pattern, speed in _measured(volume, patterns).items():
        slow = speed.gb_per_second < _SLOW_GB_PER_SECOND
        yield Finding(
            subject=f"sequential {pattern}",
            found=f"{speed.gb_per_second:.2f} GB/s",
            verdict="slower" if slow else "fine",
            advice=faster if slow else "",
        )


def _measured(volume: Volume, patterns: Sequence[Pattern]) -> dict[str, Speed]:
    """Measures each pattern. If a pattern writes, first fills the volume for at most `_TRIAL_SECONDS`."""
    speeds: dict[str, Speed] = {}
    filled = volume.size
    with blocks(_BLOCK_BYTES, _DEPTH) as tensors:
        if set(patterns) != {"read"}:
            # The first write to a block of a new file is slower than later writes, and a run writes each block many
            # times. A read of a block that was never written may need no I/O. So only filled blocks are measured.
            filled = transfer(volume, tensors, "write", volume.size, _TRIAL_SECONDS).nbytes
        for pattern in patterns:
            speeds[pattern] = transfer(volume, tensors, pattern, 8 * volume.size, _TRIAL_SECONDS, span=filled)
            if pattern != "read":
                volume.flush()
    return speeds


def require_usable(paths: Sequence[Path]) -> None:
    """Raises StorageError if no store can be made at one of the paths. Does not check raw devices."""
    for path in paths:
        problem = None if path.is_block_device() else _unusable(path)
        if problem is not None:
            raise StorageError(problem)


def speeds_at(path: Path) -> dict[str, Speed]:
    """Measures reads, writes, and alternating reads and writes ("mixed"). On a raw device, measures only reads."""
    if path.is_block_device():
        with nvme.open(path) as volume:
            return _measured(volume, ("read",))
    require_usable([path])
    with _trial(_folder_of(path)) as volume:
        return _measured(volume, ("read", "write", "mixed"))


def disk_folder() -> Path:
    """Returns the first writable folder on a disk among the temporary folder, /var/tmp and the current folder.

    Raises:
        StorageError: each of these folders is in RAM, does not exist, or rejects this user's writes.
        FileNotFoundError: Python finds no temporary folder.
    """
    for place in (Path(tempfile.gettempdir()), Path("/var/tmp"), Path.cwd()):  # noqa: S108
        if os.access(place, os.W_OK | os.X_OK) and file_system(place) not in _MEMORY:
            return place
    raise StorageError(
        "the temporary folder, /var/tmp and the current folder are in RAM or cannot be written: pass --storage with a "
        "folder on a disk"
    )


def file_system(folder: Path) -> str:
    """Returns the type of the file system of `folder`; "a file system" if /proc/self/mountinfo does not list it."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        fields = line.split()
        if fields[2] == number:
            return fields[fields.index("-") + 1]
    return "a file system"


def mount_point(folder: Path) -> Path:
    """Returns the folder at which the file system of `folder` is mounted."""
    found = folder.resolve()
    while not found.is_mount():
        found = found.parent
    return found
