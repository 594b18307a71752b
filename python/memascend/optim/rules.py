"""Chooses, for each parameter, the format of its state, and whether the engine or the optimizer's code updates it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend.errors import UsageError
from memascend.memory import whole_pages
from memascend.optim.generic import Given, Runs, import_state
from memascend.optim.members import GroupOwners, members_of, require_roster, roster_of
from memascend.optim.shared import SharedName, group_options
from memascend.optim.state import StateFormats, StateTrials, compact_format, engine_kind
from memascend.optim.trial import require_streamable
from memascend.params.offloaded_param import dense_strides
from memascend.storage import Adam, Momentum, adam_state, decode_state, state_tensors
from memascend.text import warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from memascend.optim.state import StateLayout
    from memascend.storage import Engine


_FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(kw_only=True, eq=False)
class _Rule:
    """The update of one parameter, and the format of its state. `Arithmetic` makes a rule before the store exists."""

    arithmetic: Arithmetic
    code: Runs  # has the optimizer that owns the parameter, and runs this optimizer's own code
    number: int  # the number of the parameter's group among the groups of all optimizers
    name: str
    parameter: torch.Tensor
    format: str | None  # the format that `StateFormats` or `compact_format` selects for the state, if any
    sparse: bool  # True if the parameter's gradients may be sparse

    # True if updates draw random bits, for stochastic rounding.
    draws: bool = field(init=False, default=False)
    # The layout of the state if updates need the whole parameter at once; else None.
    whole: StateLayout | None = field(init=False, default=None)
    # How updates get the parameter's values: "resident" in memory, or "read" from storage; "never" if updates do not
    # need the values.
    needs_values: Literal["resident", "read", "never"] = field(init=False, default="never")
    # True if only the engine's own arithmetic updates the parameter, so that updates can be replayed from gradients.
    is_replayed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        # Read the shape, dtype and strides now, before the parameter is offloaded.
        self._shape, self._dtype = self.parameter.shape, self.parameter.dtype
        self._stride = dense_strides(self.parameter)

    def _empty(self, device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty_strided(self._shape, self._stride, dtype=dtype or self._dtype, device=device)

    @property
    def _group(self) -> dict[str, Any]:
        groups = self.arithmetic.optimizer.param_groups
        if self.number >= len(groups):
            raise UsageError(
                f"{self.name!r} has no group, because a group was removed from optimizer.param_groups after offload(): "
                "add it again and call zero_grad(). To freeze parameters, use requires_grad_(False)"
            )
        return groups[self.number]

    @property
    def has_master(self) -> bool:
        """False if `format` rounds 16-bit values stochastically, without fp32 master weights."""
        return not (self.format or "").startswith("stochastic")

    def options(self) -> dict[str, Any]:
        """Returns the present options of the group, as an update uses them."""
        raise NotImplementedError

    def numbers(self, options: Mapping[str, Any], done: int, scale: float) -> Adam | Momentum | None:
        """Returns the engine's arguments for update number `done + 1`, with the gradient multiplied by `scale`.

        Returns None if the optimizer's own code has to run with these options.
        """
        raise NotImplementedError

    def update(
        self,
        engine: Engine,
        done: int,
        scale: float,
        gradient: torch.Tensor | None = None,
        *,
        factors: Sequence[float] = (),
        values: torch.Tensor | None = None,
        early: bool = False,
    ) -> dict[str, Any] | None:
        """Begins update number `done + 1` with `gradient`, multiplied by `scale`; returns the options of the update.

        If `gradient` is None, uses the spilled gradient, multiplied by each of `factors`, and then by `scale`. `values`
        are the parameter's values, if they are in memory. With `early`, also spills the gradient; but if the
        optimizer's own code would have to run, begins nothing and returns None.
        """
        options = self.options()
        is_sparse = gradient is not None and gradient.is_sparse
        numbers = None if is_sparse else self.numbers(options, done, scale)
        if numbers is None:
            if early:
                return None
            # Copy the sparse tensor, which has few rows, to the CPU: the update runs there, on the engine's thread.
            sparse = gradient.cpu() if gradient is not None and is_sparse else None
            given = Given(sparse, tuple(factors), scale)
            self._run(engine, done, given, gradient if sparse is None else sparse.to_dense(), values=values)
        elif gradient is None:
            engine.update_spilled(self.name, numbers, factors=factors)
        else:
            engine.update(self.name, gradient, numbers, values=values, spills=early)
        return options

    def _run(self, *_: Any, **__: Any) -> None:
        """Begins a run of the optimizer's own code; only `OwnRule` supports it."""
        raise UsageError(
            f"{self.name!r} has a sparse gradient, which offload() does not support for this "
            f"{type(self.code.optimizer).__name__}: use SparseAdam, SGD without the options state= and rounding=, or "
            "an embedding without sparse=True"
        )

    def switch(self, engine: Engine, mode: str, done: int) -> bool:
        """Stages the changes of `train()` or `eval()` to the parameter; returns False if there are no changes."""
        del engine, mode, done
        return False


@dataclass(kw_only=True, eq=False)
class EngineRule(_Rule):
    """Updates a parameter by Adam, AdamW or SGD with momentum.

    The engine computes the update, on state in the engine's format.
    """

    kind: Literal["adam", "momentum"]

    def __post_init__(self) -> None:
        super().__post_init__()
        # A momentum in bfloat16 is rounded to nearest, without random bits.
        self.draws = not self.has_master or (self.kind == "adam" and "bf16" in (self.format or ""))
        needs_none = self.has_master and self._dtype == torch.float16
        self.needs_values = "never" if needs_none else "resident"
        self.is_replayed = not self.sparse
        # The format of the state, or None for plain tensors. For the format "compact", `format` is None, because the
        # engine recognises that format by its tensors.
        self._form = self.format or ("compact" if self._dtype == torch.bfloat16 else None)

    def describe(self) -> dict[str, torch.Tensor]:
        """Returns the state tensors, on meta."""
        meta = self._empty("meta")
        return adam_state(meta) if self._form is None else state_tensors(meta, self._form, self.kind)

    def initial(self) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the optimizer's existing state, and the number of updates that made it; for SGD, 1 or 0."""
        state = self.code.optimizer.state.get(self.parameter) or {}
        names = ("exp_avg", "exp_avg_sq", "momentum_buffer")
        found = {name: self._laid_out(state[name]) for name in names if state.get(name) is not None}
        # SGD counts no steps; an existing momentum means at least one step.
        step = int(state.get("step", "momentum_buffer" in found))
        if found and self._dtype != torch.float32 and self.has_master:
            found["master"] = self._laid_out(self.parameter)
        return found, step

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._empty("cpu", torch.float32).copy_(tensor)

    def options(self) -> dict[str, Any]:
        """Implements `_Rule.options`."""
        group = self._group
        if group.get("amsgrad") if self.kind == "adam" else not group["momentum"]:
            raise UsageError(
                f"the options of {self.name!r} were changed after offload(), and now need other state (amsgrad or "
                "momentum): undo the change. Set such options before offload()"
            )
        numbers = "lr", "weight_decay", *(("eps",) if self.kind == "adam" else ("momentum", "dampening"))
        options: dict[str, Any] = {name: float(group[name]) for name in numbers}
        options["maximize"] = bool(group.get("maximize"))
        if self.kind == "adam":
            beta1, beta2 = group["betas"]
            is_adamw = type(self.code.optimizer) is not torch.optim.Adam
            options["betas"] = float(beta1), float(beta2)
            options["decoupled"] = is_adamw or bool(group.get("decoupled_weight_decay"))
        else:
            options["nesterov"] = bool(group["nesterov"])
        return self.arithmetic.shared(self.number, options)

    def numbers(self, options: Mapping[str, Any], done: int, scale: float) -> Adam | Momentum:
        """Implements `_Rule.numbers`."""
        kind: Any = Adam if self.kind == "adam" else Momentum
        return kind(step=done + 1, grad_scale=scale, seed=self.arithmetic.seed, **options)  # type: ignore[no-any-return]

    def state(self, values: torch.Tensor, state: dict[str, torch.Tensor], done: int) -> dict[str, Any]:
        """Returns the state after `done` updates, by torch's names, including the master weights."""
        form = self._form
        found = {"master": values, **state} if form is None else decode_state(values, state, form)
        master = {"master": found.pop("master")}
        if done == 0:
            return master
        # SGD has no step count in torch.
        step = {"step": torch.tensor(float(done), dtype=torch.float32, device="cpu")} if self.kind == "adam" else {}
        return {**step, **found, **master}


@dataclass(kw_only=True, eq=False)
class OwnRule(_Rule):
    """Updates a parameter by the optimizer's own code.

    For SGD, the engine computes the update instead if `numbers()` returns its arguments. The bits are the same.
    """

    layout: StateLayout

    def __post_init__(self) -> None:
        super().__post_init__()
        self.whole = self.layout if self.layout.whole or self.sparse else None
        self.is_replayed = not self.sparse and self.numbers(self._group, 1, 1.0) is not None
        if self._dtype != torch.float32 and self.format is None and not self.is_replayed:
            self.needs_values = "read"
        else:
            # If the state has a format, torch's own code reads the values. If the state has a master, an update only
            # writes the values.
            self.needs_values = "resident" if self._dtype == torch.float32 or self.format else "never"

    def describe(self) -> dict[str, torch.Tensor]:
        """Returns the state tensors, on meta."""
        if self.format is None:
            return dict(self.layout.tensors)
        return state_tensors(self._empty("meta"), self.format, "momentum")

    def initial(self) -> tuple[dict[str, torch.Tensor], int]:
        """Returns the optimizer's existing state, and the number of past updates; see `import_state`."""
        return import_state(self.code.optimizer, self.parameter, self.layout)

    def options(self) -> dict[str, Any]:
        """Implements `_Rule.options`."""
        return group_options(self._group)

    def numbers(self, options: Mapping[str, Any], done: int, scale: float) -> Momentum | None:
        """Returns the engine's arguments for SGD that computes in float32; None for other optimizers and dtypes.

        The engine's updates are bit-identical to torch's updates without `fused`.

        Also returns None for `fused=True` (with momentum, torch's fused kernel has other bits), and for options that
        only torch's own code handles: tensors, numbers out of range, Nesterov momentum with dampening, or a momentum
        that does not match the state.
        """
        if type(self.code.optimizer) is not torch.optim.SGD:
            return None
        if self.layout.dtype != torch.float32 or options.get("fused"):
            return None
        numbers = {name: options[name] for name in ("lr", "momentum", "dampening", "weight_decay")}
        if not all(type(value) in {int, float} and 0 <= value <= _FLOAT32_MAX for value in numbers.values()):
            return None
        has_momentum, keeps_one = numbers["momentum"] != 0, "momentum_buffer" in self.layout.tensors
        nesterov = bool(options["nesterov"] and has_momentum)
        if (has_momentum and not keeps_one) or (keeps_one and done == 0 and not has_momentum):
            return None
        if nesterov and numbers["dampening"]:
            return None
        plain = {name: float(value) for name, value in numbers.items()}
        maximize = bool(options["maximize"])
        return Momentum(
            step=done + 1, grad_scale=scale, seed=self.arithmetic.seed, nesterov=nesterov, maximize=maximize, **plain
        )

    def _run(
        self,
        engine: Engine,
        done: int,
        given: Given,
        gradient: torch.Tensor | None,
        *,
        method: str = "step",
        values: torch.Tensor | None = None,
    ) -> None:
        group = self.number - self.code.first_group
        function, may_wait = self.code.update(
            self.name, group, self.layout, given, self._dtype, first=done == 0, method=method
        )
        engine.apply(
            self.name,
            function,
            step=done + 1 if method == "step" else done,
            gradient=gradient,
            whole=self.layout.whole or given.sparse is not None,
            values=values,
            after_commit=may_wait,
        )

    def switch(self, engine: Engine, mode: str, done: int) -> bool:
        """Implements `_Rule.switch`."""
        if done == 0:
            # offload() has verified that a change of mode before the first step changes no parameter.
            return False
        # The engine requires a gradient, so it gets an uninitialised tensor. No code reads this tensor, and its pages
        # take no memory, because no code writes to them.
        self._run(engine, done, Given(), self._empty("cpu"), method=mode)
        return True

    def state(self, values: torch.Tensor, state: dict[str, torch.Tensor], done: int) -> dict[str, Any]:
        """Returns the state after `done` updates, by torch's names, including the master weights."""
        if self.format is not None:
            state = decode_state(values, state, self.format)
        master = {"master": state.pop("master", values)}
        return master if done == 0 else {**self.layout.state_from(state), **master}


Rule = EngineRule | OwnRule


def takes_engine_state(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    dtype: torch.dtype,
    master_dtype: torch.dtype | None,
    given: str | None,
) -> Literal["adam", "momentum"] | None:
    """Returns the arithmetic of an `EngineRule` for a parameter of `dtype` in `group`; None if it needs an `OwnRule`.

    `given` is the format of the state, if the state has a format. Adam and AdamW, but not their subclasses, get an
    `EngineRule` if amsgrad is off, and master weights and moments are float32 or in a format. SGD gets an `EngineRule`
    if the momentum is in a format.
    """
    kind = engine_kind(optimizer)
    if kind == "adam":
        is_wide = dtype == torch.float32 or (master_dtype == torch.float32 and dtype in {torch.bfloat16, torch.float16})
        return kind if not group.get("amsgrad") and (given is not None or is_wide) else None
    return kind if given else None


class Arithmetic:
    """Holds the rules of all parameters, and the optimizers that own the parameters.

    `sparse` has the ids of parameters whose gradients may be sparse. For a sparse gradient, an `OwnRule` updates the
    whole parameter at once. `formats` has the state formats; an optimizer gets only a format that it supports. `names`
    has the parameters' names by id.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master_dtype: torch.dtype | None,
        sparse: frozenset[int],
        formats: StateFormats,
        names: Mapping[int, str],
    ) -> None:
        self.optimizer = optimizer
        self.seed = formats.seed
        # The rules, by `id()` of their parameters.
        self.rules: dict[int, Rule] = {}
        # The most recent options of each group, by the group's number.
        self._options: dict[int, dict[str, Any]] = {}
        members, first = [], 0
        for member, given in zip(members_of(optimizer), formats.of_each(members_of(optimizer)), strict=True):
            code = Runs(member, *require_streamable(member, master_dtype), first)
            own, trials = given.of(member, master_dtype), StateTrials(member, master_dtype, code.run_mode)
            for number, group in enumerate(member.param_groups, first):
                for parameter in filter(torch.is_floating_point, group["params"]):
                    key, form = id(parameter), own.get(id(parameter))
                    of: dict[str, Any] = {"arithmetic": self, "code": code, "number": number, "parameter": parameter}
                    of.update(name=names.get(key, ""), sparse=key in sparse)
                    kind = takes_engine_state(member, group, parameter.dtype, master_dtype, form)
                    if kind is not None:
                        self.rules[key] = EngineRule(kind=kind, format=form or None, **of)
                        continue
                    layout = trials.layout(number - first, parameter)
                    form = compact_format(member, parameter, layout) if form is None else form
                    self.rules[key] = OwnRule(layout=layout, format=form or None, **of)
            members.append(code)
            first += len(member.param_groups)
        self.members = tuple(members)
        self._roster = roster_of(optimizer)
        self._owners = GroupOwners(optimizer, names)

    def shared(self, group: int, options: dict[str, Any]) -> dict[str, Any]:
        """Returns one object for equal options of a group, so that thousands of parameters can share the object."""
        if self._options.get(group) != options:
            self._options[group] = options
        return self._options[group]

    def of(self, parameter: torch.Tensor) -> Rule:
        """Returns the rule of `parameter`."""
        return self.rules[id(parameter)]

    @property
    def whole_bytes(self) -> int:
        """The bytes of memory for the largest parameter that is updated whole."""
        return _aligned(rule.whole.whole_bytes for rule in self.rules.values() if rule.whole is not None)

    @property
    def whole_next_bytes(self) -> int:
        """The bytes of memory to read the next parameter while a parameter is updated whole.

        Of each two consecutive parameters of an optimizer, the smaller one counts. The result is the largest of these
        sizes.
        """
        found = [(rule.code, rule.whole.stored_bytes) for rule in self.rules.values() if rule.whole is not None]
        return _aligned(min(one, other) for (code, one), (after, other) in pairwise(found) if code is after)

    @property
    def update_values(self) -> Literal["resident", "read", "never"]:
        """Combines the rules' `needs_values`: "read" if any rule has "read"; else "resident" if any has "resident"."""
        needs = {rule.needs_values for rule in self.rules.values()}
        return "read" if "read" in needs else "resident" if "resident" in needs else "never"

    @property
    def examples(self) -> dict[SharedName, Any]:
        """Group options that steps change, by group number among the groups of all optimizers."""
        return {
            SharedName(place.group + member.first_group, place.name): value
            for member in self.members
            for place, value in member.examples.items()
            if place.group is not None
        }

    def adopt(
        self,
        names: Sequence[str],
        finish: Callable[[], None],
        changed: Mapping[int, Mapping[SharedName, Any]] | None = None,
    ) -> Callable[[], None]:
        """Sets the shared values that the runs of the parameters `names` changed; returns a function that undoes this.

        `changed` is the result of `switched`, or None after a step. See `Runs.adopt`.
        """
        with contextlib.ExitStack() as undo:
            for member in self.members:
                first = member.first_group
                # torch's own classes change no shared values: do not wait for their runs.
                if not member.is_known and (changed is None or first in changed):
                    undo.callback(member.adopt(names, finish, None if changed is None else changed[first]))
            return undo.pop_all().close

    def switched(self, mode: str) -> dict[int, Mapping[SharedName, Any]]:
        """Returns the shared values that `train()` or `eval()` changes, by the first group number of each optimizer."""
        found = {member.first_group: member.switched(mode) for member in self.members}
        return {first: changes for first, changes in found.items() if changes}

    def attributes(self) -> dict[str, Any]:
        """Returns the attributes that steps change, as JSON.

        If there are several optimizers, the result has the attributes of each optimizer under the optimizer's number.
        """
        found = [{} if member.is_known else member.attributes() for member in self.members]
        if len(found) == 1:
            return found[0]
        return {str(number): attributes for number, attributes in enumerate(found) if attributes}

    def restore(self, attributes: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Sets stored attributes; `undo` restores the optimizers' own attributes."""
        for number, member in enumerate(self.members):
            own = attributes if len(self.members) == 1 else attributes.get(str(number), {})
            member.restore(own, undo)

    def committed(self) -> dict[str, Any]:
        """Returns the entries for each commit: the seed, if used, the optimizers, and the group of each parameter."""
        seed = {"seed": self.seed} if any(rule.draws for rule in self.rules.values()) else {}
        found = {"members": self._roster, "owners": self._owners.runs()}
        return {**seed, **{name: value for name, value in found.items() if value}}

    def take_seed(self, stored: Mapping[str, Any]) -> None:
        """Uses the stored seed, if the rules use a seed and the commit has a seed."""
        if "seed" not in self.committed() or "seed" not in stored:
            return
        if self.seed not in (0, stored["seed"]):
            warn(f"the stored seed {stored['seed']} is used, not {self.seed}: to use another seed, start a new store")
        self.seed = int(stored["seed"])

    def require_members(self, stored: Mapping[str, Any] | None, where: str) -> None:
        """Rejects a commit that was made with other joined optimizers, or whose groups had other parameters."""
        stored = stored or {}
        require_roster(self._roster, stored.get("members") or [], where)
        self._owners.require_same(len(stored.get("groups") or []), stored.get("owners") or [], where)


def _aligned(sizes: Iterable[int]) -> int:
    """Returns the largest of `sizes` in whole pages, with room to align 16 tensors to cache lines."""
    largest = max(sizes, default=0)
    return whole_pages(largest + 64 * 16) if largest else 0


class GroupMembers:
    """Records the parameters of each group at offload(), so that later changes of the groups are detected."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """Records the current parameters of `groups`."""
        self._groups = groups
        # These references keep the parameters alive, so that no new parameter gets the id of a deleted parameter.
        self._members: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]

    def require_same(self, groups: Sequence[dict[str, Any]]) -> None:
        """Raises UsageError if `groups` has other groups or parameters than recorded."""
        found = [group["params"] for group in groups]
        if groups is self._groups and [list(map(id, one)) for one in found] == [
            list(map(id, one)) for one in self._members
        ]:
            return
        had = ", ".join(str(len(members)) for members in self._members)
        has = ", ".join(str(len(params)) for params in found) or "no"
        raise UsageError(
            "the groups in optimizer.param_groups, or their parameters, were changed after offload() "
            f"(the groups have {has} parameters, and had {had}): "
            "undo the change and call zero_grad(). To freeze parameters, use requires_grad_(False). To change options, "
            "set them in the dict of the group. To use other groups, call save(), then offload() with a new optimizer"
        )
