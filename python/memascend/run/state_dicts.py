"""Makes and loads state dicts of an offloaded model: copies out, values through to storage."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from memascend.errors import UsageError
from memascend.residency.gates import COPIED

if TYPE_CHECKING:
    import torch

    from memascend.run.loads import Loads
    from memascend.run.run import Run

_KEY = "memascend"
# A module's own tables of hooks.
_TABLES = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


class StateDicts:
    """The hooks by which torch makes and loads state dicts of one offloaded model."""

    def __init__(self, model: torch.nn.Module, run: Run, loads: Loads, *, sharded: bool) -> None:
        """Nothing of the model changes before `install`; `sharded`: ranks share its parameters."""
        self._sharded = sharded
        self._model = model
        self._run = run
        self._loads = loads
        # The module whose state dict is being made.
        self._making: torch.nn.Module | None = None
        self._loading: list[torch.nn.Module] = []

    def install(self) -> None:
        """Give every module the hooks."""
        # Under one key, as gates do it: torch's own calls would leave a handle and a wrapper for each of them.
        before, after = self._before_making, _AfterMaking(self)
        for module in self._model.modules():
            tables: Any = module.__dict__
            tables["_state_dict_pre_hooks"][_KEY] = before
            tables["_state_dict_hooks"][_KEY] = after
            tables["_load_state_dict_pre_hooks"][_KEY] = functools.partial(self._before_loading, module)
            tables["_load_state_dict_post_hooks"][_KEY] = self._after_loading

    def remove(self) -> None:
        """Take the hooks away."""
        for module in self._model.modules():
            for table in _TABLES:
                module.__dict__[table].pop(_KEY, None)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)

    def forget(self) -> None:
        """Give up a state dict whose making or loading was interrupted."""
        self._making = None
        self._run.residency.transfers.end_making()
        self._loading.clear()
        self._loads.give_up()

    # --- making ---------------------------------------------------------------------------

    def _before_making(self, module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
        del prefix
        if self._making is None and not keep_vars:
            self._making = module
            self._run.residency.transfers.begin_making()

    def after_making(self, module: torch.nn.Module) -> None:
        """A module has added what it has."""
        if self._making is module:
            self._making = None
            self._run.residency.transfers.end_making()
            self._run.resources.unread = False

    # --- loading ------------------------------------------------------------------------------

    def _before_loading(  # noqa: PLR0913, PLR0917 - as torch calls it
        self,
        module: torch.nn.Module,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        del strict, missing, unexpected
        if local_metadata.get("assign_to_params_buffers"):
            raise UsageError("load_state_dict(assign=True) would replace offloaded parameters; leave assign out")
        if not self._loading:
            self._run.require_quiet()
        if self._sharded:
            # torch writes to the rows, as anybody may between steps.
            return
        if not self._loading:
            self._loads.begin(module, {name.removeprefix(prefix) for name in state_dict}, errors)
        self._loading.append(module)

    def _after_loading(self, module: torch.nn.Module, incompatible: Any) -> None:
        del incompatible
        if module not in self._loading:
            return
        del self._loading[self._loading.index(module) :]
        if not self._loading:
            self._loads.end()


class _AfterMaking:
    """A hook of its own class: torch marks it, which a method does not allow."""

    def __init__(self, state_dicts: StateDicts) -> None:
        self._state_dicts = state_dicts

    def __call__(self, module: torch.nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
        del state_dict, prefix, local_metadata
        self._state_dicts.after_making(module)

    # What torch marks the hooks with that were registered by its own call.
    _from_public_api = True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(COPIED)
