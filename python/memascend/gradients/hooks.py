"""Hooks the gradients that autograd accumulates, without the handle that torch makes for each hook."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

# In the parameters' tables of hooks, where torch's own keys are numbers.
_KEY = "memascend"


class AccumulationHooks:
    """One function for all parameters, called with each whose gradient was accumulated."""

    def __init__(self, heard: Callable[[torch.Tensor], None]) -> None:
        """`heard` is a bound method. torch holds hooks where Python's collector does not look, so it is held weakly."""
        weak = weakref.WeakMethod(heard)

        def call(parameter: torch.Tensor) -> None:
            method = weak()
            if method is not None:
                method(parameter)

        self._call = call
        self._parameters: list[Any] = []

    def add(self, parameter: torch.Tensor) -> None:
        """Hear of this one's gradients."""
        self._parameters.append(parameter)
        with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            frozen = not parameter.requires_grad
            # One that is frozen now may thaw later, and torch takes no hook of it.
            parameter.requires_grad_(True)
            own: Any = parameter
            if own._post_accumulate_grad_hooks is None:  # noqa: SLF001
                own._post_accumulate_grad_hooks = _Hooks()  # noqa: SLF001
            own._post_accumulate_grad_hooks[_KEY] = self._call  # noqa: SLF001
            parameter.requires_grad_(not frozen)

    def remove(self) -> None:
        """Let go of all parameters."""
        for parameter in self._parameters:
            with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
                hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001
            if hooks is not None:
                hooks.pop(_KEY, None)
        self._parameters.clear()


class _Hooks(dict[Any, Any]):
    """A parameter's hooks, as torch's own table of them but smaller: a model has thousands of parameters."""

    __slots__ = ("__weakref__",)
