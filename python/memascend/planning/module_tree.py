"""Names the modules and parameters of a model, and which parameters belong to no unit yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from memascend.errors import ConfigError
from memascend.pages import whole_pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# Modules that hold others and are never called themselves.
_UNCALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclass(eq=False)
class UnitDraft:
    """A unit in the making."""

    name: str
    parameters: list[str]
    module: str | None
    pinned: bool = False
    again: list[str] = field(default_factory=list)
    # As sets that keep their order.
    around: dict[str, None] = field(default_factory=dict)
    around_again: dict[str, None] = field(default_factory=dict)


class ModuleTree:
    """The modules and parameters of a model by name, shared ones by the first of their names."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        if not self.parameters:
            raise ConfigError("the model has no parameters, so there is nothing to offload")
        lazy = [name for name, parameter in self.parameters.items() if is_lazy(parameter)]
        if lazy:
            raise ConfigError(f"the shape of {lazy[0]!r} is not known yet: run one forward before offload()")
        self.raw = {name: parameter.numel() * parameter.dtype.itemsize for name, parameter in self.parameters.items()}
        self.index = {name: index for index, name in enumerate(self.parameters)}
        owners = dict.fromkeys(map(self.owner, self.parameters), 0)
        for name, nbytes in self.raw.items():
            owners[self.owner(name)] += nbytes
        # The least that must be in memory at once: a module's call binds all that it owns.
        self.largest_owner = max(owners.values())
        self.claimed: set[str] = set()
        # Every module's parameters, without a walk over all names for each module.
        self._below: dict[str, list[str]] = {name: [] for name in self.modules}
        for name in self.parameters:
            owner = self.owner(name)
            self._below[""].append(name)
            while owner:
                if owner in self._below:
                    self._below[owner].append(name)
                owner = owner.rpartition(".")[0]

    @staticmethod
    def owner(parameter: str) -> str:
        """The module that owns a parameter directly."""
        return parameter.rpartition(".")[0]

    def below(self, module: str) -> list[str]:
        """The parameters in a module that no piece has claimed."""
        return [name for name in self._below[module] if name not in self.claimed]

    def under(self, module: str) -> list[str]:
        """The parameters in a module."""
        return self._below[module]

    def direct(self, module: str) -> list[str]:
        """What a module owns directly and no piece has claimed."""
        return [name for name in self.below(module) if self.owner(name) == module]

    def children(self, module: str) -> Iterator[str]:
        """Modules below a module, each at its first place in the tree."""
        prefix = f"{module}." if module else ""
        for name, _ in self.modules[module].named_children():
            # A child that was met before, elsewhere in the tree, has its place there.
            if prefix + name in self.modules:
                yield prefix + name

    def claim(self, pieces: Iterable[UnitDraft]) -> None:
        """Note that these pieces have their parameters."""
        for piece in pieces:
            self.claimed.update(piece.parameters)

    def bytes_of(self, parameters: Iterable[str]) -> int:
        """Bytes of parameters, without padding."""
        return sum(self.raw[name] for name in parameters)

    def paged(self, parameter: str) -> int:
        """Bytes of a parameter on storage and in a lease."""
        return whole_pages(self.raw[parameter])

    def is_whole(self, module: str) -> bool:
        """Whether no piece has claimed anything in it."""
        return self.claimed.isdisjoint(self._below[module])

    def called(self, module: str) -> str | None:
        """The module, if its own call binds its parameters."""
        return None if isinstance(self.modules[module], _UNCALLED) else module
