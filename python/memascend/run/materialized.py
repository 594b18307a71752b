"""Gives an offloaded model real parameters for a while; they lie in unlinked files."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING

from memascend.engine import checksum_of
from memascend.errors import UsageError
from memascend.residency.unit_slot import NOBODY
from memascend.run.optimizer import session_of
from memascend.tensors import bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from memascend.residency.unit_slot import Home
    from memascend.run.attachment import Attachment
    from memascend.run.rewrites import Rewrites
    from memascend.run.run import Run

# Models whose parameters are real now.
_OPEN: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


class Materializer:
    """Makes an offloaded model a plain one, and takes it back."""

    def __init__(self, run: Run, rewrites: Rewrites, attachment: Attachment, *, sharded: bool) -> None:
        """`sharded`: ranks share the parameters."""
        self._sharded = sharded
        self._run = run
        self._rewrites = rewrites
        self._attachment = attachment

    @contextlib.contextmanager
    def materialized(self, *, modify: bool) -> Iterator[None]:
        """Real parameters inside."""
        model = self._attachment.model
        if self._sharded:
            raise UsageError(
                "materialized() is for a model of one process: under fully_shard(), optimizer.save() writes all "
                "values, parameter.full_tensor() gathers those of one, and model.state_dict() has the rows of all"
            )
        if model in _OPEN:
            raise UsageError("materialized() within materialized(): the parameters are real already")
        if modify:
            self._run.require_quiet()
        self._run.require_open()
        optimizer = model.__dict__["_memascend"]
        homes: list[Home] = []
        # What is written back is compared with storage: only what is dropped needs them.
        checksums: dict[str, str] | None = None if modify else {}
        written: str | None = None
        try:
            with self._run.residency.turns.alone():
                self._run.residency.require_idle("materialized()")
                # What user code wrote to weights is what the model has.
                self._run.residency.reached.look()
                self._make_real(homes, checksums)
            _OPEN.add(model)
            # What is copied or pickled in there is a plain model.
            self._attachment.leave()
            self._run.resources.unread = False
            yield
            if checksums is None:
                self._run.require_open()
                self._write_back(homes)
            else:
                written = _written(homes, checksums)
        finally:
            if model in _OPEN:
                _OPEN.discard(model)
                if not self._run.resources.closed:
                    self._attachment.enter(optimizer)
            self._release(homes)
        if written is not None:
            warnings.warn(
                f"the values of {written} were changed within materialized(model), and are what they were before: "
                "materialized(model, modify=True) keeps changes",
                stacklevel=3,
            )

    def _make_real(self, homes: list[Home], checksums: dict[str, str] | None) -> None:
        """Let every parameter be a plain one; `homes` are those that are, `checksums` of all values where asked for."""
        residency = self._run.residency
        for home in residency.units.homes:
            copies = [residency.copy_of(place) for place in home.places]
            if checksums is not None:
                named = zip(home.places, copies, strict=True)
                checksums.update({place.name: checksum_of(bytes_of(copy)) for place, copy in named})
            with residency.lock:
                # Its place in the arena is needed for the next one.
                residency.units.evict(home)
                homes.append(home)
                home.count(NOBODY, 1)
                for place, copy in zip(home.places, copies, strict=True):
                    place.release(copy)

    def _write_back(self, homes: list[Home]) -> None:
        values = {place.name: place.parameter.detach() for home in homes for place in home.places}
        self._release(homes)
        places = [place for home in self._run.residency.units.homes for place in home.places]
        try:
            changed = [place.name for place in places if self._rewrites.stage(place, values.pop(place.name))]
            if changed:
                self._rewrites.commit(changed)
        except BaseException:
            self._run.discard(place.name for place in places)
            raise

    def _release(self, homes: list[Home]) -> None:
        with self._run.residency.turns.alone(), self._run.residency.lock:
            while homes:
                home = homes[-1]
                for place in home.places:
                    place.unbind()
                home.count(NOBODY, -1)
                homes.pop()


def _written(homes: list[Home], checksums: dict[str, str]) -> str | None:
    """A parameter whose values are not what they were, by whatever way they were changed; None where there is none."""
    for place in (place for home in homes for place in home.places):
        values = place.parameter.detach()
        is_alike = values.shape == place.shape and values.dtype == place.dtype and values.stride() == place.stride
        if not is_alike or not values.is_cpu or checksum_of(bytes_of(values)) != checksums[place.name]:
            return place.name
    return None


def is_materialized(model: torch.nn.Module) -> bool:
    """Whether a module, or one in it, is offloaded and within `materialized()` now."""
    return any(module in _OPEN for module in model.modules())


def materialized(model: torch.nn.Module, modify: bool = False) -> contextlib.AbstractContextManager[None]:
    """Real parameters inside a `with` block: those of the last committed step.

    They lie in unlinked files, so that a model larger than memory can be looked at and saved.

    Args:
        model: an offloaded model.
        modify: write back what was changed, and commit it at once. A value whose bits did not change leaves its master
            and its state untouched. Without it what is changed inside is dropped at the end, with a warning.

    Raises:
        UsageError: the model is not offloaded, or a step is staged (with `modify`).
    """
    offloaded = model.__dict__.get("_memascend")
    if model in _OPEN:
        raise UsageError("materialized() within materialized(): the parameters are real already")
    if offloaded is None:
        raise UsageError("this model is not offloaded, or its optimizer was closed")
    materializer: Materializer = session_of(offloaded).materializer
    return materializer.materialized(modify=modify)
