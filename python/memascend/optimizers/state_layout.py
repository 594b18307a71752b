"""Describes the state that an optimizer keeps for one parameter, as the store has it and as torch has it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import arithmetic_dtype, named, user_attributes
from memascend.optimizers.state_trials import StateTrials
from memascend.optimizers.support import elementwise, known
from memascend.optimizers.tensor_parts import TensorParts, parts_of

if TYPE_CHECKING:
    from collections.abc import Mapping

# Python's numbers in a state, and how the store holds each.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
_MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """What an optimizer keeps for one parameter."""

    # Its state by torch's names, on "meta", what has the parameter's shape laid out as that is; scalars are 0-dim, and
    # "master" is ours.
    tensors: dict[str, torch.Tensor]
    numbers: dict[str, type]  # the names among them that are Python's numbers in torch's state, and of which type
    # Names in torch's state that are tensors of a subclass: `tensors` has the parts that they are made of.
    parted: dict[str, TensorParts]
    shape: torch.Size  # the parameter's
    stride: tuple[int, ...]  # the parameter's, in elements, as its bytes are laid out
    dtype: torch.dtype  # what the update computes in: the master's where there is one
    master: bool  # whether it has a master, which the values are rounded from
    whole: bool  # whether an update needs all of the parameter at once
    attributes: Mapping[str, Any] = field(default_factory=dict)  # what users wrote on the parameter

    @property
    def names(self) -> list[str]:
        """The names in torch's state."""
        parts = {part for name, parted in self.parted.items() for part in parted.names(name)}
        return [*(name for name in self.tensors if name != _MASTER and name not in parts), *self.parted]

    def state_from(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The state as torch has it, on the memory of these tensors: numbers, and subclasses put together."""
        state: dict[str, Any] = {}
        for name in self.names:
            if name in self.parted:
                # What is quantised in blocks counts row by row, whatever the parameter's strides.
                plain = {part: tensors[part].contiguous() for part in self.parted[name].names(name)}
                state[name] = self.parted[name].together(name, plain)
            else:
                state[name] = self.numbers[name](tensors[name].item()) if name in self.numbers else tensors[name]
        return state

    @property
    def whole_bytes(self) -> int:
        """Bytes in memory at once while a whole parameter is updated, beside what the optimizer makes itself."""
        numel = self.shape.numel()
        state = sum(tensor.nbytes for tensor in self.tensors.values())
        # The values, the gradient as it came, and where there is a master the gradient in its type.
        values = numel * (2 if self.master else self.dtype.itemsize)
        return state + 2 * values + (numel * self.dtype.itemsize if self.master else 0)


def describe(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    master_dtype: torch.dtype | None = torch.float32,
    trials: StateTrials | None = None,
) -> StateLayout:
    """What `optimizer` keeps for `parameter`, which may be on "meta"; nothing is done to either.

    State that it has already and would not make now (Adam's maximum after amsgrad was switched off) is kept too, as
    torch keeps it.

    Args:
        optimizer: any whose state is per parameter.
        parameter: one of its parameters.
        master_dtype: of the master of 16-bit parameters, in which their update computes; None: they have none.
        trials: of this optimizer, where several of its parameters are described.

    Raises:
        ConfigError: it keeps what cannot be streamed, or could not be tried.
    """
    group = next(
        (
            number
            for number, group in enumerate(optimizer.param_groups)
            if any(parameter is member for member in group["params"])
        ),
        None,
    )
    if group is None:
        raise ConfigError("the optimizer does not own this parameter")
    dtype = arithmetic_dtype(parameter.dtype, master_dtype)
    master = dtype != parameter.dtype
    # Where elements are repeated or left out there is no such layout, and this is the next best.
    stride = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    found = _Found(optimizer, parameter, dtype, stride)
    if master:
        found.tensors[_MASTER] = torch.empty_strided(parameter.shape, stride, dtype=dtype, device="meta")
    attributes = user_attributes(parameter)
    tried = (trials or StateTrials(optimizer)).state(group, parameter.shape, dtype, attributes)
    existing = optimizer.state.get(parameter, {})
    for name, value in {**tried, **existing}.items():
        # Of a subclass, what a step makes of it: its own may be of the parameter's type.
        found.add(name, tried[name] if parts_of(value) is not None and name in tried else value)
    return StateLayout(
        tensors=found.tensors,
        numbers=found.numbers,
        parted=found.parted,
        shape=parameter.shape,
        stride=stride,
        dtype=dtype,
        master=master,
        # The scalars of a 0-dim parameter would pass for parts of it.
        whole=not elementwise(optimizer) or parameter.dim() == 0,
        attributes={} if known(optimizer) else attributes,
    )


class _Found:
    """The state of one parameter, as it is found."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, dtype: torch.dtype, stride: tuple[int, ...]
    ) -> None:
        self._optimizer = optimizer
        self._parameter = parameter
        self._dtype = dtype
        self._stride = stride
        self.tensors: dict[str, torch.Tensor] = {}
        self.numbers: dict[str, type] = {}
        self.parted: dict[str, TensorParts] = {}

    def add(self, name: Any, value: Any) -> None:
        """Take a value of the state, under its name there."""
        if value is None:
            return
        if not isinstance(name, str) or name == _MASTER or name in self.tensors:
            raise ConfigError(f"{named(self._optimizer)} keeps state under {name!r}, a name that cannot be stored")
        parts = parts_of(value)
        if type(value) in _NUMBERS:
            self.numbers[name] = type(value)
            self.tensors[name] = torch.empty((), dtype=_NUMBERS[type(value)], device="meta")
        elif parts is not None:
            self.parted[name] = parts
            for part, tensor in parts.apart(name, value).items():
                self._add_tensor(part, tensor, tensor.dtype)
        else:
            dtype = getattr(value, "dtype", None)
            self._add_tensor(name, value, self._dtype if dtype == self._parameter.dtype else dtype)

    def _add_tensor(self, name: str, value: Any, dtype: Any) -> None:
        plain = type(value) in {torch.Tensor, torch.nn.Parameter}
        if not plain or value.layout != torch.strided or name in self.tensors:
            kind = f"a {type(value).__qualname__}" if not plain else "a sparse tensor"
            raise ConfigError(
                f"{named(self._optimizer)} keeps {kind} as {name!r}; only dense tensors and numbers are streamed: "
                "docs/optimizers.md lists optimizers that are"
            )
        made = torch.empty(value.shape, dtype=dtype, device="meta")
        # State of the parameter's shape lies as the parameter does.
        own = made.shape == self._parameter.shape
        self.tensors[name] = made.as_strided(made.shape, self._stride) if own else made


def in_order(tensor: torch.Tensor, layout: StateLayout) -> torch.Tensor:
    """The tensor, laid out as the parameter is where it has the parameter's shape, else row by row."""
    if tensor.shape != layout.shape:
        return tensor.contiguous()
    if tensor.stride() == layout.stride:
        return tensor
    return torch.empty_strided(layout.shape, layout.stride, dtype=tensor.dtype).copy_(tensor)
