"""Owns store, engine and memory of a run; closes them once, by close(), by the garbage collector or at exit."""

from __future__ import annotations

import contextlib
import logging
import warnings
from typing import TYPE_CHECKING

from memascend.errors import UsageError
from memascend.progress import Progress
from memascend.residency.access import OwnProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.activations.activations import Activations
    from memascend.device.unit_memory import UnitMemory
    from memascend.engine import Engine, Store

_log = logging.getLogger("memascend")

CLOSED = "this model was offloaded, and its optimizer has been closed; open its storage again to go on"


class Resources:
    """What has to be let go: it knows neither model nor optimizer, so that both can be collected."""

    def __init__(
        self,
        store: Store,
        engine: Engine,
        units: UnitMemory,
        activations: Activations | None = None,
        *,
        release: Callable[[], None],
        temporary: bool = False,
    ) -> None:
        """`release` gives up the share in process-wide hooks; a `temporary` store is gone with the process."""
        self.store = store
        self.engine = engine
        self.units = units
        self.activations = activations
        self._release = release
        self.temporary = temporary
        # Steps were committed that nobody has read out.
        self.unread = False
        self.closed = False
        self._told_of_loss = False
        self._first: Callable[[], None] | None = None
        self.process = OwnProcess()

    def _close_store(self) -> None:
        try:
            if self.temporary:
                # Nobody will read it.
                self.store.give_up()
            else:
                self._write_held()
        finally:
            self.store.close()

    def _write_held(self) -> None:
        """Write what only memory and the log have; without a log one Ctrl-C does not end that: all would be lost."""
        with Progress("writing what is held to storage", 0) as progress:
            try:
                self.store.write_applied(progress.reached)
            except KeyboardInterrupt:
                if self.store.info()["log_steps"]:
                    _log.info("interrupted while what is held is written: the store is whole with its log, which stays")
                    raise
                _log.warning(
                    "interrupted while trained parameters are written to storage, and nothing else has them: that goes "
                    "on; another Ctrl-C gives them up, and the store with them"
                )
                try:
                    self.store.write_applied(progress.reached)
                except KeyboardInterrupt:
                    self.store.give_up()
                    raise
                raise

    def require_open(self) -> None:
        """Refuse what comes after close(), and what a forked child asks."""
        if self.closed:
            raise UsageError(CLOSED)
        self.process.require_here()

    def warn_if_lost(self) -> None:
        """Warn once where the store's file lost its name: all goes well until the end of the process."""
        lost = None if self._told_of_loss else self.store.lost()
        if lost is not None:
            self._told_of_loss = True
            warnings.warn(str(lost), stacklevel=5)

    def finish_first(self, finish: Callable[[], None] | None) -> None:
        """Have something done at the beginning of close(); it must know neither model nor optimizer."""
        self._first = finish

    def close(self) -> None:
        """Drain, drop what is not committed, free. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        if self.process.is_elsewhere:
            # A forked child has none of the threads, and what it would write is its parent's.
            return
        with contextlib.ExitStack() as last_first:
            # Each of them also where another fails.
            last_first.callback(self._release)
            if self.activations is not None:
                last_first.callback(self.activations.close, CLOSED)
            last_first.callback(self.units.close)
            last_first.callback(self._close_store)
            last_first.callback(self.units.stop)
            last_first.callback(self.engine.close)
            if self._first is not None:
                last_first.callback(self._first)
        if self.temporary and self.unread:
            warnings.warn(
                "the trained weights were in a temporary store and are gone, for nobody read them out: give storage=, "
                "or save model.state_dict() before close()",
                stacklevel=4,
            )
