"""Describes a model by the names and shapes of its parameters, as a tree of modules that needs no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Dtype(str):
    """The name of a dtype, which knows the bytes of an element."""

    __slots__ = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return _ITEM_BYTES.get(self, 1)


@dataclass(frozen=True, eq=False)
class Sketch:
    """What a plan reads of a tensor without gaps, by torch's names."""

    shape: tuple[int, ...]
    dtype: Dtype
    requires_grad: bool = True

    def numel(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def dim(self) -> int:
        """Its dimensions."""
        return len(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Always."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel() * self.element_size()


@dataclass(eq=False)
class Outline:
    """What a plan reads of a module, by torch's names."""

    own: dict[str, Sketch] = field(default_factory=dict)  # parameters that it owns directly
    children: dict[str, Outline] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of torch's class, of containers: modules whose children are numbered are lists."""
        return "ModuleList" if any(name.isdecimal() for name in self.children) else "Module"

    @classmethod
    def of(cls, shapes: Mapping[str, tuple[int, ...]], dtype: Dtype) -> Outline:
        """The tree of parameters with these names."""
        root = cls()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = root
            for part in path:
                module = module.children.setdefault(part, cls())
            module.own[last] = Sketch(shape, dtype)
        return root

    def named_modules(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Outline]]:
        """This module and all below it, each before those that it contains; none has two names."""
        del remove_duplicate
        yield "", self
        for name, child in self.children.items():
            for below, module in child.named_modules():
                yield f"{name}.{below}" if below else name, module

    def named_children(self) -> Iterator[tuple[str, Outline]]:
        """The modules directly below it."""
        yield from self.children.items()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Sketch]]:
        """All parameters; tied ones have several names, of which the first counts where duplicates are removed."""
        met: set[int] = set()
        for name, module in self.named_modules():
            for last, parameter in module.own.items():
                if remove_duplicate and id(parameter) in met:
                    continue
                met.add(id(parameter))
                yield f"{name}.{last}" if name else last, parameter

    def get_output_embeddings(self) -> Outline | None:
        """The module of the LM head."""
        return self.children.get("lm_head")
