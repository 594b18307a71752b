"""Decides units, store entries, files and the plan of a run from shapes alone; refuses what cannot be offloaded."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from memascend import storage as engines
from memascend.activations import activations
from memascend.checkpoint.init import Buffers, require_plain
from memascend.device.device import copied_bytes
from memascend.device.transfer import CHUNKS, WINDOWS
from memascend.distributed.setup import PlannedSharding
from memascend.errors import BudgetError, ConfigError, StorageError
from memascend.optim.members import members_of, require_one_owner, title_of
from memascend.optim.rules import Arithmetic, unwrapped
from memascend.optim.state import StateFormats
from memascend.params.aliases import require_unaliased
from memascend.params.module_hooks import gated
from memascend.params.offloaded_param import dense_strides
from memascend.plan.memory_plan import Log, Requirements, make_plan
from memascend.plan.units import find_units
from memascend.session.materialize import is_materialized
from memascend.session.optimizer import OffloadedOptimizer
from memascend.session.original_state import require_unaliased_state
from memascend.text import expanded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from memascend.device.device import Device
    from memascend.distributed.reshard import Earlier
    from memascend.distributed.sharding import Sharding
    from memascend.plan.cost import Network
    from memascend.plan.options import Options
    from memascend.plan.table import Plan
    from memascend.plan.units import Unit
    from memascend.storage import Entry, Store


def file_of(path: str) -> Path:
    """The store's file, where a folder is given (or one that will be: "runs/first/"), or else the path itself."""
    place = Path(path)
    return place / "memascend.store" if path.endswith("/") or place.is_dir() else place


def temporary(create: Callable[[str], Store]) -> tuple[Store, Path]:
    """A store whose file is gone with the process, where there is a disk, and the folder that it was in."""
    refused: Exception | None = None
    for place in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", os.getcwd())):  # noqa: PTH109, S108
        try:
            folder = tempfile.mkdtemp(prefix="memascend-", dir=place)
        except OSError as error:
            refused = refused or error
            continue
        try:
            store = create(folder)
            store.become_temporary()
            return store, Path(place)
        except StorageError as error:
            refused = refused or error
        finally:
            # Nobody else knows the folder.
            (Path(folder) / "memascend.store").unlink(missing_ok=True)
            Path(folder).rmdir()
    raise StorageError(f"there is no place for a temporary store: {refused}; give storage=")


def room_beside(paths: Sequence[str] | None, total_bytes: int) -> int | None:
    """Bytes that there are on storage beside a store of so many, made or not; None where that cannot be found out."""
    try:
        places = [file_of(path) for path in paths or (tempfile.gettempdir(),)]
        systems = [_nearest(place).stat().st_dev for place in places]
        rooms = []
        for place, system in zip(places, systems, strict=True):
            if place.is_block_device():
                with place.open("rb") as device:
                    rooms.append(device.seek(0, os.SEEK_END))
                continue
            # Several parts on one file system share what is free.
            free = shutil.disk_usage(_nearest(place)).free // systems.count(system)
            rooms.append(free + (place.stat().st_size if place.is_file() else 0))
    except OSError:
        return None
    return max(0, min(rooms) * len(rooms) - total_bytes)


def _nearest(place: Path) -> Path:
    """What there is of a path."""
    return next(path for path in (place, *place.absolute().parents) if path.exists())


def folders_of(options: Options) -> list[Path]:
    """For files that are gone with the process: beside each part of the store, as far as that is known."""
    if options.scratch is not None:
        return [Path(expanded(options.scratch))]
    files = [path for path in options.paths or () if not Path(path).is_block_device()]
    return list(dict.fromkeys(file_of(path).parent for path in files))


def scratch_of(options: Options) -> Path | None:
    """The folder for copies of the weights: beside the first part of the store, where that is a file with a name."""
    if options.scratch is not None:
        return Path(expanded(options.scratch))
    if not options.paths or Path(options.paths[0]).is_block_device():
        return None
    return file_of(options.paths[0]).parent


_TRAINED = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


@dataclass(frozen=True)
class Owned:
    """A parameter of the model, as the optimizer sees it."""

    name: str
    parameter: torch.nn.Parameter
    # Its group; None where the optimizer does not own it.
    group: int | None


def find_owned(
    model: torch.nn.Module,
    named: Mapping[str, torch.nn.Parameter] | None,
    optimizer: torch.optim.Optimizer,
    device: torch.device | None = None,
) -> dict[str, Owned]:
    """The parameters of a model, with their groups; raises `ConfigError` where they cannot be offloaded.

    They are on the CPU, on meta, or on the `device` that is going to compute. `named` are those that a rank has of a
    model that others share; None: the model's own.
    """
    _refuse_kinds(model, optimizer)
    if named is None:
        named = dict(model.named_parameters())
    if not named:
        raise ConfigError("the model has no parameters: there is nothing to offload")
    require_one_owner(optimizer, named)
    groups = {
        id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]
    }
    _refuse_owners(named, groups)
    for name, parameter in named.items():
        if parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise ConfigError(
                f"{name} is on {parameter.device}; offload() takes models on the CPU, on meta, or on the device= that "
                "computes; load it without device_map= if that divided it"
            )
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} is not initialised yet: run the model once before offload()")
    _refuse_shared(model, named)
    owned = {}
    for name, parameter in named.items():
        # Of whole numbers there is no gradient: torch's optimizers leave them alone.
        number = groups.get(id(parameter)) if parameter.is_floating_point() or parameter.is_complex() else None
        if number is not None and parameter.dtype not in _TRAINED:
            raise ConfigError(
                f"{name} is {parameter.dtype}, and parameters of float32, float64, bfloat16 and float16 are trained: "
                "give the optimizer the others alone, and freeze this one with requires_grad_(False)"
            )
        owned[name] = Owned(name, parameter, number)
    return owned


def _refuse_kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    members = members_of(optimizer)
    replaced = next(filter(_has_own_step, members), None)
    if replaced is not None:
        raise ConfigError(
            f"step() of this {type(replaced).__name__} was replaced on the object, and offload() runs that of its "
            "class: register_step_pre_hook() and register_step_post_hook() are heard, or make it a subclass"
        )
    if any(isinstance(one, OffloadedOptimizer) for one in members) or gated(model) or is_materialized(model):
        raise ConfigError("this model or optimizer is offloaded already; close() it first")
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, wrappers) or type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{type(model).__name__} does not work with offload(); give the module inside it, on several processes "
            "after torch.distributed.fsdp.fully_shard() on each block and on the model"
        )
    _refuse_placed(model)


def _refuse_placed(model: torch.nn.Module) -> None:
    """Refuse what accelerate keeps elsewhere: its weights seem to be on meta, and would get first values."""
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise ConfigError(
                f"weights of {name or 'the model'} were put on the CPU or on disk by accelerate (device_map=, "
                "cpu_offload): load the model without device_map=, offload() streams what does not fit"
            )


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """Whether somebody replaced `step` of an object; a scheduler puts a function there that counts and goes on."""
    step = vars(optimizer).get("step")
    if step is not None and hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", None)
    return (
        step is not None
        and step is not type(optimizer).step
        and getattr(step, "__func__", None) is not type(optimizer).step
    )


def _refuse_owners(named: Mapping[str, torch.nn.Parameter], groups: Mapping[int, int]) -> None:
    known = {id(parameter) for parameter in named.values()}
    if not groups.keys() <= known:
        count = len(groups.keys() - known)
        raise ConfigError(
            f"the optimizer owns {count} parameters that are not this model's; make it from model.parameters()"
        )
    orphans = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in groups]
    if orphans:
        raise ConfigError(
            f"the optimizer does not own {len(orphans)} trainable parameters ({', '.join(orphans[:3])}...): freeze "
            "them with requires_grad_(False), or give them to it, or to another one: offload(model, [one, other])"
        )
    if not groups:
        raise ConfigError("the optimizer owns no parameters of this model")


def _refuse_shared(model: torch.nn.Module, named: Mapping[str, torch.nn.Parameter]) -> None:
    """Tensors that lie in each other's memory change together in torch; on storage they would go apart in silence."""
    spans = []
    for name, tensor in [*named.items(), *model.named_buffers()]:
        if tensor.is_meta or tensor.layout != torch.strided or tensor.numel() == 0:
            continue
        # Of what has gaps, others may lie in these.
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            begin = tensor.data_ptr()
            spans.append((begin, begin + tensor.nbytes, name, isinstance(tensor, torch.nn.Parameter)))
    spans.sort()
    parameter: tuple[int, str] = (0, "")
    other: tuple[int, str] = (0, "")
    for begin, end, name, owned in spans:
        for before in (parameter, other if owned else (0, "")):
            if begin < before[0]:
                raise ConfigError(
                    f"{before[1]} and {name} share memory, so that each changes with the other, which storage cannot: "
                    "tie them as one Parameter (head.weight = embedding.weight), or clone one"
                )
        if owned:
            parameter = max(parameter, (end, name))
        else:
            other = max(other, (end, name))


def refuse_sizes(unit_bytes: Mapping[str, int], units: Iterable[Unit]) -> None:
    """What is brought into memory together must have bytes."""
    for unit in units:
        if unit_bytes[unit.name] == 0:
            raise ConfigError(
                f"{', '.join(unit.parameters)} has no elements, and stands alone: leave it out of the model, or put it "
                "into a module that has other parameters"
            )


def sparse_weights(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Parameters whose gradients are sparse."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield module.weight


def embeddings(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    """The weights of embeddings, also where a head is tied to them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            yield module.weight


_STATES: tuple[Literal["fp32", "bf16", "8bit"], ...] = ("fp32", "bf16", "8bit")


class Subject:
    """The model and the optimizer of one call of `offload()`, checked."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: Options,
        device: Device | None,
        *,
        sharding: Sharding | None = None,
        earlier: Earlier | None = None,
        only_planned: bool = False,
    ) -> None:
        """`optimizer` is the original, or several that are joined. `device` computes, where that is not the host.

        `sharding` has the parameters, where ranks share them; `earlier` the stores of another number of ranks, from
        which the run goes on. What is `only_planned` needs neither the device that computes nor a place of its store.
        """
        self.model = model
        self.original = optimizer
        self.options = options
        self.device = device
        # Units reach the device through chunks.
        self.staged = device is not None or (only_planned and options.where.type != "cpu")
        # Nobody said where the store will lie: how much room there is beside it is not known.
        self.unplaced = only_planned and options.paths is None
        self.sharding = sharding
        named = None if sharding is None else sharding.named
        self.owned = find_owned(model, named, self.original, None if device is None else device.torch_device)
        self.named = {name: owned.parameter for name, owned in self.owned.items()}
        self.trained = {name for name, owned in self.owned.items() if owned.group is not None}
        require_plain(self.named)
        if options.weights is not None and not any(parameter.is_meta for parameter in self.named.values()):
            raise ConfigError("weights= is for parameters on meta, and the model has none there: leave it out")
        formats = StateFormats(
            state=options.state,
            stochastic=options.rounding == "stochastic",
            seed=options.seed,
            whole=self._ids(embeddings(model)),
            elements={} if sharding is None else sharding.elements(),
        )
        names = {id(parameter): name for name, parameter in self.named.items()} if sharding is None else None
        sparse = self._ids(sparse_weights(model))
        self.arithmetic = Arithmetic(self.original, options.master_dtype, sparse, formats, names)
        if sharding is not None:
            sharding.require_by_rows(self.arithmetic)
        if not only_planned:
            require_unaliased(self.named, model, () if sharding is None else sharding.held)
            for member in members_of(self.original):
                require_unaliased_state(member, self.named, model)
        self.buffers = Buffers(model)
        self.earlier = earlier

    def _ids(self, weights: Iterable[torch.Tensor]) -> frozenset[int]:
        """The ids of some of the model's weights, as the optimizer has them."""
        sharding = self.sharding
        return frozenset(id(weight if sharding is None else sharding.local_of(weight)) for weight in weights)

    @property
    def durability(self) -> Literal["step", "close", "none"]:
        """Of the store: what is temporary is gone with the process, and nothing of it needs to last."""
        return self.options.durability if self.options.paths or self.unplaced else "none"

    @property
    def moves_activations(self) -> bool:
        """Whether what checkpoints save goes elsewhere; on the host, "host" is where it is."""
        return self.options.activations == "ssd" or (self.options.activations == "host" and self.staged)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a run is going to be."""

    units: tuple[Unit, ...]  # the parameters that travel together
    entries: list[Entry]  # what the store holds
    sizes: engines.Sizes  # what that takes there
    plan: Plan  # of memory


@dataclass(frozen=True)
class Planned:
    """What `offload()` would do."""

    plan: Plan  # the plan
    state_bytes: int  # what the same optimizer keeps in memory without offloading
    network: Network | None = None  # what a rank sends and receives; None for one process


def planned(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    options: Options,
    ranks: int = 1,
) -> Planned:
    """Decide as `offload()` with these options would, from shapes alone: the model may be on "meta"; nothing changes.

    Args:
        model: that is trained.
        optimizer: owns its parameters; or several that do.
        options: of `offload()`; with several ranks, of each.
        ranks: how many share the model: the plan is that of one.

    Raises:
        ConfigError: it would refuse; the message says why.
        BudgetError: the budget is too small; `smallest` is what works.
    """
    with torch.no_grad():
        original = unwrapped(optimizer)
        sharding = PlannedSharding(model, ranks, options) if ranks > 1 else None
        if sharding is not None:
            original = sharding.stand_in(original)
        rows = cast("Sharding | None", sharding)
        subject = Subject(model, original, options, None, sharding=rows, only_planned=True)
        decision = decide(subject)
    # The rest of a compact master stands for all of it.
    state = (
        tensor.numel() * (4 if name == "rest" else tensor.element_size())
        for entry in decision.entries
        for name, tensor in entry.state.items()
    )
    return Planned(decision.plan, sum(state), None if sharding is None else sharding.network)


def planned_formats(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options, budget: int, ranks: int = 1
) -> dict[Literal["fp32", "bf16", "8bit"], Planned]:
    """What it would do with state in each format that goes with the optimizer, and the same budget of host memory."""
    found: dict[Literal["fp32", "bf16", "8bit"], Planned] = {}
    for state in _STATES:
        try:
            found[state] = planned(model, optimizer, replace(options, state=state, host_memory=budget), ranks)
        except (ConfigError, BudgetError):
            # What does not go is no choice.
            continue
    return found


def decide(subject: Subject) -> Decision:
    """Find the units, describe what the store holds, and plan.

    Raises:
        ConfigError: an option does not fit.
        BudgetError: the budget is too small.
    """
    options = subject.options
    sharding = subject.sharding
    units = find_units(subject.model, units=options.unit_names) if sharding is None else sharding.units()
    entries = _entries(subject, units)
    _require_folder(subject)
    devices = max(1, len(options.paths or ()))
    sizes = engines.sizes(entries, optimizer=title_of(subject.original), devices=devices)
    refuse_sizes(sizes.unit_bytes, units)
    gradients = {name: subject.named[name].nbytes for name in subject.trained}
    wanted = _requirements(subject, units, (entries, sizes), gradients)
    plan = make_plan(wanted, budget=options.host_bytes, device_budget=options.device_bytes)
    _require_log(options, plan)
    if subject.staged:
        plan = replace(plan, recurrent_bytes=copied_bytes(subject.model))
    return Decision(units=units, entries=entries, sizes=sizes, plan=plan)


def _requirements(
    subject: Subject,
    units: tuple[Unit, ...],
    stored: tuple[list[Entry], engines.Sizes],
    gradients: Mapping[str, int],
) -> Requirements:
    """What a plan has to provide; `gradients` are bytes by parameter."""
    entries, sizes = stored
    options, moves = subject.options, subject.moves_activations
    stays = moves and options.activations == "host"
    return Requirements(
        units=units,
        sizes=sizes,
        gradients="ssd" if options.gradients == "auto" and options.keeps else options.gradients,
        largest_gradient=max(gradients.values()),
        all_gradients=sum(gradients.values()),
        whole_bytes=subject.arithmetic.whole_bytes + sizes.other_bytes,
        whole_next_bytes=subject.arithmetic.whole_next_bytes,
        staging={"unit staging": CHUNKS, "gradient windows": WINDOWS} if subject.staged else None,
        activation_chunks=activations.CHUNKS if moves else {},
        activation_group=activations.MORE if stays else 0,
        activation_groups=activations.MORE_USUAL if stays else 0,
        update_values=subject.arithmetic.update_values,
        trained=subject.trained,
        gradient_bytes=gradients,
        applies=subject.durability == "none",
        log=_log(subject, entries, sizes),
    )


def _log(subject: Subject, entries: list[Entry], sizes: engines.Sizes) -> Log | None:
    options = subject.options
    if subject.durability == "none":
        return None
    names = frozenset(name for name in subject.trained if subject.arithmetic.is_replayed(subject.named[name]))
    nbytes = engines.log_bytes(entries)
    # A raw device is the store's alone.
    shares = any(not Path(path).is_block_device() for path in options.paths or ())
    room = None if subject.unplaced else room_beside(options.paths, sizes.total_bytes)
    return Log(names, nbytes, options.log_steps, room, shares=shares)


def _require_log(options: Options, plan: Plan) -> None:
    """Refuse a number of steps that was asked for and has no room; of its own accord a log is as long as may be."""
    if options.log_steps is not None and plan.log_steps < plan.log_wanted:
        fits = f"log_steps={plan.log_steps} fits" if plan.log_steps else "not one step fits (log_steps=0 goes without)"
        raise ConfigError(
            f"there is no disk space beside the store for a gradient log of {options.log_steps} steps: {fits}; free "
            "disk space, or leave log_steps out"
        )


def _require_folder(subject: Subject) -> None:
    options = subject.options
    if subject.moves_activations and options.paths and not folders_of(options):
        raise ConfigError(
            f"the storage is a raw device: give offload(scratch=) a folder for activations={options.activations!r}"
        )


def _entries(subject: Subject, units: Sequence[Unit]) -> list[Entry]:
    entries = []
    sharding = subject.sharding
    firsts = {} if sharding is None or sharding.world_size == 1 else sharding.first_elements
    for unit in units:
        for name in unit.parameters:
            parameter = subject.named[name]
            trained = name in subject.trained
            meta = torch.empty_strided(parameter.shape, dense_strides(parameter), dtype=parameter.dtype, device="meta")
            entries.append(
                engines.Entry(
                    name=name,
                    values=meta,
                    state=subject.arithmetic.describe(parameter) if trained else {},
                    unit=unit.name,
                    order=engines.order_of(meta),
                    # Also where gradients stay in memory: a store may be resumed in another mode.
                    spill=parameter.dtype if trained else None,
                    format=subject.arithmetic.format_of(parameter) if trained else None,
                    first_element=firsts.get(name),
                )
            )
    return entries + subject.buffers.entries(engines.Entry)
