"""Detects whether several ranks train a model together, finds each rank's store, and shards the model."""

from __future__ import annotations

import copy
import glob
import logging
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from memascend.distributed.control_plane import Alone, Exchange
from memascend.distributed.opening import choose
from memascend.distributed.reshard import file_of_rank, find_earlier, left_over, stores_in
from memascend.distributed.rows import Layout, Rows, RowsOfRank, on_meta
from memascend.errors import ConfigError, StorageError
from memascend.optim.members import JoinedOptimizers, members_of
from memascend.params.aliases import require_unaliased
from memascend.plan.cost import Network
from memascend.plan.units import find_units
from memascend.storage import Checksum
from memascend.text import expanded

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from memascend.distributed.reshard import Earlier
    from memascend.distributed.sharding import Sharding
    from memascend.plan.options import Options


def filled(path: str, rank: int) -> str:
    """Replaces `{rank}` in `path` by the rank, and `{local_rank}` by LOCAL_RANK, the rank's number on its host.

    Without the environment variable LOCAL_RANK, replaces `{local_rank}` by the rank, too.
    """
    local = os.environ.get("LOCAL_RANK", str(rank))
    return path.replace("{rank}", str(rank)).replace("{local_rank}", local)


def _place(path: str, layout: Layout, *, several: bool) -> str:
    place = filled(path, layout.rank)
    if place != path:
        return place
    if several:
        raise ConfigError(f"storage={path!r} is the same for all ranks: put {{rank}} or {{local_rank}} into each path")
    found = Path(path)
    if found.exists() and not found.is_dir():
        what = "a device" if found.is_block_device() else "a file"
        raise ConfigError(
            f"{path} is {what}, but each rank needs its own store: give storage= a folder, or a path that contains "
            "{rank} or {local_rank}"
        )
    # If several ranks shard the rows, the path contains their number: with a different number of ranks, a rank has
    # different rows, and so needs a different store.
    own = file_of_rank(path, layout.rank, layout.shards)
    left = left_over(path, layout)
    if left and not own.is_file():
        # Continue with the store of a replica that an earlier run dropped. If all ranks share the folder, `left` has
        # the stores of all dropped replicas, and replicas with numbers below `len(left)` take different ones.
        own = left[layout.replica if layout.replica < len(left) else 0]
    # The extension creates only the last folder of a path, so create the folders above it.
    own.parent.parent.mkdir(parents=True, exist_ok=True)
    return f"{own.parent}/"


def shared_folder(options: Options) -> str | None:
    """Returns the folder in which each rank has its own store; None if ranks have own paths or temporary stores."""
    storage = options.storage
    if not isinstance(storage, (str, os.PathLike)) or options.paths is None or "{" in options.paths[0]:
        return None
    return options.paths[0]


def places_of_others(options: Options, layout: Layout) -> dict[int, list[str]]:
    """Returns the paths of other ranks' stores that exist on this rank's host, by the number of the other rank."""
    folder, rank = shared_folder(options), layout.rank
    if folder is not None:
        # Includes the stores of dropped replicas: a new run must not begin in a folder that has such stores.
        return {other: [f"{file.parent}/"] for other, file in stores_in(folder, layout.shards).items() if other != rank}
    local = os.environ.get("LOCAL_RANK", str(rank))
    paths = [path.replace("{local_rank}", local) for path in options.paths or ()]
    parts = os.path.normpath(paths[0]).split("{rank}") if paths else []
    if len(parts) < 2:
        # The first path does not contain {rank}, or the store is temporary.
        return {}
    first, *more = map(re.escape, parts)
    pattern = re.compile(first + r"(\d{1,5})" + r"\1".join(more))
    there = map(pattern.fullmatch, glob.glob("*".join(map(glob.escape, parts))))  # noqa: PTH207
    # A file or folder that matches the pattern belongs to the run. A block device that matches the pattern belongs to
    # the run only if the number in its name is the number of a rank.
    numbers = {
        int(match[1])
        for match in there
        if match and (not Path(match[0]).is_block_device() or int(match[1]) < distributed.get_world_size())
    }
    return {number: [path.replace("{rank}", str(number)) for path in paths] for number in numbers - {rank}}


def candidates(paths: Sequence[str], rank: int, count: int) -> list[list[str]]:
    """Returns the places at which a rank's store may be, each as the list of the store's paths.

    The first place is the place for `count` ranks. If `paths` is one folder without placeholders, the files of the
    first replica's other stores in the folder follow.
    """
    places = [filled(path, rank) for path in paths] if count > 1 else list(paths)
    if len(paths) > 1 or places != list(paths):
        return [places]
    folder = Path(paths[0])
    # In a single process, the path is the file of the store, unless there is a folder at the path.
    own = str(file_of_rank(paths[0], rank, count)) if count > 1 or folder.is_dir() else paths[0]
    there = [
        str(file) for pattern in ("rank-*-of-*/memascend.store", "memascend.store") for file in folder.glob(pattern)
    ]
    return [[own], *([file] for file in sorted(there) if file != own)]


def require_own(places: Sequence[str], exchange: Exchange) -> None:
    """Rejects a file or device that is given to two ranks; a collective call."""
    owner: dict[str, int] = {}
    for rank, theirs in enumerate(exchange.all_values([_identity(place) for place in places])):
        for identity in theirs:
            if identity in owner:
                path = identity.split(":", 1)[1]
                raise StorageError(
                    f"{path} is given to rank {owner[identity]} and to rank {rank}, but each rank needs its "
                    "own store: give each rank a different path; no store was changed",
                    path=path,
                )
            owner[identity] = rank


def _identity(place: str) -> str:
    path = os.path.realpath(place)
    if Path(path).is_block_device():
        number = Path(path).stat().st_rdev
        path = f"device {os.major(number)}:{os.minor(number)}"
    return f"{socket.gethostname()}:{path}"


_log = logging.getLogger("memascend")


def divide(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    units: Sequence[str] | None,
    exchange: Exchange,
    undo: contextlib.ExitStack,
) -> None:
    """Shards a model among all ranks, and puts the sharded parameters into its optimizer.

    Rejects an optimizer that has state. `units` has the names of the modules that are each gathered as one unit. If
    `units` is None, `find_units` chooses the modules. If `offload()` fails later, `undo` restores the optimizer, but
    the model stays sharded, because torch cannot undo `fully_shard()`.
    """
    modules = exchange.together(lambda: _found(model, optimizer, units))
    other = exchange.first_other(_checksum(model))
    if other is not None:
        raise ConfigError(
            f"the model on rank {other} has other values than the model on rank 0: start every rank with the whole "
            "model and the same values (the same seed, or the same files). Pipeline parallelism does not work with "
            "offload()"
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
        "offload() called fully_shard() on %d modules and on the whole model: all rows are sharded among %d ranks",
        len(modules),
        exchange.size,
    )


def _found(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, units: Sequence[str] | None
) -> list[torch.nn.Module]:
    """Returns the modules inside the model to which `divide` applies fully_shard().

    Rejects a model or an optimizer that `divide` cannot shard.
    """
    if any(member.state for member in members_of(optimizer)):
        raise ConfigError(
            "the optimizer has state of whole parameters, which offload() cannot shard: call "
            "torch.distributed.fsdp.fully_shard() on each block and on the model before you create the optimizer"
        )
    divided = next((name for name, one in model.named_parameters() if isinstance(one, DTensor)), None)
    if divided is not None:
        raise ConfigError(
            f"{divided} is a DTensor, but offload() shards only plain parameters. Tensor parallelism (tp_plan=, "
            "parallelize_module()) does not work with offload(): leave it out. To shard the model yourself, call "
            "torch.distributed.fsdp.fully_shard() on each block and on the model, on all ranks"
        )
    own: Any = dict(model.named_parameters())
    hooked = next((name for name, p in own.items() if p._backward_hooks or p._post_accumulate_grad_hooks), None)  # noqa: SLF001
    if hooked is not None:
        raise ConfigError(
            f"{hooked} has a gradient hook, and fully_shard() makes new parameters without hooks: register the hook "
            "after offload() with register_post_accumulate_grad_hook(), and pass gradients='ssd' or 'ram' to offload() "
            "(FSDP2 does not call hooks of register_hook())"
        )
    require_unaliased(own, model)
    found = find_units(model, units=units)
    named = dict(model.named_modules())
    # Leave out a unit with a tied parameter, which modules outside of the unit use, too. The call on the whole model
    # then shards the unit's parameters.
    whole = [unit.module for unit in found if unit.module and not unit.again]
    return [named[name] for name in whole]


def _checksum(model: torch.nn.Module) -> str:
    """Returns a checksum of all parameters that are not on meta."""
    checksum = Checksum()
    for parameter in model.parameters():
        if parameter.is_meta:
            continue
        values = parameter.detach().cpu().contiguous()
        if values.numel():
            checksum.update(values)
    return str(checksum)


# The default of `timeout=`, in seconds.
_TIMEOUT_SECONDS = 600.0


def begin(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options, undo: contextlib.ExitStack
) -> tuple[Sharding | None, Options, Earlier | None]:
    """Returns a model's sharding, this rank's options, and the stores of an earlier run with another number of ranks.

    On several ranks, first shards a model that is not sharded yet. The sharding is None for a plain model in one
    process. The earlier stores are None if no earlier store has to be read or removed.
    """
    several = distributed.is_initialized() and distributed.get_world_size() > 1
    if not (several or _is_sharded(model)):
        return None, *_earlier_of_others(options, undo)
    _refuse_wrappers(model)
    if not several:
        refuse_options(options)
        return _sharding(model, optimizer, options.reduction, undo, None), *_earlier_of_others(options, undo)
    exchange = Exchange(options.timeout or _TIMEOUT_SECONDS)
    undo.callback(exchange.close)
    divides = any(exchange.all_values(not _is_sharded(model)))
    if divides:
        exchange.together(lambda: refuse_options(options, divides=True))
        divide(model, optimizer, options.unit_names, exchange, undo)

    def found() -> tuple[Sharding, Options]:
        if not divides:
            refuse_options(options)
        sharding = _sharding(model, optimizer, options.reduction, undo, exchange)
        several = not isinstance(options.storage, (str, os.PathLike))
        places = [_place(path, sharding.layout, several=several) for path in options.paths or ()]
        # If offload() shards the model, `divide` has already used the option `units`. Each gather is then a unit.
        return sharding, replace(options, storage=places or None, units=None if divides else options.units)

    sharding, own = exchange.together(found)
    require_own(own.paths or (), exchange)
    folder = shared_folder(options)
    layout = sharding.layout
    earlier = None if folder is None else find_earlier(folder, options.existing, exchange, layout)
    if earlier is not None:
        undo.callback(earlier.close)
    # If the run resumes from stores of another number of ranks, replace the stores of the present number of ranks. The
    # replaced stores are older or were never filled.
    existing = "replace" if earlier is not None and earlier.files else options.existing
    opening = choose(own.paths, exchange, existing, layout, places_of_others(options, layout))
    has_values = opening.number > 0 or bool(earlier is not None and earlier.files)
    if not has_values and options.weights is None and options.checkpoint is None:
        sharding.require_same_generators()
    used = {place for each in exchange.all_values(own.paths or []) for place in each}
    # `retire` locks each store that it reads, so only the ranks of the first replica get stores of dropped replicas.
    left = [] if folder is None or not opening.number or layout.replica else left_over(folder, layout, used)
    sharding.open_by(opening, left)
    # With `opening.existing`, this rank opens the chosen commit, which may be older than its newest commit.
    return sharding, replace(own, existing=opening.existing), earlier


def _earlier_of_others(options: Options, undo: contextlib.ExitStack) -> tuple[Options, Earlier | None]:
    """Finds the stores of an earlier run on several ranks, for a run in a single process.

    Returns the options with which to open the store of this run, and the earlier stores. Returns `options` and None if
    `storage` is not a folder, or if the folder has no such stores.
    """
    storage = options.storage
    if not isinstance(storage, (str, os.PathLike)) or not Path(expanded(storage)).is_dir():
        return options, None
    alone = Layout(0, 1, 1)
    of_replicas = left_over(expanded(storage), alone)
    if of_replicas and not file_of_rank(expanded(storage), 0, 1).is_file():
        raise ConfigError(
            f"{of_replicas[0]} is the store of one of several ranks, and a single process cannot resume from "
            "it: start the ranks as before, call optimizer.save(folder), and pass checkpoint=folder to offload() in "
            "the single process. To begin a new run, move this store away. Nothing was changed"
        )
    earlier = find_earlier(expanded(storage), options.existing, Alone(), alone)
    if earlier is None:
        return options, None
    undo.callback(earlier.close)
    return (replace(options, existing="replace") if earlier.files else options), earlier


def _sharding(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    reduction: str,
    undo: contextlib.ExitStack,
    exchange: Exchange | None,
) -> Sharding:
    try:
        from memascend.distributed.sharding import Sharding
    except ImportError as error:
        raise ConfigError(
            f"this version of memascend does not work with FSDP2 of torch {torch.__version__} ({error}): use a torch "
            "version that docs/limits.md names, or a newer memascend"
        ) from error

    sharding = Sharding(model, reduction, exchange)
    for member in members_of(optimizer):
        sharding.use_local_rows(member, undo)
    return sharding


def _is_sharded(model: torch.nn.Module) -> bool:
    return isinstance(model, torch.nn.Module) and any(isinstance(module, FSDPModule) for module in model.modules())


def _refuse_wrappers(model: torch.nn.Module) -> None:
    """Rejects a model that contains a wrapper of DDP, FSDP1 or DataParallel."""
    kinds = {kind.__name__ for module in model.modules() for kind in type(module).__mro__}
    for kind in ("DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"):
        if kind in kinds:
            raise ConfigError(
                f"{kind} does not work with offload(): pass the module inside it to offload(), which shards this "
                "module by torch.distributed.fsdp.fully_shard() if you have not"
            )


def refuse_options(options: Options, *, divides: bool = False) -> None:
    """Rejects options that do not work with a sharded model.

    `units` works if `offload()` itself shards the model (`divides`).
    """
    refused = "does not work under fully_shard()"
    if options.activations != "device":
        raise ConfigError(
            f"activations={options.activations!r} {refused}: leave it out, and use torch's activation checkpointing"
        )
    if options.units is not None and not divides:
        raise ConfigError(
            f"units={options.units!r} {refused}, because each module given to fully_shard() is a unit: leave units= out"
        )


class PlannedSharding(RowsOfRank):
    """The rows of the first of `count` ranks, on meta. A plan uses these rows if `offload()` shards a plain model.

    No other rank has more rows than the first rank.
    """

    # A plan exchanges nothing with other ranks.
    exchange = None

    def __init__(self, model: torch.nn.Module, count: int, options: Options) -> None:
        """Plans how `offload()` shards `model` among `count` ranks; `options` are the options of `offload()`."""
        refuse_options(options, divides=True)
        whole = dict(model.named_parameters())
        for name, parameter in whole.items():
            if not parameter.dim():
                raise ConfigError(
                    f"{name} has no dimension, and fully_shard() shards only parameters with rows: give {name} one "
                    "dimension, for example by torch.ones(1)"
                )
        rows = {name: Rows(one.shape, 0, -(-one.shape[0] // count)) for name, one in whole.items()}
        named = {name: on_meta(one, rows[name].shape) for name, one in whole.items()}
        blocks = [unit for unit in find_units(model, units=options.unit_names) if unit.module and not unit.again]
        inside = {name for unit in blocks for name in unit.parameters}
        # The root first, then the blocks: torch gathers in this order.
        root = ("root", [name for name in whole if name not in inside])
        super().__init__(
            rows,
            Layout(0, 1, count),
            named=named,
            gathers=[root, *((unit.name, unit.parameters) for unit in blocks)],
            local={id(parameter): named[name] for name, parameter in whole.items()},
        )
        # The bytes that each rank sends and receives, and the bytes that gathered parameters and gradients take.
        self.network = self._network()

    def _network(self) -> Network:
        count = self.layout.size
        values = [[self.named[name].nbytes for name in names] for _, names in self.gathers]
        gradients = [
            sum(self.named[name].nbytes for name in names if self.named[name].requires_grad)
            for _, names in self.gathers
        ]
        root, *blocks = map(sum, values)
        others = count - 1
        return Network(
            forward=others * (root + sum(blocks)),
            backward=others * sum(blocks),
            gradients=others * sum(gradients),
            # In a gather, each rank sends as many rows as the first rank has.
            gathered=count * (root + 2 * max(blocks, default=0) + 2 * max(gradients)),
        )

    def use_local_rows(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Returns a copy of the optimizer with the rows in place of the whole parameters."""
        members = members_of(optimizer)
        if len(members) > 1:
            return JoinedOptimizers([self.use_local_rows(member) for member in members])
        made = copy.copy(optimizer)
        made.param_groups = [
            {**group, "params": [self.local_of(one) for one in group["params"]]} for group in optimizer.param_groups
        ]
        return made
