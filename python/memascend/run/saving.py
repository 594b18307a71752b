"""Writes a checkpoint of a run: of one process's store, or of the rows of all ranks together."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, cast

from memascend.checkpoint.contents import StoreContents, WeightContents
from memascend.checkpoint.writer import save, save_weights
from memascend.errors import RankError, UsageError
from memascend.formatting import listed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from memascend.checkpoint.contents import Contents, RankContents
    from memascend.ranks.sharding import Sharding
    from memascend.run.loads import Loads
    from memascend.run.newcomers import Newcomers
    from memascend.run.reached_values import ReachedValues
    from memascend.run.run import Run


class Saving:
    """How checkpoints of one run are written."""

    def __init__(
        self,
        model: torch.nn.Module,
        run: Run,
        loads: Loads,
        reached_values: ReachedValues,
        newcomers: Newcomers,
        sharding: Sharding | None,
    ) -> None:
        self._model = model
        self._run = run
        self._loads = loads
        self._reached_values = reached_values
        self._newcomers = newcomers
        # Where ranks share the parameters, and there are several.
        self._sharding = None if sharding is None or sharding.figures is None else sharding

    def save(self, folder: str | os.PathLike[str], *, among_others: bool) -> None:
        """Write what is committed, with the options that the groups have now; all ranks do so together."""
        if self._sharding is None:
            self._settle()
            self._write(folder, self._contents(), {}, among_others=among_others)
        else:
            self._save_together(self._sharding, folder, among_others=among_others)
        self._run.record.position.save_to(folder)
        self._run.resources.unread = False
        missing = self._newcomers.unsaved(self._run.record.buffers.names)
        if missing:
            warnings.warn(
                f"{listed(missing)} came to the model after offload(), and the checkpoint in {folder} has them not: "
                "save them beside it, by torch.save() of their values",
                stacklevel=4,
            )

    def save_weights(self, folder: Path | None) -> None:
        """Write weights and configuration alone into a folder that is there; all ranks do so together.

        `folder` is the first rank's; the others have none.
        """
        sharding = self._sharding
        assert sharding is not None
        figures = sharding.figures
        assert figures is not None
        figures.together(self._settle, UsageError)
        own = figures.together(lambda: WeightContents(self._contents()))
        self._gather(sharding, own, lambda contents: save_weights(cast("Path", folder), contents, self._model))

    def _settle(self) -> None:
        self._run.require_quiet()
        self._loads.settle()
        self._reached_values.write_between_steps()

    def _contents(self) -> StoreContents:
        return StoreContents(self._run.resources.store, self._run.gradients.by_name.keys())

    def _write(
        self, folder: str | os.PathLike[str], contents: Contents, more: dict[str, Any], *, among_others: bool
    ) -> None:
        save(folder, contents, self._model, {**self._run.record.facts(), **more}, among_others=among_others)

    def _save_together(self, sharding: Sharding, folder: str | os.PathLike[str], *, among_others: bool) -> None:
        figures = sharding.figures
        assert figures is not None
        figures.together(self._settle, UsageError)
        own = figures.together(self._contents)
        # Data positions, random states: each rank has its own.
        states = figures.everyone(self._run.record.user_state)
        more = {} if all(state == states[0] for state in states) else {"user_states": states}
        self._gather(sharding, own, lambda found: self._write(folder, found, more, among_others=among_others))

    def _gather(self, sharding: Sharding, own: RankContents, write: Callable[[Contents], None]) -> None:
        """Have the first rank write what all have."""
        # One process needs nothing of these.
        from memascend.checkpoint.rank_contents import GatheredContents, send_contents
        from memascend.ranks.line import StoppedError

        figures = sharding.figures
        assert figures is not None
        line = figures.line()

        def receive() -> None:
            gathered = GatheredContents(own, sharding.rows, line)
            try:
                write(gathered)
            finally:
                gathered.stop()

        def do_part() -> bool:
            """Whether nobody stopped it."""
            try:
                if sharding.rank:
                    send_contents(own, sharding.rows, sharding.order, line)
                else:
                    receive()
            except StoppedError:
                return False
            except RankError as error:
                # The first rank names whom it misses; who sends may wait for it while it waits for another.
                if not sharding.rank:
                    raise
                raise figures.exchange.lost(
                    f"sending rows to the first rank ({error})", figures.exchange.timeout
                ) from error
            return True

        if not figures.together(do_part, _not_saved):
            raise _not_saved("rows of a rank did not arrive")


def _not_saved(why: str) -> RankError:
    return RankError(f"the checkpoint was not written, and what was there before stays: {why}", ranks=())
