"""Finds the state that an optimizer keeps for a parameter, by stepping a copy of it on one of the same shape."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from memascend.errors import ConfigError
from memascend.optimizers.clone import named, stand_in
from memascend.optimizers.option_values import same
from memascend.optimizers.randomness import uncompiled, undrawn
from memascend.optimizers.support import known
from memascend.optimizers.tensor_parts import parts_of
from memascend.optimizers.trial import stepping

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# Steps without memory, or on little: state that first appears after some, or grows, is seen.
_STEPS = 7
# Steps on memory of the true size, which may be large.
_TRUE_STEPS = 2
# Dimensions of the small tensors that stand for large ones: unlike, so that each can be told in a state's shape.
_SMALL_DIMS = (3, 5, 7, 11, 13, 17, 19, 23)


class StateTrials:
    """What an optimizer keeps for parameters of each kind, each tried once."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found: dict[tuple[int, torch.Size, torch.dtype], dict[str, Any]] = {}

    def state(self, group: int, shape: torch.Size, dtype: torch.dtype, attributes: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a parameter of that shape, in the group of that number, whose update computes in `dtype`.

        Raises:
            ConfigError: its step failed, or keeps what cannot be streamed.
        """
        trial = _Trial(self._optimizer, group, dtype, attributes)
        if attributes:
            # Of one parameter alone.
            return trial.state(shape)
        kind = group, shape, dtype
        if kind not in self._found:
            self._found[kind] = trial.state(shape)
        return self._found[kind]


class _Way(NamedTuple):
    """One way to try a step: on a parameter of what size, and where."""

    size: torch.Size
    device: str = "cpu"
    sparse: bool = False
    steps: int = _STEPS
    fill: float = 1.0


@dataclass(frozen=True)
class _Trial:
    """Of one kind of parameter."""

    optimizer: torch.optim.Optimizer
    group: int
    dtype: torch.dtype
    attributes: Mapping[str, Any]

    def state(self, shape: torch.Size) -> dict[str, Any]:
        """The state after a trial; its tensors have the shapes that they have for a parameter of `shape`."""
        small = torch.Size(1 if dim == 1 else unlike for dim, unlike in zip(shape, _SMALL_DIMS, strict=False))
        ways = [_Way(small), _Way(small, sparse=True)]
        if not known(self.optimizer):
            # What it keeps may depend on the size: first of a parameter that takes no memory, then of one that does.
            ways = [_Way(shape, "meta"), _Way(shape, steps=_TRUE_STEPS), ways[1]]
            self._refuse_kinds_by_value(small)
        failed: Exception | None = None
        for way in ways:
            if len(way.size) != len(shape) or (way.sparse and not shape):
                continue
            try:
                state = self._after(way)
                # Where there are values it may keep something else.
                if way.device == "meta" and not _alike(state, self._after(_Way(small))):
                    continue
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - the next kind of tensor may do
                failed = failed or error
                continue
            return {name: _scaled(self.optimizer, name, value, way.size, shape) for name, value in state.items()}
        raise ConfigError(
            f"what {named(self.optimizer)} keeps for a parameter of shape {list(shape)} could not be found out: its "
            f"step failed ({type(failed).__name__}: {failed})"
        ) from failed

    def _refuse_kinds_by_value(self, small: torch.Size) -> None:
        """Refuse state whose kinds depend on what the parameter holds: the store is made before that is known."""
        try:
            one, other = self._after(_Way(small)), self._after(_Way(small, fill=0.0))
        except ConfigError:
            raise
        except Exception:  # noqa: BLE001 - it may need another kind of tensor, which is tried next
            return
        differs = next((name for name in one if _kind(one[name]) != _kind(other.get(name))), None)
        if differs is not None:
            raise ConfigError(
                f"{named(self.optimizer)} keeps {differs!r} as another kind of value where the parameter is zero; "
                "only one kind of state can be streamed"
            )

    def _after(self, way: _Way) -> dict[str, Any]:
        """The state after some steps."""
        values = torch.full(way.size, way.fill, dtype=self.dtype, device=way.device)
        ones = torch.ones_like(values)
        gradients = (_sparse(ones) if way.sparse else ones.clone() for _ in range(way.steps))
        # Neither has kernels for tensors without bytes. Of torch's own classes what they keep is the same.
        plain = known(self.optimizer) or way.device == "meta"
        off = {"foreach": False, "fused": False} if plain else {}
        states = stepping(self.optimizer, self.group, stand_in(values, self.attributes), gradients, off)
        with undrawn(self.optimizer), warnings.catch_warnings(), uncompiled():
            warnings.simplefilter("ignore")
            return _steady(self.optimizer, states)


def _alike(state: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two states of parameters of other sizes are of the same kinds; never of subclasses of tensors."""
    if any(parts_of(value) is not None for value in state.values()):
        # What they know of themselves may be the device.
        return False
    return {name: _kind(value) for name, value in state.items()} == {name: _kind(of) for name, of in other.items()}


def _kind(value: Any) -> Any:
    """What a value is, whatever its size."""
    return (type(value), value.dtype, value.dim()) if isinstance(value, torch.Tensor) else type(value)


def _sparse(values: torch.Tensor) -> torch.Tensor:
    # No check of its invariants: the check warns that it was not asked for.
    indices = torch.zeros((1, 1), dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, torch.ones_like(values[:1]), values.shape, check_invariants=False)


def _steady(optimizer: torch.optim.Optimizer, states: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """The state, which has the same names and shapes after each step."""
    first = next(states)
    if known(optimizer):
        return first
    shapes = _shapes(first)
    for number, later in enumerate(states, 2):
        if not same(shapes, _shapes(later)):
            raise ConfigError(
                f"{named(optimizer)} keeps other state after step {number} than after its first; only state that is "
                "there from the first step on can be streamed"
            )
    return first


def _shapes(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [value.shape, value.dtype] if isinstance(value, torch.Tensor) else type(value)
        for name, value in state.items()
    }


def _scaled(optimizer: torch.optim.Optimizer, name: str, value: Any, size: Sequence[int], shape: torch.Size) -> Any:
    """What stands for a tensor of a small parameter's state in that of a parameter of `shape`."""
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or tuple(size) == tuple(shape):
        return value
    dims = {1: 1, torch.Size(size).numel(): shape.numel(), **dict(zip(size, shape, strict=True))}
    if parts_of(value) is not None or any(dim not in dims for dim in value.shape):
        raise ConfigError(
            f"the shape of {name!r}, which {named(optimizer)} keeps, does not follow from that of the parameter"
        )
    return torch.empty([dims[dim] for dim in value.shape], dtype=value.dtype, device="meta")
