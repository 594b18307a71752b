"""Measures the bandwidth of memascend's reads and writes on the disk, for the lower bound of a step."""

from __future__ import annotations

import tempfile
from pathlib import Path

from memascend import nvme
from memascend.cli.storage import blocks, transfer

__all__ = ["disk_speeds"]

_MIB = 1 << 20
_FILE_BYTES = 512 * _MIB
_PASSES = 2
_DEPTH = 8


def disk_speeds(storage: Path) -> dict[str, float]:
    """Returns the GB/s of reads ("read"), and of alternating reads and writes ("mixed").

    Uses as many buffers as an update with the default budget.
    """
    with (
        tempfile.TemporaryDirectory(dir=storage, prefix=".memascend-speed-") as folder,
        nvme.open(Path(folder, "file"), size=_FILE_BYTES, queue_depth=_DEPTH) as volume,
        blocks(_MIB, _DEPTH + _DEPTH // 2) as tensors,
    ):
        # All blocks are written first, because the first access to a block that is only reserved is slower.
        transfer(volume, tensors, "write", _FILE_BYTES)
        volume.flush()
        return {
            "read": transfer(volume, tensors, "read", _PASSES * _FILE_BYTES).gb_per_second,
            "mixed": transfer(volume, tensors, "mixed", _PASSES * _FILE_BYTES).gb_per_second,
        }
