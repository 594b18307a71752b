"""Parses the options of `memascend plan` for GPU, RAM and drive, and measures the storage of this machine."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from memascend.cli.plan.shapes import ASSUMED_RAM, positive
from memascend.cli.storage import speeds_at
from memascend.errors import ConfigError
from memascend.plan.cost import Drive
from memascend.plan.hardware import CARDS, DRIVES, USUAL, Gpu, short_name
from memascend.plan.options import parse_bytes
from memascend.plan.spare import HostMemory

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memascend.cli.plan.answer import Source


_GB = 10**9
# An error suggests at most 3 names, each with at least this similarity to the user's name.
_NEAR_MAX, _NEAR = 3, 0.6


def machine_of(ram: str | None, *, is_here: bool, has_budget: bool) -> tuple[HostMemory | None, Source]:
    """Returns the memory of the machine that computes, and where its size comes from. None: the memory is not known.

    Args:
        ram: the value of `--ram`, or None.
        is_here: True if this machine computes.
        has_budget: True if the user gives a budget. With a budget, no RAM is assumed for another machine.
    """
    if ram is None and is_here:
        return HostMemory.here(), "here"
    if ram is None and has_budget:
        return None, "given"
    total = parse_bytes(ram or ASSUMED_RAM, "--ram")
    return HostMemory(total=total, available=total), "assumed" if ram is None else "given"


def parse_gpu(text: str) -> Gpu:
    """Parses the value of `--gpu`: a GPU's name, or TFLOPS,GB,PCIE_GB_S.

    The three numbers are the peak of dense 16-bit products, the memory, and the speed of the link in one direction.
    """
    short = short_name(text)
    known = CARDS.get(USUAL.get(short, short))
    if known is not None:
        return known
    try:
        tflops, memory, link = map(positive, text.split(","))
    except ValueError as error:
        near = difflib.get_close_matches(short, [*CARDS, *USUAL], n=_NEAR_MAX, cutoff=_NEAR)
        hint = f"did you mean {' or '.join(near)}? Pass" if near else "pass"
        raise ConfigError(
            f"--gpu {text!r} is not a GPU that memascend knows: {hint} one of {', '.join([*CARDS, *USUAL])}, or three "
            "numbers above 0, TFLOPS,GB,PCIE_GB_S, such as 165,24,25"
        ) from error
    return Gpu(f"GPU of {tflops:g} TFLOPS and {memory:g} GB", tflops, int(memory * _GB), link * _GB)


def parse_drive(text: str) -> Drive:
    """Parses the value of `--drive`: a name, or READ,WRITE.

    READ and WRITE are the sustained speeds of all devices together, in GB/s.
    """
    known = DRIVES.get(text.lower().replace(" ", ""))
    if known is not None:
        return known
    try:
        read, write = map(positive, text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--drive {text!r} is neither a known drive nor two speeds above 0: pass one of {', '.join(DRIVES)}, or "
            "READ,WRITE in GB/s such as 5,4"
        ) from error
    return Drive(read=read * _GB, write=write * _GB)


def drive_at(paths: Sequence[Path]) -> tuple[Drive | None, dict[str, float]]:
    """Measures storage. Returns the speed of all devices together, and the measured figures in GB/s.

    The returned drive is None if a path is a raw device, because writing to a raw device would destroy its data.
    """
    # Each file system is measured alone, although a store uses all file systems at once. Paths on one file system share
    # its speed. The slowest path limits the speed of all paths.
    systems = [_system(path) for path in paths]
    each = {system: speeds_at(path) for system, path in dict(zip(systems, paths, strict=True)).items()}
    slowest = {
        pattern: min(speed[pattern].gb_per_second / systems.count(system) for system, speed in each.items())
        for pattern in ("read", "write", "mixed")
        if each and all(pattern in speed for speed in each.values())
    }
    speeds = {pattern: len(paths) * slow for pattern, slow in slowest.items()}
    if "mixed" not in speeds:
        return None, speeds
    busy = sum(speed["mixed"].cpu_seconds for speed in each.values()) / sum(
        speed["mixed"].nbytes for speed in each.values()
    )
    read, write, mixed = (speeds[pattern] * 1e9 for pattern in ("read", "write", "mixed"))
    return Drive(read=read, write=write, mixed=mixed, processor_seconds=busy), speeds


def _system(path: Path) -> int:
    """Returns the number of the device at `path`, or of the file system on which `path` is or will be.

    Returns 0 if the folder of `path` does not exist.
    """
    try:
        status = (path if path.is_dir() or path.is_block_device() else path.parent).stat()
    except FileNotFoundError:
        return 0
    return status.st_rdev or status.st_dev
