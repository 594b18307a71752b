"""Tracks which step of which store a run stands at, and which checkpoint it began from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from memascend.checkpoint.manifest import identity_of
from memascend.errors import UsageError

if TYPE_CHECKING:
    import os

    from memascend.engine import Store


class Position:
    """Where a run stands.

    An identity names store and step, and the line of steps where the run went back: two steps that have one number are
    told apart by what they were made from.
    """

    def __init__(self, store: Store, checkpoint: str | os.PathLike[str] | None) -> None:
        """`checkpoint` is what offload() was given, also where the store stood before it."""
        self._store = store
        self._checkpoint = checkpoint
        self.step = store.step
        # Steps that were committed by this run.
        self.made = 0
        stored = store.hyperparameters or {}
        # The identity of the checkpoint that it began from, where no step was made since.
        self._origin: dict[str, Any] | None = stored.get("origin")
        # The generation of the store in which it went back last.
        self.line: int | None = stored.get("line")
        # The checkpoint that was written of this step.
        self._saved: str | None = None

    def advance(self) -> None:
        """A step was committed."""
        self.step += 1
        self.made += 1
        self._origin = self._saved = None

    def go_back(self, step: int, origin: dict[str, Any], line: int) -> None:
        """What a checkpoint of this identity holds was committed."""
        self.step, self._origin, self.line, self._saved = step, origin, line, None

    def save_to(self, folder: str | os.PathLike[str]) -> None:
        """A checkpoint of this step was written."""
        self._saved = str(Path(folder).absolute())

    def identity(self) -> dict[str, Any]:
        """Which store this is, and where it stands."""
        line = {} if self.line is None else {"line": self.line}
        return {"store": self._store.info()["uuid"], "step": self.step, **line}

    def state(self) -> dict[str, Any]:
        """The identity for a state dict, with the checkpoint that was written of it."""
        return {**self.identity(), **({} if self._saved is None else {"checkpoint": self._saved})}

    def find(self, state: dict[str, Any] | None) -> str | os.PathLike[str] | None:
        """The checkpoint to go back to for a state dict's state; None where the store holds it already.

        Raises:
            UsageError: it is of another step, and no checkpoint of that is at hand.
        """
        if state is None:
            raise UsageError(
                "this state dict was not made by an offloaded optimizer; give the optimizer that holds the state to "
                "offload()"
            )
        wanted = {name: value for name, value in state.items() if name != "checkpoint"}
        here = self.identity()
        # What began from a checkpoint is what was saved there, until the next step.
        if wanted in (here, self._origin):
            return None
        if wanted.get("store") == here["store"]:
            for folder in (state.get("checkpoint"), self._checkpoint):
                if folder is not None and identity_of(folder) == wanted:
                    return folder
        began = f" (begun from a checkpoint of {shown(self._origin)})" if self._origin else ""
        given = None if self._checkpoint is None else identity_of(self._checkpoint)
        other = f", and the checkpoint {self._checkpoint} is of {shown(given)}" if given else ""
        raise UsageError(
            f"this state dict is of {shown(wanted)}, and the storage holds {shown(here)}{began}{other}: go on from the "
            'storage (existing="resume") with the data of its step, or begin from a checkpoint of the state dict, '
            'offload(existing="replace", checkpoint=...). optimizer.save() writes one; a state dict that is taken '
            "after it goes back to it by itself"
        )

    @property
    def given(self) -> str:
        """For messages: the checkpoint that offload() was given."""
        return "" if self._checkpoint is None else f" (offload() was given checkpoint={str(self._checkpoint)!r})"


def shown(identity: dict[str, Any]) -> str:
    """A step of a store, for messages."""
    return f"step {identity.get('step')} of store {identity.get('store')}"
