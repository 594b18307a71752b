"""Copies modules of an offloaded model deeply: plain modules, whose weights lie in files of their own."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

# What copy.deepcopy() asks a module for, and what makes it an offloaded one.
_COPIER = "__deepcopy__"
_OURS = (_COPIER, "__prepare_scriptable__", "_memascend")
_KEY = "memascend"
_TABLES = (
    *("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_state_dict_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def copy_module(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module deeply without what makes it an offloaded one: `torch.nn.Module.__deepcopy__` while any run is.

    An attribute of each module would cost one or two kilobytes: its dict would no longer share the keys of its class.
    """
    with _plain(module):
        # As copy.deepcopy() does it where a class has no `__deepcopy__`.
        return copy._reconstruct(module, memo, *module.__reduce_ex__(4))  # type: ignore[attr-defined]  # noqa: SLF001


def allow_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Let modules be copied deeply whose class has a `__deepcopy__` of its own."""
    for module in modules:
        if getattr(type(module), _COPIER, copy_module) is not copy_module:
            module.__dict__[_COPIER] = functools.partial(_copied, module)


def forbid_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Take that back; what is plain needs no help."""
    for module in modules:
        module.__dict__.pop(_COPIER, None)


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    with _plain(module):
        return copy.deepcopy(module, memo)


@contextlib.contextmanager
def _plain(module: torch.nn.Module) -> Iterator[None]:
    """Without our attributes and hooks inside."""
    own = module.__dict__
    ours = {name: own.pop(name) for name in _OURS if name in own}
    tables = {name: own[name] for name in _TABLES if _KEY in own.get(name, ())}
    try:
        for name, table in tables.items():
            own[name] = type(table)((key, hook) for key, hook in table.items() if key != _KEY)
        yield
    finally:
        own.update(ours)
        own.update(tables)
