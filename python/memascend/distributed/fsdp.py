"""Makes FSDP2 gather a rank's rows of parameters from storage, by means of private fields of torch."""

from __future__ import annotations

import sys
import types
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import distributed
from torch.distributed._state_dict_utils import _distribute_tensors
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map

from memascend.distributed.rows import Layout, Rows
from memascend.errors import ConfigError, UsageError
from memascend.params.offloaded_param import refused_write
from memascend.params.unit import NOBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import FrameType

    from memascend.errors import MemascendError
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency


__all__ = ["AllGather", "FsdpGroup", "FsdpParameter", "ReduceScatter", "groups_of"]
# The private attributes of torch's parameter groups and parameters that this file uses.
_OF_GROUPS = (
    "fsdp_params", "mesh_info", "post_forward_mesh_info", "_reset_sharded_params", "gradient_divide_factor",
    "offload_policy", "_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook",
)  # fmt: skip
_OF_PARAMETERS = (
    "sharded_param", "_sharded_param_data", "padded_sharded_param_size", "sharded_size", "mp_policy", "_module_info",
    "reset_sharded_param", "_init_extensions", "to_sharded_dtensor",
)  # fmt: skip


# The supported placements: the rows are sharded over a mesh of one dimension, or over the second dimension of a mesh of
# two dimensions. The first of two dimensions has the replicas.
_PLACEMENTS = ((Shard(0),), (Replicate(), Shard(0)))


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    """One parameter that `fully_shard` sharded, with torch's own object for it."""

    name: str  # the name in `model.named_parameters()`
    leaf: torch.nn.Parameter  # the DTensor that model and optimizer hold
    _torch: Any
    # Weak references to `leaf`. A cast of the model calls `torch.utils.swap_tensors`, which rejects a tensor that has
    # weak references. So no cast replaces `leaf`.
    _unswapped: list[weakref.ref[torch.Tensor]] = field(default_factory=list, init=False)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        rows: torch.Tensor = self.leaf._local_tensor  # type: ignore[attr-defined] # noqa: SLF001
        return rows

    @property
    def held(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two tensors that use the memory of this rank's rows: the local tensor of `leaf`, and FSDP2's tensor."""
        return self.local, self._torch._sharded_param_data  # noqa: SLF001

    @property
    def is_kept(self) -> bool:
        """True if other code holds the tensor object of this rank's rows; always False for a parameter on meta.

        `to_local()` returns this object if autograd records no graph.
        """
        if self.leaf.is_meta:
            return False
        # If C++ code holds the tensor, for example as the base of a view, the Python object has one more reference.
        also_there = int(self.leaf._local_tensor._use_count()) > 1  # type: ignore[attr-defined] # noqa: SLF001
        # For comparison: an object that holds a tensor in the same way as a DTensor holds its local tensor.
        alone = types.SimpleNamespace(_local_tensor=torch.empty(1, device="cpu"))
        return sys.getrefcount(self.leaf._local_tensor) > sys.getrefcount(alone._local_tensor) + also_there  # type: ignore[attr-defined] # noqa: SLF001

    @property
    def shape(self) -> torch.Size:
        """The shape of this rank's rows."""
        return torch.Size(self._torch.sharded_size)

    @property
    def padded_shape(self) -> torch.Size:
        """The shape of the rows that each rank passes to a gather, padded to the number of rows on rank 0."""
        return torch.Size(self._torch.padded_sharded_param_size)

    @property
    def rows(self) -> Rows:
        """This rank's rows, as a range of the parameter's rows."""
        shape = self.shape
        # The last dimension of the mesh shards rows.
        shard = int(self.leaf.device_mesh.get_coordinate()[-1])  # type: ignore[attr-defined]
        after = shard * self.padded_shape[0]
        return Rows(self.leaf.shape, min(after, self.leaf.shape[0]), shape[0])

    @property
    def device(self) -> torch.device:
        """The device on which the model computes."""
        kind: str = self.leaf.device_mesh.device_type  # type: ignore[attr-defined]
        return torch.device("cuda", torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    def replace_local(self, rows: torch.Tensor) -> None:
        """Replaces the parameter's local tensor; `rows` may have the hooks of an FSDP2 extension."""
        # Drops torch's own reference to the old rows.
        self._torch._sharded_param_data = torch.empty(0, dtype=rows.dtype, device=rows.device)  # noqa: SLF001
        if self.leaf.is_meta:
            # The device of a DTensor cannot change, so replace the DTensor by a new one.
            made = torch.nn.Parameter(self.as_sharded(rows), requires_grad=self.leaf.requires_grad)
            swap: Any = torch.utils.swap_tensors
            swap(self.leaf, made)
        self._unswapped.append(weakref.ref(self.leaf))
        self.leaf._local_tensor = rows  # type: ignore[attr-defined] # noqa: SLF001
        self._torch._init_extensions()  # noqa: SLF001
        # torch calls this method after `load_state_dict()` and after casts of a module. torch's own method would read
        # the rows into memory.
        self._torch.reset_sharded_param = self._require_kept

    def _require_kept(self) -> None:
        of = self._torch._module_info  # noqa: SLF001
        rows = self.leaf._local_tensor  # type: ignore[attr-defined] # noqa: SLF001
        if getattr(of.module, of.param_name) is not self.leaf or not hasattr(rows, "fsdp_pre_all_gather"):
            raise UsageError(
                f"{self.name!r} is offloaded and was replaced, for example by a cast or a move of the model: for "
                "another dtype or device, call close(), cast or move the model, and call offload() again"
            )

    @property
    def grad(self) -> Any:
        """This rank's rows of the gradient; None if there is no gradient."""
        found: Any = self.leaf.grad
        return None if found is None else found._local_tensor  # noqa: SLF001

    def set_grad(self, values: torch.Tensor | None) -> None:
        """Replaces the gradient by `values`, which is a DTensor, or None for no gradient."""
        self.leaf.grad = values

    def as_sharded(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the rows `local` as a DTensor with the parameter's shape and sharding, as required for `.grad`."""
        with torch.no_grad():
            found: torch.Tensor = self._torch.to_sharded_dtensor(local)
        return found


@dataclass(frozen=True, eq=False)
class FsdpGroup:
    """Parameters that FSDP2 gathers and reduces together."""

    name: str  # the name of the group's module; "root" for the model itself
    parameters: tuple[FsdpParameter, ...]  # in the order in which FSDP2 gathers them
    module: FSDPModule  # the module of the group, or its first module if it has several
    _torch: Any

    def layout(self) -> Layout:
        """Returns this rank's position among all ranks.

        Raises:
            ConfigError: the mesh leaves ranks out, or does not number them replica by replica.
        """
        mesh: Any = self.parameters[0].leaf.device_mesh  # type: ignore[attr-defined]
        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        if mesh.size() != world_size:
            raise ConfigError(
                f"{self.name} is on a mesh of {mesh.size()} of {world_size} ranks, and offload() needs rows on all "
                "ranks: call fully_shard(module) without mesh=, or with a mesh of all ranks whose dimensions are "
                "replicas and shards"
            )
        if int(mesh.mesh.flatten()[rank]) != rank:
            raise ConfigError(
                f"{self.name} is on a mesh that does not number the ranks replica by replica: make the mesh with "
                "init_device_mesh()"
            )
        shards = int(mesh.size(mesh.ndim - 1))
        return Layout(rank, world_size // shards, shards)

    def require_supported(self, *, ordered: bool) -> None:
        """Rejects sharding that cannot be offloaded; `ordered`: gradients are added in the order of ranks."""
        kept = self._torch
        if type(kept.offload_policy).__name__ == "CPUOffloadPolicy":
            raise ConfigError(
                "fully_shard() was given CPUOffloadPolicy, and offload() already moves the parameters: leave "
                "offload_policy out"
            )
        if kept.post_forward_mesh_info is not None and kept.post_forward_mesh_info != kept.mesh_info:
            raise ConfigError(
                f"{self.name}: reshard_after_forward= is a number of ranks, which offload() does not support: pass "
                "True or False to fully_shard()"
            )
        for one in self.parameters:
            wide = one._torch.mp_policy.reduce_dtype  # noqa: SLF001
            if ordered and wide is not None and wide.itemsize > one.leaf.dtype.itemsize:
                raise ConfigError(
                    f"{one.name} is {one.leaf.dtype} and its gradient is reduced in {wide}, but reduction='ordered' "
                    "adds gradients in the dtype of the parameter, as one process does: leave reduce_dtype out, or "
                    "pass reduction='native'"
                )

    def require_no_hooks(self) -> None:
        """Rejects hooks that torch would call before the gradients of all ranks are added."""
        hooked = next((one.name for one in self.parameters if one.leaf._post_accumulate_grad_hooks), None)  # noqa: SLF001
        if hooked is not None:
            raise ConfigError(
                f"{hooked} has a hook of register_post_accumulate_grad_hook(), which torch would call with the "
                "gradient of one rank instead of the sum, because of reduction='ordered': register the hook after "
                "offload(), and pass gradients='ssd' or 'ram' to offload(), or pass reduction='native'"
            )

    def require_own_collectives(self, refusal: type[MemascendError], *, ordered: bool) -> None:
        """Rejects collectives that the user has set, because this run sets its own collectives.

        If `ordered`, also rejects a user's all-reduce hook, because the hook would get the gradients of one rank only.
        """
        comms = {
            "set_custom_all_gather": self._torch._all_gather_comm,  # noqa: SLF001
            "set_custom_reduce_scatter": self._torch._reduce_scatter_comm,  # noqa: SLF001
        }
        for call, comm in comms.items():
            if not type(comm).__module__.startswith(("torch.", "memascend.")):
                raise refusal(
                    f"{call}() was called on {self.name}, and offload() sets its own collectives on several ranks: "
                    f"leave {call}() out"
                )
        hook = self._torch._all_reduce_hook  # noqa: SLF001
        owner = type(getattr(hook, "__self__", None)).__module__
        if ordered and hook is not None and not owner.startswith("memascend."):
            raise refusal(
                f"set_all_reduce_hook() was called on {self.name}, and reduction='ordered' adds the gradients after "
                "the hook: leave the hook out, or pass reduction='native' to offload(), so that torch adds the "
                "gradients and calls the hook"
            )

    def reduce_within_replica(self, then: Callable[[torch.Tensor], None] | None, size: int) -> None:
        """Makes torch reduce gradients only among the ranks of a replica, and then call `then` with the result.

        If `then` is None, torch calls nothing. `size` is the number of all ranks. torch divides gradients by `size`,
        unless the user set a divisor.
        """
        kept = self._torch
        if isinstance(kept.mesh_info, HSDPMeshInfo):
            within = FSDPMeshInfo(kept.mesh_info.mesh, shard_mesh_dim=kept.mesh_info.shard_mesh_dim)
            if kept.post_forward_mesh_info is not None:
                kept.post_forward_mesh_info = within
            kept.mesh_info = within
        if kept.gradient_divide_factor is None:
            kept.gradient_divide_factor = float(size)
        kept._all_reduce_hook = then  # noqa: SLF001

    def settle(self) -> None:
        """Prevents torch from looking for replaced parameters, because offload() replaced their tensors on purpose."""
        self._torch._reset_sharded_params = True  # noqa: SLF001

    def factor_after(self, dtype: torch.dtype) -> float | None:
        """Returns the number by which FSDP2 divides a complete sum of this dtype; None if FSDP2 does not divide it."""
        found = _fsdp_collectives._get_gradient_divide_factors(  # noqa: SLF001
            self._torch.mesh_info.shard_process_group,
            None,
            dtype,
            factor=self._torch.gradient_divide_factor,
            force_sum_reduction_for_comms=True,
        )
        after: float | None = found[1]
        return after


def groups_of(model: torch.nn.Module) -> list[FsdpGroup]:
    """Returns the groups of a model in the order of its modules; rejects sharding that cannot be offloaded."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A forward without a backward may have left parameters gathered.
            module.reshard()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[FsdpGroup] = []
    seen: set[int] = set()
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        groups = _groups_of_module(module)
        if not groups or id(groups[0]) in seen:
            continue
        group = groups[0]
        seen.add(id(group))
        _require_known(group, _OF_GROUPS)
        parameters = []
        for one in group.fsdp_params:
            _require_known(one, _OF_PARAMETERS)
            leaf: Any = one.sharded_param
            if id(leaf) not in names or not isinstance(leaf, DTensor):
                raise ConfigError(
                    f"a parameter of {name or 'the model'} was replaced or removed after fully_shard(): replace "
                    "or remove the parameter before you call fully_shard()"
                )
            if tuple(leaf.placements) not in _PLACEMENTS or len(groups) > 1:
                raise ConfigError(
                    f"{names[id(leaf)]} is sharded as {leaf.placements}, and offload() supports only rows (Shard(0)) "
                    "over one mesh with one dimension, or with two dimensions: replicas and shards. Leave out "
                    "shard_placement_fn and tensor parallelism"
                )
            parameters.append(FsdpParameter(names[id(leaf)], one.sharded_param, one))
        found.append(FsdpGroup(name or "root", tuple(parameters), module, group))
    return found


def _groups_of_module(module: Any) -> list[Any]:
    """Returns torch's groups of a module; several if the module is sharded over several meshes."""
    _require_known(module, ("_get_fsdp_state",))
    state = module._get_fsdp_state()  # noqa: SLF001
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return groups
    # Before torch 2.12 a module has at most one group.
    _require_known(state, ("_fsdp_param_group",))
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # noqa: SLF001


def _require_known(kept: Any, names: tuple[str, ...]) -> None:
    """Rejects a version of torch whose FSDP2 does not have all of these attributes."""
    missing = [name for name in names if not hasattr(kept, name)]
    if missing:
        raise ConfigError(
            f"this version of memascend does not work with FSDP2 of torch {torch.__version__}, because "
            f"{type(kept).__name__} has no {', '.join(missing)}: use a torch version that docs/limits.md "
            "names, or a newer memascend"
        )


# Operations whose result has the values, the shape and the memory of their argument.
_SAME = frozenset({"detach", "alias"})


class RowSource:
    """Reads the rows of one parameter from its unit."""

    def __init__(
        self,
        sharded: FsdpParameter,
        place: Place | None,
        residency: Residency,
        alone: Callable[[], AbstractContextManager[None]],
        note: Callable[[str, torch.Tensor], None] | None = None,
    ) -> None:
        """`place` is the parameter's place in a unit; None if this rank has no rows.

        `alone` wraps work that this rank does outside of collectives. `note` is called with the rows of each gather.
        """
        self.name = sharded.name
        self.shape = sharded.shape
        self.dtype = sharded.local.dtype
        self._padded_shape = sharded.padded_shape
        self._place = place
        self.residency = residency
        self._alone = alone
        self._note = note
        # To load a full (unsharded) state dict, torch writes to the rows twice, and each write calls `load`. Between
        # the calls, `_given` has the rows of the first call, and the version of this rank's rows at the first call.
        self._given: tuple[torch.Tensor, int] | None = None

    def gathered(self, dtype: torch.dtype | None) -> torch.Tensor:
        """Returns the rows for a gather, padded to the number of rows that each rank passes.

        Floating-point rows are cast to `dtype`, unless `dtype` is None. The tensor may use memory of the arena. The
        arena keeps the bytes as long as the tensor exists.
        """
        wanted = self.dtype if dtype is None or not self.dtype.is_floating_point else dtype
        residency, place = self.residency, self._place
        found: list[torch.Tensor] = []

        def take(values: torch.Tensor) -> None:
            if self._note is not None:
                self._note(self.name, values)
            if self.shape == self._padded_shape:
                found.append(values.to(wanted))
                return
            found.append(torch.zeros(self._padded_shape, dtype=wanted, device=values.device))
            found[0][: self.shape[0]] = values

        with self._alone():
            residency.units.require_open()
            # If user code calls a module inside the model directly, this gather is the first sign that a forward began.
            residency.copies.forward_begins()
            if place is None or self.is_real:
                take(self.rows())
            else:
                residency.read_into(place, take)
            return found[0]

    def load(self, values: torch.Tensor, caller: FrameType) -> bool:
        """Takes rows of a state dict that is being loaded; returns False if no state dict is being loaded."""
        if caller.f_code is _distribute_tensors.__code__:
            # For a full (unsharded) state dict, torch first copies rows of the state dict into this rank's rows. torch
            # then copies this rank's rows to themselves.
            if self._place is not None:
                self._given = (self.residency.filed(self._place, values), self._version)
            return True
        if not self.residency.is_loading:
            return False
        if self._place is not None:
            given = self._given if isinstance(values, LocalRows) and values.source is self else None
            self.residency.loaded(self._place, values if given is None or given[1] != self._version else given[0])
        return True

    @property
    def _version(self) -> int:
        """A number that changes with each change of the rows' values."""
        assert self._place is not None
        return self.residency.units.unit_of[self._place.name].version

    @property
    def is_real(self) -> bool:
        """True within `materialized()`, where the rows are in memory."""
        # `materialized()` makes `NOBODY` a holder of each unit, in the order of the units. If `NOBODY` holds the last
        # unit, it holds all units.
        return NOBODY in self.residency.units.all[-1].holders

    def rows(self) -> torch.Tensor:
        """Returns the real rows within `materialized()`. Otherwise returns a copy, which is in an unlinked file.

        On a rank without rows, always returns an empty tensor.
        """
        self._given = None
        self.residency.units.require_open()
        if self._place is None:
            return torch.empty(self.shape, dtype=self.dtype)
        return self._place.parameter.detach() if self.is_real else self.residency.copy_of(self._place)

    def memory(self, what: str) -> torch.Tensor:
        """Returns the real rows, or a copy, for an operation whose result uses the memory of its argument."""
        copies = self.residency.copies
        if not self.is_real and copies.computes:
            raise UsageError(
                f"the values of {self.name!r} are on storage, and {what}() needs their memory while the model "
                f"computes: call {what}() between forwards, or on a clone() of the parameter"
            )
        return self.rows() if self.is_real or self._place is None else copies.of(self._place)


class LocalRows(torch.Tensor):
    """This rank's rows, as a tensor without memory.

    An operation that reads this tensor gets a copy of the rows. An operation that writes to this tensor raises an
    error, unless it loads a state dict. Within `materialized()` all operations get the real rows.
    """

    source: RowSource

    @staticmethod
    def __new__(cls: type[Self], source: RowSource, device: torch.device) -> Self:
        """Makes a tensor without memory, of the shape of the rows."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=device)  # noqa: SLF001
        return made

    def __init__(self, source: RowSource, device: torch.device) -> None:
        del device
        self.source = source

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    # --- called by FSDP2 ------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """Returns the rows that this rank gives to a gather."""
        del mesh, outer_size, outer_stride, module
        return (self.source.gathered(mp_policy.param_dtype),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Returns the gathered parameter, which uses the memory of the gather; None if `out` is given."""
        del metadata, param_dtype
        if out is not None:
            # `out` is the parameter from an earlier gather. It already uses the memory of the gather.
            return None
        (gathered,) = outputs
        return gathered, (gathered,)

    # --- called by user code ---------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs each torch operation that has a `LocalRows` among its arguments."""
        del types
        options = kwargs or {}
        schema = func._schema  # noqa: SLF001
        name = schema.name.removeprefix("aten::")
        if name in _SAME or (func is torch.ops.aten.view.default and torch.Size(args[1]) == args[0].shape):
            return args[0].source.rows() if args[0].source.is_real else LocalRows(args[0].source, args[0].device)
        given = {one.name: value for one, value in zip(schema.arguments, args, strict=False)} | options
        written = [given.get(one.name) for one in schema.arguments if one.alias_info and one.alias_info.is_write]
        changed = next((leaf.source for leaf in tree_leaves(written) if isinstance(leaf, LocalRows)), None)
        if changed is not None and not changed.is_real:
            if name == "copy_" and changed.load(args[1], sys._getframe(1)):  # noqa: SLF001
                return args[0]
            changed.residency.units.require_open()
            raise refused_write(changed.name, f"written to by {name}()")
        is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
        # By `id()` of the source: the tensor that the operation gets in place of a `LocalRows`. The operation gets the
        # same tensor for all `LocalRows` of one source.
        instead: dict[int, torch.Tensor] = {}
        own: dict[int, LocalRows] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, LocalRows):
                return leaf
            key = id(leaf.source)
            if key not in instead:
                instead[key] = leaf.source.memory(name) if is_view else leaf.source.rows()
                own[id(instead[key])] = leaf
            return instead[key]

        found = func(*tree_map(real, args), **tree_map(real, options))
        # An in-place operation returns the `LocalRows` on which it was called, not the real tensor.
        return found if changed is None else tree_map(lambda one: own.get(id(one), one), found)

    # --- calls outside of the dispatcher -------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """Returns a numpy array that uses the memory of the real rows, or of a copy."""
        return self.source.memory("numpy").numpy(force=force)

    def __array__(self, *given: Any, **options: Any) -> Any:
        return self.source.memory("numpy").__array__(*given, **options)

    def tolist(self) -> Any:
        """Returns the rows as nested lists."""
        return self.source.rows().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.source.rows().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError(
            f"{self.source.name!r} is offloaded and cannot be copied with its model: call save(), and load the "
            "checkpoint"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"LocalRows({self.source.name}, {list(self.shape)}, {self.dtype})"


class LocalParameter(torch.nn.Parameter):
    """This rank's rows of a parameter that `fully_shard` sharded.

    The `grad` of this parameter is this rank's part of the DTensor's `grad`. So each gradient exists only once, and a
    gradient that user code assigns to the model's parameter is visible here.
    """

    @staticmethod
    def __new__(cls: type[Self], sharded: FsdpParameter) -> Self:
        """Makes a parameter that uses the memory of the present rows."""
        made: Self = torch.Tensor._make_subclass(cls, sharded.local.detach(), sharded.leaf.requires_grad)  # noqa: SLF001
        return made

    def __init__(self, sharded: FsdpParameter) -> None:
        self.sharded = sharded

    @property
    def grad(self) -> Any:
        """This rank's rows of the gradient; None if there is no gradient."""
        return self.sharded.grad

    @grad.setter
    def grad(self, values: torch.Tensor | None) -> None:
        self.sharded.set_grad(None if values is None else self.sharded.as_sharded(values))

    @grad.deleter
    def grad(self) -> None:
        self.sharded.set_grad(None)
