"""`memascend.offload()`: what is checked, decided and wired before a run."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend import activations, kernels, memory
from memascend import engine as engines
from memascend.beginning import Beginning, InHand
from memascend.bodiless import MetaBuffers, embody, require_plain
from memascend.buffers import Buffers
from memascend.checkpoint import Checkpoint, Continued
from memascend.config import Options
from memascend.errors import ConfigError, StorageError
from memascend.gates import Frames, close_gates, gated, open_gates
from memascend.gradients import Arrival, Gradients
from memascend.optimizer import OffloadedOptimizer
from memascend.placeholder import Place, dense_strides
from memascend.plan import make_plan
from memascend.progress import Progress
from memascend.residency import Residency
from memascend.scaling import LossScale
from memascend.session import Resources, Session, options_of
from memascend.surgery import Surgery, is_materialized
from memascend.units import find_units
from memascend.updates import Arithmetic, Updates
from memascend.weights import open_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.engine import Engine, Entry, Store
    from memascend.plan import Plan
    from memascend.residency import Home
    from memascend.units import Unit

__all__ = ["offload"]

_Path = str | os.PathLike[str]

_log = logging.getLogger("memascend")

# From malloc.h, and the value that glibc begins with.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 128 << 10


def offload(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    storage: _Path | Sequence[_Path] | None = None,
    existing: Literal["refuse", "resume", "replace"] = "refuse",
    host_memory: int | str | None = None,
    device: str | torch.device | None = None,
    gradients: Literal["auto", "fused", "ssd", "ram"] = "auto",
    max_grad_norm: float | None = None,
    accumulation_steps: int = 1,
    loss_scale: float | Literal["dynamic"] | None = None,
    master_dtype: torch.dtype | None = torch.float32,
    units: Sequence[str] | None = None,
    weights: Any = None,
    checkpoint: _Path | None = None,
    scratch: _Path | None = None,
    device_memory: int | str | None = None,
    activations: Literal["device", "host", "ssd"] = "device",
    durability: Literal["step", "close", "none"] = "step",
) -> tuple[torch.nn.Module, OffloadedOptimizer]:
    """Move a model's parameters and an optimizer's state to storage, and train on as before.

    The loop stays what it is. Nothing changes numerically, and host memory stays within the budget.

    Args:
        model: any module on the CPU; the same object comes back.
        optimizer: a torch.optim optimizer that owns every trainable parameter of the model. State that it has already
            moves into the store.
        storage: a folder, file or raw block device, or several of them, over which it is striped; None: a temporary
            file that is gone with the process.
        existing: what to do where a store is already: "refuse", "resume" its last committed step, or "replace" it.
        host_memory: a hard budget for what is held in memory, in bytes or as "8GiB"; None: the smallest that keeps disk
            and compute busy.
        device: where the model computes. Only the CPU so far.
        gradients: "fused": updated as they appear; "ssd" or "ram": kept until `step()`; "auto": learnt in the first
            step.
        max_grad_norm: clip the global norm in `step()`.
        accumulation_steps: backwards that make one step; "ssd" and "ram" take any number undeclared.
        loss_scale: "dynamic" or a number, for `optimizer.backward()`; None: dynamic for fp16 models, off otherwise.
        master_dtype: of the copies that 16-bit parameters are updated in; None: their own.
        units: names of modules that travel as one; None: found from the model.
        weights: for parameters on "meta": a safetensors file, a folder of them with their index, or a function of
            (name, parameter) that returns a tensor and is called one at a time. None: they are initialised by the
            model's own code, from torch's default generator. A store that is resumed needs none.
        checkpoint: a folder that `OffloadedOptimizer.save` wrote, to start from: its values, state, options and step
            stand. A store that is resumed stands before it.
        scratch: a folder for copies of the weights that `state_dict()` and `materialized()` make; None: beside the
            store.
        device_memory: not there yet.
        activations: where what checkpoints save within the model's forward waits for the backward: "device": in
            memory, as torch keeps it; "ssd": in files beside the store (in `scratch`, where that is given), in the same
            bits. "host" is for a CUDA device.
        durability: "step": every step survives a loss of power; "close": the death of the process; "none": nothing is
            kept before `close()`.

    Returns:
        The model, and a `memascend.OffloadedOptimizer` that shares the original's `param_groups`.

    Raises:
        ConfigError: an option, the model, the optimizer or the store that is there does not fit; nothing was changed.
        BudgetError: `host_memory` is too small; `smallest` is what works.
        StorageError: storage failed, is full, foreign or in use.
    """
    options = Options(
        storage=storage,
        existing=existing,
        host_memory=host_memory,
        device=device,
        gradients=gradients,
        max_grad_norm=max_grad_norm,
        accumulation_steps=accumulation_steps,
        loss_scale=loss_scale,
        master_dtype=master_dtype,
        units=units,
        weights=weights,
        checkpoint=checkpoint,
        scratch=scratch,
        device_memory=device_memory,
        activations=activations,
        durability=durability,
    )
    with torch.no_grad():
        return _Offloading(model, optimizer, options).run()


@dataclass(frozen=True)
class _Owned:
    """A parameter of the model, as the optimizer sees it."""

    name: str
    parameter: torch.nn.Parameter
    # Its group; None where the optimizer does not own it.
    group: int | None


class _Offloading:
    """One call of `offload()`."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> None:
        self.model = model
        self.original = optimizer
        self.options = options
        self.owned = _owned(model, optimizer)
        self.named = {name: owned.parameter for name, owned in self.owned.items()}
        require_plain(self.named)
        if options.weights is not None and not any(parameter.is_meta for parameter in self.named.values()):
            raise ConfigError("weights= is for parameters on meta, and the model has none there: leave it out")
        self.arithmetic = Arithmetic(optimizer, options.master_dtype, frozenset(_sparse(model)))
        self.buffers = Buffers(model)
        self.meta_buffers = MetaBuffers(model)
        self.weights = None if options.weights is None else open_weights(options.weights)
        self.checkpoint: Checkpoint | None = None
        self.beginning: Beginning | None = None
        # Where a temporary store went.
        self.folder: Path | None = None
        self.sizes: engines.Sizes

    def run(self) -> tuple[torch.nn.Module, OffloadedOptimizer]:
        options = self.options
        units = find_units(self.model, units=options.unit_names)
        entries = self._entries(units)
        paths = list(options.paths or ())
        sizes = self.sizes = engines.sizes(entries, optimizer=type(self.original).__name__, devices=max(1, len(paths)))
        gradients = [owned.parameter.nbytes for owned in self.owned.values() if owned.group is not None]
        plan = make_plan(
            units,
            sizes,
            gradients=options.gradients,
            largest_gradient=max(gradients),
            all_gradients=sum(gradients),
            whole_bytes=self.arithmetic.whole_bytes + sizes.other_bytes,
            activation_chunks=activations.CHUNKS if options.activations == "ssd" else None,
            update_values=self.arithmetic.update_values,
            budget=options.host_bytes,
        )
        with contextlib.ExitStack() as undo:
            self.meta_buffers.install()
            undo.callback(self.meta_buffers.uninstall)
            if options.existing != "resume":
                self._prepare(created=True)
            store = self._store(paths, entries, undo)
            undo.callback(store.close)
            engine = engines.Engine(
                store, chunks=plan.chunks, queue=plan.queue_bytes, whole=self.arithmetic.whole_bytes
            )
            undo.callback(engine.close)
            if options.existing == "resume":
                self._prepare(created=store.created)
            if store.created:
                stored = self._fill(engine, units, plan.queue_bytes, undo)
            else:
                self.buffers.restore(store)
                stored = store.hyperparameters or {}
            self._take_options(stored.get("groups"), undo)
            # Files stay mapped no longer.
            self.beginning = self.weights = None
            region = memory.Region(memory.layout(plan.classes).reserved, pin=False, on_fork="wipe", owner="units")
            undo.callback(region.close)
            keeper = self._activations()
            if keeper is not None:
                undo.callback(keeper.close, "offload() failed")
            resources = Resources(store, engine, region, keeper)
            offloaded = self._wire(units, plan, resources)
            undo.pop_all()
        _steady_heap()
        _trim()
        if options.host_memory is None:
            _log.info("host_memory: %d bytes, the smallest that keeps disk and compute busy", plan.budget)
        return self.model, offloaded

    # --- the store ------------------------------------------------------------------------

    def _entries(self, units: Sequence[Unit]) -> list[Entry]:
        entries = []
        for unit in units:
            for name in unit.parameters:
                owned = self.owned[name]
                parameter = owned.parameter
                meta = torch.empty_strided(
                    parameter.shape, dense_strides(parameter), dtype=parameter.dtype, device="meta"
                )
                state = {} if owned.group is None else self.arithmetic.describe(parameter)
                order = engines.order_of(meta)
                entries.append(
                    engines.Entry(
                        name=name,
                        values=meta,
                        state=state,
                        unit=unit.name,
                        order=order,
                        # Also where gradients stay in memory: a store may be resumed in another mode.
                        spill=parameter.dtype if owned.group is not None else None,
                    )
                )
        return entries + self.buffers.entries(engines.Entry)

    def _store(self, paths: list[str], entries: list[Entry], undo: contextlib.ExitStack) -> Store:
        options = self.options
        kind = type(self.original).__name__

        def create(where: str | list[str]) -> Store:
            # A temporary store is gone with the machine's power anyway.
            durability = options.durability if paths else "close"
            return engines.Store.create(
                where, entries, optimizer=kind, existing=options.existing, durability=durability, fill=False
            )

        if paths:
            before = [path for path in paths if _file_of(path).exists()]
            store = create(paths)
            if store.created and not before:
                # A call that fails leaves nothing behind.
                undo.callback(_remove, [_file_of(path) for path in paths])
            return store
        store, self.folder = _temporary(create)
        return store

    # --- what it begins with ------------------------------------------------------------------

    def _beginning(self) -> Beginning:
        trained = {name for name, owned in self.owned.items() if owned.group is not None}
        if self.options.checkpoint is not None:
            self.checkpoint = Checkpoint(self.options.checkpoint)
            buffers = {name: self.buffers.tensor(name) for name in self.buffers.names}
            return Continued(self.checkpoint, self.model, self.named, buffers, self.arithmetic, trained)
        saved = self.meta_buffers.saved
        return InHand(self.model, self.named, trained, self.arithmetic, self.weights, saved)

    def _prepare(self, *, created: bool) -> None:
        """Everything that can be found wrong before something is written."""
        if created:
            self.beginning = self._beginning()
            self.beginning.check()
        initialised = created and self.weights is None and self.options.checkpoint is None
        self.meta_buffers.rebuild(self.weights, saved=initialised)
        count = sum(parameter.is_meta for parameter in self.named.values())
        if count and initialised:
            _log.info(
                "%d parameters on meta are initialised by the model's own code, from torch's default generator", count
            )

    def _options(self) -> list[dict[str, Any]]:
        return [options_of(group) for group in self.original.param_groups]

    def _fill(
        self, engine: Engine, units: Sequence[Unit], queue_bytes: int, undo: contextlib.ExitStack
    ) -> dict[str, Any]:
        """Write and commit the first values; the hyperparameters that were committed."""
        beginning = self.beginning
        assert beginning is not None
        waiting = 0
        with (
            Progress("writing the model to storage", self.sizes.slot_bytes) as progress,
            contextlib.closing(beginning.parameters(units)) as firsts,
        ):
            for name, values, state, step in firsts:
                engine.fill(name, values, state, step=step)
                nbytes = values.nbytes + sum(tensor.nbytes for tensor in state.values())
                waiting += nbytes
                if waiting >= queue_bytes:
                    # What was just handed over goes before the next is made.
                    engine.finish()
                    waiting = 0
                if self.owned[name].group is not None:
                    nbytes = values.nbytes + sum(t.nbytes for t in self.arithmetic.describe(self.named[name]).values())
                progress.add(nbytes)
            for name in self.buffers.names:
                target = self.buffers.target(name)
                if not isinstance(beginning, InHand):
                    undo.callback(target.copy_, target.clone())
                beginning.buffer(name, target)
                engine.fill(name, self.buffers.tensor(name), {})
            hyperparameters = beginning.hyperparameters(self._options())
            engine.commit(beginning.step, user_state=beginning.user_state, hyperparameters=hyperparameters)
        return hyperparameters

    def _take_options(self, stored: list[dict[str, Any]] | None, undo: contextlib.ExitStack) -> None:
        """Let the groups have the options that are stored."""
        groups = self.original.param_groups
        if stored is None or len(stored) != len(groups):
            raise ConfigError(f"what is stored has {len(stored or [])} parameter groups, the optimizer {len(groups)}")
        changed = []
        for number, (group, options) in enumerate(zip(groups, stored, strict=True)):
            now = options_of(group)
            for name, value in options.items():
                if now.get(name) != value:
                    changed.append(f"group {number}: {name} {now.get(name)} -> {value}")
                    undo.callback(group.__setitem__, name, group.get(name))
                    group[name] = _as(group.get(name), value)
        if changed:
            warnings.warn(
                "the stored options stand, and differ from the optimizer's: " + "; ".join(changed), stacklevel=4
            )

    # --- the wiring ---------------------------------------------------------------------------

    def _wire(self, units: Sequence[Unit], plan: Plan, resources: Resources) -> OffloadedOptimizer:
        options, store, engine = self.options, resources.store, resources.engine
        arena = memory.Arena(resources.region, plan.classes)
        residency = Residency(
            arena,
            lambda: engine.counters()["queued"] > 0,
            store.fetch,
            lookahead=max(0, plan.window - 1),
            slots=plan.classes,
        )
        known = {entry["name"]: entry for entry in store.entries()}
        homes: dict[str, Home] = {}
        for unit in units:
            home = homes[unit.name] = residency.add(unit.name, self.sizes.unit_bytes[unit.name], pinned=unit.pinned)
            home.places = [
                Place(self.owned[name].parameter, name, known[name]["unit_offset"], residency)
                for name in unit.parameters
            ]
        residency.settle()
        residency.hooks.keeper = resources.activations
        residency.larger_budget = plan.larger_budget
        index = {home.name: home.index for home in residency.homes}
        forward = [index[name] for name in plan.order]
        residency.order.expect(forward + forward[::-1])
        groups = self.original.param_groups

        def resident(kept: Arrival) -> torch.Tensor | None:
            # Where one unit at a time is held, an update must not keep it from making room.
            return residency.values_of(kept.place) if plan.window > 1 else None

        rule = Updates(self.arithmetic, engine, store, resident)
        gradients = Gradients(
            engine,
            rule,
            kernels.check_and_unscale,
            mode=options.gradients,
            accumulation_steps=options.accumulation_steps,
            keeps=options.max_grad_norm is not None or options.accumulation_steps > 1,
        )
        frames = Frames(residency, gradients.entered)
        gates = self._gates(units, homes)
        modules = [module for module, _ in gates]
        scale = self._scale(store)

        def leave() -> None:
            close_gates(modules)
            self.model.__dict__.pop("_memascend", None)

        surgery = residency.surgery = Surgery(self.model, residency, self._scratch())
        session = Session(
            resources=resources,
            residency=residency,
            frames=frames,
            gradients=gradients,
            scale=scale,
            buffers=self.buffers,
            plan=plan,
            groups=groups,
            surgery=surgery,
            max_grad_norm=options.max_grad_norm,
            leave=leave,
        )
        resources.temporary = not options.paths
        offloaded = OffloadedOptimizer(self.original, session)

        def enter() -> None:
            open_gates(self.model, gates, residency, frames)
            self.model.__dict__["_memascend"] = offloaded

        if self.checkpoint is not None and store.created:
            session.origin = {name: self.checkpoint.manifest[name] for name in ("store", "step")}
        surgery.attach(session, leave=leave, enter=enter)
        for home in residency.homes:
            for place in home.places:
                if place.parameter.is_meta:
                    embody(place.parameter, place.nan)
                place.unbind()
                owned = self.owned[place.name]
                if owned.group is not None:
                    gradients.watch(place, owned.group, known[place.name]["step"])
        self.original.state.clear()
        enter()
        return offloaded

    def _gates(self, units: Sequence[Unit], homes: dict[str, Home]) -> list[tuple[torch.nn.Module, tuple[Home, ...]]]:
        """Every module that owns a parameter, and every unit that is one module, with the units that it binds."""
        home_of = {id(place.parameter): home for home in homes.values() for place in home.places}
        whole = {unit.module: homes[unit.name] for unit in units if unit.module is not None}
        gates = []
        for name, module in self.model.named_modules():
            needed = [whole[name]] if name in whole else []
            needed += [home_of[id(own)] for own in module._parameters.values() if own is not None]  # noqa: SLF001
            needed += [home_of[id(own)] for own in _listed(module)]
            if needed or module is self.model:
                gates.append((module, tuple({id(home): home for home in needed}.values())))
        return gates

    def _activations(self) -> activations.Activations | None:
        if self.options.activations != "ssd":
            return None
        folders = self._folders()
        if not folders:
            raise ConfigError("the storage is a raw device: give offload(scratch=) a folder for activations='ssd'")
        return activations.open_activations(folders)

    def _folders(self) -> list[Path]:
        """For files that are gone with the process: beside each part of the store."""
        if self.options.scratch is not None:
            return [Path(self.options.scratch)]
        if not self.options.paths:
            return [] if self.folder is None else [self.folder]
        files = [path for path in self.options.paths if not Path(path).is_block_device()]
        return list(dict.fromkeys(_file_of(path).parent for path in files))

    def _scratch(self) -> Path | None:
        if self.options.scratch is not None:
            return Path(self.options.scratch)
        paths = self.options.paths
        if not paths:
            return self.folder
        folder = _file_of(paths[0]).parent
        return None if Path(paths[0]).is_block_device() else folder

    def _scale(self, store: Store) -> LossScale:
        asked = self.options.loss_scale
        if asked is None:
            half = any(
                owned.parameter.dtype == torch.float16 for owned in self.owned.values() if owned.group is not None
            )
            asked = "dynamic" if half else None
        scale = LossScale(asked)
        stored = (store.hyperparameters or {}).get("loss_scale")
        if stored and scale.mode == "dynamic" and stored.get("mode") == "dynamic":
            scale.load(stored)
        return scale


def _sparse(model: torch.nn.Module) -> Iterator[int]:
    """Parameters whose gradients are sparse."""
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse:
            yield id(module.weight)


def _listed(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Parameters that a module reaches through a ParameterList or ParameterDict of its own, which is never called."""
    for child in module.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            yield from child.parameters()


def _owned(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, _Owned]:
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, OffloadedOptimizer) or gated(model) or is_materialized(model):
        raise ConfigError("this model or optimizer is offloaded already; close() it first")
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, wrappers) or type(model).__name__ in ("FullyShardedDataParallel", "FSDPModule"):
        raise ConfigError(
            f"{type(model).__name__} does not work with offload(); give the module inside it, on one process"
        )
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ConfigError("a world size above 1 is not supported yet: offload() works in one process")
    named = dict(model.named_parameters())
    if not named:
        raise ConfigError("the model has no parameters: there is nothing to offload")
    groups = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            groups[id(parameter)] = number
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
            "them with requires_grad_(False), or give them to it"
        )
    if not groups:
        raise ConfigError("the optimizer owns no parameters of this model")
    for name, parameter in named.items():
        if parameter.device.type not in ("cpu", "meta"):
            raise ConfigError(f"{name} is on {parameter.device}; offload() takes models on the CPU, or on meta")
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} is not initialised yet: run the model once before offload()")
    _refuse_shared(model)
    return {name: _Owned(name, parameter, groups.get(id(parameter))) for name, parameter in named.items()}


def _refuse_shared(model: torch.nn.Module) -> None:
    """Tensors that lie in each other's memory change together in torch; on storage they would go apart in silence."""
    spans = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.numel() == 0:
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


def _as(like: Any, value: Any) -> Any:
    """A stored option as the group holds it."""
    if isinstance(like, torch.Tensor):
        return torch.full_like(like, value)
    if isinstance(like, tuple):
        return tuple(value)
    return value


def _file_of(path: str) -> Path:
    place = Path(path)
    return place / "memascend.store" if place.is_dir() else place


def _remove(files: Sequence[Path]) -> None:
    for file in files:
        if file.is_file():
            file.unlink()


def _temporary(create: Callable[[str], Store]) -> tuple[Store, Path]:
    """A store whose file is gone with the process, where there is a disk, and the folder that it was in."""
    refused: Exception | None = None
    for place in dict.fromkeys((tempfile.gettempdir(), "/var/tmp", os.getcwd())):  # noqa: PTH109, S108
        try:
            folder = tempfile.mkdtemp(prefix="memascend-", dir=place)
        except OSError as error:
            refused = refused or error
            continue
        try:
            return create(folder), Path(place)
        except StorageError as error:
            refused = refused or error
        finally:
            _remove([Path(folder) / "memascend.store"])
            Path(folder).rmdir()
    raise StorageError(f"there is no place for a temporary store: {refused}; give storage=")


def _steady_heap() -> None:
    """Let gradients and activations be mappings of their own.

    glibc raises its threshold for that with each one that is freed, up to 32 MiB. From then on they come from the heap,
    where what little stays between them keeps it from shrinking: it would grow with the depth of the model.
    """
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or "GLIBC_TUNABLES" in os.environ:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)


def _trim() -> None:
    """Give back to the system what the model held."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
