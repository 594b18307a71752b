"""Offloads a preference Trainer's reference model. This model needs neither gradients nor optimizer state."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from memascend.errors import BudgetError
from memascend.plan.decision import file_of
from memascend.plan.options import Options
from memascend.session.decide import planned
from memascend.session.offload import offload
from memascend.text import bytes_shown, size_option

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memascend.session.optimizer import OffloadedOptimizer

_log = logging.getLogger("memascend")
# Options of `offload()` for the budgets that both models share -> the fields of these budgets in `Options`.
_BUDGETS = {"host_memory": "host_bytes", "device_memory": "device_bytes"}


def offload_both(trainer: Any, options: dict[str, Any]) -> OffloadedOptimizer:
    """Offloads the trained model into its store, and the reference model, if there is one, into a temporary store.

    Returns the trained model's optimizer.

    Each start of the training reads the reference model's weights from its files or from memory. Under FSDP2 only the
    trained model is offloaded, because TRL shards the reference model itself.

    Raises:
        ConfigError: one of the models cannot be offloaded.
        BudgetError: a budget is too small for the models.
    """
    reference = getattr(trainer, "ref_model", None)
    if not isinstance(reference, torch.nn.Module) or trainer.is_fsdp_enabled:
        return offload(trainer.model, trainer.optimizer, **options)[1]
    own, rest = _shares(reference, options)
    try:
        offloaded = offload(trainer.model, trainer.optimizer, **options | rest)[1]
    except BudgetError as error:
        short = next((name for name in rest if str(error).startswith(name)), None)
        if short is None:
            raise
        smallest = error.smallest + own[short]
        raise BudgetError(
            f"{error}. These sizes are of the trained model alone. The reference model also takes "
            f'{bytes_shown(own[short])} of {short}: pass {short}="{size_option(smallest)}" or more',
            smallest=smallest,
        ) from error
    try:
        offload(reference, _idle(reference), **own)
    except BaseException:
        offloaded.close()
        raise
    return offloaded


def _shares(model: torch.nn.Module, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Plans the reference model. Returns its options, and the budgets that remain for the trained model.

    The reference model gets the smallest budget that keeps storage and compute busy. The trained model gets the rest of
    the memory, because each byte for the trained model also saves I/O of optimizer state. The reference model's store
    is an unlinked file in the folder `scratch`, or in the folder of the trained model's store if the user passes no
    `scratch` and that store is not a block device.
    """
    # TRL computes the reference model without gradients.
    model.requires_grad_(False)
    own = {name: options[name] for name in ("device", "scratch", "timeout") if name in options}
    storage = options["storage"]
    store_file = file_of(storage if isinstance(storage, str) else storage[0])
    if not store_file.is_block_device():
        own.setdefault("scratch", Path(store_file).expanduser().absolute().parent)
    plan = planned(model, _idle(model), Options(**own)).plan
    own |= {"host_memory": plan.budget}
    if plan.device_budget:
        own |= {"device_memory": plan.device_budget}
    given, rest = Options(**options), {}
    for name, parsed in _BUDGETS.items():
        total = getattr(given, parsed)
        if name == "host_memory" and given.spare is not None:
            rest[name] = replace(given.spare, taken=own[name])
        elif total is not None and name in own:
            # Use at least 1. Then the plan of the trained model raises the error that names the smallest budget that
            # works.
            rest[name] = max(1, total - own[name])
    taken = bytes_shown(plan.budget)
    _log.info("the reference model takes %s of host memory; the trained model gets the rest", taken)
    return own, rest


def _idle(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Returns a stateless optimizer of the smallest parameter. `offload()` needs an optimizer for each model."""
    return torch.optim.SGD([min(model.parameters(), key=torch.Tensor.numel)], lr=0.0)
