"""Reads `optimizer.state` from storage, one parameter at a time, when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import UsageError
from memascend.residency.away import is_in_place
from memascend.tensors import same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memascend.run.session import Session

# What torch's own state does not have.
_OURS = ("master", "rest")


class StoredState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state of each parameter, by the parameter, as torch's optimizers have it.

    What is given are copies that refuse writes, which would be lost.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self:
            return _Read()
        found = self._session.state_of(parameter)
        with torch.inference_mode():
            return _Read({name: value.clone().as_subclass(_Copy) for name, value in found.items() if name not in _OURS})

    def __contains__(self, parameter: object) -> bool:
        return any(known is parameter for known in self)

    def __iter__(self) -> Iterator[torch.Tensor]:
        entries = self._session.run.resources.store.entries()
        has = {entry["name"] for entry in entries if any(name not in _OURS for name, _, _ in entry["state"])}
        gradients = self._session.run.gradients.by_name
        return iter([one.place.parameter for name, one in gradients.items() if one.step and name in has])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, parameter: torch.Tensor, state: dict[str, Any]) -> None:
        now = self[parameter]
        if now.keys() != state.keys() or not all(_same(state[name], value) for name, value in now.items()):
            refuse_other_state()

    def __delitem__(self, parameter: torch.Tensor) -> None:
        refuse_other_state()


class _Copy(torch.Tensor):
    """A copy of a state, or a view of one, which refuses to be written to."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        written = (kwargs.get("out"), (args[0] if args else kwargs) if is_in_place(func) else None)
        if func == _SET_DATA or any(isinstance(leaf, _Copy) for leaf in tree_leaves(written)):
            refuse_other_state()
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            found = func(*args, **kwargs)
            if func in _GIVES_ARRAY:
                found.flags.writeable = False
                return found
            memory = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Copy)}
            return tree_map(lambda leaf: leaf.as_subclass(_Copy) if _address(leaf) in memory else leaf, found)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return self.as_subclass(torch.Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            return self.as_subclass(torch.Tensor).clone().__reduce_ex__(protocol)


_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_GIVES_ARRAY = (torch.Tensor.numpy, torch.Tensor.__array__)


def _address(value: Any) -> int | None:
    """Where the memory of a tensor begins; None of what has none."""
    return value.untyped_storage().data_ptr() or None if isinstance(value, torch.Tensor) else None


class _Read(dict[str, Any]):
    """The state of one parameter as it was read. Other values in it would be lost."""

    def __setitem__(self, name: str, value: Any) -> None:
        # Lightning puts back what it moved to where it is.
        if name not in self or not _same(value, self[name]):
            refuse_other_state()

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        refuse_other_state()

    __delitem__ = pop = popitem = clear = setdefault = update = __ior__ = _refuse


def refuse_other_state() -> NoReturn:
    """Raise what says where state can be given."""
    raise UsageError(
        "the optimizer's state is on storage and cannot be replaced: give the optimizer that holds the other state "
        "to offload(), or begin from a checkpoint, offload(checkpoint=...)"
    )


def _same(given: Any, value: torch.Tensor) -> bool:
    return (
        isinstance(given, torch.Tensor)
        and given.dtype == value.dtype
        and given.shape == value.shape
        and same_bits(given, value)
    )
