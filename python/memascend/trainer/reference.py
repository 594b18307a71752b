"""Offloads the reference model of a preference Trainer: its weights stream, without gradients and state."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import BudgetError
from memascend.plan.decision import file_of
from memascend.plan.options import Options
from memascend.session.decide import planned
from memascend.session.offload import offload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.session.optimizer import OffloadedOptimizer

_log = logging.getLogger("memascend")
# The budgets of `offload()`, which are for both models.
_BUDGETS = {"host_memory": "host_bytes", "device_memory": "device_bytes"}


@dataclass(frozen=True)
class Reference:
    """The reference model that a Trainer has, and its share of the options of `memascend.offload()`."""

    model: torch.nn.Module
    options: dict[str, Any]  # of the reference
    rest: dict[str, Any]  # the budgets that remain for the trained model


def offload_both(
    model: torch.nn.Module, optimizer: Any, options: dict[str, Any], reference: Reference | None
) -> OffloadedOptimizer:
    """Offload the trained model, and the reference into a temporary store; returns the optimizer of the first.

    The weights of the reference come from its files, or from memory, at each start.
    """
    if reference is None:
        return offload(model, optimizer, **options)[1]
    try:
        offloaded = offload(model, optimizer, **options | reference.rest)[1]
    except BudgetError as error:
        share = sum(reference.options[name] for name in reference.rest)
        raise BudgetError(
            f"{error}; the reference model takes {share} bytes beside it, which are in the budget, too",
            smallest=error.smallest + share,
        ) from error
    try:
        offload(reference.model, _idle(reference.model), **reference.options)
    except BaseException:
        offloaded.close()
        raise
    return offloaded


def reference_of(trainer: Any, options: Mapping[str, Any]) -> Reference | None:
    """The reference model, planned; None where there is none, and under FSDP2, where TRL shards it.

    It takes the smallest budget that keeps disk and compute busy, and the trained model the rest: there memory saves
    state, too. Its store is an unlinked file beside that of the trained model.

    Raises:
        ConfigError: it cannot be offloaded.
    """
    model = getattr(trainer, "ref_model", None)
    if not isinstance(model, torch.nn.Module) or trainer.is_fsdp_enabled:
        return None
    # TRL computes it without gradients.
    model.requires_grad_(False)
    own = {name: options[name] for name in ("device", "scratch", "timeout") if name in options}
    storage = options["storage"]
    beside = file_of(storage if isinstance(storage, str) else storage[0])
    if not beside.is_block_device():
        own.setdefault("scratch", Path(beside).expanduser().absolute().parent)
    plan = planned(model, _idle(model), Options(**own)).plan
    own |= {"host_memory": plan.budget}
    if plan.device_budget:
        own |= {"device_memory": plan.device_budget}
    given, rest = Options(**options), {}
    for name, parsed in _BUDGETS.items():
        total = getattr(given, parsed)
        if total is not None and name in own:
            # An error of the trained model's plan names the smallest that works.
            rest[name] = max(1, total - own[name])
    _log.info("the reference model takes %d bytes of host memory; the trained model has the rest", plan.budget)
    return Reference(model, own, rest)


def _idle(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer without state that owns one parameter, the smallest: `offload()` takes models with one."""
    return torch.optim.SGD([min(model.parameters(), key=torch.Tensor.numel)], lr=0.0)
