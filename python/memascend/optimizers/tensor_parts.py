"""Takes tensor subclasses apart into plain tensors and puts them together again, as quantised state needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memascend.optimizers.option_values import same

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class TensorParts:
    """How a tensor subclass is made of others."""

    kind: Any  # its class
    context: Any  # what the class needs beside the parts
    size: torch.Size  # its own shape
    stride: tuple[int, ...]  # its own strides
    parts: dict[str, TensorParts | None]  # by name; those of a part that is of a subclass itself, else None

    def fits(self, value: Any) -> bool:
        """Whether a value is made in the same way, so that it can be put together from its parts."""
        other = parts_of(value)
        if other is None or other.kind is not self.kind or other.size != self.size or other.stride != self.stride:
            return False
        if list(other.parts) != list(self.parts) or not same(other.context, self.context):
            return False
        return all(
            inner.fits(getattr(value, name)) if inner is not None else other.parts[name] is None
            for name, inner in self.parts.items()
        )

    def names(self, name: str) -> list[str]:
        """The names that the plain tensors of the value called `name` have."""
        found: list[str] = []
        for part, inner in self.parts.items():
            found += [f"{name}.{part}"] if inner is None else inner.names(f"{name}.{part}")
        return found

    def apart(self, name: str, value: Any) -> dict[str, torch.Tensor]:
        """The plain tensors of a value that fits, each under a name of its own."""
        found: dict[str, torch.Tensor] = {}
        for part, inner in self.parts.items():
            tensor: torch.Tensor = getattr(value, part)
            found |= {f"{name}.{part}": tensor} if inner is None else inner.apart(f"{name}.{part}", tensor)
        return found

    def together(self, name: str, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The value, on the memory of those tensors."""
        parts = {
            part: tensors[f"{name}.{part}"] if inner is None else inner.together(f"{name}.{part}", tensors)
            for part, inner in self.parts.items()
        }
        made: torch.Tensor = self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)
        return made


def parts_of(value: Any) -> TensorParts | None:
    """How a tensor is made of others; None for a plain one, and for what is no tensor."""
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return None
    names, context = value.__tensor_flatten__()
    parts = {name: parts_of(getattr(value, name)) for name in names}
    return TensorParts(type(value), context, value.shape, value.stride(), parts)
