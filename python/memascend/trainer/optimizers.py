"""Chooses the optimizer of a Trainer's arguments: what streams is used as the Trainer makes it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from memascend.errors import ConfigError

_log = logging.getLogger("memascend")
# bitsandbytes' AdamW by `optim=` of the arguments: the `state=` of `memascend.offload()`. It needs no pages.
_ADAMW = dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "8bit") | {"paged_adamw_32bit": None}
# Others of bitsandbytes, and those that update within the backward by themselves, by their beginnings.
_REFUSED = ("ademamix", "lion", "paged_ademamix", "paged_lion", "rmsprop_bnb", "lomo", "adalomo")
_LAYERWISE = "_layerwise"
_STREAMS = (
    "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_torch_8bit, adamw_torch_4bit, adafactor, sgd, adagrad, rmsprop, "
    "schedule_free_adamw, or one of yours by optimizers=(optimizer, None)"
)


def prepare_optimizer(trainer: Any) -> dict[str, Any]:
    """Let the Trainer make an optimizer that streams; returns the options of `memascend.offload()` that go with it.

    Raises:
        ConfigError: what its arguments ask for cannot stream.
    """
    args = trainer.args
    name = str(getattr(args.optim, "value", args.optim))
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return {}
    if name.startswith(_REFUSED) or name.endswith(_LAYERWISE):
        raise ConfigError(f"optim={name!r} cannot stream; these can: {_STREAMS}")
    if name not in _ADAMW:
        return {}
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, options)
    state = _ADAMW[name]
    _log.info("optim=%r is torch's AdamW with state=%r here, and not bitsandbytes'", name, state)
    return {} if state is None else {"state": state}
