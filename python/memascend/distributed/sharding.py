"""Represents a sharded model on one rank. The rank has its own store, with its rows of each parameter."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from memascend.distributed.collectives import Collectives
from memascend.distributed.fsdp import LocalParameter, LocalRows, RowSource, groups_of
from memascend.distributed.reduce import Gather, NativeReduction, OrderedReduction
from memascend.distributed.replicas import Refill, retire
from memascend.distributed.rows import RowsOfRank
from memascend.errors import ConfigError, UsageError
from memascend.params.aliases import held_for_good, shared_memory
from memascend.storage import checksum_of

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.fsdp import FsdpGroup, FsdpParameter
    from memascend.distributed.opening import Opening
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.storage import Store


class Sharding(RowsOfRank):
    """This rank's rows of a model. Makes FSDP2 gather these rows from storage and reduce their gradients."""

    def __init__(self, model: torch.nn.Module, reduction: str, exchange: Exchange | None = None) -> None:
        """Replaces no parameter. `reduction` is "ordered" or "native"; `exchange` is None for a single rank."""
        self._groups = groups_of(model)
        self._ordered = reduction == "ordered"
        sharded = {one.name: one for group in self._groups for one in group.parameters}
        others = [name for name, _ in model.named_parameters() if name not in sharded]
        if others:
            raise ConfigError(
                f"fully_shard() did not shard {', '.join(others[:3])}, but sharded other parameters: call "
                "fully_shard(model) on the whole model after its blocks, without ignored_params"
            )
        # Exchanges values between the ranks. With a single rank, `exchange`, `opening` and `collectives` are None.
        self.exchange = exchange
        # Says how this rank opens its store, so that all ranks begin at one commit.
        self.opening: Opening | None = None
        layouts = [group.layout() for group in self._groups]
        layout = layouts[0]
        if any(one != layout for one in layouts):
            raise ConfigError("fully_shard() was given several meshes: give the same mesh to each fully_shard() call")
        for group in self._groups:
            group.require_supported(ordered=self._ordered)
            if exchange is not None:
                group.require_own_collectives(ConfigError, ordered=self._ordered)
                if self._ordered:
                    group.require_no_hooks()
        self._sharded = {name: sharded[name] for name, _ in model.named_parameters()}
        named = {name: LocalParameter(one) for name, one in self._sharded.items() if one.shape.numel()}
        if not named:
            raise ConfigError(
                f"rank {layout.rank} has no rows of any parameter: the model is too small to be sharded among "
                f"{layout.shards} ranks. Start fewer ranks"
            )
        super().__init__(
            {name: local.sharded.rows for name, local in named.items()},
            layout,
            named=named,
            gathers=[(group.name, [one.name for one in group.parameters]) for group in self._groups],
            local={id(self._sharded[name].leaf): local for name, local in named.items()},
        )
        # Runs the collectives of a forward and a backward.
        self.collectives: Collectives | None = None
        if exchange is not None:
            # Takes the device from the mesh, because the rows may be on meta.
            self.collectives = Collectives(exchange, layout, next(iter(self._sharded.values())).device)
        self._reductions: list[OrderedReduction] = []
        self._gradients: Any = None
        # Stores of dropped replicas, which `retire_replicas` removes.
        self._left: Sequence[Path] = ()
        # Names of parameters that are in the RAM tier of some rank. A gather notes a digest of the rows of these
        # parameters, and the next step() compares the digests of replicas.
        self._compared: Collection[str] = ()

    # --- before there is a store ---------------------------------------------------------

    def open_by(self, opening: Opening, left: Sequence[Path]) -> None:
        """Sets how this rank opens its store. `left` has the stores for `retire_replicas`."""
        self.opening, self._left = opening, left
        self.refill = Refill(opening) if opening.lost else None

    def compare(self, store: Store, ram_tier: Collection[str]) -> None:
        """Makes each commit compare the values that ranks with the same rows have computed; a collective call.

        A rank updates the parameters in its RAM tier only after the commit. So if a parameter is in the RAM tier of
        some rank, the next gather notes a digest of its values, and the step() after this gather compares the digests.
        """
        if self.exchange is None or self.layout.replicas == 1:
            return
        self._compared = {name for each in self.exchange.all_gather("the RAM tiers", sorted(ram_tier)) for name in each}
        streamed = [not record["buffer"] and record["name"] not in self._compared for record in store.each_record()]
        store.compare([number for number, is_streamed in enumerate(streamed) if is_streamed])

    def retire_replicas(self) -> None:
        """Calls `retire` for the stores of dropped replicas. All ranks must have opened their stores before."""
        if self.opening is not None:
            retire(self._left, self.opening)

    def use_local_rows(self, optimizer: torch.optim.Optimizer, undo: contextlib.ExitStack) -> None:
        """Replaces the optimizer's parameters by this rank's rows, and its state by this rank's rows of the state."""
        leaves = {id(one.leaf) for one in self._sharded.values()}
        for group in optimizer.param_groups:
            given = group["params"]
            undo.callback(group.__setitem__, "params", given)
            # Leaves out each parameter of which this rank has no rows.
            group["params"] = [
                self.local.get(id(one), one) for one in given if id(one) in self.local or id(one) not in leaves
            ]
        for leaf in [one.leaf for one in self._sharded.values() if one.leaf in optimizer.state]:
            state = optimizer.state.pop(leaf)
            undo.callback(optimizer.state.__setitem__, leaf, state)
            local = self.local.get(id(leaf))
            if local is not None:
                optimizer.state[local] = {
                    name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()
                }
                undo.callback(optimizer.state.pop, local, None)

    @property
    def held(self) -> list[torch.Tensor]:
        """The two tensors of torch that use the memory of each parameter's rows: its local tensor, and FSDP2's own."""
        return [tensor for one in self._sharded.values() for tensor in one.held]

    def require_unaliased(self) -> None:
        """Rejects a model if other code holds the tensor object of some rows.

        This method does not find other tensors that use the memory of the rows: `aliases.require_unaliased` does.
        """
        kept = held_for_good(self._sharded, lambda name: self._sharded[name].is_kept)
        if kept:
            raise shared_memory("the weight", kept)

    @property
    def order(self) -> list[str]:
        """The names of all parameters that have elements, in the order of the first rank's units."""
        return [one.name for group in self._groups for one in group.parameters if one.leaf.shape.numel()]

    @property
    def written(self) -> set[str]:
        """The names of parameters whose rows this rank writes, if each rank writes its own rows to a checkpoint.

        Only one replica writes a parameter.
        """
        return self.rows.keys() & set(self.order[self.layout.replica :: self.layout.replicas])

    @property
    def leaves(self) -> dict[str, torch.nn.Parameter]:
        """The model's own parameters, by name."""
        return {name: one.leaf for name, one in self._sharded.items()}

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shapes of whole parameters that have elements, by name, in the model's order; equal on all ranks."""
        return {name: one.leaf.shape for name, one in self._sharded.items() if one.leaf.shape.numel()}

    def require_same_generators(self) -> None:
        """Rejects ranks with different random states if each rank initialises the model itself; a collective call."""
        if self.exchange is None or not any(one.leaf.is_meta for one in self._sharded.values()):
            return
        other = self.exchange.first_other(checksum_of(torch.get_rng_state()))
        if other is not None:
            raise ConfigError(
                "the model has parameters on meta, which each rank initialises, but the state of torch's generator on "
                f"rank {other} differs from the state on rank 0: call torch.manual_seed() with the same number on all "
                "ranks just before offload(), or give weights="
            )

    def leaf_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the model's parameter to which the rows `parameter` belong. Returns any other tensor unchanged."""
        return parameter.sharded.leaf if isinstance(parameter, LocalParameter) else parameter

    def reshard(self) -> None:
        """Frees the gathered parameters that a forward without a backward left in the model."""
        for group in self._groups:
            group.module.reshard()

    # --- the run ---------------------------------------------------------------------------

    def install(self, residency: Residency, places: Mapping[str, Place], gradients: Any) -> None:
        """Makes FSDP2 gather rows from storage, and passes the gradients that FSDP2 reduces to `gradients`.

        `places` has the places of this rank's rows, by parameter name.
        """
        # Keep a weak reference: Python's garbage collector does not see the hooks that torch holds, so a strong
        # reference would keep `gradients` alive.
        self._gradients = weakref.ref(gradients)
        for group in self._groups:
            reduction = self._reduction_of(group)
            for one in group.parameters:
                place = places.get(one.name)
                note = self.collectives.note_rows if self.collectives and one.name in self._compared else None
                source = RowSource(one, place, residency, self._alone, note)
                one.replace_local(LocalRows(source, one.device))
                one.leaf.__dict__["_memascend"] = place
                if one.leaf.requires_grad:
                    one.leaf.register_post_accumulate_grad_hook(partial(self._on_reduced, one, reduction))
            group.settle()

    def require_exact(self) -> None:
        """Rejects a forward whose gradients could not be reduced as `reduction` requires.

        Raises:
            UsageError: the user has set a collective of a module; or, with "ordered", the user has set an all-reduce
                hook, or FSDP2's divisor is not a power of two.
        """
        if self.collectives is not None:
            for group in self._groups:
                group.require_own_collectives(UsageError, ordered=self._ordered)
        for reduction in self._reductions:
            reduction.exact_factor(torch.float32)
            reduction.forward_begins()

    def _reduction_of(self, group: FsdpGroup) -> OrderedReduction | None:
        """Makes FSDP2 gather and reduce a group within a replica through `Collectives`, whose errors name lost ranks.

        Returns the reduction that adds gradients in the order of ranks; None if torch adds them in its own order. Does
        nothing for a single rank.
        """
        if self.collectives is None:
            return None
        module: Any = group.module
        module.set_custom_all_gather(Gather(self.collectives, group.name))
        if not self._ordered:
            # Between replicas, torch itself adds the gradients, through the mesh's process group.
            module.set_custom_reduce_scatter(NativeReduction(self.collectives, group.name))
            return None
        reduction = OrderedReduction(group, self.collectives)
        module.set_custom_reduce_scatter(reduction)
        # Makes torch divide the reduced gradient, not the summands.
        module.set_force_sum_reduction_for_comms(enable=True)
        layout = self.layout
        if layout.replicas > 1:
            group.reduce_within_replica(reduction.reduced_alone if layout.shards == 1 else None, layout.size)
        self._reductions.append(reduction)
        return reduction

    def _alone(self) -> AbstractContextManager[None]:
        return nullcontext() if self.collectives is None else self.collectives.alone()

    def _on_reduced(self, one: FsdpParameter, reduction: OrderedReduction | None, leaf: torch.Tensor) -> None:
        """Hands to `gradients` a gradient that FSDP2 has reduced."""
        if leaf is not one.leaf:
            # A user's hook returned another tensor than the parameter. torch raises an error after the last hook.
            return
        with self._alone():
            if self.collectives is not None:
                self.collectives.note(f"the gradient of {one.name}")
            gradients = self._gradients()
            if gradients is None:
                return
            total = None if reduction is None else reduction.take(one, gradients.accumulated_value)
            local = self.named.get(one.name)
            if local is None:
                # This rank has no rows of the parameter, so drop the gradient.
                one.set_grad(None)
                return
            gradients.on_sum(local, total)
