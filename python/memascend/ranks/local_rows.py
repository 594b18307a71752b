"""Defines the local tensor of a parameter on storage, from which FSDP2 takes the rows that it gathers.

Between forwards it is read, viewed and written to as a plain tensor is: what needs its memory gets what a parameter of
one process has then (`residency.reached`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from memascend.residency.placeholder import Place
    from memascend.residency.residency import Residency

# These give the same tensor again.
_SAME = frozenset({"detach", "alias"})


class RowSource:
    """Where one parameter's rows come from."""

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        padded_shape: torch.Size,
        dtype: torch.dtype,
        alone: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """`padded_shape` is what each rank gives to a gather; `alone` is around what it does before."""
        self._alone = alone
        self.name = name
        self.shape = shape
        self.dtype = dtype
        self._padded_shape = padded_shape
        self._place: Place | None = None
        self._residency: Residency | None = None

    def connect(self, place: Place | None, residency: Residency) -> None:
        """They come from the unit of `place`; None: this rank has no rows of it."""
        self._place = place
        self._residency = residency

    def gathered(self, dtype: torch.dtype | None) -> torch.Tensor:
        """The rows for a gather, in `dtype`, filled up to as many as each rank gives.

        They lie in the arena, which has their bytes for as long as the tensor lives.
        """
        with self._alone():
            return self._gathered(dtype)

    def _gathered(self, dtype: torch.dtype | None) -> torch.Tensor:
        wanted = self.dtype if dtype is None or not self.dtype.is_floating_point else dtype
        residency, place = self._residency, self._place
        assert residency is not None
        residency.units.require_open()
        residency.transfers.settle()
        if not residency.reached.computes:
            # A part of the model that is called by itself.
            residency.reached.look()
        if place is None:
            return torch.zeros(self._padded_shape, dtype=wanted)
        found: list[torch.Tensor] = []

        def take(values: torch.Tensor) -> None:
            if self.shape == self._padded_shape:
                found.append(values.to(wanted))
                return
            padded = torch.zeros(self._padded_shape, dtype=wanted, device=values.device)
            padded[: self.shape[0]] = values
            found.append(padded)

        residency.read_into(place, take)
        return found[0]

    def copy(self) -> torch.Tensor:
        """The rows, in an unlinked file of their own; or the memory that somebody has of them."""
        residency, place = self._residency, self._place
        assert residency is not None
        residency.units.require_open()
        if place is None:
            return torch.empty(self.shape, dtype=self.dtype)
        if residency.reached.has([place]):
            return residency.reached.stand_in(place).detach()
        return residency.copy_of(place)

    def memory(self, what: str, *, written: bool) -> torch.Tensor:
        """Memory of the rows, which the model computes with from the next forward on, for an operation that needs it.

        Raises:
            UsageError: the model computes, or a step is staged and `written` says that it is written to.
        """
        residency, place = self._residency, self._place
        assert residency is not None
        reached = residency.reached
        if reached.computes:
            raise UsageError(
                f"the values of {self.name!r} are on storage, on each rank its rows, and {what}() needs their memory "
                "while the model computes: call it between forwards, or clone() them"
            )
        reached.handed_out = True
        if place is None:
            residency.units.require_open()
            return torch.empty(self.shape, dtype=self.dtype)
        if written:
            reached.require_writable(place)
        return reached.stand_in(place).detach()


class LocalRows(torch.Tensor):
    """This rank's rows without their memory. What reads them gets a copy; what writes to them has memory of theirs."""

    source: RowSource

    @staticmethod
    def __new__(cls: type[Self], source: RowSource, device: torch.device) -> Self:
        """Make a tensor that has all of a tensor but its memory."""
        made: Self = torch.Tensor._make_wrapper_subclass(cls, source.shape, dtype=source.dtype, device=device)  # noqa: SLF001
        return made

    def __init__(self, source: RowSource, device: torch.device) -> None:
        del device
        self.source = source

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    # --- what FSDP2 asks ------------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], None]:
        """What this rank gives to a gather."""
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
        """The gathered parameter: what was gathered, where it was gathered to."""
        del metadata, param_dtype
        if out is not None:
            # It lies in the same memory as before.
            return None
        (gathered,) = outputs
        return gathered, (gathered,)

    # --- what anybody else does ---------------------------------------------------------

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every operation of torch that gets rows comes through here."""
        del types
        options = kwargs or {}
        schema = func._schema  # noqa: SLF001
        name = schema.name.removeprefix("aten::")
        if name in _SAME or (name == "view" and torch.Size(args[1]) == args[0].shape):
            return LocalRows(args[0].source, args[0].device)
        named = zip(schema.arguments, args, strict=False)
        written = [value for argument, value in named if argument.alias_info and argument.alias_info.is_write]
        written += [options[one.name] for one in schema.arguments if _writes(one, options)]
        sources = {id(leaf.source) for leaf in tree_leaves(written) if isinstance(leaf, LocalRows)}
        is_view = any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
        # By its source: two tensors of the same rows are one to the operation.
        instead: dict[int, torch.Tensor] = {}
        own: dict[int, LocalRows] = {}

        def real(leaf: Any) -> Any:
            if not isinstance(leaf, LocalRows):
                return leaf
            key = id(leaf.source)
            if key not in instead:
                is_written = key in sources
                needed = is_written or is_view
                instead[key] = leaf.source.memory(name, written=is_written) if needed else leaf.source.copy()
                own[id(instead[key])] = leaf
            return instead[key]

        found = func(*tree_map(real, args), **tree_map(real, options))
        return tree_map(lambda leaf: own.get(id(leaf), leaf), found)

    # --- what does not come through the dispatcher ----------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        """Share the memory of the rows with numpy."""
        return self.source.memory("numpy", written=False).numpy(force=force)

    def __array__(self, *given: Any, **options: Any) -> Any:
        return self.source.memory("numpy", written=False).__array__(*given, **options)

    def tolist(self) -> Any:
        """The numbers."""
        return self.source.copy().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.source.copy().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise UsageError(
            f"{self.source.name!r} is offloaded and cannot be copied with its model: save() and load it elsewhere"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"LocalRows({self.source.name}, {list(self.shape)}, {self.dtype})"


def _writes(argument: Any, options: dict[str, Any]) -> bool:
    return argument.name in options and argument.alias_info is not None and argument.alias_info.is_write
