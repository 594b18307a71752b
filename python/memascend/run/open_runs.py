"""Tracks the runs of this process; closes one whose store is opened again, as by a notebook cell run twice."""

from __future__ import annotations

import errno
import gc
import os
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

from memascend.errors import StorageError
from memascend.run.optimizer import session_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.engine import Store
    from memascend.run.optimizer import OffloadedOptimizer

_RUNS: weakref.WeakSet[OffloadedOptimizer] = weakref.WeakSet()


def note(run: OffloadedOptimizer) -> None:
    """Remember a run, without keeping it."""
    _RUNS.add(run)


def open_again(
    create: Callable[[], Store], paths: Sequence[str], *, closes: bool, judge: Callable[[Store], None]
) -> Store:
    """What `create` opens at `paths`, also where a run of this process has it open.

    Args:
        create: opens or makes the store.
        paths: where.
        closes: close that run, with a warning; else it is an error, unless nothing refers to the run any more.
        judge: raises where the store of a run cannot be what `create` opens; that run then goes on.

    Raises:
        StorageError: as `create`, or a run of this process has the store open.
    """
    try:
        return create()
    except StorageError as error:
        if error.errno != errno.EBUSY:
            raise
    # A model is in cycles: what nothing refers to waits for the collector.
    gc.collect()
    for run, file in list(_holders(paths)):
        if not closes:
            raise StorageError(
                f"{file}: a run of this process has this store open: end it by optimizer.close(), or give offload() "
                'existing="resume" or "replace", which do so',
                errno=errno.EBUSY,
                path=file,
            )
        judge(session_of(run).run.resources.store)
        run.close()
        warnings.warn(
            f"{file}: a run of this process had this store open and was closed at step {run.steps}; its model cannot "
            "be used any more (call optimizer.close() before offload() to be without this warning)",
            stacklevel=5,
        )
    return create()


def _holders(paths: Sequence[str]) -> Iterator[tuple[OffloadedOptimizer, str]]:
    for run in list(_RUNS):
        resources = session_of(run).run.resources
        if resources.closed:
            continue
        files = [os.fspath(file) for file in resources.store.info()["devices"]]
        found = next((file for file in files for path in paths if _is_at(file, path)), None)
        if found is not None:
            yield run, found


def _is_at(file: str, path: str) -> bool:
    """Whether a path given to `offload()` means a file: that file, or its folder."""
    given = Path(path)
    try:
        return given.samefile(Path(file).parent if given.is_dir() else file)
    except OSError:
        return False
