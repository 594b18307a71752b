"""Represents a model that `fully_shard` divides: the rows of one rank are parameters, in a store of its own."""

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
from memascend.errors import ConfigError
from memascend.memory import whole_pages
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
        named: by the names of the model's parameters, those of which this rank has rows, in the model's order.
        rows: by the same names, which rows those are.
        exchange: how the ranks talk; None where there is one.
        collectives: where they meet in a forward and a backward; None where there is one.
        opening: how their stores are opened at one commit; None where there is one.
        world_size: the number of ranks.
        rank: which one this is.
    """

    def __init__(self, model: torch.nn.Module, reduction: str, exchange: Exchange | None = None) -> None:
        """Nothing of the model has changed; `reduction` is "ordered" or "native", and `exchange` None for one rank.

        Raises:
            ConfigError: it is divided in a way that cannot be offloaded.
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
        """Have the stores of all ranks opened so."""
        self.opening = opening

    def stand_in(self, optimizer: torch.optim.Optimizer, undo: contextlib.ExitStack) -> None:
        """Give the optimizer this rank's rows for the model's parameters, and their part of its state."""
        leaves = {id(one.leaf) for one in self._sharded.values()}
        for group in optimizer.param_groups:
            given = group["params"]
            undo.callback(group.__setitem__, "params", given)
            # Of some this rank has no rows.
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
        """What is gathered together travels together. Only the rows of one gather are needed at once."""
        return units_of_gathers(
            [(group.name, [one.name for one in group.parameters]) for group in self._groups], self.named
        )

    @property
    def held(self) -> list[torch.Tensor]:
        """What the model's parameters and torch keep on the memory of this rank's rows."""
        return [tensor for one in self._sharded.values() for tensor in one.held]

    @property
    def order(self) -> list[str]:
        """The parameters that the first rank has rows of, in the order of its units: all that have elements."""
        return [one.name for group in self._groups for one in group.parameters if one.leaf.shape.numel()]

    @property
    def partition(self) -> Partition:
        """What this rank has of the model."""
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
        """Of whole parameters that have elements, by name, in the model's order: the same on all ranks."""
        return {name: one.leaf.shape for name, one in self._sharded.items() if one.leaf.shape.numel()}

    def require_same_generators(self) -> None:
        """What is on meta and initialised here is made by each rank whole, and must be the same; asked of all ranks.

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
        """Refuse what needs more than rows.

        Raises:
            ConfigError: the optimizer or the format of its state does; nothing was changed.
        """
        require_divisible(arithmetic, self.named, self.first_elements)

    def elements(self) -> dict[int, int]:
        """How many elements the parameters have whose rows these are, by the rows' ids."""
        return {id(local): self.rows[name].whole.numel() for name, local in self.named.items()}

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The model's parameter that some rows are of; anything else is itself."""
        return parameter.sharded.leaf if isinstance(parameter, LocalParameter) else parameter

    def local_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """The other way."""
        return self._local.get(id(parameter), parameter)

    def leaving(self) -> Callable[[], None]:
        """What ends all talk with the other ranks; it knows nothing of the model."""
        collectives, exchange = self.collectives, self.exchange

        def leave() -> None:
            if collectives is not None and exchange is not None:
                collectives.close()
                exchange.close()

        return leave

    # --- the run ---------------------------------------------------------------------------

    def install(self, residency: Residency, places: Mapping[str, Place], heard: Any, met: Any) -> None:
        """Let FSDP2 gather from storage, and hand on what it reduces.

        Args:
            residency: has the rows.
            places: of the parameters that this rank has rows of, by name.
            heard: a bound method, which hears of each gradient: whose it is, what stood in its place before, the parts
                that are to be added to that in their order. Where nothing stood there the sum is made.
            met: a bound method, which is called in each gather, where all ranks are.
        """
        # torch holds hooks where Python's collector does not look.
        self._heard = weakref.WeakMethod(heard)
        if self.collectives is not None:
            self.collectives.hear_of_gathers(weakref.WeakMethod(met))
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
        """Refuse to begin a step whose gradients could not be reduced in order.

        Raises:
            UsageError: FSDP2 divides them by what is no power of two; see `OrderedReduction.exact_factor`.
        """
        for reduction in set(self._reductions.values()):
            reduction.exact_factor(torch.float32)

    def _let_meet(self, group: FsdpGroup) -> None:
        """Have the rows of a group gathered, and its gradients reduced, where a rank that is gone is missed by name."""
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
        """FSDP2 has reduced a gradient."""
        with self._alone():
            self._hand_on(leaf)

    def _hand_on(self, leaf: torch.Tensor) -> None:
        one = self._of.get(id(leaf))
        if one is None:
            # What a hook of the user's returned, which torch refuses after the last hook.
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
