"""Represents a sharded model on one rank: its rows are parameters, in a store of their own."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

from memascend.distributed.fsdp import LocalParameter, LocalRows, RowSource, groups_of, reshard
from memascend.distributed.reduce import Collectives, Gather, NativeReduction, OrderedReduction
from memascend.distributed.rows import Partition, require_divisible, units_of_gathers
from memascend.errors import ConfigError, UsageError
from memascend.memory import whole_pages
from memascend.params.aliases import held_for_good, shared_memory
from memascend.plan.units import Unit
from memascend.storage import Checksum

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.fsdp import FsdpGroup, FsdpParameter
    from memascend.distributed.opening import Opening
    from memascend.optim.rules import Arithmetic
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency


class Sharding:
    """This rank's rows of a model.

    Attributes:
        named: this rank's rows, by the parameters' names, in the model's order. Parameters without rows are left out.
        rows: by the same names, the range of rows.
        exchange: between the ranks; None with a single rank.
        collectives: the gathers and reductions of a forward and a backward; None with a single rank.
        opening: opens the stores of all ranks at one commit; None with a single rank.
        world_size: the number of ranks.
        rank: of this process.
    """

    def __init__(self, model: torch.nn.Module, reduction: str, exchange: Exchange | None = None) -> None:
        """Changes nothing of the model. `reduction` is "ordered" or "native"; `exchange` is None for a single rank.

        Raises:
            ConfigError: the model is sharded in a way that cannot be offloaded.
        """
        self._groups = groups_of(model)
        self._ordered = reduction == "ordered"
        sharded = {one.name: one for group in self._groups for one in group.parameters}
        _refuse_others(model, sharded)
        self.exchange = exchange
        self.opening: Opening | None = None
        self.world_size = distributed.get_world_size()
        self.rank = distributed.get_rank()
        for group in self._groups:
            _refuse_kind(group, self.world_size, ordered=self._ordered)
            if exchange is not None:
                group.require_own_collectives(ConfigError, ordered=self._ordered)
                _refuse_hooks(group, ordered=self._ordered)
        reshard(model)
        self._sharded = {name: sharded[name] for name, _ in model.named_parameters()}
        self.named: dict[str, LocalParameter] = {
            name: LocalParameter.of(one) for name, one in self._sharded.items() if one.shape.numel()
        }
        if not self.named:
            raise ConfigError(
                f"rank {self.rank} has no rows of any parameter: the model is too small for {self.world_size} ranks. "
                "Start fewer"
            )
        self.rows = {name: local.sharded.rows for name, local in self.named.items()}
        self._local = {id(self._sharded[name].leaf): local for name, local in self.named.items()}
        self.collectives: Collectives | None = None
        if exchange is not None:
            ranks = distributed.get_process_group_ranks(self._groups[0].process_group)
            device = next(iter(self.named.values())).device
            self.collectives = Collectives(exchange, ranks, device)
        self._reductions: dict[int, OrderedReduction] = {}
        self._of = {id(one.leaf): one for one in self._sharded.values()}
        self._heard: Any = None

    # --- before there is a store ---------------------------------------------------------

    def open_by(self, opening: Opening) -> None:
        """Set how the stores of all ranks are opened."""
        self.opening = opening

    def stand_in(self, optimizer: torch.optim.Optimizer, undo: contextlib.ExitStack) -> None:
        """Give the optimizer this rank's rows for the model's parameters, and their part of its state."""
        leaves = {id(one.leaf) for one in self._sharded.values()}
        for group in optimizer.param_groups:
            given = group["params"]
            undo.callback(group.__setitem__, "params", given)
            # This rank has no rows of some parameters.
            group["params"] = [
                self._local.get(id(one), one) for one in given if id(one) in self._local or id(one) not in leaves
            ]
        for leaf in [one.leaf for one in self._sharded.values() if one.leaf in optimizer.state]:
            state = optimizer.state.pop(leaf)
            undo.callback(optimizer.state.__setitem__, leaf, state)
            local = self._local.get(id(leaf))
            if local is not None:
                optimizer.state[local] = {name: _local_part(value) for name, value in state.items()}
                undo.callback(optimizer.state.pop, local, None)

    def units(self) -> tuple[Unit, ...]:
        """The units: parameters that are gathered together, since only the rows of one gather are needed at once."""
        return units_of_gathers(
            [(group.name, [one.name for one in group.parameters]) for group in self._groups], self.named
        )

    @property
    def held(self) -> list[torch.Tensor]:
        """The tensors of the model's parameters and of torch on the memory of this rank's rows."""
        return [tensor for one in self._sharded.values() for tensor in one.held]

    def require_unaliased(self) -> None:
        """Refuse rows whose very tensor others hold; further tensors on its memory are looked for as without ranks."""
        kept = held_for_good(self._sharded, lambda name: self._sharded[name].is_kept)
        if kept:
            raise shared_memory("the weight", kept)

    @property
    def order(self) -> list[str]:
        """The parameters with rows on the first rank, in the order of its units: all parameters that have elements."""
        return [one.name for group in self._groups for one in group.parameters if one.leaf.shape.numel()]

    @property
    def partition(self) -> Partition:
        """This rank's share of the model."""
        return Partition(self.rows, self.rank, self.world_size)

    @property
    def leaves(self) -> dict[str, torch.nn.Parameter]:
        """The model's own parameters, by name."""
        return {name: one.leaf for name, one in self._sharded.items()}

    def whole_units(self) -> tuple[Unit, ...]:
        """The units of a process that has all rows."""
        units = []
        for group in self._groups:
            nbytes = sum(whole_pages(one.leaf.nbytes) for one in group.parameters)
            names = tuple(one.name for one in group.parameters)
            units.append(Unit(name=group.name, parameters=names, nbytes=nbytes, module=None, pinned=False))
        return tuple(units)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of whole parameters that have elements, by name, in the model's order: the same on all ranks."""
        return {name: one.leaf.shape for name, one in self._sharded.items() if one.leaf.shape.numel()}

    def require_same_generators(self) -> None:
        """Check that all ranks initialise parameters on meta equally: each makes them whole. All ranks call this.

        Raises:
            ConfigError: torch's generators are in different states.
        """
        if self.exchange is None or not any(one.leaf.is_meta for one in self._sharded.values()):
            return
        state = Checksum()
        state.update(torch.get_rng_state())
        told = self.exchange.everyone(str(state))
        other = next((rank for rank, one in enumerate(told) if one != told[0]), None)
        if other is not None:
            raise ConfigError(
                f"the model is on meta and initialised by each rank, and torch's generator of rank {other} is in "
                "another state than that of rank 0: call torch.manual_seed() with the same number on each just before "
                "offload(), or give weights="
            )

    @property
    def first_elements(self) -> dict[str, int]:
        """Where in the whole parameters this rank's rows begin, by name."""
        return {name: rows.first_element for name, rows in self.rows.items()}

    def require_by_rows(self, arithmetic: Arithmetic) -> None:
        """Reject optimizers and formats that need whole parameters.

        Raises:
            ConfigError: the optimizer or the format of its state does; nothing was changed.
        """
        require_divisible(arithmetic, self.named, self.first_elements)

    def elements(self) -> dict[int, int]:
        """The number of elements of each whole parameter, by the id of its rows."""
        return {id(local): self.rows[name].whole.numel() for name, local in self.named.items()}

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The model's parameter of some rows; any other tensor is returned as it is."""
        return parameter.sharded.leaf if isinstance(parameter, LocalParameter) else parameter

    def local_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The rows of a parameter of the model; any other tensor is returned as it is."""
        return self._local.get(id(parameter), parameter)

    def leaving(self) -> Callable[[], None]:
        """A function that leaves all groups of ranks; it does not keep the model alive."""
        collectives, exchange = self.collectives, self.exchange

        def leave() -> None:
            if collectives is not None and exchange is not None:
                collectives.close()
                exchange.close()

        return leave

    # --- the run ---------------------------------------------------------------------------

    def install(self, residency: Residency, places: Mapping[str, Place], heard: Any) -> None:
        """Let FSDP2 gather rows from storage, and pass on the gradients that it reduces.

        Args:
            residency: reads the rows.
            places: of this rank's rows, by the parameters' names.
            heard: a bound method, called with each gradient: the rows' parameter, the previous value of its `grad`, and
                the parts to add to that in their order. Without a previous value, `grad` is already the sum.
        """
        # torch keeps hooks where Python's garbage collector cannot see them.
        self._heard = weakref.WeakMethod(heard)
        for group in self._groups:
            self._let_meet(group)
            for one in group.parameters:
                place = places.get(one.name)
                source = RowSource(one, place, residency, self._alone)
                one.replace_local(LocalRows(source, one.device))
                one.leaf.__dict__["_memascend"] = place
                if one.leaf.requires_grad:
                    one.leaf.register_post_accumulate_grad_hook(self._hear)
            group.settle()

    def require_exact(self) -> None:
        """Reject a step whose gradients could not be reduced in order.

        Raises:
            UsageError: FSDP2 divides them by a factor that is no power of two, see `OrderedReduction.exact_factor`; or
                the user has replaced the collectives of a module since `offload()`.
        """
        if self.collectives is not None:
            for group in self._groups:
                group.require_own_collectives(UsageError, ordered=self._ordered)
        for reduction in set(self._reductions.values()):
            reduction.exact_factor(torch.float32)

    def _let_meet(self, group: FsdpGroup) -> None:
        """Gather and reduce a group through `Collectives`, whose errors name a rank that is gone."""
        if self.collectives is None:
            return
        group.gather_by(Gather(self.collectives, group.name))
        if not self._ordered:
            group.reduce_by(NativeReduction(self.collectives, group.name), sums=False)
            return
        reduction = OrderedReduction(group, self.collectives)
        group.reduce_by(reduction, sums=True)
        self._reductions.update((id(one.leaf), reduction) for one in group.parameters)

    def _alone(self) -> AbstractContextManager[None]:
        return nullcontext() if self.collectives is None else self.collectives.alone()

    def _hear(self, leaf: torch.Tensor) -> None:
        """Pass on a gradient that FSDP2 has reduced."""
        with self._alone():
            self._pass_on(leaf)

    def _pass_on(self, leaf: torch.Tensor) -> None:
        one = self._of.get(id(leaf))
        if one is None:
            # A user's hook returned another tensor, which torch rejects after the last hook.
            return
        if self.collectives is not None:
            self.collectives.note(f"the gradient of {one.name}")
        reduction = self._reductions.get(id(leaf))
        taken = None if reduction is None else reduction.take(one)
        local = self._local.get(id(leaf))
        if local is None:
            # No rows, no gradient.
            leaf.grad = None
            return
        heard = self._heard()
        if heard is None:
            return
        if taken is not None and taken.before is not None:
            leaf.grad = taken.before
            rows = local.grad
            heard(local, rows, [part.to(rows.dtype) for part in taken.parts])
            return
        if taken is not None:
            taken.sum_into(local.grad)
        heard(local, None, ())


def _local_part(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _refuse_others(model: torch.nn.Module, sharded: Mapping[str, FsdpParameter]) -> None:
    others = [name for name, _ in model.named_parameters() if name not in sharded]
    if others:
        raise ConfigError(
            f"{', '.join(others[:3])} is not sharded by fully_shard() and other parameters are: apply "
            "fully_shard(model) to the whole model after its blocks, without ignored_params"
        )


def _refuse_kind(group: FsdpGroup, world_size: int, *, ordered: bool) -> None:
    if group.divided_twice:
        raise ConfigError(
            f"{group.name} is on a mesh on which ranks replicate it: offload() works where the rows are divided among "
            "all ranks: fully_shard(module), without mesh=, or with one of one dimension"
        )
    if group.process_group.size() != world_size:
        raise ConfigError(
            f"{group.name} is divided among {group.process_group.size()} of {world_size} ranks: offload() works where "
            "the rows are divided among all of them: fully_shard(module) without mesh="
        )
    if group.offloads:
        raise ConfigError(
            "fully_shard() was given CPUOffloadPolicy, and offload() moves parameters itself: leave offload_policy out"
        )
    kept = group.kept_after_forward
    if kept is not None:
        raise ConfigError(f"{group.name}: {kept}")
    for one in group.parameters:
        wide = one.reduce_dtype
        if ordered and wide is not None and wide.itemsize > one.leaf.dtype.itemsize:
            raise ConfigError(
                f"{one.name} is {one.leaf.dtype} and its gradient is reduced in {wide}: in the order of ranks it is "
                "added in its own type, as one process accumulates: leave reduce_dtype out, or pass reduction='native'"
            )


def _refuse_hooks(group: FsdpGroup, *, ordered: bool) -> None:
    """Reject hooks that would run before the gradients of all ranks are added."""
    hooked = next((one.name for one in group.parameters if one.leaf._post_accumulate_grad_hooks), None)  # noqa: SLF001
    if ordered and hooked is not None:
        raise ConfigError(
            f"{hooked} has a hook of register_post_accumulate_grad_hook(), which reduction='ordered' would call with "
            "the gradient of one rank instead of the sum: register it after offload(), with gradients='ssd' or 'ram', "
            "or pass reduction='native'"
        )
