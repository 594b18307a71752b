"""Says what became of a store's file that its path does not name any more."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from memascend.errors import StorageError

if TYPE_CHECKING:
    from pathlib import Path

_RESCUE = "is gone with the end of this run; keep it with optimizer.save(folder)"
_LOST = {
    "deleted": f"was deleted while its store was in use: what is in it {_RESCUE}",
    "moved": "was moved while its store was in use: what was committed is in it, under the name that it has now",
    "truncated": f"was truncated while its store was in use: what was behind its end {_RESCUE}",
    "replaced": f"is now another file than that of the store in use: unless that was moved, what is in it {_RESCUE}",
}


def loss(path: Path, what: str) -> StorageError:
    """The error: `what` is "deleted", "moved", "truncated" or "replaced"."""
    return StorageError(f"{path} {_LOST[what]}", errno=errno.ENOENT, path=os.fspath(path))
