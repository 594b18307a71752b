"""Where a store's files lie: in a folder, at a path of their own, or nowhere by name."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.engine import Store

__all__ = ["file_of", "remove", "temporary"]


def file_of(path: str) -> Path:
    """The store's file, where a folder is given, or else the path itself."""
    place = Path(path)
    return place / "memascend.store" if place.is_dir() else place


def remove(files: Sequence[Path]) -> None:
    """Remove the files that are there; never a device."""
    for file in files:
        if file.is_file():
            file.unlink()


def temporary(create: Callable[[str], Store]) -> tuple[Store, Path]:
    """A store whose file is gone with the process, where there is a disk, and the folder that it was in."""
    refused: Exception | None = None
    for place in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", os.getcwd())):  # noqa: PTH109, S108
        try:
            folder = tempfile.mkdtemp(prefix="memascend-", dir=place)
        except OSError as error:
            refused = refused or error
            continue
        try:
            return create(folder), Path(place)
        except StorageError as error:
            refused = refused or error
        finally:
            remove([Path(folder) / "memascend.store"])
            Path(folder).rmdir()
    raise StorageError(f"there is no place for a temporary store: {refused}; give storage=")
