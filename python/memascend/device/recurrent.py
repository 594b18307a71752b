"""Keeps LSTM, GRU and RNN weights in place where torch would flatten them for cuDNN.

Here each weight begins on a page of its unit, and is away most of the time. So torch's `flatten_parameters()` does
nothing while a model is offloaded, and cuDNN copies the weights in each call, as it does with any that are not one
chunk: memory of torch's own, which the backward needs, too.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import torch

_NAME = "flatten_parameters"
# What cuDNN's caller says in each call, and asks for what does nothing here. `Plan` has the bytes.
_WARNING = "RNN module weights are not part of single contiguous chunk of memory"


def copied_bytes(model: torch.nn.Module) -> int:
    """What cuDNN's copies take while all of them are there, from the forward of each module to its backward."""
    of_modules = [parameter for module in _recurrent(model) for parameter in module.parameters(recurse=False)]
    return sum({id(parameter): parameter.nbytes for parameter in of_modules}.values())


class Flattening:
    """Whether the recurrent modules of a model move their weights."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = _recurrent(model)
        # What a module had of its own in its place.
        self._before: dict[torch.nn.Module, Any] = {}
        self._filter: Any = None

    def stop(self) -> None:
        """Let them stay where they are."""
        for module in self._modules:
            self._before[module] = module.__dict__.get(_NAME)
            module.__dict__[_NAME] = _stay
        if self._modules:
            warnings.filterwarnings("ignore", message=_WARNING)
            self._filter = warnings.filters[0]

    def resume(self) -> None:
        """As it was. Twice is fine."""
        for module, before in self._before.items():
            module.__dict__.pop(_NAME, None)
            if before is not None:
                module.__dict__[_NAME] = before
        self._before.clear()
        # Whoever put others there may have taken this one away.
        with contextlib.suppress(ValueError):
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]


def _stay() -> None:
    """In place of a module's `flatten_parameters`."""


def _recurrent(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if isinstance(module, torch.nn.RNNBase)]
