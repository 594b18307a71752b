"""Tracks which step of which store a run stands at, and which checkpoint it began from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memascend.checkpoint.reader import identity_of
from memascend.errors import UsageError

if TYPE_CHECKING:
    import os

    from memascend.engine import Store

__all__ = ["Position", "shown"]


class Position:
    """Where a run stands."""

    def __init__(self, store: Store, checkpoint: str | os.PathLike[str] | None) -> None:
        """`checkpoint` is what offload() was given, also where the store stood before it."""
        self._store = store
        self._checkpoint = checkpoint
        self.step = store.step
        self._began = self.step
        # Store and step of the checkpoint that it began from, where no step was made since.
        self._origin: dict[str, Any] | None = (store.hyperparameters or {}).get("origin")

    @property
    def made(self) -> int:
        """Steps that were committed by this run."""
        return self.step - self._began

    def advance(self) -> None:
        """A step was committed."""
        self.step += 1

    def identity(self) -> dict[str, Any]:
        """Which store this is, and where it stands."""
        return {"store": self._store.info()["uuid"], "step": self.step}

    def require(self, identity: dict[str, Any] | None) -> None:
        """Refuse a state that is not what the store holds."""
        here = self.identity()
        if identity is None:
            raise UsageError(
                "this state dict was not made by an offloaded optimizer; give the optimizer that holds the state to "
                "offload()"
            )
        # What began from a checkpoint is what was saved there, until the next step.
        if identity != here and not (identity == self._origin and self.step == self._began):
            began = f" (begun from a checkpoint of {shown(self._origin)})" if self._origin else ""
            given = None if self._checkpoint is None else identity_of(self._checkpoint)
            other = f", and the checkpoint {self._checkpoint} is of {shown(given)}" if given else ""
            raise UsageError(
                f"this state dict is of {shown(identity)}, and the storage holds {shown(here)}{began}{other}: go on "
                'from the storage (existing="resume") with the data of its step, or begin from the checkpoint of the '
                'state dict: offload(existing="replace", checkpoint=...)'
            )

    @property
    def given(self) -> str:
        """For messages: the checkpoint that offload() was given."""
        return "" if self._checkpoint is None else f" (offload() was given checkpoint={str(self._checkpoint)!r})"


def shown(identity: dict[str, Any]) -> str:
    """A step of a store, for messages."""
    return f"step {identity.get('step')} of store {identity.get('store')}"
