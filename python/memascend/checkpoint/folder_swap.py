"""Replaces a folder by a new one at once, locked against other processes that save there."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.checkpoint.file_errors import file_errors
from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_MARK = ".memascend-saving"
# Others may put what is at the temporary name into its place, or remove it, between two looks.
_ATTEMPTS = 16


@contextlib.contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A new folder beside the target, gone at the end; what a killed process left there before is, too.

    It and the target are locked meanwhile, whichever of the two paths each is at; nothing is removed that is not.
    """
    new = target.parent / f".{target.name}{_MARK}"
    with file_errors(new, "cannot be written"), contextlib.ExitStack() as held:
        ours: list[int] = []
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                new.mkdir()
            try:
                ours = [_lock(new, target, held)]
            except FileNotFoundError:
                continue
            if not _is_one_of(new, ours):
                # Whoever had it has just put it in place.
                continue
            if is_empty(new):
                break
            shutil.rmtree(new)
        else:
            raise UsageError(f"other processes keep saving to {target}")
        try:
            if target.is_dir():
                ours.append(_lock(target, target, held))
            yield new
        finally:
            if _is_one_of(new, ours):
                shutil.rmtree(new, ignore_errors=True)


def _lock(folder: Path, target: Path, held: contextlib.ExitStack) -> int:
    """A descriptor of a folder that no other saver has."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    held.callback(os.close, descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"another process is saving to {target} now") from None
    return descriptor


def _is_one_of(path: Path, descriptors: list[int]) -> bool:
    """Whether a path names what one of the descriptors has open."""
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return any(os.path.samestat(there, os.fstat(descriptor)) for descriptor in descriptors)


def put_in_place(target: Path, new: Path) -> None:
    """Put the new folder in the place of the target; at no moment is there less than one of them whole."""
    with file_errors(target, "cannot be written"):
        if target.is_dir():
            # Who may look into it stays as it was.
            new.chmod(stat.S_IMODE(target.stat().st_mode))
        _sync_all(new)
        if not target.exists() or is_empty(target):
            new.rename(target)
        elif not _exchange(new, target):
            old = target.parent / f".{target.name}.memascend-old"
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
            new.rename(target)
            shutil.rmtree(old)
        sync(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders at once; False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    done: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return done == 0


def is_empty(path: Path) -> bool:
    """Whether it is a folder with nothing in it."""
    return path.is_dir() and not any(path.iterdir())


def sync(path: Path) -> None:
    """Flush a file or folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_all(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        sync(Path(path))
