"""Packs attributes of a Trainer as JSON. Warns if an attribute changes during training but no commit stores it."""

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

# The containers that JSON does not have: name of the class in the packed form -> class.
_KINDS: dict[str, type[Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque, "Counter": Counter, "OrderedDict": OrderedDict
}  # fmt: skip
# Of an attribute that is a container with more entries than this, `Watch` compares only the length.
_COMPARED_PARTS = 10_000
# `Watch` ignores the attributes that the code of these packages uses. Of these attributes, commits store only
# `names.SUMS` and `names.AVERAGES` without `keep=`.
_LIBRARIES = frozenset(
    {"transformers", "trl", "sentence_transformers", "peft", "accelerate", "torch", "builtins", "axolotl", "swift"}
)


def packed(value: Any, what: str) -> Any:
    """Converts a value to JSON.

    The value may be None, a number, a text, a scalar of numpy or torch, or a container of such values.

    Raises:
        ConfigError: the value contains an object of another type. `what` names the value in the message.
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
        f"{what} contains an object of type {type(value).__name__}, which a commit cannot store. Use only numbers, "
        "texts, and containers of numbers and texts"
    )


def unpacked(value: Any) -> Any:
    """Converts the result of `packed()` back to a value. A dict whose class is not in `_KINDS` becomes a plain dict."""
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
        # Make a Counter from a dict, because Counter() of a list of pairs would count the pairs.
        return pairs if kind == "dict" else _KINDS[kind](pairs)
    return deque(parts, value["maxlen"]) if kind == "deque" else _KINDS[kind](parts)


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute. Changes a dict or a list in place, because other code may refer to the same object."""
    now = getattr(owner, name, None)
    if isinstance(now, dict) and isinstance(value, dict):
        fill(now, value)
    elif isinstance(now, list) and isinstance(value, list):
        now[:] = value
    else:
        setattr(owner, name, value)


def fill(home: dict[Any, Any], value: dict[Any, Any]) -> None:
    """Replaces the contents of nested dicts in place, so that each defaultdict keeps its factory."""
    for name in [name for name in home if name not in value]:
        del home[name]
    for name, part in value.items():
        if isinstance(part, dict) and type(part) is dict:
            # If the entry is missing, indexing a defaultdict makes the entry with the factory.
            fill(home[name] if isinstance(home, defaultdict) else home.setdefault(name, {}), part)
        else:
            home[name] = part


class Watch:
    """Warns once about attributes of a Trainer that changed from the first to the second step but are not in `keep`."""

    def __init__(self, trainer: Any, keep: Sequence[str]) -> None:
        self._trainer, self._keep = trainer, frozenset(keep)
        self._first: dict[str, int] | None = None
        self._compared = False

    def look(self) -> None:
        """Records the attributes at the first step, and compares them at the second.

        `Resume.position()` calls this method during each commit of a step.
        """
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
                f"{listed} of {type(self._trainer).__name__} changed from one step to the next, but commits do not "
                "store these attributes, so a resume would start with their values from the constructor. To store them "
                f"in each commit, add them to keep= of memascend.trainer.offload(): keep={changed}"
            )

    def _digests(self) -> dict[str, int]:
        """Returns digests of the attributes that a commit could store.

        Leaves out attributes that library code uses, and attributes in `keep`.
        """
        theirs = {*_names_in_libraries(type(self._trainer)), *self._keep}
        texts = {name: _text(value) for name, value in vars(self._trainer).items() if name not in theirs}
        return {name: hash(text) for name, text in texts.items() if text is not None}


def _text(value: Any) -> str | None:
    """Returns a value as JSON, or its length if it is a long container; None if a commit cannot store the value."""
    if isinstance(value, list | tuple | dict | set | deque) and len(value) > _COMPARED_PARTS:
        return str(len(value))
    try:
        return json.dumps(packed(value, ""))
    except (ConfigError, RecursionError):
        return None


def _names_in_libraries(kind: type) -> Iterator[str]:
    """Yields all names that occur in the code of the methods that a class inherits from the libraries."""
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
