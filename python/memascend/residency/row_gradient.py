"""Represents an embedding's gradient by the gradients of its look-ups, never whole in memory.

It is a tensor to autograd, which carries it to the parameter and adds those of several look-ups. Bits are those of
torch's dense gradient: each part of it is made by torch's own kernel, in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from memascend.errors import UsageError
from memascend.squares import total

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from memascend.squares import Squares

_aten = torch.ops.aten
_CPU = torch.device("cpu")
# So many elements are made and measured at once.
_SPAN = 1 << 16


class Term(NamedTuple):
    """What one look-up adds."""

    result: torch.Tensor  # the gradient of what it gave, a row for each position
    rows: torch.Tensor  # the rows that it named, in their order; those of padding are left out
    positions: torch.Tensor  # where each of them was named, in the order of the positions for the same row

    @classmethod
    def of(cls, gradient: torch.Tensor, indices: torch.Tensor, padding: int) -> Term:
        """Of a look-up of `indices` whose result has this gradient."""
        rows, positions = torch.sort(indices.reshape(-1).long(), stable=True)
        if padding >= 0:
            named = rows != padding
            rows, positions = rows[named], positions[named]
        return cls(gradient.detach().reshape(-1, gradient.shape[-1]), rows, positions)

    def window(self, first: int, end: int) -> torch.Tensor:
        """Rows `first` up to `end` of the dense gradient, in new memory."""
        count = end - first
        low, high = torch.searchsorted(self.rows, torch.tensor([first, end], device=_CPU)).tolist()
        if low == high:
            return torch.zeros((count, self.result.shape[-1]), dtype=self.result.dtype, device=_CPU)
        local, positions = self.rows[low:high] - first, self.positions[low:high]
        if high - low <= count:
            part: torch.Tensor = _aten.embedding_dense_backward(
                self.result.index_select(0, positions), local, count, -1, False
            )
            return part
        # A row that is named very often: nothing is gathered, and what is elsewhere counts as padding.
        everywhere = torch.full((self.result.shape[0],), count, device=_CPU)
        everywhere[positions] = local
        part = _aten.embedding_dense_backward(self.result, everywhere, count + 1, count, False)
        return part[:count]


class RowGradient(torch.Tensor):
    """A gradient without its bytes, and what they are made of."""

    terms: tuple[Term, ...]

    @staticmethod
    def __new__(cls: type[Self], terms: tuple[Term, ...], shape: Sequence[int], dtype: torch.dtype) -> Self:
        """Make a tensor that has all of a tensor but its memory."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, tuple(shape), dtype=dtype, device=_CPU
        )
        return made

    def __init__(self, terms: tuple[Term, ...], shape: Sequence[int], dtype: torch.dtype) -> None:
        del shape, dtype
        self.terms = terms

    # Results are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # noqa: SLF001

    def window(self, first: int, end: int) -> torch.Tensor:
        """Rows `first` up to `end`, in new memory."""
        with torch.no_grad():
            total = self.terms[0].window(first, end)
            for term in self.terms[1:]:
                total.add_(term.window(first, end))
            return total

    def dense(self) -> torch.Tensor:
        """All of it, in new memory."""
        return self.window(0, self.shape[0])

    def elements(self, start: int, count: int) -> torch.Tensor:
        """Elements `start` up to `start + count`, in the order in which the parameter is stored."""
        width = self.shape[1]
        first, end = start // width, -(-(start + count) // width)
        return self.window(first, end).view(-1)[start - first * width :][:count]

    def measured(self, measure: Callable[[torch.Tensor], tuple[bool, Squares]]) -> tuple[bool, Squares]:
        """Whether a value is not finite, and the sum of squares, as `measure` finds them in parts."""
        width = self.shape[1]
        rows = torch.cat([term.rows for term in self.terms])
        spans = torch.cat([rows * width // _SPAN, (rows * width + width - 1) // _SPAN]).unique().tolist()
        if width > _SPAN:
            spans = range(-(-self.numel() // _SPAN))
        # What is left out is zeros, which add nothing.
        parts = [measure(self.elements(at * _SPAN, min(_SPAN, self.numel() - at * _SPAN))) for at in spans]
        return any(bad for bad, _ in parts), total(square for _, square in parts)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Carry it; anything else is done with all of it."""
        del types
        options = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default):
            return cls(args[0].terms, args[0].shape, args[0].dtype)
        if func is _aten.add.Tensor and len(args) == 2 and not options and all(isinstance(one, cls) for one in args):
            one, other = args
            if one.shape == other.shape and len(other.terms) == 1:
                return cls((*one.terms, *other.terms), one.shape, one.dtype)
        for index, argument in enumerate(func._schema.arguments):  # noqa: SLF001
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[index] if index < len(args) else options.get(argument.name)
                if any(isinstance(leaf, cls) for leaf in tree_leaves(value)):
                    raise UsageError(
                        f"the gradient of an embedding is not in memory yet and cannot be changed by {func} here: "
                        "change p.grad after backward(), or register a hook on the parameter"
                    )
        return func(*tree_map(_dense, args), **tree_map(_dense, options))


def _dense(value: Any) -> Any:
    return value.dense() if isinstance(value, RowGradient) else value
