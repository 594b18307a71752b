"""Replaces weights that autograd saves by references, so that the backward reloads them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from memascend.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from memascend.residency.residency import Residency
    from memascend.residency.unit_slot import Home

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


class Keeper(Protocol):
    """Keeps tensors that lie in no unit elsewhere; a protocol, as who does, `activations`, is in a room above this."""

    def save(self, tensor: torch.Tensor, caller: FrameType) -> Any:
        """What stands for a tensor that is saved in this frame, with a method `tensor()`; or the tensor itself."""


class SavedTensorHooks:
    """One pair of hooks, which are pushed while a unit computes."""

    __slots__ = ("_pair", "_residency", "keeper")

    def __init__(self, residency: Residency, keeper: Keeper | None = None) -> None:
        """Where there is a keeper, the hooks are pushed for all of a model's forward."""
        self._residency = residency
        self.keeper = keeper
        # Bound once, so that they can be told from others'.
        self._pair = (self.pack, self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """A note for what lies in a unit; anything else as it is."""
        note = self._note(tensor)
        if note is not None:
            return note
        if _is_offloaded(tensor):
            return _Saved(tensor.detach(), tensor._memascend.name)  # type: ignore[attr-defined] # noqa: SLF001
        kept = tensor if self.keeper is None else self.keeper.save(tensor, sys._getframe(1))  # noqa: SLF001
        return _Saved(tensor) if kept is tensor else kept

    def unpack(self, saved: Any) -> torch.Tensor:
        """The tensor again."""
        if isinstance(saved, Note):
            return self._tensor(saved)
        tensor: torch.Tensor = saved if isinstance(saved, torch.Tensor) else saved.tensor()
        return tensor

    def lies_in_unit(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is a unit's."""
        return self._note(tensor) is not None

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
        """Pop what `push` pushed, if anything is there: a user's own hooks, left by an interrupt, may have taken it."""
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

    def _note(self, tensor: torch.Tensor) -> Note | None:
        try:
            address = tensor.untyped_storage().data_ptr()
        except (NotImplementedError, RuntimeError):
            # Sparse, or a subclass without memory of its own: no bytes of ours.
            return None
        found = self._residency.units.home_at(address)
        if found is None:
            return None
        home, version = found
        return Note(
            home,
            version,
            int(tensor.storage_offset()) * tensor.element_size(),
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def _tensor(self, note: Note) -> torch.Tensor:
        storage = self._residency.storage_of(note.home, note.version)
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            # Elsewhere, as in most backwards, there is nothing to leave.
            with torch.inference_mode(mode=False), torch.no_grad():
                return _viewed(storage, note)
        return _viewed(storage, note)


def _viewed(storage: torch.UntypedStorage, note: Note) -> torch.Tensor:
    tensor = torch.empty(0, dtype=note.dtype, device=storage.device)
    tensor.set_(storage, note.offset // note.dtype.itemsize, note.size, note.stride)
    if note.conjugate:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if note.negative else tensor  # noqa: SLF001


class _Saved:
    """What lies in no unit, as it was when it was saved. Torch looks at no version of what hooks have packed."""

    __slots__ = ("_name", "_values", "_version")

    def __init__(self, values: torch.Tensor, name: str | None = None) -> None:
        """`name`: of the parameter that it is, which had memory of its own and is away when the graph is walked."""
        self._values = values
        self._name = name
        self._version = values._version  # noqa: SLF001

    def tensor(self) -> torch.Tensor:
        values = self._values
        version = values._version  # noqa: SLF001
        if version == self._version:
            return values
        if self._name is not None:
            raise UsageError(
                f"a graph needs {self._name!r} as it was before step(), or before it was written to: call backward() "
                "before that, or compute what it is of again"
            )
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{list(values.shape)} {values.dtype} is at version {version}, and was saved at version {self._version}"
        )


class _Delegating:
    """Ours over another user's hooks (`save_on_cpu`, say): what is no unit's is handed on."""

    __slots__ = ("_pack", "_unpack", "hooks")

    def __init__(self, hooks: SavedTensorHooks, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        self.hooks = hooks
        self._pack = pack
        self._unpack = unpack

    def pack(self, tensor: torch.Tensor) -> Any:
        note = self.hooks._note(tensor)  # noqa: SLF001
        if note is not None:
            return (True, note)
        return (False, self._pack(tensor.detach() if _is_offloaded(tensor) else tensor))

    def unpack(self, saved: Any) -> torch.Tensor:
        ours, what = saved
        if ours:
            return self.hooks._tensor(what)  # noqa: SLF001
        tensor: torch.Tensor = self._unpack(what)
        return tensor


class _OverCheckpoint:
    """Ours over a checkpoint's, which keeps what is saved as it is: a view keeps its bytes alive, a parameter does not.

    Of what needs a gradient it makes a view itself; a frozen parameter that it kept would be away in the backward.
    """

    __slots__ = ("_pack", "hooks")

    # So torch finds the hooks of users beneath: what a selective checkpoint caches is not for these.
    _checkpoint_internal = True

    def __init__(self, hooks: SavedTensorHooks, pack: Callable[..., Any]) -> None:
        self.hooks = hooks
        self._pack = pack

    @property
    def _user_hooks(self) -> Any:
        return getattr(self._pack, "_user_hooks", None)

    def __call__(self, tensor: torch.Tensor) -> Any:
        return self._pack(tensor.detach() if _is_offloaded(tensor) else tensor)


def _is_offloaded(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and "_memascend" in tensor.__dict__


def _owner(pack: Callable[..., Any]) -> SavedTensorHooks | None:
    """Whose a pack hook is, where it is one of this module's."""
    owner = pack if isinstance(pack, _OverCheckpoint) else getattr(pack, "__self__", None)
    if isinstance(owner, (_Delegating, _OverCheckpoint)):
        return owner.hooks
    return owner if isinstance(owner, SavedTensorHooks) else None
