"""Copies modules of an offloaded model deeply: plain modules, whose weights lie in files of their own."""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["allow_copies", "forbid_copies", "is_offloaded"]

# What copy.deepcopy() asks a module for, and what makes it an offloaded one.
_COPIER = "__deepcopy__"
_OURS = (_COPIER, "__prepare_scriptable__", "_memascend")
_KEY = "memascend"
_TABLES = (
    *("_forward_pre_hooks", "_forward_hooks", "_forward_hooks_always_called", "_state_dict_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)


def allow_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Let modules be copied deeply."""
    for module in modules:
        module.__dict__[_COPIER] = functools.partial(_copied, module)


def forbid_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Take that back; what is plain needs no help."""
    for module in modules:
        module.__dict__.pop(_COPIER, None)


def is_offloaded(module: torch.nn.Module) -> bool:
    """Whether a module is a part of an offloaded model, and not of one that is materialized."""
    own = module.__dict__
    return isinstance(own.get(_COPIER), functools.partial) or _KEY in own.get("_forward_hooks_always_called", ())


def _copied(module: torch.nn.Module, memo: dict[int, Any]) -> Any:
    own = module.__dict__
    ours = {name: own.pop(name) for name in _OURS if name in own}
    tables = {name: own[name] for name in _TABLES if _KEY in own[name]}
    try:
        for name, table in tables.items():
            own[name] = type(table)((key, hook) for key, hook in table.items() if key != _KEY)
        # As torch, or the module's class, does it.
        return copy.deepcopy(module, memo)
    finally:
        own.update(ours)
        own.update(tables)
