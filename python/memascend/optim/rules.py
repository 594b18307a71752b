"""Chooses how each parameter is updated, by the engine or by the optimizer's own code, and with which state."""

from __future__ import annotations

import contextlib
import warnings
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend.errors import ConfigError, UsageError
from memascend.memory import whole_pages
from memascend.optim import generic
from memascend.optim.generic import Runs
from memascend.optim.members import GroupOwners, joined, members_of, require_roster, roster_of
from memascend.optim.shared import SharedName
from memascend.optim.state import (
    StateFormats,
    StateTrials,
    compact_format,
    describe,
    momentum_options,
    rule_of,
)
from memascend.optim.trial import require_streamable
from memascend.params.offloaded_param import dense_strides
from memascend.storage import Adam, Momentum, state_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memascend.optim.state import StateLayout


_FORMATS_AS_EVER = StateFormats()


class MemberArithmetic:
    """The updates and state of one optimizer's parameters, as decided before there is a store."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master_dtype: torch.dtype | None,
        sparse: frozenset[int],
        formats: StateFormats,
        first_group: int,
    ) -> None:
        """`first_group` is the number of its first group among the groups of all optimizers; see `Arithmetic`."""
        examples, self.manner = require_streamable(optimizer, master_dtype)
        # By the ids of parameters whose state the engine stores in another format than torch.
        self._formats = formats.of(optimizer, master_dtype)
        self._rule = rule_of(optimizer)
        self.runs = Runs(optimizer, examples, self.manner)
        self.optimizer = optimizer
        self.first_group = first_group
        self.master_dtype = master_dtype
        self._sparse = sparse
        # By the ids of parameters, the state that torch's own code keeps; None where Adam runs in the engine.
        self.layouts: dict[int, StateLayout | None] = {}
        trials = StateTrials(optimizer, self.manner)
        for group in optimizer.param_groups:
            for parameter in filter(torch.is_floating_point, group["params"]):
                rust = self.rust_options(group, parameter)
                layout = None if rust is not None else describe(optimizer, parameter, master_dtype, trials)
                self.layouts[id(parameter)] = layout
                compact = None if layout is None else compact_format(optimizer, parameter, layout)
                if compact is not None:
                    self._formats.setdefault(id(parameter), compact)

    def rust_options(self, group: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any] | None:
        """The numbers of an update by the engine; None where torch's own code has to run."""
        given = self._formats.get(id(parameter))
        if given is not None and self._rule == "adam":
            return None if group.get("amsgrad") else generic.adam_options(self.optimizer, group)
        if given and self._rule == "momentum":
            return momentum_options(group)
        return generic.rust_options(self.optimizer, group, dtype=parameter.dtype, master_dtype=self.master_dtype)

    def own_options(self, group: Mapping[str, Any], parameter: torch.Tensor, *, first: bool) -> dict[str, Any] | None:
        """The numbers of an update by the engine of a parameter whose state is in its optimizer's format, or None."""
        layout = self.layouts[id(parameter)]
        return None if layout is None else generic.sgd_options(self.optimizer, group, layout, first=first)

    def format_of(self, parameter: torch.Tensor) -> str | None:
        """The name of the engine's format of its state; None where the state is in its optimizer's format."""
        return self._formats.get(id(parameter)) or None

    @property
    def draws(self) -> bool:
        """Whether its updates draw random bits."""
        # A momentum in bfloat16 is rounded to nearest.
        given = self._formats.values()
        return any(map(_has_no_master, given)) or (self._rule == "adam" and any("bf16" in one for one in given))

    def describe(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of a parameter, on meta."""
        layout, given = self.layouts[id(parameter)], self.format_of(parameter)
        strides = dense_strides(parameter)
        if given is not None:
            meta = torch.empty_strided(parameter.shape, strides, dtype=parameter.dtype, device="meta")
            return state_tensors(meta, given, self._rule or ("adam" if layout is None else "momentum"))
        if layout is not None:
            return dict(layout.tensors)
        moments = {"exp_avg": torch.float32, "exp_avg_sq": torch.float32}
        masters = {torch.float32: {}, torch.bfloat16: {"rest": torch.int16}, torch.float16: {"master": torch.float32}}
        return {
            name: torch.empty_strided(parameter.shape, strides, dtype=dtype, device="meta")
            for name, dtype in {**masters[parameter.dtype], **moments}.items()
        }

    def initial(self, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """The state that the optimizer has already, and the number of updates that made it."""
        layout = self.layouts[id(parameter)]
        if layout is not None:
            return generic.import_state(self.optimizer, parameter, layout)
        strides = dense_strides(parameter)
        state = self.optimizer.state.get(parameter) or {}
        found = {
            name: torch.empty_strided(parameter.shape, strides, dtype=torch.float32).copy_(state[name])
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer")
            if state.get(name) is not None
        }
        # SGD counts no steps; a momentum means that there was one.
        step = int(state.get("step", "momentum_buffer" in found))
        has_master = parameter.dtype != torch.float32 and not _has_no_master(self.format_of(parameter) or "")
        if found and has_master:
            found["master"] = torch.empty_strided(parameter.shape, strides, dtype=torch.float32).copy_(parameter)
        return found, step

    @property
    def whole_bytes(self) -> int:
        """Memory for the largest parameter that is updated whole."""
        return _aligned(layout.whole_bytes for layout in self._whole())

    @property
    def whole_next_bytes(self) -> int:
        """Memory for the smaller of any two such that follow each other: one is read while the other is updated."""
        return _aligned(map(min, pairwise(layout.stored_bytes for layout in self._whole())))

    def _whole(self) -> Iterator[StateLayout]:
        for parameter, layout in self.layouts.items():
            if layout is not None and (layout.whole or parameter in self._sparse):
                yield layout

    def is_replayed(self, parameter: torch.Tensor) -> bool:
        """Whether its updates are the engine's own, so that they can be replayed from their gradients alone."""
        if id(parameter) in self._sparse:
            return False
        if self.layouts.get(id(parameter), parameter) is None:
            return True
        groups = self.optimizer.param_groups
        own = next((group for group in groups if any(parameter is one for one in group["params"])), None)
        return own is not None and self.own_options(own, parameter, first=False) is not None

    @property
    def update_values(self) -> Literal["resident", "read", "never"]:
        """Whether updates need the values, for the plan: "resident", "read" or "never"."""
        trained = [
            (group, parameter, self.layouts[id(parameter)] is not None)
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in self.layouts
        ]
        if any(
            own
            and parameter.dtype != torch.float32
            and self.format_of(parameter) is None
            and (id(parameter) in self._sparse or self.own_options(group, parameter, first=False) is None)
            for group, parameter, own in trained
        ):
            return "read"
        if any(map(_has_no_master, self._formats.values())) or any(
            # torch's own code reads values where they have a format; with a master they are only written.
            parameter.dtype == torch.float32
            or (self.format_of(parameter) if own else parameter.dtype == torch.bfloat16)
            for _, parameter, own in trained
        ):
            return "resident"
        return "never"


class Arithmetic:
    """The updates and state of all optimizers' parameters, as decided before there is a store.

    Args:
        optimizer: the original, or several that are joined.
        master_dtype: of the master weights of 16-bit parameters, or None.
        sparse: the ids of parameters whose gradients may be sparse: these are updated whole.
        formats: the formats of the state; of several optimizers, of those that have such formats.
        names: of the parameters, by id.

    Raises:
        ConfigError: an optimizer cannot be streamed, or none in these formats; the message says why.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        master_dtype: torch.dtype | None,
        sparse: frozenset[int] = frozenset(),
        formats: StateFormats = _FORMATS_AS_EVER,
        *,
        names: Mapping[int, str],
    ) -> None:
        self.optimizer = optimizer
        self.seed = formats.seed
        members, first = [], 0
        for member, given in zip(members_of(optimizer), formats.of_each(members_of(optimizer)), strict=True):
            members.append(MemberArithmetic(member, master_dtype, sparse, given, first))
            first += len(member.param_groups)
        self.members = tuple(members)
        # By the ids of parameters, as those of each member.
        self.layouts = {key: layout for member in members for key, layout in member.layouts.items()}
        self._of = {key: member for member in members for key in member.layouts}
        self._roster = roster_of(optimizer)
        self._owners = GroupOwners(optimizer, names)

    def of(self, parameter: torch.Tensor) -> MemberArithmetic:
        """The member whose optimizer owns a parameter."""
        return self._of[id(parameter)]

    def numbers(self, options: Mapping[str, Any], step: int, scale: float) -> Adam | Momentum:
        """The engine's arguments for update number `step`, with gradients that are multiplied by `scale`."""
        kind = Momentum if "momentum" in options else Adam
        return kind(step=step, grad_scale=scale, seed=self.seed, **options)

    def format_of(self, parameter: torch.Tensor) -> str | None:
        """The name of the engine's format of its state; None where the state is in its optimizer's format."""
        member = self._of.get(id(parameter))
        return None if member is None else member.format_of(parameter)

    def describe(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The state tensors of a parameter, on meta."""
        return self.of(parameter).describe(parameter)

    def initial(self, parameter: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
        """The state that its optimizer has already, and the number of updates that made it."""
        return self.of(parameter).initial(parameter)

    @property
    def whole_bytes(self) -> int:
        """Memory for the largest parameter that is updated whole."""
        return max(member.whole_bytes for member in self.members)

    @property
    def whole_next_bytes(self) -> int:
        """Memory for a second one, which is read while the first is updated."""
        return max(member.whole_next_bytes for member in self.members)

    @property
    def update_values(self) -> Literal["resident", "read", "never"]:
        """Whether updates need the values, for the plan: "resident", "read" or "never"."""
        needs = {member.update_values for member in self.members}
        return "read" if "read" in needs else "resident" if "resident" in needs else "never"

    @property
    def examples(self) -> dict[SharedName, Any]:
        """Options that steps change, by the numbers of groups among those of all optimizers."""
        return {
            SharedName(place.group + member.first_group, place.name): value
            for member in self.members
            for place, value in member.runs.examples.items()
            if place.group is not None
        }

    def adopt(
        self,
        names: Sequence[str],
        finish: Callable[[], None],
        changed: Mapping[int, Mapping[SharedName, Any]] | None = None,
    ) -> Callable[[], None]:
        """Set the values that the runs of these parameters changed; returns the function that reverts it.

        See `Runs.adopt`.

        Args:
            names: of the parameters.
            finish: waits until all runs have ended.
            changed: the result of `switched`; None: a step was made.
        """
        with contextlib.ExitStack() as undo:
            for number, member in enumerate(self.members):
                if changed is None or number in changed:
                    undo.callback(member.runs.adopt(names, finish, None if changed is None else changed[number]))
            return undo.pop_all().close

    def switched(self, mode: str) -> dict[int, Mapping[SharedName, Any]]:
        """The changes by `train()` or `eval()` for all parameters alike, by the numbers of optimizers that switch."""
        members = enumerate(self.members)
        found = {number: member.runs.switched(mode) for number, member in members if member.runs.has(mode)}
        return {number: changes for number, changes in found.items() if changes}

    def attributes(self) -> dict[str, Any]:
        """The attributes that steps change, as JSON; of several optimizers by their numbers."""
        found = [member.runs.attributes() for member in self.members]
        if len(found) == 1:
            return found[0]
        return {str(number): attributes for number, attributes in enumerate(found) if attributes}

    def restore(self, attributes: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
        """Set stored attributes; `undo` restores the optimizers' own."""
        for number, member in enumerate(self.members):
            own = attributes if len(self.members) == 1 else attributes.get(str(number), {})
            member.runs.restore(own, undo)

    def committed(self) -> dict[str, Any]:
        """The entries of each commit about the optimizers.

        The seed, where it is used; the list of several optimizers; the parameters of several groups.
        """
        seed = {"seed": self.seed} if any(member.draws for member in self.members) else {}
        found = {"members": self._roster, "owners": self._owners.runs()}
        return {**seed, **{name: value for name, value in found.items() if value}}

    def take_seed(self, stored: Mapping[str, Any]) -> None:
        """Use the stored seed, where there is one."""
        if "seed" not in self.committed() or "seed" not in stored:
            return
        if self.seed not in (0, stored["seed"]):
            warnings.warn(
                f"the stored seed stands: {stored['seed']}, and not {self.seed}; another one begins with another store",
                stacklevel=5,
            )
        self.seed = int(stored["seed"])

    def require_members(self, stored: Mapping[str, Any] | None, where: str) -> None:
        """Reject a commit that was made with other optimizers, or whose groups had other parameters.

        Raises:
            ConfigError: it names the optimizers, or the first parameters.
        """
        stored = stored or {}
        require_roster(self._roster, stored.get("members") or [], where)
        self._owners.require_same(len(stored.get("groups") or []), stored.get("owners") or [], where)


def _aligned(sizes: Iterable[int]) -> int:
    """The largest of them, of which each tensor begins on a line of the cache."""
    largest = max(sizes, default=0)
    return whole_pages(largest + 64 * 16) if largest else 0


def _has_no_master(given: str) -> bool:
    return given.startswith("stochastic")


class GroupMembers:
    """The parameters of each group, by which updates and their options were decided."""

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        """Remember the current parameters of `groups`."""
        self._groups = groups
        self._members: list[list[torch.Tensor]] = [list(group["params"]) for group in groups]

    def require_same(self, groups: Sequence[dict[str, Any]]) -> None:
        """Compare with the current groups of an optimizer.

        Raises:
            UsageError: there are other groups, or other parameters in them.
        """
        found = [group["params"] for group in groups]
        if groups is self._groups and len(found) == len(self._members) and all(map(_are_same, found, self._members)):
            return
        had = ", ".join(str(len(members)) for members in self._members)
        has = ", ".join(str(len(params)) for params in found) or "no"
        raise UsageError(
            "optimizer.param_groups has other groups, or other parameters in them, than at offload() "
            f"({has} parameters, and had {had}), by which updates go: put "
            "them back and call zero_grad(); freeze parameters with requires_grad_(False), set the options of a group "
            "in place, and for other groups save() and offload() anew"
        )


def _are_same(params: Sequence[torch.Tensor], members: Sequence[torch.Tensor]) -> bool:
    return len(params) == len(members) and all(one is other for one, other in zip(params, members, strict=True))


_ACCELERATED = ("accelerate.optimizer", "AcceleratedOptimizer")
_OF_FABRIC = (("lightning.fabric.wrappers", "_FabricOptimizer"), ("lightning_fabric.wrappers", "_FabricOptimizer"))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that runs the steps, without the wrapper of accelerate or Fabric; those of a list as one.

    Raises:
        ConfigError: a wrapper does more than to pass the steps on, or the list has another kind of object.
    """
    if isinstance(optimizer, list | tuple):
        return joined([_unwrapped(one) for one in optimizer])
    return _unwrapped(optimizer)


def _unwrapped(optimizer: Any) -> Any:
    if _is_wrapped(optimizer, _ACCELERATED):
        instead = "give offload() the model and the optimizer before accelerator.prepare(), which then takes what it "
        instead += "returns"
        if optimizer.scaler is not None:
            raise ConfigError(f"the AcceleratedOptimizer scales gradients (fp16); {instead}")
        steps = optimizer.gradient_state.num_steps
        if steps != 1:
            raise ConfigError(f"the AcceleratedOptimizer steps after {steps} backwards alone; {instead}")
        return optimizer.optimizer
    if _is_wrapped(optimizer, *_OF_FABRIC):
        instead = "give offload() the model and the optimizer before fabric.setup(), which then takes what it returns"
        strategy = optimizer._strategy  # noqa: SLF001
        if type(strategy).__name__ != "SingleDeviceStrategy":
            raise ConfigError(f"Fabric's optimizer is stepped by its {type(strategy).__name__}; {instead}")
        if getattr(strategy.precision, "scaler", None) is not None:
            raise ConfigError(f"Fabric's {type(strategy.precision).__name__} scales gradients (fp16); {instead}")
        return optimizer._optimizer  # noqa: SLF001
    return optimizer


def wrap_again(optimizer: Any, offloaded: torch.optim.Optimizer) -> None:
    """Put the offloaded optimizer into the wrapper of the original, which then stays usable."""
    if _is_wrapped(optimizer, _ACCELERATED):
        optimizer.optimizer = offloaded
    elif _is_wrapped(optimizer, *_OF_FABRIC):
        optimizer._optimizer = offloaded  # noqa: SLF001


def _is_wrapped(optimizer: Any, *kinds: tuple[str, str]) -> bool:
    """Compare classes by name: neither library need be installed."""
    return any((kind.__module__, kind.__name__) in kinds for kind in type(optimizer).__mro__)
