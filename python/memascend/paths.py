"""Normalises paths from users: expands "~", accepts one path or several."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_Path = str | os.PathLike[str]


def expanded(path: _Path) -> str:
    """The path with a leading "~" or "~name" replaced, as a shell does it where it sees the path."""
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111 (a trailing "/" says that it is a folder)


def refusal_of(path: _Path) -> str | None:
    """Why no file of the system can have this path; None where one can."""
    try:
        os.lstat(expanded(path))
    except ValueError as error:
        return str(error)
    except OSError as error:
        # What else is wrong with it depends on what it is for.
        return f"{len(os.fsencode(path))} bytes are too long" if error.errno == errno.ENAMETOOLONG else None
    return None


def listed(paths: _Path | Sequence[_Path]) -> list[str]:
    """One path or several."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [expanded(path) for path in several]
