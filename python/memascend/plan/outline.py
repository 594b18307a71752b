"""Describes a model without torch, as a tree of modules. The tree has the names and shapes of all parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Dtype(str):
    """The name of a dtype. The property `itemsize` has the bytes of an element."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        """The number of bytes of an element."""
        return _ITEM_BYTES.get(self, 1)


@dataclass(frozen=True, eq=False)
class Sketch:
    """A dense tensor without values. It has the attributes and methods of torch's tensors that the planner uses."""

    shape: tuple[int, ...]
    dtype: Dtype
    requires_grad: bool = True

    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Returns the number of dimensions."""
        return len(self.shape)

    def element_size(self) -> int:
        """Returns the number of bytes of an element."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Returns True, because the strides of every `Sketch` are row-major."""
        return True

    @property
    def nbytes(self) -> int:
        """The number of bytes of all elements."""
        return self.numel() * self.element_size()


@dataclass(eq=False)
class Outline:
    """A module without code. It has the methods of torch's modules that the planner calls."""

    own: dict[str, Sketch] = field(default_factory=dict)  # the parameters that the module owns directly
    children: dict[str, Outline] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The torch class that this module stands for: "ModuleList" if a child's name is a number, else "Module"."""
        return "ModuleList" if any(name.isdecimal() for name in self.children) else "Module"

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Dtype) -> Outline:
        """Returns the tree of modules for parameters with these names, shapes and `dtype`."""
        root = cls()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = root
            for part in path:
                module = module.children.setdefault(part, cls())
            module.own[last] = Sketch(shape, dtype)
        return root

    def named_modules(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Outline]]:
        """Yields the names and modules of the tree: this module, and all modules below it. Parents are before children.

        `remove_duplicate` has no effect, since no module has two names.
        """
        del remove_duplicate
        yield "", self
        for name, child in self.children.items():
            for below, module in child.named_modules():
                yield f"{name}.{below}" if below else name, module

    def named_children(self) -> Iterator[tuple[str, Outline]]:
        """Yields the name and module of each direct child."""
        yield from self.children.items()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Sketch]]:
        """Yields the name and `Sketch` of each parameter; with `remove_duplicate`, a tied parameter only once."""
        met: set[int] = set()
        for name, module in self.named_modules():
            for last, parameter in module.own.items():
                if remove_duplicate and id(parameter) in met:
                    continue
                met.add(id(parameter))
                yield f"{name}.{last}" if name else last, parameter

    def get_output_embeddings(self) -> Outline | None:
        """Returns the LM head; None if no child is named "lm_head"."""
        return self.children.get("lm_head")
