"""Chooses the optimizer of a Trainer's arguments: what streams is used as the Trainer makes it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from memascend.errors import ConfigError

_log = logging.getLogger("memascend")
# By `optim=` of the arguments, of bitsandbytes' AdamW: the format of the moments in `memascend.offload(state=)`.
# Pages are what the store is, anyway.
_STATES = {
    **dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "8bit"),
    "paged_adamw_32bit": None,
}
# Those that cannot, by their beginnings and ends.
_BEGINNINGS = {
    **dict.fromkeys(("ademamix", "lion", "paged_ademamix", "paged_lion", "rmsprop_bnb"), "it is of bitsandbytes"),
    **dict.fromkeys(("lomo", "adalomo"), "it updates within the backward by itself"),
    "adamw_torch_xla": "it is for TPUs",
    "adamw_torch_npu": "it is for NPUs",
}
_LAYERWISE = "_layerwise"
_STREAMS = (
    "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_torch_8bit, adamw_torch_4bit, adafactor, sgd, adagrad, rmsprop, "
    "schedule_free_adamw, or one of yours by optimizers=(optimizer, None)"
)


def prepare_optimizer(trainer: Any) -> dict[str, Any]:
    """Let the Trainer make an optimizer that streams; returns what `memascend.offload()` needs beside it.

    Raises:
        ConfigError: what its arguments ask for cannot stream.
    """
    args = trainer.args
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return {}
    name = str(getattr(args.optim, "value", args.optim))
    reasons = [why for begins, why in _BEGINNINGS.items() if name.startswith(begins)]
    if name.endswith(_LAYERWISE):
        reasons.append("it updates within the backward by itself")
    if reasons:
        raise ConfigError(f"optim={name!r} cannot stream, since {reasons[0]}: what can are {_STREAMS}")
    if name not in _STATES:
        return {}
    betas = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"lr": args.learning_rate, **betas})
    state = _STATES[name]
    _log.info("optim=%r is torch's AdamW here, with state=%r: bitsandbytes is not used", name, state)
    return {} if state is None else {"state": state}
