"""Computes what a plan costs besides memory: disk space, wear, and the disk's part of a step."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memascend.cli.storage import bandwidth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from memascend.planning.plan import Plan
    from memascend.run.decision import Planned

__all__ = ["Costs", "cost", "disk_seconds"]

# What endurance is reckoned by: drives are rated in terabytes written.
_WRITTEN_BYTES = 100 * 10**12


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Figures of one plan.

    Attributes:
        parameters: elements.
        in_memory: bytes that the same training holds in memory, but for activations: values, state, gradients.
        read_bytes: of a step.
        written_bytes: of a step.
        steps_per_100_tb: how many steps write 100 TB.
        free_bytes: on the storage, all devices together; None where none was named.
        speeds: measured, in GB/s, by pattern; empty where no storage was named.
        seconds: that the disk takes for a step; None where its speed is not known.
    """

    parameters: int
    in_memory: int
    read_bytes: int
    written_bytes: int
    steps_per_100_tb: int
    free_bytes: int | None
    speeds: Mapping[str, float]
    seconds: float | None


def cost(model: torch.nn.Module, found: Planned, paths: Sequence[Path]) -> Costs:
    """The costs of a plan for `model`, on storage that is measured.

    Raises:
        StorageError: a path cannot hold a store; the message says why.
    """
    plan = found.plan
    parameters = list(model.parameters())
    # Several devices are measured one after the other, and work at once; the slowest sets the pace of all.
    each = [bandwidth(path) for path in paths]
    speeds = {pattern: len(each) * min(speed[pattern] for speed in each) for pattern in (each[0] if each else ())}
    values = sum(parameter.nbytes for parameter in parameters)
    gradients = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
    written = sum(plan.written_bytes.values())
    return Costs(
        parameters=sum(parameter.numel() for parameter in parameters),
        in_memory=values + found.state_bytes + gradients,
        read_bytes=sum(plan.read_bytes.values()),
        written_bytes=written,
        steps_per_100_tb=_WRITTEN_BYTES // max(1, written),
        free_bytes=sum(map(_free, paths)) if paths else None,
        speeds=speeds,
        seconds=disk_seconds(plan, speeds) if "mixed" in speeds else None,
    )


def disk_seconds(plan: Plan, speeds: Mapping[str, float]) -> float:
    """How long a step's bytes take: a forward only reads, everything else reads and writes at once."""
    forward = plan.read_bytes.get("values, forward", 0)
    rest = sum(plan.read_bytes.values()) - forward + sum(plan.written_bytes.values())
    return (forward / speeds["read"] + rest / speeds["mixed"]) / 1e9


def _free(path: Path) -> int:
    if path.is_block_device():
        with path.open("rb") as device:
            return device.seek(0, os.SEEK_END)
    room = os.statvfs(path if path.is_dir() else path.parent)
    return room.f_bavail * room.f_frsize
