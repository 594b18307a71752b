"""Raises errors of the file system as StorageError, with the path."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from memascend.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def file_errors(path: Path, what: str) -> Iterator[None]:
    """Around work on a file or folder; `what` says what could not be done, as "cannot be read"."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} {what}: {error.strerror}", errno=error.errno, path=str(path)) from error
