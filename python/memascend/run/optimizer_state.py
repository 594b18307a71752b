"""Reads `optimizer.state` from storage, one parameter at a time, when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from memascend.errors import UsageError

if TYPE_CHECKING:
    from memascend.run.session import Session

__all__ = ["StoredState", "refuse_other_state"]

# What torch's own state does not have.
_OURS = ("master", "rest")


class StoredState(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The state of each parameter, by the parameter, as torch's optimizers have it.

    What is given are copies that torch lets nobody write to outside of inference mode: a write would be lost.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getitem__(self, parameter: torch.Tensor) -> dict[str, Any]:
        if parameter not in self:
            return _Read()
        found = self._session.state_of(parameter)
        with torch.inference_mode():
            return _Read({name: value.clone() for name, value in found.items() if name not in _OURS})

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
        and torch.equal(given.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))
    )
