"""Finds out whether several ranks train a model together, and refuses what they cannot do yet."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from memascend.errors import ConfigError
from memascend.paths import expanded

if TYPE_CHECKING:
    import contextlib

    from memascend.planning.options import Options
    from memascend.ranks.earlier import Earlier
    from memascend.ranks.figures import Figures
    from memascend.ranks.sharding import Sharding

# How long ranks wait for each other where nobody says.
_TIMEOUT_SECONDS = 600.0


def begin(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options, undo: contextlib.ExitStack
) -> tuple[Sharding | None, Options, Earlier | None]:
    """The rows of a model that ranks share, the options as this rank has them, and what another number of ranks left.

    None and None for one process's own model: one process with a plain model imports and pays nothing.

    Raises:
        ConfigError: what is asked for does not work with several ranks; the message says what does.
    """
    several = _world_size() > 1
    if not (several or _is_sharded(model)):
        return None, *_earlier_of_others(options, undo)
    _refuse_wrappers(model)
    if not several:
        return _sharding(model, optimizer, options, undo, None), *_earlier_of_others(options, undo)
    from memascend.ranks.earlier import find_earlier
    from memascend.ranks.exchange import Exchange
    from memascend.ranks.figures import Figures
    from memascend.ranks.opening import choose
    from memascend.ranks.places import places_of_others, places_of_rank, require_own, shared_folder

    exchange = Exchange(options.timeout or _TIMEOUT_SECONDS)
    undo.callback(exchange.close)
    figures = Figures(exchange)
    if figures.any(not _is_sharded(model)):
        from memascend.ranks.division import divide

        figures.together(lambda: refuse_options(replace(options, units=None)))
        divide(model, optimizer, options.unit_names, figures, undo)
        options = replace(options, units=None)
    asked = options

    def found() -> tuple[Sharding, Options]:
        sharding = _sharding(model, optimizer, asked, undo, figures)
        return sharding, replace(asked, storage=places_of_rank(asked))

    sharding, own = figures.together(found)
    if options.weights is None and options.checkpoint is None:
        sharding.require_same_generators()
    require_own(own.paths or (), figures)
    folder = shared_folder(asked)
    earlier = None if folder is None else find_earlier(folder, asked.existing, exchange)
    if earlier is not None:
        undo.callback(earlier.close)
        if earlier.files:
            # What lies there of now was never filled, or the earlier ones stand for it.
            own = replace(own, existing="replace")
    opening = choose(own.paths, exchange, own.existing, places_of_others(asked))
    sharding.open_by(opening)
    # A rank that is ahead of others goes back.
    return sharding, replace(own, existing=opening.existing), earlier


def _earlier_of_others(options: Options, undo: contextlib.ExitStack) -> tuple[Options, Earlier | None]:
    """The stores that several ranks left in the folder of a single process, which goes on from them."""
    storage = options.storage
    if not isinstance(storage, (str, os.PathLike)) or not any(Path(expanded(storage)).glob("rank-*-of-*")):
        return options, None
    from memascend.ranks.earlier import find_earlier

    earlier = find_earlier(expanded(storage), options.existing, None)
    if earlier is None:
        return options, None
    undo.callback(earlier.close)
    return (replace(options, existing="replace") if earlier.files else options), earlier


def _sharding(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    options: Options,
    undo: contextlib.ExitStack,
    figures: Figures | None,
) -> Sharding:
    try:
        from memascend.ranks.sharding import Sharding
    except ImportError as error:
        raise ConfigError(
            f"torch {torch.__version__} keeps what fully_shard() divides in another way: {error}"
        ) from error

    refuse_options(options)
    sharding = Sharding(model, options.reduction, figures)
    sharding.stand_in(optimizer, undo)
    return sharding


def _world_size() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1


def _is_sharded(model: torch.nn.Module) -> bool:
    # Whoever divided a model has imported it.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(model, torch.nn.Module):
        return False
    return any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def _refuse_wrappers(model: torch.nn.Module) -> None:
    """Other ways to train on several ranks."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    for kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        if kind in kinds:
            raise ConfigError(
                f"{kind} does not work with offload(): give the module inside it, after "
                "torch.distributed.fsdp.fully_shard() on each block and on the model"
            )


def refuse_options(options: Options) -> None:
    """What this version does with one rank only."""
    refused = {
        "activations": (options.activations != "device", "leave it out, and checkpoint activations"),
        "units": (options.units is not None, "what fully_shard() was called on is a unit: leave it out"),
    }
    for name, (is_refused, instead) in refused.items():
        if is_refused:
            raise ConfigError(f"{name}={getattr(options, name)!r} does not work under fully_shard(): {instead}")
