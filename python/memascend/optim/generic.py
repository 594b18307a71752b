"""Runs an optimizer's own code for one parameter at a time, on state that the engine streams from the store."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.errors import ConfigError, UsageError
from memascend.optim.comparison import RunMode, changes_alone, copy_of_one, without_scratch
from memascend.optim.shared import (
    GONE,
    Disagreement,
    SharedName,
    SharedValues,
    attributes_of,
    cloned,
    common_end,
    copied,
    give_gradient,
    named,
    parts_of,
    plain,
    plain_parameter,
    put,
    restored,
    run,
    storable,
)
from memascend.optim.trial import known
from memascend.tensors import laid_out

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from memascend.optim.state import StateLayout
    from memascend.storage import Chunk

    # A function that gets the changes that a run made to shared values.
    Ended = Callable[[dict[SharedName, Any]], None]


class Given(NamedTuple):
    """The arguments of an update, except the chunks."""

    sparse: torch.Tensor | None = None  # replaces the gradient of the chunks; one chunk then has the whole parameter
    factors: tuple[float, ...] = ()  # each multiplies the gradient in the gradient's dtype, in this order
    grad_scale: float = 1.0  # multiplies the gradient after `factors`, in the dtype in which the update computes


@dataclass(kw_only=True, eq=False)
class OwnUpdate:
    """One update of one parameter by the optimizer's own code. `Engine.apply` calls it for each chunk of the parameter.

    The optimizer's step runs on the memory of a chunk. State tensors that the step allocates are copied into the chunk.
    """

    optimizer: torch.optim.Optimizer
    group: int  # the number of the parameter's group
    layout: StateLayout
    given: Given
    ended: Ended  # called after the last chunk, on the same thread
    first: bool  # True if the parameter has no state yet
    method: str  # the method to run; only "step" runs with a gradient

    def __post_init__(self) -> None:
        self._is_known = known(self.optimizer)
        # Copy the options now: the engine calls this object later, and by then a scheduler may have set the options of
        # the next step.
        shared = SharedValues.of(self.optimizer)
        if self._is_known:
            # The copy gets only this group. That is safe for torch's own classes; other classes may read their first
            # group, or write to any group.
            self._begin = SharedValues(shared.attributes, copied([shared.groups[self.group]]))
            self.group = 0
        else:
            self._begin = shared.copy()
        # If there are several chunks: the scalars of the state before the update. Each chunk gets a copy of them.
        self._scalars: dict[str, torch.Tensor] = {}

    def __call__(self, chunk: Chunk) -> None:
        """Updates the part of the parameter in `chunk`."""
        layout = self.layout
        whole = chunk.start == 0 and chunk.last
        assert whole or not layout.whole, "the update needs the whole parameter at once"
        values = self._laid(chunk.values, whole)
        target = self._laid(chunk.state["master"], whole) if layout.master else values
        parameter = plain_parameter(target, layout.attributes)
        if self.method == "step":
            give_gradient(parameter, self._gradient_of(chunk, target, whole))
        state = {} if self.first else self._state_of(chunk, whole)
        begin = self._begin if self._is_known else self._begin.copy()
        copy = copy_of_one(self.optimizer, begin, self.group, parameter, state, layout.run_mode)
        run(copy, self.method)
        with torch.no_grad():
            if parameter.data_ptr() != target.data_ptr():
                target.copy_(parameter)
            if layout.master:
                values.copy_(target)
            self._keep(chunk, copy.state.get(parameter, {}), whole)
        if chunk.last:
            self.ended({} if self._is_known else changes_alone(self._begin, copy, self.group, layout.run_mode))

    def _laid(self, tensor: torch.Tensor, whole: bool) -> torch.Tensor:
        """Returns `tensor` with the parameter's shape and strides, or flat if it is only a part of the parameter."""
        if not whole:
            return tensor.reshape(-1)
        return tensor if tensor.shape == self.layout.shape else tensor.as_strided(self.layout.shape, self.layout.stride)

    def _gradient_of(self, chunk: Chunk, target: torch.Tensor, whole: bool) -> torch.Tensor:
        gradient = self.given.sparse
        if gradient is None:
            assert chunk.gradient is not None
            gradient = self._laid(chunk.gradient, whole)
        for factor in self.given.factors:
            gradient = gradient * factor
        gradient = gradient.to(target.dtype)
        scale = self.given.grad_scale
        return gradient if scale == 1.0 else gradient * scale

    def _shared(self, name: str) -> bool:
        """True if the shape of the state tensor `name` is not the parameter's. All chunks share such a tensor."""
        return self.layout.tensors[name].shape != self.layout.shape

    def _state_of(self, chunk: Chunk, whole: bool) -> dict[str, Any]:
        layout = self.layout
        if chunk.start == 0:
            self._scalars = {}
        state: dict[str, Any] = {}
        for name, described in layout.tensors.items():
            if name == "master":
                continue
            tensor = chunk.state[name]
            if not self._shared(name):
                state[name] = self._laid(tensor, whole)
                continue
            if not whole:
                tensor = self._scalars.setdefault(name, tensor.clone()).clone()
            state[name] = tensor.reshape(described.shape)
        return layout.state_from(state)

    def _keep(self, chunk: Chunk, state: Mapping[str, Any], whole: bool) -> None:
        layout = self.layout
        made = {name: value for name, value in state.items() if value is not None}
        wanted = layout.names
        if made.keys() != set(wanted):
            raise UsageError(
                f"{named(self.optimizer)} now keeps the state {sorted(made)} for a parameter, but kept "
                f"{sorted(wanted)} at offload(). Set options that decide which state it keeps (momentum, amsgrad, ...) "
                "before offload(), and do not change them"
            )
        for name, value in made.items():
            parts = layout.parted.get(name)
            if (parts is None) != (parts_of(value) is None) or (parts is not None and not parts.fits(value)):
                raise self._unfit(name, value)
            tensors = {name: value} if parts is None else parts.apart(name, value)
            for part, tensor in tensors.items():
                # Every chunk writes the same values to shared state, because every chunk began with a copy of the same
                # values.
                self._keep_tensor(chunk.state[part], part, tensor, whole)

    def _keep_tensor(self, into: torch.Tensor, name: str, value: Any, whole: bool) -> None:
        if name in self.layout.numbers:
            into.fill_(value)
            return
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dtype != into.dtype:
            raise self._unfit(name, value)
        into = into.reshape(self.layout.tensors[name].shape) if self._shared(name) else self._laid(into, whole)
        if value.shape != into.shape:
            raise self._unfit(name, value)
        if value.data_ptr() != into.data_ptr():
            into.copy_(value)

    def _unfit(self, name: str, value: Any) -> UsageError:
        described = self.layout.tensors.get(name)
        stored = (
            "a tensor subclass" if described is None else f"{described.dtype} values of shape {list(described.shape)}"
        )
        got = type(value).__qualname__
        if isinstance(value, torch.Tensor):
            got += f" of {value.dtype}, {value.layout} and shape {list(value.shape)}"
        return UsageError(
            f"{named(self.optimizer)} changed its state {name!r} to a {got}, but the store has {stored}: call "
            "zero_grad(), and use an optimizer listed in docs/optimizers.md"
        )


def import_state(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, layout: StateLayout
) -> tuple[dict[str, torch.Tensor], int]:
    """Returns the optimizer's existing state for `parameter` as tensors for the store, and the number of past updates.

    The tensors share memory with the optimizer's tensors where device, dtype and strides match. There is no "master"
    tensor. The number of updates is the state's "step", but at least 1; it is 0 if there is no state.
    """
    existing = optimizer.state.get(parameter, {})
    existing = {name: value for name, value in existing.items() if value is not None}
    # State on "meta" has no values yet: it was made for a parameter on "meta".
    if not existing or any(isinstance(value, torch.Tensor) and value.is_meta for value in existing.values()):
        return {}, 0
    missing = [name for name in layout.names if name not in existing]
    if missing:
        raise ConfigError(
            f"{named(optimizer)} has state for a parameter, but this state has no {missing[0]!r}, which the present "
            "options need: restore the earlier options, or make a new optimizer to start without this state"
        )
    state = {}
    for name in layout.names:
        parts, value = layout.parted.get(name), existing[name]
        own = parts_of(value)
        if (own and list(own.parts)) != (parts and list(parts.parts)):
            raise ConfigError(
                f"{named(optimizer)} has a {type(value).__qualname__} as its state {name!r}, but its step now keeps "
                "a value of another class: make a new optimizer to start without this state"
            )
        for part, tensor in ({name: value} if parts is None else parts.apart(name, value)).items():
            described = layout.tensors[part]
            plain = torch.as_tensor(tensor).detach().to("cpu", described.dtype)
            if plain.shape != described.shape:
                raise ConfigError(
                    f"{named(optimizer)} has its state {part!r} in shape {list(plain.shape)}, but its step now keeps "
                    f"it in shape {list(described.shape)}: make a new optimizer to start without this state"
                )
            # A tensor of the parameter's shape gets the parameter's strides; other tensors are contiguous.
            state[part] = laid_out(plain, layout.stride) if plain.shape == layout.shape else plain.contiguous()
    return state, max(1, int(existing.get("step", 1)))


def _kind(value: Any) -> object:
    """Returns the traits of an option's value that decide which code of the optimizer runs."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.device
    if isinstance(value, list | tuple):
        return type(value), *map(_kind, value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value), bool(value)
    if value is None or isinstance(value, bool | str):
        return value
    return type(value)


@dataclass(eq=False)
class Runs:
    """Makes the `OwnUpdate` objects of one optimizer, and collects the shared values that these updates change.

    After all runs of a step have ended, `adopt` sets the changed shared values on the optimizer.
    """

    optimizer: torch.optim.Optimizer
    examples: dict[SharedName, Any]  # an example of each value that steps change: `restore` needs its type
    run_mode: RunMode
    first_group: int  # the number of the optimizer's first group among the groups of all optimizers

    def __post_init__(self) -> None:
        # True for torch's own classes, whose code changes only parameters and their state.
        self.is_known = known(self.optimizer)
        self._kinds_ended: set[Hashable] = set()
        # By the name of a parameter: the number of its group, and the changes that its last run made to shared values.
        self._ends: dict[str, tuple[int, Mapping[SharedName, Any]]] = {}

    def update(
        self,
        name: str,
        group: int,
        layout: StateLayout,
        given: Given,
        dtype: torch.dtype,
        *,
        first: bool,
        method: str = "step",
    ) -> tuple[OwnUpdate, bool]:
        """Returns the update of a parameter of `dtype`, and whether this update may run after the commit.

        An update after the commit must not fail. So the code must be torch's own, and an update of the same `kind` must
        have succeeded before.
        """
        self._ends.pop(name, None)
        options = self.optimizer.param_groups[group].items()
        kind = dtype, first, given.sparse is None, tuple((of, _kind(value)) for of, value in options if of != "params")
        ended = functools.partial(self._ended, name, group, kind)
        function = OwnUpdate(
            optimizer=self.optimizer,
            group=group,
            layout=layout,
            given=given,
            ended=ended,
            first=first,
            method=method,
        )
        return function, kind in self._kinds_ended

    def _ended(self, name: str, group: int, kind: Hashable, changes: dict[SharedName, Any]) -> None:
        if self.is_known:
            self._kinds_ended.add(kind)
            return
        lost = next((place for place, value in changes.items() if not storable(value)), None)
        if lost is not None:
            value = changes[lost]
            done = f"removed {lost}" if value is GONE else f"set {lost} to a value of type {type(value).__qualname__}"
            raise UsageError(
                f"{named(self.optimizer)} {done}, which cannot be committed with the step. Change the optimizer so "
                "that it keeps a number or text there, or use another optimizer"
            )
        self._ends[name] = group, changes

    def adopt(
        self, names: Iterable[str], finish: Callable[[], None], changed: Mapping[SharedName, Any] | None = None
    ) -> Callable[[], None]:
        """Sets the shared values that the runs of the parameters `names` changed; returns a function that undoes this.

        `finish` waits until all runs have ended. `changed` has the changes that every run must have made. These changes
        are set even if no parameter had a run. Raises UsageError if the runs left different values.
        """
        finish()
        ends = [self._ends[name] for name in names if name in self._ends]
        if changed is not None:
            ends += [(number, changed) for number in range(len(self.optimizer.param_groups))]
        try:
            changes = common_end(ends)
        except Disagreement as error:
            raise UsageError(
                f"{named(self.optimizer)} changed {error.place} to values that differ between parameters, so this step "
                "would differ from torch's step: call zero_grad(), and use another optimizer"
            ) from None
        before = [(place, copied(self._home(place).get(place.name, GONE))) for place in changes]
        for place, value in changes.items():
            self.examples.setdefault(place, value)
            put(self._home(place), place.name, value)

        def revert() -> None:
            for place, value in before:
                put(self._home(place), place.name, value)

        return revert

    def switched(self, mode: str) -> dict[SharedName, Any]:
        """Calls `train()` or `eval()` on a copy of the optimizer; returns the shared values that the call changed."""
        if not callable(getattr(type(self.optimizer), mode, None)):
            return {}
        begin = SharedValues.of(self.optimizer).copy()
        given = begin.copy()
        groups = [{**group, "params": []} for group in given.groups]
        copy = cloned(self.optimizer, given.attributes, groups, {})
        run(copy, mode)
        return without_scratch(begin.changes(SharedValues.of(copy)), self.run_mode.scratch)

    def _home(self, place: SharedName) -> dict[str, Any]:
        return vars(self.optimizer) if place.group is None else self.optimizer.param_groups[place.group]

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes that steps change, as JSON; changed options are stored with the groups' options."""
        now = attributes_of(self.optimizer)
        names = [place.name for place in self.examples if place.group is None]
        return {name: plain(now[name]) for name in names if name in now and storable(now[name])}

    def restore(self, attributes: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Sets stored attributes; `undo` restores the optimizer's own attributes."""
        for name, value in attributes.items():
            place = SharedName(None, name)
            own = attributes_of(self.optimizer).get(name, GONE)
            undo.callback(put, self._home(place), name, copied(own))
            example = self.examples.setdefault(place, None if own is GONE else own)
            put(self._home(place), name, restored(value, example))
