"""Packs the tensors that autograd saves: what lies in a unit as a note of where it lies, anything else as it is."""

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
    from memascend.params.unit import Home

_CHECKPOINT = "torch.utils.checkpoint"


class Note(NamedTuple):
    """Where a tensor that autograd saved lies: enough to build the same view again."""

    home: Home
    version: int
    offset: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conjugate: bool
    negative: bool


class SavedTensorHooks:
    """One pair of hooks, which are pushed while a unit computes."""

    __slots__ = ("_pair", "_residency", "keeper")

    def __init__(self, residency: Residency, keeper: Activations | None = None) -> None:
        """Where there is a keeper, the hooks are pushed for all of a model's forward."""
        self._residency = residency
        self.keeper = keeper
        # Bound once, so that they can be distinguished from other hooks.
        self._pair = (self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """A note for what lies in a unit; anything else as it is."""
        note = self.note_of(tensor)
        if note is not None:
            return note
        kept = tensor if self.keeper is None else self.keeper.save(tensor, sys._getframe(1))  # noqa: SLF001
        return _Saved(tensor, tensor._version) if kept is tensor else kept  # noqa: SLF001

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(saved, Note):
            return self.tensor_of(saved)
        tensor: torch.Tensor = saved if isinstance(saved, torch.Tensor) else saved.tensor()
        return tensor

    def push(self) -> bool:
        """Push the hooks where they are needed, which is not where ours are on top; whether they were pushed."""
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
        """Pop the pushed hooks, if there are any: a user's own hooks, left by an interrupt, may have popped them."""
        if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:  # noqa: SLF001
            return
        torch._C._autograd._pop_saved_tensors_default_hooks()  # noqa: SLF001

    def pop_left(self) -> None:
        """Pop what an interrupt left on top, where this thread computes nothing."""
        while torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            top = torch._C._autograd._top_saved_tensors_default_hooks(False)  # noqa: SLF001
            if top is None or _owner(top[0]) is not self:
                return
            self.pop()

    def note_of(self, tensor: torch.Tensor) -> Note | None:
        """Where in a unit a tensor lies; None: it lies elsewhere."""
        try:
            # A parameter that is materialized beside other threads would give a copy's.
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                address = torch.Tensor.untyped_storage(tensor).data_ptr()
        except (NotImplementedError, RuntimeError):
            # Sparse, or a subclass without memory of its own: no bytes of ours.
            return None
        found, start = self._residency.units.at.get(address), 0
        if found is None and _is_offloaded(tensor):
            # It has a copy for a moment, see `WeightCopies.materialized`: the unit has the same values.
            place: Place = tensor._memascend  # type: ignore[attr-defined] # noqa: SLF001
            home = self._residency.units.home_of[place.name]
            found, start = (home, home.version), place.offset
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
        """The tensor again that a note is of."""
        storage = self._residency.storage_of(note.home, note.version)
        tensor = view_of(storage, note.dtype, note.offset // note.dtype.itemsize, note.size, note.stride)
        if not (note.conjugate or note.negative):
            return tensor
        with torch.inference_mode(mode=False), torch.no_grad():
            tensor = tensor.conj() if note.conjugate else tensor
            return torch._neg_view(tensor) if note.negative else tensor  # noqa: SLF001


class _Saved(NamedTuple):
    """A saved tensor that lies in no unit, with its version: torch checks no version of packed tensors."""

    values: torch.Tensor
    version: int

    def tensor(self) -> torch.Tensor:
        values, now = self.values, self.values._version  # noqa: SLF001
        if now != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{list(values.shape)} {values.dtype} is at version {now}, and was saved at version {self.version}"
            )
        return values


@dataclass(eq=False, slots=True)
class _Delegating:
    """Ours over hooks of user code (such as `save_on_cpu`): tensors outside of units are passed on."""

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
    """Ours over a checkpoint's, which keeps saved tensors as they are: a view keeps its bytes, a parameter does not.

    Of a tensor that needs a gradient it makes a view itself; a frozen parameter would be offloaded in the backward.
    """

    hooks: SavedTensorHooks
    _pack: Callable[..., Any]

    # So torch finds the hooks of users beneath: tensors that a selective checkpoint caches are not for these.
    _checkpoint_internal = True

    @property
    def _user_hooks(self) -> Any:
        return getattr(self._pack, "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._pack(torch.Tensor.detach(tensor) if _is_offloaded(tensor) else tensor)


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and "_memascend" in tensor.__dict__


def _owner(pack: Callable[..., Any]) -> SavedTensorHooks | None:
    """Whose a pack hook is, where it is one of this module's."""
    owner = pack if isinstance(pack, _OverCheckpoint) else getattr(pack, "__self__", None)
    if isinstance(owner, (_Delegating, _OverCheckpoint)):
        return owner.hooks
    return owner if isinstance(owner, SavedTensorHooks) else None
