"""Materializes all parameters of a model for a `with` block, in unlinked files, and writes checkpoints of a run."""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

from torch.distributed.tensor import DTensor

from memascend.checkpoint.contents import StoreContents, whole_records
from memascend.checkpoint.shares import Shares, write_into
from memascend.checkpoint.writer import save, save_weights
from memascend.distributed.control_plane import Alone, exchange_of
from memascend.distributed.groups import StoppedError
from memascend.errors import RankError, UsageError
from memascend.params.aliases import FOREIGN, find_foreign, others_hold, overlapping
from memascend.params.unit import NOBODY
from memascend.session.optimizer import session_of
from memascend.storage import checksum_of
from memascend.tensors import bytes_of, same_bits
from memascend.text import listed, warn

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from memascend.checkpoint.contents import Content
    from memascend.checkpoint.writer import Fill
    from memascend.distributed.sharding import Sharding
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.params.unit import CachedUnit
    from memascend.session.attachment import AddedParameters
    from memascend.session.run import Run
    from memascend.session.value_edits import Edit, Edits


# The models that are inside a block of `materialized()`.
_MATERIALIZED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def materialized(model: torch.nn.Module, modify: bool = False) -> Iterator[None]:
    """Gives the parameters their values of the last committed step inside a `with` block.

    The values are in unlinked files, so you can inspect and save a model that is larger than memory. Under
    `fully_shard` the parameters stay DTensors; their local tensors (this rank's rows) are in unlinked files. All ranks
    must enter and leave the block together, with and without `modify`.

    Args:
        model: an offloaded model.
        modify: True writes changed values and buffers back at the end of the block, in one commit on all ranks or on
            none. A parameter whose bits changed gets a master weight that equals its new values; other parameters keep
            their master weights. All other optimizer state stays as it was. If the block replaced a parameter, as
            `load_state_dict(assign=True)` does, the original parameter gets the values of its replacement, and the
            module gets the original parameter back. False drops changes of parameters at the end of the block, with a
            warning.

    Raises:
        UsageError: the model is not offloaded, is computing or is inside `materialized()` already; or code wrote to a
            copy of a weight. With `modify`, also: a step is staged; or the block replaced a parameter by a parameter
            that does not fit, removed a parameter and added another, or gave a parameter values of another
            shape, or memory that other code may change.
        ConfigError: the storage is a raw device, and `offload()` got no `scratch` folder for the files. With `modify`,
            also: the dtype or shape of a buffer changed.
        StorageError: storage failed, or the files cannot be written; the last commit is intact.
        RankError: another rank failed in the block or is gone; nothing was committed.
    """
    if model in _MATERIALIZED:
        raise UsageError(
            "materialized() was called inside materialized() on the same model, whose parameters have their values "
            "already: remove the inner call"
        )
    optimizer = model.__dict__.get("_memascend")
    if optimizer is None:
        raise UsageError(
            "the model given to materialized() is not offloaded, or its optimizer was closed: pass the model that "
            "offload() returned, not a part of it or a wrapper, and call materialized() before optimizer.close()"
        )
    session = session_of(optimizer)
    run, attachment, edits = session.run, session.attachment, session.edits
    reshard: Callable[[], object] = int if session.sharding is None else session.sharding.reshard
    units: list[CachedUnit] = []
    # Without `modify`, changes are dropped, and these checksums show whether a warning is needed. With `modify`,
    # `Edits.stage` compares all values with storage.
    checksums: dict[str, str] | None = None if modify else {}
    written: str | None = None
    kept: list[tuple[Place, torch.Tensor]] = []
    slots = _Slots(model)
    with edits.together() if modify else edits.reading() as edit:
        run.require_open()
        # After a forward without a backward, FSDP2's outermost module still holds its gathered parameters: shard them.
        reshard()
        try:
            with run.residency.turns.alone():
                run.residency.require_idle("materialized()")
                run.residency.copies.require_unwritten()
                _make_real(run.residency, units, checksums)
            # If `_make_real` failed on a rank, all ranks raise here, before code in the block waits for that rank.
            edits.is_any(False)
            _MATERIALIZED.add(model)
            # Inside the block, copies and pickles of the model are plain models.
            attachment.leave()
            run.resources.values_read()
            yield
            # After a forward in the block, modules may still have gathered parameters.
            reshard()
            if modify:
                run.require_open()
            values, written = _taken(slots, units, checksums)
        finally:
            slots.restore()
            if model in _MATERIALIZED:
                _MATERIALIZED.discard(model)
                if not run.resources.closed:
                    attachment.enter(optimizer)
            _release(run.residency, units)
            # Reshard after an exception, too. Otherwise the next forward would compute with parameters that were
            # gathered in the block.
            reshard()
        if not run.resources.closed:
            kept = _settle(edits, edit, values)
    # User code still refers to the tensors in `kept`. In a plain model, a write to such a tensor would change a weight.
    # Here the write would not change the weight, so `copies` rejects such writes.
    run.residency.copies.keep(kept, is_snapshot=not modify)
    if written is not None:
        warn(
            f"{written} was changed within materialized(model), and the change was dropped: use "
            "materialized(model, modify=True) to keep changes"
        )


class _Slots:
    """Records which module holds which parameter: code inside `materialized()` may replace or remove parameters.

    A slot is an entry of a module's `_parameters`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Records the slots of all offloaded parameters."""
        self.model = model
        # Maps the id of a parameter to a tuple: the parameter, its `Place` (None if this rank has no rows of the
        # parameter), and its slots as (full name, module, name in the module).
        self._of: dict[int, tuple[torch.nn.Parameter, Place | None, list[tuple[str, torch.nn.Module, str]]]] = {}
        for prefix, module in model.named_modules():
            for short, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None and "_memascend" in parameter.__dict__:
                    known = self._of.setdefault(id(parameter), (parameter, parameter.__dict__["_memascend"], []))
                    known[2].append((f"{prefix}.{short}" if prefix else short, module, short))

    def replaced(self) -> Iterator[str]:
        """Yields the names of slots whose parameter was replaced inside the block."""
        for parameter, _, slots in self._of.values():
            for name, module, short in slots:
                now = module._parameters.get(short)  # noqa: SLF001
                if now is not None and now is not parameter:
                    yield name

    def restore(self) -> None:
        """Puts the original parameters back into slots with replacements. Slots that user code emptied stay empty."""
        for parameter, _, slots in self._of.values():
            for _, module, short in slots:
                if module._parameters.get(short) is not None:  # noqa: SLF001
                    module._parameters[short] = parameter  # noqa: SLF001

    def given(self) -> dict[str, torch.Tensor]:
        """Returns this rank's values of each replacement, under the name of the replaced parameter.

        Raises:
            UsageError: a replacement does not fit the parameter; the slots of one parameter have different values; or
                a parameter was removed, and the model has other new parameters.
        """
        modules, there = set(self.model.modules()), set(map(id, self.model.parameters()))
        in_slots = {id(module._parameters.get(short)) for *_, slots in self._of.values() for _, module, short in slots}  # noqa: SLF001
        # A removed parameter is an error only if the model has new parameters elsewhere: the values of the new
        # parameters would be lost. Merging an adapter only removes parameters, so it is allowed.
        are_others = bool(there - self._of.keys() - in_slots)
        found: dict[str, torch.Tensor] = {}
        for parameter, place, slots in self._of.values():
            now = [(name, module._parameters.get(short)) for name, module, short in slots if module in modules]  # noqa: SLF001
            others = [(name, one) for name, one in now if one is not None and one is not parameter]
            if not others:
                if are_others and id(parameter) not in there:
                    raise _misfit(
                        slots[0][0],
                        "removed",
                        "to give the model other parameters, call optimizer.save(folder), change a plain model with "
                        "the saved values, and call offload() again",
                    )
                continue
            for name, one in others:
                _require_fits(name, parameter, one)
            (first, given), *rest = [(name, one) for name, one in now if one is not None]
            for name, one in rest:
                if one is not given and not same_bits(_rows(one).cpu(), _rows(given).cpu()):
                    why = (
                        f"{first!r} and {name!r} are one tied parameter, which storage keeps once: give both names "
                        "the same values"
                    )
                    raise _misfit(others[0][0], "replaced", why)
            if place is not None:
                found[place.name] = _rows(others[0][1])
        return found


def _require_fits(name: str, parameter: torch.nn.Parameter, given: torch.nn.Parameter) -> None:
    """Rejects a replacement `given` that differs from `parameter` in a property that `_traits` lists."""
    like = [_traits(one) for one in (parameter, given)]
    for wanted, found in zip(*like, strict=True):
        if wanted != found:
            raise _misfit(
                name,
                "replaced",
                f"the parameter has {wanted}, but the replacement has {found}. Copy new values into the parameter "
                "with copy_()",
            )


def _traits(parameter: torch.nn.Parameter) -> list[str]:
    """Describes, for messages, the properties in which a replacement must equal the parameter that it replaces."""
    of_ranks = isinstance(parameter, DTensor)
    where = f"placements {parameter.placements} on {parameter.device_mesh}" if of_ranks else "no placements on ranks"  # type: ignore[attr-defined]
    values = "no values" if parameter.is_meta else str(parameter.layout)
    asks = f"requires_grad={parameter.requires_grad}"
    return [f"shape {list(parameter.shape)}", str(parameter.dtype), asks, values, where]


def _rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns this rank's rows of a DTensor, or the parameter itself."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _misfit(name: str, what: str, why: str) -> UsageError:
    return UsageError(f"{name!r} was {what} within materialized(), and nothing was changed on storage: {why}")


def _make_real(residency: Residency, units: list[CachedUnit], checksums: dict[str, str] | None) -> None:
    """Gives every parameter its values, in an unlinked file.

    Appends each unit to `units` before it changes the unit's parameters, so that `_release` can undo an interrupted
    call. `checksums`, unless it is None, gets the checksum of each parameter's values, under the parameter's name.
    """
    for unit in residency.units.all:
        copies = [residency.copy_of(place) for place in unit.places]
        if checksums is not None:
            named = zip(unit.places, copies, strict=True)
            checksums.update({place.name: checksum_of(bytes_of(copy)) for place, copy in named})
        with residency.lock:
            # The next unit needs this unit's slot in the arena.
            residency.units.evict(unit)
            units.append(unit)
            # `NOBODY` counts as a thread that uses the unit, so the cache does not fetch the unit during the block.
            unit.count(NOBODY, 1)
            for place, copy in zip(unit.places, copies, strict=True):
                place.release(copy)


def _taken(
    slots: _Slots, units: list[CachedUnit], checksums: Mapping[str, str] | None
) -> tuple[dict[str, torch.Tensor], str | None]:
    """Returns the values of all parameters at the end of the block, and the name of a parameter that was changed.

    With `modify`, `checksums` is None, the values include those of replacements, and the returned name is None.
    Without `modify`, `checksums` has the checksums of the values at the beginning of the block, and the values do not
    include those of replacements. The returned name is then None only if no parameter was changed or replaced.
    """
    own: dict[str, torch.Tensor] = {place.name: place.parameter for unit in units for place in unit.places}
    written = None
    if checksums is None:
        own.update(slots.given())
        _require_own_memory(own, slots.model)
    else:
        written = next(slots.replaced(), None) or _written(units, checksums)
    return {name: one.detach() for name, one in own.items()}, written


def _settle(edits: Edits, edit: Edit | None, values: dict[str, torch.Tensor]) -> list[tuple[Place, torch.Tensor]]:
    """Stages changed values if there is an `edit`; returns tensors of unchanged shape that user code still holds."""
    kept = set(others_hold(values))
    found = []
    if edit is not None:
        edits.run.require_quiet()
    for place in (place for unit in edits.run.residency.units.all for place in unit.places):
        own = values.pop(place.name)
        if edit is not None:
            edits.stage(edit, place, own)
        # Without `modify`, user code may have set values of a different shape. `copies` need not watch such values,
        # because they are not a copy of the weight. `materialized` drops them with a warning.
        if place.name in kept and own.shape == place.shape:
            found.append((place, own))
    return found


def _require_own_memory(named: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
    """Rejects values in memory that other code uses, because later writes by that code would not reach storage."""
    pair = overlapping([*named.items(), *model.named_buffers()])
    if pair is not None:
        raise UsageError(
            f"{pair[0]!r} and {pair[1]!r} were made to share memory within materialized(), but storage keeps each of "
            "them separately; nothing was changed: assign a clone() to .data of one of the two"
        )
    foreign = find_foreign(named)
    if foreign:
        raise UsageError(
            f"{foreign[0]!r} was given {FOREIGN} within materialized(), and later writes to this memory would be lost; "
            "nothing was changed: write the values with copy_(), or assign a clone() to .data"
        )


def _release(residency: Residency, units: list[CachedUnit]) -> None:
    """Turns parameters of `units` into placeholders again, the last unit first. An interrupted call can be repeated."""
    with residency.turns.alone(), residency.lock:
        while units:
            unit = units[-1]
            for place in unit.places:
                place.offload()
            unit.count(NOBODY, -1)
            units.pop()


def _written(units: list[CachedUnit], checksums: Mapping[str, str]) -> str | None:
    """Returns the name of a parameter whose values, shape, dtype, strides or device changed; None without changes."""
    for place in (place for unit in units for place in unit.places):
        values = place.parameter.detach()
        has_layout = values.shape == place.shape and values.dtype == place.dtype and values.stride() == place.stride
        if not has_layout or not values.is_cpu or checksum_of(bytes_of(values)) != checksums[place.name]:
            return place.name
    return None


def is_materialized(model: torch.nn.Module) -> bool:
    """True if `model`, or one of its submodules, is the model of an open block of `materialized()`."""
    return any(module in _MATERIALIZED for module in model.modules())


@dataclass(eq=False)
class Saving:
    """Writes checkpoints of one run; all ranks call its methods together."""

    _model: torch.nn.Module
    _run: Run
    _added_parameters: AddedParameters
    _sharding: Sharding | None

    def __post_init__(self) -> None:
        sharding, exchange = self._sharding, exchange_of(self._sharding)
        self._exchange = exchange
        self._shares = None if sharding is None or isinstance(exchange, Alone) else Shares(sharding, exchange)

    def save(self, folder: str | os.PathLike[str], *, among_others: bool = False) -> None:
        """Writes a checkpoint: values and state of the last commit, current options of the groups, current buffers.

        With `among_others`, the folder may have other files even if it has no earlier checkpoint.
        """
        own = self._contents()
        facts = self._exchange.together(self._run.metadata.facts, UsageError)
        # `user_state` may differ between ranks: it may have a rank's data position or random state, for example.
        states = self._exchange.all_values(self._run.metadata.user_state)
        if not all(state == states[0] for state in states):
            facts["user_states"] = states
        self._write(
            own, lambda records, fill: save(folder, records, self._model, facts, fill, among_others=among_others)
        )
        self._run.resources.values_read()
        missing = self._added_parameters.unsaved(self._run.buffers.names)
        if missing:
            warn(
                f"{listed(missing)} were added to the model after offload(), so the checkpoint in {folder} does not "
                "contain them: save their values separately with torch.save()"
            )

    def save_weights(self, folder: Path | None) -> None:
        """Writes only weights and configuration into an existing folder.

        The first rank passes `folder`, and all other ranks pass None.
        """
        own = self._contents(values_alone=True)
        self._write(own, lambda records, fill: save_weights(cast("Path", folder), records, self._model, fill))

    def _contents(self, *, values_alone: bool = False) -> StoreContents:
        """Returns this rank's part of the last commit, with the model's buffers.

        All ranks raise if `Run.require_quiet` raises on one of them, for example because a step is staged.
        """
        run = self._run
        self._exchange.together(run.require_quiet, UsageError)

        def contents() -> StoreContents:
            run.buffers.require_same_kinds()
            store, names = run.resources.store, run.gradients.by_name.keys()
            return StoreContents(store, names, run.buffers, values_alone=values_alone)

        return self._exchange.together(contents)

    def _write(self, own: StoreContents, write: Callable[[Sequence[Content], Fill], None]) -> None:
        """Writes the checkpoint's files.

        The only process, or the first rank, calls `write`, which creates the files. The only process writes all rows
        into these files. With several ranks, `Shares.fill` writes the rows: each rank writes its own rows if all ranks
        can write to the folder. Otherwise the ranks of the first replica send their rows to the first rank, which
        writes them.
        """
        sharding, exchange, shares = self._sharding, self._exchange, self._shares
        if sharding is None or shares is None or isinstance(exchange, Alone):
            write(own.records, lambda folder, places: write_into(folder, places, own))
            return
        line = exchange.line

        def do_part() -> bool:
            """Does this rank's part of the writing. If rows did not arrive, returns False, or raises on a timeout."""
            try:
                if not sharding.layout.rank:
                    write(whole_records(own, sharding.rows), partial(shares.fill, own))
                else:
                    shares.fill(own)
            except StoppedError as error:
                if error.is_late:
                    raise exchange.lost(f"sending rows to the first rank ({error})", exchange.timeout) from error
                return False
            except BaseException:
                line.close()
                raise
            return True

        arrived = False
        try:
            arrived = all(exchange.all_values(exchange.together(do_part, _not_saved)))
        finally:
            if not arrived:
                line.close()
        if not arrived:
            raise _not_saved("rows of a rank did not arrive")


def _not_saved(why: str) -> RankError:
    return RankError(
        f"the checkpoint was not written, and an earlier checkpoint in the folder was not changed: {why}. Save again "
        "on all ranks",
        ranks=(),
    )
