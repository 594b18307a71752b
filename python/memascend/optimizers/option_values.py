"""Copies values of options and attributes, and compares them bit for bit."""

from __future__ import annotations

import copy as copying
import types
from collections import OrderedDict, defaultdict, deque
from typing import Any

import torch

from memascend.tensors import same_bits

# Tensors that are copied for each update; a larger one is a table that steps only read.
_COPIED_NUMEL = 4096


def copied(value: Any, *, deep: bool = False, memo: dict[int, Any] | None = None) -> Any:
    """A copy of containers and tensors, through and through; what is one object in several places stays one.

    Large tensors and objects of other classes stay as they are, unless it is `deep`: then nothing of the copy is the
    value's own, but for functions, classes and modules.

    Args:
        value: what is copied.
        deep: whether all is.
        memo: the copies made so far, by the ids of what they are of, where several values are copied.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    made = _copied(value, deep=deep, memo=memo)
    # With the value: another may not come to be where it was.
    memo[id(value)] = made, value
    return made


def _copied(value: Any, *, deep: bool, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        small = value.numel() <= _COPIED_NUMEL and kind is torch.Tensor
        return value.detach().clone() if small or deep else value
    if kind in {dict, OrderedDict}:
        return kind((name, copied(part, deep=deep, memo=memo)) for name, part in value.items())
    if kind is defaultdict:
        parts = {name: copied(part, deep=deep, memo=memo) for name, part in value.items()}
        return defaultdict(value.default_factory, parts)
    if kind in {list, tuple, set, deque}:
        made = [copied(part, deep=deep, memo=memo) for part in value]
        return deque(made, value.maxlen) if kind is deque else kind(made)
    return copying.deepcopy(value) if deep and kind is not types.ModuleType else value


def same(one: Any, other: Any) -> bool:
    """Whether two such copies are equal to the bit."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, torch.Tensor):
        equal = _same_tensor(one, other)
    elif isinstance(one, dict):
        equal = one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    elif isinstance(one, list | tuple | deque):
        equal = len(one) == len(other) and all(map(same, one, other))
    elif isinstance(one, int | float | str | bytes | complex | set | frozenset):
        # NaN is what differs from itself.
        equal = bool(one == other or (one != one and other != other))  # noqa: PLR0124
    else:
        equal = hasattr(one, "__dict__") and same(vars(one), vars(other))
    return equal


def _same_tensor(one: Any, other: Any) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if hasattr(one, "__tensor_flatten__"):
        (names, context), (others, their_context) = one.__tensor_flatten__(), other.__tensor_flatten__()
        return (
            list(names) == list(others)
            and same(context, their_context)
            and all(same(getattr(one, name), getattr(other, name)) for name in names)
        )
    if one.layout != torch.strided:
        return False
    return same_bits(one, other)
