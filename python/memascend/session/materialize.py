"""Makes parameters real for a while, in unlinked files, and writes whole checkpoints of a run."""

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
    from memascend.params.unit import Home
    from memascend.session.attachment import Newcomers
    from memascend.session.run import Run
    from memascend.session.value_edits import Edit, Edits


# Models whose parameters are real now.
_MATERIALIZED: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


@contextlib.contextmanager
def materialized(model: torch.nn.Module, modify: bool = False) -> Iterator[None]:
    """Make the parameters real inside a `with` block, with the values of the last committed step.

    The values are in unlinked files, so that a model larger than memory can be inspected and saved. Under
    `fully_shard` the parameters stay DTensors, and their local tensors are this rank's rows in such files. All ranks
    enter and leave the block together, with and without `modify`.

    Args:
        model: an offloaded model.
        modify: write back changed values, and commit them at once, on all ranks or none. A value whose bits did not
            change leaves its master and its state untouched. Without it changes are dropped at the end, with a warning.
            A parameter that was replaced by another one, as `load_state_dict(assign=True)` does, gets its values: the
            modules have their own parameters again.

    Raises:
        UsageError: the model is not offloaded; or with `modify`, a step is staged, a parameter was given memory that
            other code may write to unseen, or was removed, or replaced by one that does not fit.
        RankError: another rank failed in the block, or is gone; nothing was committed.
    """
    if model in _MATERIALIZED:
        raise UsageError(
            "materialized() within materialized(): the parameters are real already. Leave the inner one out"
        )
    optimizer = model.__dict__.get("_memascend")
    if optimizer is None:
        raise UsageError(
            "this model is not offloaded, or its optimizer was closed, so it has no values on storage: give the model "
            "that offload() returned, before close()"
        )
    session = session_of(optimizer)
    run, attachment, edits = session.run, session.attachment, session.edits
    reshard: Callable[[], object] = int if session.sharding is None else session.sharding.reshard
    homes: list[Home] = []
    # Values that are written back are compared with storage; only dropped changes need checksums.
    checksums: dict[str, str] | None = None if modify else {}
    written: str | None = None
    kept: list[tuple[Place, torch.Tensor]] = []
    slots = _Slots(model)
    with edits.together() if modify else edits.reading() as edit:
        run.require_open()
        # A forward without a backward leaves gathered parameters of its outermost module.
        reshard()
        try:
            with run.residency.turns.alone():
                run.residency.require_idle("materialized()")
                run.residency.copies.require_unwritten()
                _make_real(run.residency, homes, checksums)
            # A rank that cannot make them real ends the block of all before they wait for it inside.
            edits.is_any(False)
            _MATERIALIZED.add(model)
            # A copy or pickle that is made inside is of a plain model.
            attachment.leave()
            run.resources.values_read()
            yield
            # A forward inside has put gathered parameters into the modules.
            reshard()
            if modify:
                run.require_open()
            values, written = _taken(slots, homes, checksums)
        finally:
            slots.restore()
            if model in _MATERIALIZED:
                _MATERIALIZED.discard(model)
                if not run.resources.closed:
                    attachment.enter(optimizer)
            _release(run.residency, homes)
            # After an exception, too: the next forward would compute with their values.
            reshard()
        if not run.resources.closed:
            kept = _settle(edits, edit, values)
    # In a plain model it would be the weights'.
    run.residency.copies.keep(kept, is_snapshot=not modify)
    if written is not None:
        warn(
            f"the values of {written} were changed within materialized(model), and are what they were before: "
            "materialized(model, modify=True) keeps changes"
        )


class _Slots:
    """The parameters in the modules of a model, which code within `materialized()` may replace or remove."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Take those of now, which are offloaded."""
        self.model = model
        # By the id of a parameter: its place (None: this rank has no rows of it) and its slots, each with its name.
        self._of: dict[int, tuple[torch.nn.Parameter, Place | None, list[tuple[str, torch.nn.Module, str]]]] = {}
        for prefix, module in model.named_modules():
            for short, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None and "_memascend" in parameter.__dict__:
                    known = self._of.setdefault(id(parameter), (parameter, parameter.__dict__["_memascend"], []))
                    known[2].append((f"{prefix}.{short}" if prefix else short, module, short))

    def replaced(self) -> Iterator[str]:
        """The names of slots that have another parameter now."""
        for parameter, _, slots in self._of.values():
            for name, module, short in slots:
                now = module._parameters.get(short)  # noqa: SLF001
                if now is not None and now is not parameter:
                    yield name

    def restore(self) -> None:
        """Put the model's own parameters where others are."""
        for parameter, _, slots in self._of.values():
            for _, module, short in slots:
                if module._parameters.get(short) is not None:  # noqa: SLF001
                    module._parameters[short] = parameter  # noqa: SLF001

    def given(self) -> dict[str, torch.Tensor]:
        """Values, on this rank, of the parameters that were replaced, by the names of their places.

        Raises:
            UsageError: a parameter was replaced by one that cannot be written to its place, or went with its module,
                for which a module with other parameters came.
        """
        modules, there = set(self.model.modules()), set(map(id, self.model.parameters()))
        in_slots = {id(module._parameters.get(short)) for *_, slots in self._of.values() for _, module, short in slots}  # noqa: SLF001
        # A parameter that only goes, as adapters that are merged do, drops nothing.
        are_others = bool(there - self._of.keys() - in_slots)
        found: dict[str, torch.Tensor] = {}
        for parameter, place, slots in self._of.values():
            now = [(name, module._parameters.get(short)) for name, module, short in slots if module in modules]  # noqa: SLF001
            others = [(name, one) for name, one in now if one is not None and one is not parameter]
            if not others:
                if are_others and id(parameter) not in there:
                    raise _misfit(slots[0][0], "removed", "change the model before offload(): save() what there is")
                continue
            for name, one in others:
                _require_fits(name, parameter, one)
            (first, given), *rest = [(name, one) for name, one in now if one is not None]
            for name, one in rest:
                if one is not given and not same_bits(_rows(one).cpu(), _rows(given).cpu()):
                    why = f"{first!r} and {name!r} are one parameter, which storage keeps: give both the same values"
                    raise _misfit(others[0][0], "replaced", why)
            if place is not None:
                found[place.name] = _rows(others[0][1])
        return found


def _require_fits(name: str, parameter: torch.nn.Parameter, given: torch.nn.Parameter) -> None:
    """Reject a parameter whose values cannot take the place of those of `parameter`."""
    like = [_traits(one) for one in (parameter, given)]
    for wanted, found in zip(*like, strict=True):
        if wanted != found:
            raise _misfit(name, "replaced", f"it has {wanted}, and the other one {found}: give its values by copy_()")


def _traits(parameter: torch.nn.Parameter) -> list[str]:
    """What has to be the same of parameters that take each other's place, in words."""
    of_ranks = isinstance(parameter, DTensor)
    where = f"{parameter.placements} on {parameter.device_mesh}" if of_ranks else "of one process"  # type: ignore[attr-defined]
    values = "no values" if parameter.is_meta else str(parameter.layout)
    asks = f"requires_grad={parameter.requires_grad}"
    return [f"shape {list(parameter.shape)}", str(parameter.dtype), asks, values, where]


def _rows(parameter: torch.nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _misfit(name: str, what: str, why: str) -> UsageError:
    return UsageError(f"{name!r} was {what} within materialized(), and nothing was changed on storage: {why}")


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


def _taken(
    slots: _Slots, homes: list[Home], checksums: Mapping[str, str] | None
) -> tuple[dict[str, torch.Tensor], str | None]:
    """The values of all parameters as the block has left them, to be written back.

    With `checksums` of the values at its beginning, nothing is written: then the name of one that was changed, too.
    """
    own: dict[str, torch.Tensor] = {place.name: place.parameter for home in homes for place in home.places}
    written = None
    if checksums is None:
        own.update(slots.given())
        _require_own_memory(own, slots.model)
    else:
        written = next(slots.replaced(), None) or _written(homes, checksums)
    return {name: one.detach() for name, one in own.items()}, written


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
        # One of another shape is no weight's, and is dropped with a warning.
        if place.name in kept and own.shape == place.shape:
            found.append((place, own))
    return found


def _require_own_memory(named: Mapping[str, torch.Tensor], model: torch.nn.Module) -> None:
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
                place.offload()
            home.count(NOBODY, -1)
            homes.pop()


def _written(homes: list[Home], checksums: Mapping[str, str]) -> str | None:
    """A parameter whose values were changed in any way; None where there is none."""
    for place in (place for home in homes for place in home.places):
        values = place.parameter.detach()
        is_alike = values.shape == place.shape and values.dtype == place.dtype and values.stride() == place.stride
        if not is_alike or not values.is_cpu or checksum_of(bytes_of(values)) != checksums[place.name]:
            return place.name
    return None


def is_materialized(model: torch.nn.Module) -> bool:
    """Whether a module, or one in it, is offloaded and within `materialized()` now."""
    return any(module in _MATERIALIZED for module in model.modules())


@dataclass(eq=False)
class Saving:
    """Writes checkpoints of one run; all ranks call it together."""

    _model: torch.nn.Module
    _run: Run
    _newcomers: Newcomers
    _sharding: Sharding | None

    def __post_init__(self) -> None:
        sharding, exchange = self._sharding, exchange_of(self._sharding)
        self._exchange = exchange
        self._shares = None if sharding is None or isinstance(exchange, Alone) else Shares(sharding, exchange)

    def save(self, folder: str | os.PathLike[str], *, among_others: bool = False) -> None:
        """Write a checkpoint of the last commit, with the current options of the groups and the current buffers."""
        own = self._contents()
        facts = self._exchange.together(self._run.metadata.facts, UsageError)
        # Data positions, random states: each rank has its own.
        states = self._exchange.everyone(self._run.metadata.user_state)
        if not all(state == states[0] for state in states):
            facts["user_states"] = states
        self._write(
            own, lambda records, fill: save(folder, records, self._model, facts, fill, among_others=among_others)
        )
        self._run.resources.values_read()
        missing = self._newcomers.unsaved(self._run.buffers.names)
        if missing:
            warn(
                f"{listed(missing)} came to the model after offload(), and the checkpoint in {folder} has them not: "
                "save them beside it, by torch.save() of their values"
            )

    def save_weights(self, folder: Path | None) -> None:
        """Write weights and configuration alone into an existing folder.

        `folder` is the first rank's; the others have none.
        """
        own = self._contents(values_alone=True)
        self._write(own, lambda records, fill: save_weights(cast("Path", folder), records, self._model, fill))

    def _contents(self, *, values_alone: bool = False) -> StoreContents:
        """The last commit of this rank, with the model's buffers. No rank has any where a step is staged on one."""
        run = self._run
        self._exchange.together(run.require_quiet, UsageError)

        def contents() -> StoreContents:
            run.buffers.require_same_kinds()
            store, names = run.resources.store, run.gradients.by_name.keys()
            return StoreContents(store, names, run.buffers, values_alone=values_alone)

        return self._exchange.together(contents)

    def _write(self, own: StoreContents, write: Callable[[Sequence[Content], Fill], None]) -> None:
        """Let the first rank, or the only process, make the files, and each rank write its rows where it can."""
        sharding, exchange, shares = self._sharding, self._exchange, self._shares
        if sharding is None or shares is None or isinstance(exchange, Alone):
            write(own.records, lambda folder, places: write_into(folder, places, own))
            return
        line = exchange.line

        def do_part() -> bool:
            """Whether all rows arrived."""
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
            arrived = all(exchange.everyone(exchange.together(do_part, _not_saved)))
        finally:
            if not arrived:
                line.close()
        if not arrived:
            raise _not_saved("rows of a rank did not arrive")


def _not_saved(why: str) -> RankError:
    return RankError(f"the checkpoint was not written, and the earlier one stays: {why}", ranks=())
