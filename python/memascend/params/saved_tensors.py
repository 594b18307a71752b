"""Packs the tensors that autograd saves: a tensor in a unit's memory as a `Note`, from which the backward reads it.

[Note: saved tensors] A saved weight must not keep its unit's memory. So autograd saves a `Note` (unit, version, offset)
instead of the tensor, and unpacking the note reads the unit again. Tensors outside of units pass through: to
`Activations`, to the hooks of user code, or unchanged.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.params.unit import view_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.activations.activations import Activations
    from memascend.params.offloaded_param import Place
    from memascend.params.residency import Residency
    from memascend.params.unit import CachedUnit

_CHECKPOINT = "torch.utils.checkpoint"


class Note(NamedTuple):
    """The place of a saved tensor in a unit, from which the same view is made again.

    See [Note: saved tensors].
    """

    unit: CachedUnit
    version: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


class SavedTensorHooks:
    """The pair of saved-tensor hooks of a run, pushed while a module with units computes."""

    __slots__ = ("_pair", "_residency", "keeper")

    def __init__(self, residency: Residency, keeper: Activations | None = None) -> None:
        """`keeper` offloads checkpointed activations; with a keeper, the root module pushes the hooks, too."""
        self._residency = residency
        self.keeper = keeper
        # All pushes use this one pair of bound methods.
        self._pair = (self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns what autograd saves for `tensor`: a `Note`, the keeper's object, or the tensor with its version."""
        note = self.note_of(tensor)
        if note is not None:
            return note
        kept = tensor if self.keeper is None else self.keeper.save(tensor, sys._getframe(1))  # noqa: SLF001
        return _Saved(tensor, tensor._version) if kept is tensor else kept  # noqa: SLF001

    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor of an object that `pack` returned."""
        if isinstance(saved, Note):
            return self.tensor_of(saved)
        tensor: torch.Tensor = saved if isinstance(saved, torch.Tensor) else saved.tensor()
        return tensor

    def push(self) -> bool:
        """Pushes the hooks unless these hooks are on top already; True if they were pushed."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
        if top is None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._pair)  # noqa: SLF001
            return True
        pack, unpack = top
        if _owner(pack) is self:
            return False
        if isinstance(pack, _OverCheckpoint) or getattr(pack, "__module__", "") == _CHECKPOINT:
            pack = _OverCheckpoint(self, pack)
        else:
            theirs = _Delegating(self, pack, unpack)
            pack, unpack = theirs.pack, theirs.unpack
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # noqa: SLF001
        return True

    @staticmethod
    def pop() -> None:
        """Pops the top hooks, if there are any: after an interrupt, the user's own context may have popped them."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # noqa: SLF001
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001

    def pop_left(self) -> None:
        """Pops hooks of this run that an interrupt left on top; does nothing inside a backward."""
        while torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
            if top is None or _owner(top[0]) is not self:
                return
            self.pop()

    def note_of(self, tensor: torch.Tensor) -> Note | None:
        """Returns the place of a tensor in a unit; None if it is outside of units."""
        try:
            # Without this guard a parameter with its placeholder class would give the address of a copy.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                address = torch.Tensor.untyped_storage(tensor).data_ptr()
        except (NotImplementedError, RuntimeError):
            # A sparse tensor, or a subclass without memory of its own, is in no unit.
            return None
        found, start = self._residency.units.at.get(address), 0
        if found is None and _is_offloaded(tensor):
            # The parameter has a copy for a moment (`WeightCopies.materialized`); its unit has the same values.
            place: Place = tensor._memascend  # type: ignore[attr-defined] # noqa: SLF001
            unit = self._residency.units.unit_of[place.name]
            found, start = (unit, unit.version), place.offset
        if found is None:
            return None
        return Note(
            *found,
            start + int(tensor.storage_offset()) * tensor.element_size(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor_of(self, note: Note) -> torch.Tensor:
        """Returns the tensor that a note describes, on the bytes of its unit."""
        storage = self._residency.storage_of(note.unit, note.version)
        tensor = view_of(storage, note.dtype, note.offset // note.dtype.itemsize, note.size, note.stride)
        if not (note.conjugate or note.negative):
            return tensor
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = tensor.conj() if note.conjugate else tensor
            return torch._neg_view(tensor) if note.negative else tensor  # noqa: SLF001


class _Saved(NamedTuple):
    """A saved tensor outside of units, with its version, since torch does not check versions of packed tensors."""

    values: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        """Returns the tensor; raises RuntimeError, as torch does, if code wrote to it after autograd saved it."""
        values, now = self.values, self.values._version  # noqa: SLF001
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(values.shape)} {values.dtype} is at version {now}, and was saved at version {self.version}"
            )
        return values


@dataclass(eq=False, slots=True)
class _Delegating:
    """Hooks that pack tensors in units as notes, and pass other tensors to hooks of user code (`save_on_cpu`)."""

    hooks: SavedTensorHooks
    _pack: Callable[..., Any]
    _unpack: Callable[..., Any]

    def pack(self, tensor: torch.Tensor) -> Any:
        note = self.hooks.note_of(tensor)
        if note is not None:
            return (True, note)
        return (False, self._pack(torch.Tensor.detach(tensor) if _is_offloaded(tensor) else tensor))

    def unpack(self, saved: Any) -> torch.Tensor:
        ours, what = saved
        if ours:
            return self.hooks.tensor_of(what)
        tensor: torch.Tensor = self._unpack(what)
        return tensor


@dataclass(eq=False, slots=True)
class _OverCheckpoint:
    """Pack hook that calls a checkpoint's pack hook with a view instead of an offloaded parameter.

    In the backward a view still has its memory, while the parameter would be a placeholder. The checkpoint's hook
    itself makes views of tensors that require gradients, but not of frozen parameters.
    """

    hooks: SavedTensorHooks
    _pack: Callable[..., Any]

    # By these two attributes of a checkpoint's hook, torch finds the hooks of user code beneath it. Without them, a
    # selective checkpoint would take this hook for a hook of user code, and pass cached tensors to it.
    _checkpoint_internal = True

    @property
    def _user_hooks(self) -> Any:
        return getattr(self._pack, "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._pack(torch.Tensor.detach(tensor) if _is_offloaded(tensor) else tensor)


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and "_memascend" in tensor.__dict__


def _owner(pack: Callable[..., Any]) -> SavedTensorHooks | None:
    """Returns the `SavedTensorHooks` that pushed a pack hook; None if other code pushed it."""
    owner = pack if isinstance(pack, _OverCheckpoint) else getattr(pack, "__self__", None)
    if isinstance(owner, (_Delegating, _OverCheckpoint)):
        return owner.hooks
    return owner if isinstance(owner, SavedTensorHooks) else None
