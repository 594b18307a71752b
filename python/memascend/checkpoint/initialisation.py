"""Initialises parameters by the model's own code: `reset_parameters()`, or transformers' `_init_weights(module)`.

A few modules at a time are real while they are initialised, so that a parent can correct what its children made.
"""

from __future__ import annotations

import contextlib
import inspect
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.formatting import listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from memascend.planning.units import Unit

# Parents initialise what these hold.
_LISTS = (torch.nn.ParameterList, torch.nn.ParameterDict)


def unwritten(like: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, of the shape and type of one on meta, whose elements are all still to be written."""
    fill = float("nan") if like.dtype.is_floating_point or like.dtype.is_complex else 0
    with torch.inference_mode(mode=False):
        return torch.full(like.shape, fill, dtype=like.dtype, device="cpu")


def is_written(tensor: torch.Tensor) -> bool:
    """Whether every element of what `unwritten` made has a value, as far as can be told."""
    if tensor.numel() == 0:
        return True
    if tensor.dtype.is_floating_point and tensor.element_size() > 1:
        # It carries a NaN through, and needs no temporary.
        return not bool(tensor.detach().min().isnan())
    return tensor._version > 0  # noqa: SLF001


class Initialiser:
    """The modules of a model in the order in which they are built, and what initialises each."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._order: list[torch.nn.Module] = []
        self._init: dict[int, Callable[[torch.nn.Module], object] | None] = {}
        self._walk(model, None)

    def _walk(self, module: torch.nn.Module, init: Callable[[torch.nn.Module], object] | None) -> None:
        if id(module) in self._init:
            return
        own = getattr(module, "_init_weights", None)
        init = own if _takes_one(own) else init
        self._init[id(module)] = init
        for child in module.children():
            self._walk(child, init)
        self._order.append(module)

    # --- buffers ------------------------------------------------------------------------------

    def buffers_of(self, module: torch.nn.Module, made: Sequence[torch.Tensor]) -> None:
        """Let a module compute the buffers that were `made` for it; what else is real keeps its values."""
        with torch.no_grad(), _spared(module, set(map(id, made))):
            self._initialise(module, made)

    def _initialise(self, module: torch.nn.Module, made: Sequence[torch.Tensor]) -> None:
        init = self._init[id(module)]
        if init is not None:
            init(module)
        if made and not all(map(is_written, made)):
            for name in ("reset_parameters", "_reset_parameters"):
                reset = getattr(module, name, None)
                if callable(reset):
                    reset()
                    return

    # --- parameters ---------------------------------------------------------------------------

    def parameters(
        self, units: Sequence[Unit], named: Mapping[str, torch.nn.Parameter]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Initialise the parameters on meta, one unit or so at a time, from torch's default generator.

        Yields:
            Name and values of each that was on meta. What is yielded is real no longer.

        Raises:
            ConfigError: nothing initialises some of them; it names them.
        """
        walk = _Walk(self._model, units, {name: named[name] for unit in units for name in unit.parameters})
        versions = {name: p._version for name, p in named.items() if not p.is_meta}  # noqa: SLF001
        try:
            for module in self._order:
                if isinstance(module, _LISTS):
                    continue
                made = walk.begin(module)
                if made or walk.is_open(module):
                    with torch.no_grad(), _spared(module, walk.real_ids):
                        self._initialise(module, made)
                yield from walk.ended(module)
        finally:
            walk.put_back()
        changed = [name for name, version in versions.items() if named[name]._version != version]  # noqa: SLF001
        if changed:
            raise ConfigError(f"initialising what is on meta wrote to {changed[0]}, which has values of its own")


class _Walk:
    """Which parameters are real now."""

    def __init__(self, model: torch.nn.Module, units: Sequence[Unit], named: Mapping[str, torch.nn.Parameter]) -> None:
        self._modules = dict(model.named_modules())
        self._name = {id(parameter): name for name, parameter in named.items() if parameter.is_meta}
        self._unit = {name: unit for unit in units for name in unit.parameters}
        self._left = {unit.name: sum(id(named[name]) in self._name for name in unit.parameters) for unit in units}
        # Units that need not wait for a module to end, and by module those that it ends.
        self._reached: set[str] = set()
        self._ends: dict[int, list[str]] = {}
        sizes = _sizes(self._modules, named)
        limit = max(unit.nbytes for unit in units)
        for unit in units:
            last = _last(unit, sizes, limit)
            if last is None:
                self._reached.add(unit.name)
            else:
                self._ends.setdefault(id(self._modules[last]), []).append(unit.name)
        # Every place of a tied parameter.
        self._places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
        for module in self._modules.values():
            for short, parameter in module._parameters.items():  # noqa: SLF001
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, short))
        # By unit: parameters on meta, and what stands for them.
        self._open: dict[str, list[tuple[torch.nn.Parameter, torch.nn.Parameter]]] = {}
        self._begun: set[int] = set()
        self.real_ids: set[int] = set()

    def begin(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """Make real what a module owns."""
        made: list[torch.Tensor] = []
        for owner in (module, *(child for child in module.children() if isinstance(child, _LISTS))):
            for parameter in _own(owner._parameters):  # noqa: SLF001
                name = self._name.get(id(parameter))
                if name is None or id(parameter) in self._begun:
                    continue
                self._begun.add(id(parameter))
                real = torch.nn.Parameter(unwritten(parameter), requires_grad=parameter.requires_grad)
                unit = self._unit[name].name
                self._open.setdefault(unit, []).append((parameter, real))
                self._left[unit] -= 1
                self.real_ids.add(id(real))
                self._place(parameter, real)
                made.append(real)
        return made

    def _place(self, parameter: torch.nn.Parameter, stands: torch.nn.Parameter) -> None:
        for module, short in self._places[id(parameter)]:
            module._parameters[short] = stands  # noqa: SLF001

    def is_open(self, module: torch.nn.Module) -> bool:
        """Whether something below the module is real."""
        return bool(self.real_ids) and any(id(parameter) in self.real_ids for parameter in module.parameters())

    def ended(self, module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """What is complete after a module."""
        self._reached.update(self._ends.get(id(module), ()))
        for unit in [unit for unit in self._open if not self._left[unit] and unit in self._reached]:
            pairs = self._open.pop(unit)
            unknown = [self._name[id(parameter)] for parameter, real in pairs if not is_written(real)]
            if unknown:
                self._open[unit] = pairs
                raise ConfigError(
                    f"nothing initialises {listed(unknown)}: they are on meta, and their modules "
                    "have no reset_parameters() and the model no _init_weights(module) that writes them; give weights="
                )
            while pairs:
                parameter, real = pairs.pop(0)
                self._place(parameter, parameter)
                self.real_ids.discard(id(real))
                yield self._name[id(parameter)], real.detach()
                del real

    def put_back(self) -> None:
        """Let everything be on meta again."""
        for pairs in self._open.values():
            for parameter, _ in pairs:
                self._place(parameter, parameter)
        self._open.clear()


def _sizes(modules: Mapping[str, torch.nn.Module], named: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Bytes of the parameters below each module."""
    sizes = dict.fromkeys(modules, 0)
    for name, parameter in named.items():
        owner = name
        while owner:
            owner = owner.rpartition(".")[0]
            if owner in sizes:
                sizes[owner] += parameter.nbytes
    return sizes


def _last(unit: Unit, sizes: Mapping[str, int], limit: int) -> str | None:
    """The module whose end a unit waits for, as its code may write to the unit, too; none where that holds too much."""
    if unit.pinned:
        # A little of everything.
        return ""
    last = unit.module
    if last is None:
        owners = [name.split(".")[:-1] for name in unit.parameters]
        alike = (len(set(parts)) == 1 for parts in zip(*owners, strict=False))
        last = ".".join(owners[0][: sum(takewhile(bool, alike))])
        if sizes.get(last, limit + 1) > limit:
            return None
    while last and sizes.get(parent := last.rpartition(".")[0], limit + 1) <= limit:
        last = parent
    return last


@contextlib.contextmanager
def _spared(module: torch.nn.Module, ours: set[int]) -> Iterator[None]:
    """Copies in place of the real tensors that a module owns and that are not `ours`, which stay as they are."""
    spared: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    parameters: dict[str, Any] = module._parameters  # noqa: SLF001
    buffers: dict[str, Any] = module._buffers  # noqa: SLF001
    for table in (parameters, buffers):
        for short, tensor in table.items():
            if tensor is not None and not tensor.is_meta and id(tensor) not in ours:
                spared.append((table, short, tensor))
                copy = tensor.detach().clone()
                table[short] = torch.nn.Parameter(copy, tensor.requires_grad) if table is parameters else copy
    try:
        yield
    finally:
        for table, short, tensor in spared:
            table[short] = tensor


def _own(table: Mapping[str, Any]) -> Iterator[Any]:
    return (tensor for tensor in table.values() if tensor is not None)


def _takes_one(function: object) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except (TypeError, ValueError):
        return False
    return True
