"""Resolves where a store's files lie: in a folder, at a path, or unlinked."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.errors import StorageError
from memascend.paths import expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.engine import Store
    from memascend.planning.options import Options


def file_of(path: str) -> Path:
    """The store's file, where a folder is given (or one that will be: "runs/first/"), or else the path itself."""
    place = Path(path)
    return place / "memascend.store" if path.endswith("/") or place.is_dir() else place


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
            store = create(folder)
            store.become_temporary()
            return store, Path(place)
        except StorageError as error:
            refused = refused or error
        finally:
            # Nobody else knows the folder.
            (Path(folder) / "memascend.store").unlink(missing_ok=True)
            Path(folder).rmdir()
    raise StorageError(f"there is no place for a temporary store: {refused}; give storage=")


def room_beside(paths: Sequence[str] | None, total_bytes: int) -> int | None:
    """Bytes that there are on storage beside a store of so many, made or not; None where that cannot be found out."""
    try:
        places = [file_of(path) for path in paths or (tempfile.gettempdir(),)]
        systems = [_nearest(place).stat().st_dev for place in places]
        rooms = []
        for place, system in zip(places, systems, strict=True):
            if place.is_block_device():
                with place.open("rb") as device:
                    rooms.append(device.seek(0, os.SEEK_END))
                continue
            # Several parts on one file system share what is free.
            free = shutil.disk_usage(_nearest(place)).free // systems.count(system)
            rooms.append(free + (place.stat().st_size if place.is_file() else 0))
    except OSError:
        return None
    return max(0, min(rooms) * len(rooms) - total_bytes)


def _nearest(place: Path) -> Path:
    """What there is of a path."""
    return next(path for path in (place, *place.absolute().parents) if path.exists())


def folders_of(options: Options) -> list[Path]:
    """For files that are gone with the process: beside each part of the store, as far as that is known."""
    if options.scratch is not None:
        return [Path(expanded(options.scratch))]
    files = [path for path in options.paths or () if not Path(path).is_block_device()]
    return list(dict.fromkeys(file_of(path).parent for path in files))


def scratch_of(options: Options) -> Path | None:
    """The folder for copies of the weights: beside the first part of the store, where that is a file with a name."""
    if options.scratch is not None:
        return Path(expanded(options.scratch))
    if not options.paths or Path(options.paths[0]).is_block_device():
        return None
    return file_of(options.paths[0]).parent
