"""Makes parameters real for a while, in unlinked files, and writes whole checkpoints of a run."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any, cast

from memascend.checkpoint.contents import StoreContents
from memascend.checkpoint.writer import save, save_weights
from memascend.errors import RankError, UsageError
from memascend.params.aliases import FOREIGN, find_foreign, others_hold, overlapping
from memascend.params.unit import NOBODY
from memascend.storage import checksum_of
from memascend.tensors import bytes_of
from memascend.text import listed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    import torch

    from memascend.checkpoint.contents import Contents
    from memascend.distributed.sharding import Sharding
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.params.unit import Home
    from memascend.session.attachment import Attachment, Newcomers
    from memascend.session.run import Run
    from memascend.session.value_edits import Edit, Edits


# Models whose parameters are real now.
MATERIALIZED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def real_parameters(edits: Edits, attachment: Attachment, sharding: Sharding | None, *, modify: bool) -> Iterator[None]:
    """Make an offloaded model a plain one inside; see `materialized`."""
    run, model = edits.run, attachment.model
    if model in MATERIALIZED:
        raise UsageError(
            "materialized() within materialized(): the parameters are real already. Leave the inner one out"
        )
    optimizer = model.__dict__["_memascend"]
    homes: list[Home] = []
    # Values that are written back are compared with storage; only dropped changes need checksums.
    checksums: dict[str, str] | None = None if modify else {}
    written: str | None = None
    kept: list[tuple[Place, torch.Tensor]] = []
    with edits.together() if modify else edits.reading() as edit:
        run.require_open()
        if sharding is not None:
            # A forward without a backward leaves gathered parameters of its outermost module.
            sharding.reshard()
        try:
            with run.residency.turns.alone():
                run.residency.require_idle("materialized()")
                run.residency.copies.require_unwritten()
                _make_real(run.residency, homes, checksums)
            # A rank that cannot make them real ends the block of all before they wait for it inside.
            edits.is_any(False)
            MATERIALIZED.add(model)
            # A copy or pickle that is made inside is of a plain model.
            attachment.leave()
            run.resources.unread = False
            yield
            values = {place.name: place.parameter.detach() for home in homes for place in home.places}
            if checksums is None:
                run.require_open()
                _require_own_memory({place.name: place.parameter for home in homes for place in home.places}, model)
            else:
                written = _written(homes, checksums)
        finally:
            if model in MATERIALIZED:
                MATERIALIZED.discard(model)
                if not run.resources.closed:
                    attachment.enter(optimizer)
            _release(run.residency, homes)
            if sharding is not None:
                # A forward inside has left them, too, and the next one would compute with their values.
                sharding.reshard()
        if not run.resources.closed:
            kept = _settle(edits, edit, values)
    # In a plain model it would be the weights'.
    run.residency.copies.keep(kept, is_snapshot=not modify)
    if written is not None:
        warnings.warn(
            f"the values of {written} were changed within materialized(model), and are what they were before: "
            "materialized(model, modify=True) keeps changes",
            stacklevel=3,
        )


def _make_real(residency: Residency, homes: list[Home], checksums: dict[str, str] | None) -> None:
    """Make every parameter a plain one; `homes` gets the finished units, `checksums` those of all values."""
    for home in residency.units.homes:
        copies = [residency.copy_of(place) for place in home.places]
        if checksums is not None:
            named = zip(home.places, copies, strict=True)
            checksums.update({place.name: checksum_of(bytes_of(copy)) for place, copy in named})
        with residency.lock:
            # Its slot in the arena is needed for the next unit.
            residency.units.evict(home)
            homes.append(home)
            home.count(NOBODY, 1)
            for place, copy in zip(home.places, copies, strict=True):
                place.release(copy)


def _settle(edits: Edits, edit: Edit | None, values: dict[str, torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    """Stage what was changed, where there is an edit; returns the memory of parameters that user code keeps."""
    kept = set(others_hold(values))
    found = []
    if edit is not None:
        edits.run.require_quiet()
    for place in (place for home in edits.run.residency.units.homes for place in home.places):
        own = values.pop(place.name)
        if edit is not None:
            edits.stage(edit, place, own)
        if place.name in kept:
            found.append((place, own))
    return found


def _require_own_memory(named: Mapping[str, torch.nn.Parameter], model: torch.nn.Module) -> None:
    """Reject memory in which later writes would be lost, where they would change a plain model."""
    pair = overlapping([*named.items(), *model.named_buffers()])
    if pair is not None:
        raise UsageError(
            f"{pair[0]!r} and {pair[1]!r} were made to share memory within materialized(), which storage cannot; "
            "nothing was changed: give clones to .data"
        )
    foreign = find_foreign(named)
    if foreign:
        raise UsageError(
            f"{foreign[0]!r} was given {FOREIGN} within materialized(), and later writes there would be lost; nothing "
            "was changed: write the values by copy_(), or give .data a clone()"
        )


def _release(residency: Residency, homes: list[Home]) -> None:
    with residency.turns.alone(), residency.lock:
        while homes:
            home = homes[-1]
            for place in home.places:
                place.unbind()
            home.count(NOBODY, -1)
            homes.pop()


def _written(homes: list[Home], checksums: dict[str, str]) -> str | None:
    """A parameter whose values were changed in any way; None where there is none."""
    for place in (place for home in homes for place in home.places):
        values = place.parameter.detach()
        is_alike = values.shape == place.shape and values.dtype == place.dtype and values.stride() == place.stride
        if not is_alike or not values.is_cpu or checksum_of(bytes_of(values)) != checksums[place.name]:
            return place.name
    return None


def is_materialized(model: torch.nn.Module) -> bool:
    """Whether a module, or one in it, is offloaded and within `materialized()` now."""
    return any(module in MATERIALIZED for module in model.modules())


class Saving:
    """Writes checkpoints of one run."""

    def __init__(
        self,
        model: torch.nn.Module,
        run: Run,
        newcomers: Newcomers,
        sharding: Sharding | None,
    ) -> None:
        self._model = model
        self._run = run
        self._newcomers = newcomers
        # Where several ranks share the parameters.
        self._shared = None if sharding is None or sharding.exchange is None else (sharding, sharding.exchange)

    def save(self, folder: str | os.PathLike[str], *, among_others: bool) -> None:
        """Write a checkpoint of the last commit, with the current options of the groups; all ranks call it together."""
        if self._shared is None:
            self._settle()
            self._write(folder, self._contents(), {}, among_others=among_others)
        else:
            _, figures = self._shared
            figures.together(self._settle, UsageError)
            own = figures.together(self._contents)
            # Data positions, random states: each rank has its own.
            states = figures.everyone(self._run.record.user_state)
            more = {} if all(state == states[0] for state in states) else {"user_states": states}
            self._gather(own, lambda found: self._write(folder, found, more, among_others=among_others))
        self._run.resources.unread = False
        missing = self._newcomers.unsaved(self._run.record.buffers.names)
        if missing:
            warnings.warn(
                f"{listed(missing)} came to the model after offload(), and the checkpoint in {folder} has them not: "
                "save them beside it, by torch.save() of their values",
                stacklevel=4,
            )

    def save_weights(self, folder: Path | None) -> None:
        """Write weights and configuration alone into an existing folder; all ranks call it together.

        `folder` is the first rank's; the others have none.
        """
        if self._shared is None:
            self._settle()
            save_weights(cast("Path", folder), self._contents(values_alone=True), self._model)
            return
        _, figures = self._shared
        figures.together(self._settle, UsageError)
        own = figures.together(lambda: self._contents(values_alone=True))
        self._gather(own, lambda contents: save_weights(cast("Path", folder), contents, self._model))

    def _settle(self) -> None:
        self._run.require_quiet()

    def _contents(self, *, values_alone: bool = False) -> StoreContents:
        run = self._run
        return StoreContents(run.resources.store, run.gradients.by_name.keys(), values_alone=values_alone)

    def _write(
        self, folder: str | os.PathLike[str], contents: Contents, more: dict[str, Any], *, among_others: bool
    ) -> None:
        save(folder, contents, self._model, {**self._run.record.facts(), **more}, among_others=among_others)

    def _gather(self, own: StoreContents, write: Callable[[Contents], None]) -> None:
        """Let the first rank write the rows of all ranks."""
        # One process does not import these.
        from memascend.checkpoint.contents import GatheredContents, send_contents
        from memascend.distributed.groups import StoppedError

        assert self._shared is not None
        sharding, figures = self._shared
        line = figures.line.open()

        def do_part() -> bool:
            """Whether all rows arrived."""
            try:
                if sharding.rank:
                    send_contents(own, sharding.rows, sharding.order, line)
                else:
                    write(GatheredContents(own, sharding.rows, line, sharding.count))
            except StoppedError as error:
                if error.is_late:
                    raise figures.lost(f"sending rows to the first rank ({error})", figures.timeout) from error
                return False
            except BaseException:
                line.close()
                raise
            return True

        arrived = False
        try:
            arrived = all(figures.everyone(figures.together(do_part, _not_saved)))
        finally:
            if not arrived:
                line.close()
        if not arrived:
            raise _not_saved("rows of a rank did not arrive")


def _not_saved(why: str) -> RankError:
    return RankError(f"the checkpoint was not written, and the earlier one stays: {why}", ranks=())
