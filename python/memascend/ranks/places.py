"""Resolves where each rank's store lies: a folder in the folder that was given, or a path with the rank in it."""

from __future__ import annotations

import glob
import os
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from torch import distributed

from memascend.errors import ConfigError, StorageError
from memascend.ranks.earlier import file_of_rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.planning.options import Options
    from memascend.ranks.figures import Figures


def places_of_rank(options: Options) -> list[str] | None:
    """The paths of this rank's store; None for a temporary one.

    Raises:
        ConfigError: a path is the same for all ranks, and no folder.
    """
    if options.paths is None:
        return None
    rank = distributed.get_rank()
    several = not (options.storage is None or isinstance(options.storage, (str, os.PathLike)))
    return [_place(path, rank, several=several) for path in options.paths]


def filled(path: str, rank: int) -> str:
    """A path with the rank in it, and its number on its host."""
    local = os.environ.get("LOCAL_RANK", str(rank))
    return path.replace("{rank}", str(rank)).replace("{local_rank}", local)


def _place(path: str, rank: int, *, several: bool) -> str:
    place = filled(path, rank)
    if place != path:
        return place
    if several:
        raise ConfigError(f"storage={path!r} is the same for all ranks: put {{rank}} or {{local_rank}} into each path")
    found = Path(path)
    if found.exists() and not found.is_dir():
        what = "a device" if found.is_block_device() else "a file"
        raise ConfigError(
            f"{path} is {what}, and each rank has a store of its own: give a folder, or a path with {{rank}} or "
            "{local_rank} in it"
        )
    # A folder in it that is made where it is missing.
    found.mkdir(parents=True, exist_ok=True)
    # Of which number of ranks it is: another number has other rows.
    return str(file_of_rank(path, rank, distributed.get_world_size()).parent) + "/"


def shared_folder(options: Options) -> str | None:
    """The folder that all ranks have their stores in; None where each is told its own place."""
    storage = options.storage
    if not isinstance(storage, (str, os.PathLike)) or options.paths is None or "{" in options.paths[0]:
        return None
    return options.paths[0]


def places_of_others(options: Options) -> dict[int, list[str]]:
    """What this rank sees where other ranks look for their stores, by the rank in its path."""
    folder, rank = shared_folder(options), distributed.get_rank()
    if folder is None:
        local = os.environ.get("LOCAL_RANK", str(rank))
        paths = [path.replace("{local_rank}", local) for path in options.paths or ()]
    else:
        paths = [str(Path(folder, f"rank-{{rank}}-of-{distributed.get_world_size()}")) + "/"]
    parts = os.path.normpath(paths[0]).split("{rank}") if paths else []
    if len(parts) < 2:
        # It is the same for all.
        return {}
    first, *more = map(re.escape, parts)
    pattern = re.compile(first + r"(\d{1,5})" + r"\1".join(more))
    there = map(pattern.fullmatch, glob.glob("*".join(map(glob.escape, parts))))  # noqa: PTH207
    numbers = {int(match[1]) for match in there if match and _may_be_of_rank(match[0], int(match[1]))}
    return {number: [path.replace("{rank}", str(number)) for path in paths] for number in numbers - {rank}}


def _may_be_of_rank(path: str, number: int) -> bool:
    """Files are ours by their names; devices of other numbers are somebody else's."""
    return not Path(path).is_block_device() or number < distributed.get_world_size()


def candidates(paths: Sequence[str], rank: int, count: int) -> list[list[str]]:
    """Where the store of a rank may be, its own place first; then those of other numbers of ranks, by their names."""
    places = [filled(path, rank) for path in paths] if count > 1 else list(paths)
    if len(paths) > 1 or places != list(paths):
        return [places]
    folder = Path(paths[0])
    # A single process makes a file where no folder is.
    own = str(file_of_rank(paths[0], rank, count)) if count > 1 or folder.is_dir() else paths[0]
    there = [
        str(file) for pattern in ("rank-*-of-*/memascend.store", "memascend.store") for file in folder.glob(pattern)
    ]
    return [[own], *([file] for file in sorted(there) if file != own)]


def require_own(places: Sequence[str], figures: Figures) -> None:
    """No two ranks have one file or device; asked of all ranks.

    Raises:
        StorageError: two have; it names both.
    """
    owner: dict[str, int] = {}
    for rank, theirs in enumerate(figures.everyone([_identity(place) for place in places])):
        for identity in theirs:
            if identity in owner:
                path = identity.split(":", 1)[1]
                raise StorageError(
                    f"{path} is given to rank {owner[identity]} and to rank {rank}: each has a store of its own; "
                    "nothing was changed",
                    path=path,
                )
            owner[identity] = rank


def _identity(place: str) -> str:
    """What tells two places apart: on which host, and where a path leads to, or which device that is."""
    path = os.path.realpath(place)
    if Path(path).is_block_device():
        number = Path(path).stat().st_rdev
        path = f"device {os.major(number)}:{os.minor(number)}"
    return f"{socket.gethostname()}:{path}"
