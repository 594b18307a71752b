"""Packs the tensors that autograd saves: for a weight, autograd saves a `Note` of where to read the weight again.

[Note: saved tensors] A saved weight must not keep its unit's memory. So autograd saves a `Note` (unit, version, offset)
instead of the tensor, and unpacking the note reads the unit again. A tensor outside of units is passed to `Activations`
or to the hooks of user code, or is saved unchanged.
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
    """Describes a saved tensor as a view into a unit, so that `tensor_of` can make the same view again.

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
    """The pack hook and the unpack hook of a run. They are pushed while a module with units computes."""

    __slots__ = ("_pair", "_residency", "keeper")

    def __init__(self, residency: Residency, keeper: Activations | None = None) -> None:
        """`keeper` offloads checkpointed activations; with a keeper, the root module pushes the hooks, too."""
        self._residency = residency
        self.keeper = keeper
        self._pair = (self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object that autograd saves for `tensor`: a `Note`, the keeper's object, or a `_Saved`."""
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
        """Pushes the hooks, which also call hooks of other code that are on top, and returns True.

        Returns False if the hooks of this run are already on top.
        """
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
        """Pops the top hooks.

        Does nothing if there are no hooks: after an interrupt, a context of the user may have popped them all.
        """
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
        """Returns the note for a tensor in a unit, or for a parameter whose data are a copy; None for other tensors."""
        try:
            # Without this guard, a parameter with its placeholder class would return the storage of a copy.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                address = torch.Tensor.untyped_storage(tensor).data_ptr()
        except (NotImplementedError, RuntimeError):
            # A sparse tensor, or a tensor subclass without a storage, is in no unit.
            return None
        found, start = self._residency.units.at.get(address), 0
        if found is None and _is_offloaded(tensor):
            # `WeightCopies.materialized` has set the parameter's data to a copy for a moment. The parameter's unit has
            # the same values, so the note refers to the unit.
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
        """Returns the tensor that a note describes, as a view into the bytes of the note's unit."""
        storage = self._residency.storage_of(note.unit, note.version)
        tensor = view_of(storage, note.dtype, note.offset // note.dtype.itemsize, note.size, note.stride)
        if not (note.conjugate or note.negative):
            return tensor
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = tensor.conj() if note.conjugate else tensor
            return torch._neg_view(tensor) if note.negative else tensor  # noqa: SLF001


class _Saved(NamedTuple):
    """A saved tensor outside of units, with its version: torch does not check the versions of packed tensors."""

    values: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        """Returns the tensor; raises RuntimeError, as torch does, if code wrote to it after autograd saved it."""
        values, now = self.values, self.values._version  # noqa: SLF001
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of {list(values.shape)} {values.dtype} is at version {now}, and was saved at version "
                f"{self.version}; "
                "compute the new value in another tensor"
            )
        return values


@dataclass(eq=False, slots=True)
class _Delegating:
    """Hooks that pack tensors in units as notes. Other tensors go to the hooks of user code, such as `save_on_cpu`."""

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
    """Pack hook that calls a checkpoint's pack hook; passes a view of an offloaded parameter instead of the parameter.

    In the backward a view still has its memory, but the parameter may be a placeholder. The checkpoint's hook makes
    views of tensors that require gradients, but not of frozen parameters.
    """

    hooks: SavedTensorHooks
    _pack: Callable[..., Any]

    # torch reads these two attributes of a checkpoint's hook to find the hooks of user code below the checkpoint.
    # Without these attributes, a selective checkpoint would treat this hook as a hook of user code, and would pass
    # cached tensors to it.
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
