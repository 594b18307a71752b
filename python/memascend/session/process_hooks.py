"""Installs hooks into torch that act on the whole process, as long as any model is offloaded."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils._foreach_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memascend.errors import UsageError
from memascend.grads.lazy_grad import GradientHandle
from memascend.params.module_hooks import refuse_moved, refuse_wrapper
from memascend.params.offloaded_param import HANDED_OUT
from memascend.params.unit import STORAGES
from memascend.session.attachment import Newcomers, copy_module
from memascend.session.optimizer import OffloadedOptimizer

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


_TENSOR_DATA: Any = torch.Tensor.data
# The types that torch's functions of lists take.
_LISTED: list[Any] = torch.utils._foreach_utils._foreach_supported_types  # noqa: SLF001


class ProcessHooks:
    """One run's share in the hooks: the first run installs them, and the last one removes them."""

    _lock = threading.Lock()
    _runs = 0
    _handles: ClassVar[list[RemovableHandle]] = []

    def __init__(self) -> None:
        self._held = True
        with self._lock:
            self._count(1)
            if self._runs == 1:
                self._handles.extend(
                    (
                        torch.nn.modules.module.register_module_module_registration_hook(refuse_wrapper),
                        torch.nn.modules.module.register_module_module_registration_hook(_note_registration),
                        torch.nn.modules.module.register_module_parameter_registration_hook(refuse_moved),
                        torch.nn.modules.module.register_module_parameter_registration_hook(_note_registration),
                        register_optimizer_step_pre_hook(_refuse_foreign_step),
                    )
                )
                # torch picks list kernels by exact type, and on a GPU a list's norm has other bits than a tensor's.
                _LISTED.append(GradientHandle)
                torch.nn.Module.__deepcopy__ = copy_module  # type: ignore[attr-defined]
                for name in HANDED_OUT:
                    setattr(torch.nn.Parameter, name, _watching(name))
                torch.nn.Parameter.data = property(_data, _set_data)  # type: ignore[assignment]

    @classmethod
    def _count(cls, more: int) -> None:
        cls._runs += more

    def release(self) -> None:
        """The run is over. Twice is fine."""
        with self._lock:
            if not self._held:
                return
            self._held = False
            self._count(-1)
            if self._runs == 0:
                for handle in self._handles:
                    handle.remove()
                self._handles.clear()
                _LISTED.remove(GradientHandle)
                del torch.nn.Module.__deepcopy__  # type: ignore[attr-defined]
                del torch.nn.Parameter.data
                for name in HANDED_OUT:
                    delattr(torch.nn.Parameter, name)


def _data(parameter: torch.nn.Parameter) -> torch.Tensor:
    """`.data` of a parameter: while it is materialized, the residency notes the access."""
    place = parameter.__dict__.get("_memascend")
    if place is not None:
        place.source.note_data(place)
    values: torch.Tensor = _TENSOR_DATA.__get__(parameter)
    return values


def _watching(name: str) -> Any:
    """A method of tensors, for parameters, that notes the access first."""
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def watched(parameter: torch.nn.Parameter, *args: Any, **options: Any) -> Any:
        place = parameter.__dict__.get("_memascend")
        if place is not None:
            (place.source.note_storage if name in STORAGES else place.source.note_data)(place)
        return method(parameter, *args, **options)

    return watched


def _set_data(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    place = parameter.__dict__.get("_memascend")
    if place is not None and values is not parameter:
        place.source.require_away(place)
    _TENSOR_DATA.__set__(parameter, values)


def _note_registration(module: torch.nn.Module, name: str, given: Any) -> None:
    del module, name
    if given is not None:
        Newcomers.note_registration()


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Reject a step of an optimizer that owns offloaded parameters and is not the one that offload() returned."""
    del args, options
    if isinstance(optimizer, OffloadedOptimizer):
        return
    if any("_memascend" in parameter.__dict__ for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"this {type(optimizer).__name__} is not the optimizer that offload() returned, and its parameters are "
            "offloaded: step the returned one; a Trainer takes it as Trainer(optimizers=(optimizer, None))"
        )
