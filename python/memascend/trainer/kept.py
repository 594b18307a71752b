"""Packs a program's own values as JSON, and watches a Trainer for attributes that change and are not kept."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memascend.errors import ConfigError
from memascend.text import warn

if TYPE_CHECKING:
    import types
    from collections.abc import Iterator, Sequence

# Containers that JSON lacks, by the name under which they are packed.
_KINDS: dict[str, type[Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "Counter": Counter, "OrderedDict": OrderedDict
}  # fmt: skip
# Of a longer container the length alone is compared.
_COMPARED_PARTS = 10_000
# Packages whose own attributes are theirs to keep.
_LIBRARIES = frozenset(
    {"transformers", "trl", "sentence_transformers", "peft", "accelerate", "torch", "builtins", "axolotl", "swift"}
)


def packed(value: Any, what: str) -> Any:
    """A value as JSON: numbers, texts, scalars of numpy and torch, and containers of them.

    Raises:
        ConfigError: there is another object in it; `what` names the whole.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list):
        return [packed(part, what) for part in value]
    kind = type(value).__name__
    if isinstance(value, dict):
        if all(isinstance(name, str) for name in value) and kind not in _KINDS and "" not in value:
            return {name: packed(part, what) for name, part in value.items()}
        pairs = [[packed(name, what), packed(part, what)] for name, part in value.items()]
        return {"": kind if kind in _KINDS else "dict", "parts": pairs}
    if _KINDS.get(kind) is type(value):
        return {"": kind, "parts": [packed(part, what) for part in value], "maxlen": getattr(value, "maxlen", None)}
    return _packed_scalar(value, what)


def _packed_scalar(value: Any, what: str) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(value, torch.nn.Parameter):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"": "torch", "dtype": dtype, "shape": list(value.shape), "parts": value.item()}
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return {"": "numpy", "dtype": str(value.dtype), "parts": value.item()}
    raise ConfigError(
        f"{what} has {type(value).__name__}, which a commit cannot hold: let it have numbers, texts, and containers of "
        "these alone"
    )


def unpacked(value: Any) -> Any:
    """The value that `packed()` gave; a dict of any other class is a plain one."""
    if isinstance(value, list):
        return [unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("")
    if kind is None:
        return {name: unpacked(part) for name, part in value.items()}
    if kind == "torch":
        return torch.full(value["shape"], value["parts"], dtype=getattr(torch, value["dtype"]))
    return _of_kind(kind, value)


def _of_kind(kind: str, value: dict[str, Any]) -> Any:
    if kind == "numpy":
        return np.dtype(value["dtype"]).type(value["parts"])
    parts = [unpacked(part) for part in value["parts"]]
    if kind in ("dict", "Counter", "OrderedDict"):
        pairs = dict(parts)
        # Not from the parts: a Counter would count them.
        return pairs if kind == "dict" else _KINDS[kind](pairs)
    return deque(parts, value["maxlen"]) if kind == "deque" else _KINDS[kind](parts)


def replace(owner: Any, name: str, value: Any) -> None:
    """Set an attribute; a dict or a list stays the object that other code may hold."""
    now = getattr(owner, name, None)
    if isinstance(now, dict) and isinstance(value, dict):
        fill(now, value)
    elif isinstance(now, list) and isinstance(value, list):
        now[:] = value
    else:
        setattr(owner, name, value)


def fill(home: dict[Any, Any], value: dict[Any, Any]) -> None:
    """Give dicts of dicts other contents in place, since some of them make missing entries."""
    for name in [name for name in home if name not in value]:
        del home[name]
    for name, part in value.items():
        if isinstance(part, dict) and type(part) is dict:
            # A defaultdict makes the kind that it wants.
            fill(home[name] if isinstance(home, defaultdict) else home.setdefault(name, {}), part)
        else:
            home[name] = part


class Watch:
    """Warns once of attributes of a Trainer's subclass that changed between its first two steps and are not kept."""

    def __init__(self, trainer: Any, keep: Sequence[str]) -> None:
        self._trainer, self._keep = trainer, frozenset(keep)
        self._first: dict[str, int] | None = None
        self._compared = False

    def look(self) -> None:
        """Look at the attributes, at each step."""
        if self._compared:
            return
        now = self._digests()
        if self._first is None:
            self._first = now
            return
        self._compared = True
        changed = sorted(name for name in now if now[name] != self._first.get(name))
        if changed:
            listed = ", ".join(changed)
            warn(
                f"{listed} of {type(self._trainer).__name__} changed from one step to the next, and a resume would "
                f"begin with what the constructor gives: memascend.trainer.offload(keep={changed}) keeps numbers, "
                "texts and containers of them with each commit"
            )

    def _digests(self) -> dict[str, int]:
        """Digests of the figures that code of no library names, by attribute."""
        theirs = {*_names_in_libraries(type(self._trainer)), *self._keep}
        texts = {name: _text(value) for name, value in vars(self._trainer).items() if name not in theirs}
        return {name: hash(text) for name, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    """A value that may be kept, as text; None for any other."""
    if isinstance(value, list | tuple | dict | set | deque) and len(value) > _COMPARED_PARTS:
        return str(len(value))
    try:
        return json.dumps(packed(value, ""))
    except (ConfigError, RecursionError):
        return None


def _names_in_libraries(kind: type) -> Iterator[str]:
    """The attributes that the methods of a class's library bases name."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            for member in vars(base).values():
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if code is not None:
                    yield from _names_in(code)


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            yield from _names_in(constant)
