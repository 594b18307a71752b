"""Applies `fully_shard` to a model that nobody divided yet: to its units, and to the whole."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from memascend.engine.checksum import Checksum
from memascend.errors import ConfigError
from memascend.planning.units import find_units
from memascend.residency.aliases import require_unaliased

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    import torch

    from memascend.ranks.figures import Figures

_log = logging.getLogger("memascend")


def divide(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[str] | None,
    figures: Figures,
    undo: contextlib.ExitStack,
) -> None:
    """Divide a model's rows among all ranks, and let its optimizer own what then stands for the parameters.

    Args:
        model: stays divided, also where the rest of `offload()` is refused: torch cannot take it back.
        optimizer: has no state yet.
        units: names of modules that are gathered as one each; None: found from the model.
        figures: what ranks tell each other.
        undo: takes back what is changed of the optimizer.

    Raises:
        ConfigError: it cannot be divided so; nothing was changed.
    """
    modules = figures.together(lambda: _found(model, optimizer, units))
    told = figures.everyone(_checksum(model))
    other = next((rank for rank, checksum in enumerate(told) if checksum != told[0]), None)
    if other is not None:
        raise ConfigError(
            f"rank {other} has other values in its model than rank 0: every rank begins with the whole model and the "
            "same values (the same seed, or the same files); stages of a pipeline do not work with offload()"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in modules:
        fully_shard(module)
    fully_shard(model)
    divided = dict(model.named_parameters())
    for group in optimizer.param_groups:
        given = group["params"]
        undo.callback(group.__setitem__, "params", given)
        group["params"] = [divided[names[id(one)]] if id(one) in names else one for one in given]
    _log.info(
        "fully_shard() was applied to %d modules and to the model, which divides its rows among %d ranks",
        len(modules),
        figures.world_size,
    )


def _found(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[str] | None
) -> list[torch.nn.Module]:
    """The modules that are gathered as one each; the rest is gathered with the model."""
    if optimizer.state:
        raise ConfigError(
            "the optimizer has state of whole parameters: call torch.distributed.fsdp.fully_shard() on each block and "
            "on the model before the optimizer is made"
        )
    divided = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
    if divided is not None:
        raise ConfigError(
            f"{divided} is a DTensor that fully_shard() did not make: tensor parallelism (tp_plan=, "
            "parallelize_module()) does not work with offload(): leave it out, and call "
            "torch.distributed.fsdp.fully_shard() on each block and on the model"
        )
    require_unaliased(dict(model.named_parameters()), model)
    found = find_units(model, units=units)
    named = dict(model.named_modules())
    # What is tied to another unit is gathered with the model, as both use it.
    whole = [unit.module for unit in found if unit.module and not unit.again]
    return [named[name] for name in whole]


def _checksum(model: torch.nn.Module) -> str:
    checksum = Checksum()
    for parameter in model.parameters():
        if parameter.is_meta:
            continue
        values = parameter.detach().cpu().contiguous()
        if values.numel():
            checksum.update(values)
    return str(checksum)
