"""Normalises paths from users: expands "~", accepts one path or several."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_Path = str | os.PathLike[str]


def expanded(path: _Path) -> str:
    """The path with a leading "~" or "~name" replaced, as a shell does it where it sees the path."""
    return os.path.expanduser(os.fspath(path))  # noqa: PTH111 (a trailing "/" says that it is a folder)


def listed(paths: _Path | Sequence[_Path]) -> list[str]:
    """One path or several."""
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    return [expanded(path) for path in several]
