"""Installs process-wide hooks into torch while any model is offloaded: registrations, state dicts, `.data`, steps."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.utils._foreach_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memascend.errors import UsageError
from memascend.grads.lazy_grad import GradientHandle
from memascend.params.module_hooks import refuse_moved, refuse_wrapper
from memascend.params.offloaded_param import MEMORY_METHODS, Placeholder, refused_write
from memascend.params.weight_access import state_dicts
from memascend.session.attachment import AddedParameters, copy_module
from memascend.session.optimizer import OffloadedOptimizer
from memascend.text import replaced

if TYPE_CHECKING:
    from collections.abc import Callable

    from memascend.params.residency import Residency


_Module: Any = torch.nn.Module
_Parameter: Any = torch.nn.Parameter
_TENSOR_DATA: Any = torch.Tensor.data
_STATE_DICT, _LOAD_STATE_DICT = _Module.state_dict, _Module.load_state_dict
_COMPILERS = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses")
# torch's list of the tensor types that its foreach kernels accept.
_LISTED: list[Any] = torch.utils._foreach_utils._foreach_supported_types  # noqa: SLF001


class ProcessHooks:
    """A run's share in the process-wide hooks. The first share installs the hooks; the last `release` removes them."""

    _lock = threading.Lock()
    _shares: ClassVar[set[ProcessHooks]] = set()
    _undo = contextlib.ExitStack()

    def __init__(self) -> None:
        with self._lock:
            if not self._shares:
                _install(self._undo)
            self._shares.add(self)

    def release(self) -> None:
        """Ends this run's share. A second call does nothing."""
        with self._lock:
            if self in self._shares:
                self._shares.remove(self)
                if not self._shares:
                    self._undo.close()


def _install(undo: contextlib.ExitStack) -> None:
    registrations = torch.nn.modules.module
    for handle in (
        registrations.register_module_module_registration_hook(refuse_wrapper),
        registrations.register_module_module_registration_hook(AddedParameters.note_registration),
        registrations.register_module_parameter_registration_hook(refuse_moved),
        registrations.register_module_parameter_registration_hook(AddedParameters.note_registration),
        register_optimizer_step_pre_hook(_refuse_foreign_step),
    ):
        undo.callback(handle.remove)
    # torch uses foreach kernels only for tensors whose exact type is in this list. On a GPU, torch clips plain
    # gradients with foreach kernels, whose norms differ in their bits from the norms of single tensors. Clipping of
    # gradient handles must have the same bits.
    _LISTED.append(GradientHandle)
    undo.callback(_LISTED.remove, GradientHandle)
    undo.enter_context(replaced(_Module, "__deepcopy__", copy_module))
    undo.enter_context(replaced(_Module, "state_dict", _make_state_dict))
    undo.enter_context(replaced(_Module, "load_state_dict", _load_state_dict))
    for name in MEMORY_METHODS:
        undo.enter_context(replaced(_Parameter, name, _of_a_copy(getattr(torch.Tensor, name))))
    undo.enter_context(replaced(_Parameter, "data", property(_of_a_copy(_TENSOR_DATA.__get__), _set_data)))


def _of_a_copy(method: Callable[..., Any]) -> Any:
    """Wraps a method that gives access to a parameter's memory. The wrapper copies a materialized parameter first.

    Inside a forward, materialized parameters have their plain class, so `Placeholder` cannot intercept the call. Calls
    from torch's compilers get the parameter itself, because the compilers must see it.
    """

    @functools.wraps(method)
    def given(parameter: torch.nn.Parameter, *args: Any, **options: Any) -> Any:
        place: Any = parameter.__dict__.get("_memascend")
        # A `Placeholder` needs no copy here, because that class overrides `method` itself. Under `fully_shard`,
        # `place.parameter` is this rank's rows, not the model's DTensor.
        is_real = place is not None and place.parameter is parameter and not isinstance(parameter, Placeholder)
        if is_real and not sys._getframe(1).f_globals.get("__name__", "").startswith(_COMPILERS):  # noqa: SLF001
            parameter = place.source.copies.plain_copy(place)
        return method(parameter, *args, **options)

    return given


def _set_data(parameter: torch.nn.Parameter, values: torch.Tensor) -> None:
    """Sets `parameter.data`; of an offloaded parameter, accepts only the parameter itself as `values`."""
    if "_memascend" in parameter.__dict__ and values is not parameter:
        place = parameter.__dict__["_memascend"]
        raise refused_write("a parameter" if place is None else place.name, "given other memory through .data")
    _TENSOR_DATA.__set__(parameter, values)


def _residencies(module: torch.nn.Module) -> list[Residency]:
    """Returns the residencies of all runs to which parameters of the module belong."""
    found = {}
    for parameter in module.parameters():
        place = parameter.__dict__.get("_memascend")
        if "_memascend" in parameter.__dict__:
            # If this rank has no rows of the parameter, the parameter's `_memascend` is None, and the parameter's local
            # tensor refers to the run.
            residency = parameter._local_tensor.source.residency if place is None else place.source  # type: ignore[attr-defined]  # noqa: SLF001
            found[id(residency)] = residency
    return list(found.values())


def _make_state_dict(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    """Replaces `torch.nn.Module.state_dict()`: values of offloaded parameters are copies that no later step changes.

    With `keep_vars=True`, the values are the parameters themselves.
    """
    if options.get("keep_vars") or state_dicts.being_made:
        return _STATE_DICT(module, *args, **options)
    with replaced(state_dicts, "being_made", value=True):
        found = _STATE_DICT(module, *args, **options)
    for residency in _residencies(module):
        residency.session.run.resources.values_read()
    return found


def _load_state_dict(
    module: torch.nn.Module, state_dict: Any, strict: bool = True, assign: bool = False, **options: Any
) -> Any:
    """Replaces `torch.nn.Module.load_state_dict()`: commits the values loaded into offloaded parameters.

    Rejects `assign=True` for a module with offloaded parameters.
    """
    with contextlib.ExitStack() as loads:
        for residency in _residencies(module):
            if assign:
                raise UsageError(
                    "load_state_dict(assign=True) would replace offloaded parameters, which are on storage: call it "
                    "without assign=True"
                )
            if not residency.is_loading:
                loads.enter_context(residency.session.edits.load())
        return _LOAD_STATE_DICT(module, state_dict, strict, assign, **options)


def _refuse_foreign_step(optimizer: torch.optim.Optimizer, args: Any, options: Any) -> None:
    """Rejects a step of an optimizer that owns offloaded parameters, unless offload() returned that optimizer."""
    del args, options
    if isinstance(optimizer, OffloadedOptimizer):
        return
    if any("_memascend" in parameter.__dict__ for group in optimizer.param_groups for parameter in group["params"]):
        raise UsageError(
            f"this {type(optimizer).__name__} is not the optimizer that offload() returned, but its parameters are "
            "offloaded: call step() of the returned optimizer. With a Trainer, pass that optimizer as "
            "Trainer(optimizers=(optimizer, None))"
        )
