"""Reads the machine of a plan from its options: GPU, RAM, drive; measures storage of this machine."""

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
# The largest number of names that an error suggests, and their least similarity.
_NEAR_MAX, _NEAR = 3, 0.6


def machine_of(ram: str | None, *, is_here: bool, has_budget: bool) -> tuple[HostMemory | None, Source]:
    """Returns the memory of a plan's machine, and the source of the figures; memory None: not known.

    Args:
        ram: the value of `--ram`, or None.
        is_here: True if this machine computes.
        has_budget: True if the budget is given: then the RAM of another machine need not be assumed.
    """
    if ram is None and is_here:
        return HostMemory.here(), "here"
    if ram is None and has_budget:
        return None, "given"
    total = parse_bytes(ram or ASSUMED_RAM, "--ram")
    return HostMemory(total=total, available=total), "assumed" if ram is None else "given"


def parse_gpu(text: str) -> Gpu:
    """Parses a GPU's name, or TFLOPS,GB,PCIE_GB_S: peak of dense 16-bit products, memory, link in one direction."""
    short = short_name(text)
    known = CARDS.get(USUAL.get(short, short))
    if known is not None:
        return known
    try:
        tflops, memory, link = map(positive, text.split(","))
    except ValueError as error:
        near = difflib.get_close_matches(short, [*CARDS, *USUAL], n=_NEAR_MAX, cutoff=_NEAR)
        hint = f"did you mean {' or '.join(near)}? It is" if near else "it is"
        raise ConfigError(
            f"--gpu {text!r} is no GPU that plan knows: {hint} one of {', '.join([*CARDS, *USUAL])}, or "
            "TFLOPS,GB,PCIE_GB_S as 165,24,25"
        ) from error
    return Gpu(f"GPU of {tflops:g} TFLOPS and {memory:g} GB", tflops, int(memory * _GB), link * _GB)


def parse_drive(text: str) -> Drive:
    """Parses a drive's name, or READ,WRITE: sustained GB/s of all devices together."""
    known = DRIVES.get(text.lower().replace(" ", ""))
    if known is not None:
        return known
    try:
        read, write = map(positive, text.split(","))
    except ValueError as error:
        raise ConfigError(
            f"--drive must be {', '.join(DRIVES)}, or READ,WRITE in GB/s, as 5,4, not {text!r}"
        ) from error
    return Drive(read=read * _GB, write=write * _GB)


def drive_at(paths: Sequence[Path]) -> tuple[Drive | None, dict[str, float]]:
    """Measures storage; returns the speed of all devices together, and the same figures in GB/s.

    The drive is None for raw devices, whose writes are not measured.
    """
    # Measure each file system alone, though a store uses all at once: paths on one file system share its speed, and the
    # slowest path limits all.
    systems = [_system(path) for path in paths]
    each = {system: speeds_at(path) for system, path in dict(zip(systems, paths, strict=True)).items()}
    slowest = {
        pattern: min(speed[pattern].gb_per_second / systems.count(system) for system, speed in each.items())
        for pattern in (next(iter(each.values())) if each else ())
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
    """Returns the number of the device at this path, or of its file system; 0 if the folder does not exist."""
    try:
        status = (path if path.is_dir() or path.is_block_device() else path.parent).stat()
    except FileNotFoundError:
        return 0
    return status.st_rdev or status.st_dev
