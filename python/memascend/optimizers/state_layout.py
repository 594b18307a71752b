"""Finds which state an optimizer holds for a parameter by stepping a copy of it on a small or a meta tensor."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import arithmetic_dtype, named, stand_in, user_attributes
from memascend.optimizers.support import TRIAL_STEPS, elementwise, known, trial

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["Kept", "describe", "in_order"]

# Python's numbers in a state, and how the store holds each.
_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
# Dimensions of the small tensors that stand for large ones: unlike, so that each can be told in a state's shape.
_SMALL_DIMS = (3, 5, 7, 11, 13, 17, 19, 23)
_MASTER = "master"


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What an optimizer keeps for one parameter.

    Attributes:
        tensors: its state by torch's names, on "meta", what has the parameter's shape laid out as that is; scalars are
            0-dim, and "master" is ours.
        numbers: the names among them that are Python's numbers in torch's state, and of which type.
        shape: the parameter's.
        stride: the parameter's, in elements, as its bytes are laid out.
        dtype: what the update computes in: the master's where there is one.
        master: whether it has a master, which the values are rounded from.
        whole: whether an update needs all of the parameter at once.
        attributes: what users wrote on the parameter.
    """

    tensors: dict[str, torch.Tensor]
    numbers: dict[str, type]
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    master: bool
    whole: bool
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole_bytes(self) -> int:
        """Bytes in memory at once while a whole parameter is updated, beside what the optimizer makes itself."""
        numel = self.shape.numel()
        state = sum(tensor.nbytes for tensor in self.tensors.values())
        # The values, the gradient as it came, and where there is a master the gradient in its type.
        values = numel * (2 if self.master else self.dtype.itemsize)
        return state + 2 * values + (numel * self.dtype.itemsize if self.master else 0)


def describe(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor, master_dtype: torch.dtype | None = torch.float32
) -> Kept:
    """What `optimizer` keeps for `parameter`, which may be on "meta"; nothing is done to either.

    State that it has already and would not make now (Adam's maximum after amsgrad was switched off) is kept too, as
    torch keeps it.

    Args:
        optimizer: any whose state is per parameter.
        parameter: one of its parameters.
        master_dtype: of the master of 16-bit parameters, in which their update computes; None: they have none.

    Raises:
        ConfigError: it keeps what cannot be streamed, or could not be tried.
    """
    index = next(
        (
            index
            for index, group in enumerate(optimizer.param_groups)
            if any(parameter is member for member in group["params"])
        ),
        None,
    )
    if index is None:
        raise ConfigError("the optimizer does not own this parameter")
    dtype = arithmetic_dtype(parameter.dtype, master_dtype)
    master = dtype != parameter.dtype
    # Where elements are repeated or left out there is no such layout, and this is the next best.
    stride = torch.empty_like(parameter, device="meta", memory_format=torch.preserve_format).stride()
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, type] = {}
    if master:
        tensors[_MASTER] = torch.empty_strided(parameter.shape, stride, dtype=dtype, device="meta")
    attributes = user_attributes(parameter)
    found = _tried(optimizer, index, parameter.shape, dtype, attributes)
    existing = optimizer.state.get(parameter, {})
    for name, value in {**found, **existing}.items():
        if value is None:
            continue
        if not isinstance(name, str) or name == _MASTER:
            raise ConfigError(f"{named(optimizer)} keeps state under {name!r}, a name that cannot be stored")
        if type(value) in _NUMBERS:
            numbers[name] = type(value)
            tensors[name] = torch.empty((), dtype=_NUMBERS[type(value)], device="meta")
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided:
            kind = value.dtype
            if master and value.dtype == parameter.dtype:
                kind = dtype
            made = torch.empty(value.shape, dtype=kind, device="meta")
            # State of the parameter's shape lies as the parameter does.
            tensors[name] = made.as_strided(made.shape, stride) if made.shape == parameter.shape else made
        else:
            kind_name = "a sparse tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__qualname__}"
            raise ConfigError(
                f"{named(optimizer)} keeps {kind_name} as {name!r}; only dense tensors and numbers are streamed"
            )
    return Kept(
        tensors=tensors,
        numbers=numbers,
        shape=parameter.shape,
        stride=stride,
        dtype=dtype,
        master=master,
        # The scalars of a 0-dim parameter would pass for parts of it.
        whole=not elementwise(optimizer) or parameter.dim() == 0,
        attributes={} if known(optimizer) else attributes,
    )


def in_order(tensor: torch.Tensor, kept: Kept) -> torch.Tensor:
    """The tensor, laid out as the parameter is where it has the parameter's shape, else row by row."""
    if tensor.shape != kept.shape:
        return tensor.contiguous()
    if tensor.stride() == kept.stride:
        return tensor
    return torch.empty_strided(kept.shape, kept.stride, dtype=tensor.dtype).copy_(tensor)


def _tried(
    optimizer: torch.optim.Optimizer,
    index: int,
    shape: torch.Size,
    dtype: torch.dtype,
    attributes: Mapping[str, Any],
) -> dict[str, Any]:
    """The state after a trial; its tensors have the shapes that they have for a parameter of `shape`."""
    small = torch.Size(1 if dim == 1 else unlike for dim, unlike in zip(shape, _SMALL_DIMS, strict=False))
    failed: Exception | None = None
    ways = [(small, "cpu", False), (small, "cpu", True)]
    if not known(optimizer):
        # What it keeps may depend on the size: no size is like the true one, where its step reads no value.
        ways.insert(0, (shape, "meta", False))
    for size, device, sparse in ways:
        if len(size) != len(shape) or (sparse and not size):
            continue
        values = torch.ones(size, dtype=dtype, device=device)
        gradients = ([_sparse(values) if sparse else torch.ones_like(values)] for _ in range(TRIAL_STEPS))
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                # Neither has kernels for tensors without bytes; what they keep is the same.
                off = {"foreach": False, "fused": False}
                members = [(index, stand_in(values, attributes))]
                states = _steady(optimizer, (state for (state,) in trial(optimizer, members, gradients, off)))
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001 - the next kind of tensor may do
            failed = failed or error
            continue
        return {name: _scaled(optimizer, name, value, size, shape) for name, value in states.items()}
    raise ConfigError(
        f"what {named(optimizer)} keeps for a parameter of shape {list(shape)} could not be found out: its step failed "
        f"({type(failed).__name__}: {failed})"
    ) from failed


def _sparse(values: torch.Tensor) -> torch.Tensor:
    # No check of its invariants: the check warns that it was not asked for.
    indices = torch.zeros((1, 1), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.ones_like(values[:1]), values.shape, check_invariants=False)


def _steady(optimizer: torch.optim.Optimizer, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The state, which has the same names and shapes after each step."""
    first = next(states)
    if known(optimizer):
        return first
    for later in states:
        if _shapes(first) != _shapes(later):
            raise ConfigError(
                f"{named(optimizer)} keeps other state after its second step than after its first; only state that is "
                "there from the first step on can be streamed"
            )
    return first


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: (value.shape, value.dtype) if isinstance(value, torch.Tensor) else type(value)
        for name, value in state.items()
    }


def _scaled(optimizer: torch.optim.Optimizer, name: str, value: Any, size: Sequence[int], shape: torch.Size) -> Any:
    """What stands for a tensor of a small parameter's state in that of a parameter of `shape`."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or tuple(size) == tuple(shape):
        return value
    dims = {1: 1, torch.Size(size).numel(): shape.numel(), **dict(zip(size, shape, strict=True))}
    if any(dim not in dims for dim in value.shape):
        raise ConfigError(
            f"the shape of {name!r}, which {named(optimizer)} keeps, does not follow from that of the parameter"
        )
    return torch.empty([dims[dim] for dim in value.shape], dtype=value.dtype, device="meta")
