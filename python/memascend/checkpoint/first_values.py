"""Fills a new store: from the model and optimizer, from `weights=`, or by initialisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from memascend.checkpoint.initialisation import Initialiser
from memascend.checkpoint.names import Names
from memascend.ranks.rows import Partition
from memascend.residency.away import dense_strides
from memascend.residency.placeholder import laid_out

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterator, Mapping, Sequence

    from memascend.checkpoint.weights import Weights
    from memascend.optimizers.update_rule import Arithmetic
    from memascend.planning.units import Unit


class FirstValue(NamedTuple):
    """The first values of a parameter."""

    name: str
    values: torch.Tensor  # as they are stored
    state: dict[str, torch.Tensor]  # of the optimizer, what there is
    step: int  # how many updates made it


class ValueSource(Protocol):
    """Where the first values come from."""

    # What is committed with them.
    step: int
    user_state: Any

    def check(self) -> None:
        """Refuse what does not fit, before anything is written."""

    def hyperparameters(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """What is committed of options, where those of the optimizer's groups are `groups`."""

    def parameters(
        self, units: Sequence[Unit]
    ) -> Generator[tuple[str, torch.Tensor, dict[str, torch.Tensor], int], None, None]:
        """Each parameter of the units once; what was yielded may go before the next is asked for."""

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Write the first values of a persistent buffer into it."""


class Divided(NamedTuple):
    """What a model is made of whose parameters ranks share."""

    partition: Partition  # what this rank has
    named: Mapping[str, torch.nn.Parameter]  # the model's own parameters, by name
    units: Sequence[Unit]  # those, whole


class ModelValues:
    """The values that model and optimizer have, and for parameters on meta `weights`, or their initialisation."""

    step = 0
    user_state = None

    def __init__(
        self,
        model: torch.nn.Module,
        named: Mapping[str, torch.nn.Parameter],
        trained: Collection[str],
        arithmetic: Arithmetic,
        weights: Weights | None,
        meta_buffers: Mapping[str, torch.Tensor],
        divided: Divided | None = None,
    ) -> None:
        """`trained` are the names that the optimizer owns, `meta_buffers` the persistent buffers that were on meta.

        `divided` has what the model is made of where `named` are some of its rows.
        """
        self._divided = divided
        self._partition = Partition() if divided is None else divided.partition
        self._model = model
        self._named = named
        self._trained = trained
        self._arithmetic = arithmetic
        self._weights = weights
        self._meta_buffers = meta_buffers

    def check(self) -> None:
        """Match names, shapes and dtypes with the weights."""
        if self._weights is not None:
            wanted = {name: self._partition.whole(name, p) for name, p in self._named.items() if p.is_meta}
            self._weights.check(Names(self._model), {**wanted, **self._meta_buffers})

    def hyperparameters(self, groups: list[dict[str, Any]]) -> dict[str, Any]:
        """The optimizer's own."""
        return {"groups": groups, "loss_scale": None}

    def parameters(self, units: Sequence[Unit]) -> Generator[FirstValue, None, None]:
        """Those on meta first where they are initialised; then all in the order of the units."""
        if self._weights is None and any(p.is_meta for p in self._named.values()):
            yield from self._initialised(units)
        for unit in units:
            for name in unit.parameters:
                parameter = self._named[name]
                if not parameter.is_meta:
                    state, step = self._arithmetic.initial(parameter) if name in self._trained else ({}, 0)
                    yield FirstValue(name, laid_out(parameter.detach().cpu()), state, step)
                elif self._weights is not None:
                    whole = self._weights.tensor(name, self._partition.whole(name, parameter))
                    yield FirstValue(name, as_laid(self._partition.part(name, whole), parameter), {}, 0)

    def _initialised(self, units: Sequence[Unit]) -> Iterator[FirstValue]:
        """What is on meta, by the model's own code, which makes whole parameters."""
        divided = self._divided
        whole_units, whole = (units, self._named) if divided is None else (divided.units, divided.named)
        for name, values in Initialiser(self._model).parameters(whole_units, whole):
            if name in self._named:
                part = self._partition.part(name, values)
                yield FirstValue(name, as_laid(part, self._named[name]), {}, 0)

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """From the weights, where it was on meta and was not initialised."""
        if self._weights is not None and name in self._meta_buffers:
            tensor.copy_(self._weights.tensor(name, self._meta_buffers[name]))


def as_laid(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Values with the strides that the parameter is stored with: themselves, or a copy."""
    strides = dense_strides(parameter)
    if tuple(values.stride()) == strides or (values.numel() <= 1 and values.is_contiguous()):
        return values
    return torch.empty_strided(parameter.shape, strides, dtype=values.dtype).copy_(values)
