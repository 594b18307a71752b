"""Implements `memascend.offload()`: checks, plans and starts a run."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from memascend import engine as engines
from memascend.activations import activations
from memascend.checkpoint.buffers import Buffers
from memascend.checkpoint.first_values import Beginning, InHand
from memascend.checkpoint.meta import MetaBuffers, require_plain
from memascend.checkpoint.reader import Checkpoint, Continued
from memascend.checkpoint.weights import open_weights
from memascend.device import device as devices
from memascend.device.download import WINDOWS
from memascend.device.recurrent import copied_bytes
from memascend.device.unit_memory import DeviceUnits, HostUnits
from memascend.device.upload import CHUNKS
from memascend.errors import ConfigError
from memascend.optimizers.group_options import options_of, take_options
from memascend.optimizers.update_rule import Arithmetic
from memascend.paths import expanded
from memascend.planning.embeddings import by_rows
from memascend.planning.options import Options
from memascend.planning.plan import make_plan
from memascend.planning.requirements import Requirements
from memascend.planning.slot_classes import reserved
from memascend.planning.units import find_units
from memascend.progress import Progress
from memascend.residency.placeholder import dense_strides
from memascend.residency.rows import CHUNKS as ROW_CHUNKS
from memascend.residency.rows import window_bytes
from memascend.run.assembly import Wiring
from memascend.run.checks import find_owned, sparse_ids
from memascend.run.locations import folders_of, scratch_of, temporary
from memascend.run.session import Resources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from memascend.device.device import Device
    from memascend.engine import Engine, Entry, Store
    from memascend.planning.plan import Plan
    from memascend.planning.units import Unit
    from memascend.run.optimizer import OffloadedOptimizer

__all__ = ["offload", "planned"]

_Path = str | os.PathLike[str]

_log = logging.getLogger("memascend")


def offload(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    storage: _Path | Sequence[_Path] | None = None,
    existing: Literal["refuse", "resume", "replace", "previous"] = "refuse",
    host_memory: float | str | None = None,
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
    device_memory: float | str | None = None,
    activations: Literal["device", "host", "ssd"] = "device",
    durability: Literal["step", "close", "none"] = "step",
) -> tuple[torch.nn.Module, OffloadedOptimizer]:
    """Move a model's parameters and an optimizer's state to storage, and train on as before.

    The loop stays what it is. Nothing changes numerically, and host memory stays within the budget.

    Args:
        model: any module on the CPU, on meta, or on the device that computes; the same object comes back.
        optimizer: a torch.optim optimizer that owns every trainable parameter of the model. State that it has already
            moves into the store.
        storage: a folder, file or raw block device, or several of them, over which it is striped; None: a temporary
            file that is gone with the process. "~" is the user's home. A path that ends in "/" is a folder, which is
            made where it is missing; any other that is not there becomes a file.
        existing: what to do where a store is already: "refuse", "resume" its last committed step, or "replace" it.
            "previous" resumes the commit before the last one, after every byte of it was read and checked, and gives
            the last one up: for a store whose newest commit is damaged, as long as the step after it was not begun.
        host_memory: a hard budget for what is held in memory, in bytes or as "8GiB"; None: the smallest that keeps disk
            and compute busy.
        device: where the model computes: "cpu", "cuda", "cuda:1"; None: CUDA if there is one. Batches go there by
            themselves no more than without offloading; buffers are moved by this call. The update runs on the CPU.
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
        device_memory: with CUDA, a hard budget for what is held in the device's memory: units, and gradients that wait
            for their update; in bytes or as "8GiB". None: the smallest that keeps disk and compute busy. Activations
            and what else torch holds there come on top.
        activations: where what checkpoints save within the model's forward waits for the backward, in the same bits:
            "device": where it was made, as torch keeps it; "host": in pinned host memory, as far as the budget goes (1
            GiB of it where `host_memory` is None), then in files; "ssd": in files beside the store (in `scratch`,
            where that is given). On the CPU, "host" is "device".
        durability: "step": every step survives a loss of power; "close": the death of the process; "none": nothing is
            kept before `close()`.

    Returns:
        The model, and a `memascend.OffloadedOptimizer` that shares the original's `param_groups`.

    Raises:
        ConfigError: an option, the model, the optimizer or the store that is there does not fit; nothing was changed.
        BudgetError: `host_memory` or `device_memory` is too small; `smallest` is what works.
        MemoryLimitError: the machine or the device does not have the memory that the plan takes.
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
    # A default device (torch.set_default_device) is for the user's tensors.
    with torch.no_grad(), torch.device("cpu"):
        opened = devices.open_device(options.where)
        return _Offloading(model, optimizer, options, opened, staged=opened is not None).run()


@dataclass(frozen=True)
class Planned:
    """What `offload()` would do.

    Attributes:
        plan: the plan.
        state_bytes: what the same optimizer keeps in memory without offloading.
    """

    plan: Plan
    state_bytes: int


def planned(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> Planned:
    """What `offload()` with these options would do, from shapes alone: the model may be on "meta"; nothing changes.

    Raises:
        ConfigError: it would refuse; the message says why.
        BudgetError: the budget is too small; `smallest` is what works.
    """
    with torch.no_grad():
        # The device need not be there.
        offloading = _Offloading(model, optimizer, options, None, staged=options.where.type != "cpu")
        _, entries, plan = offloading.decide()
    # The rest of a compact master stands for all of it.
    state = (
        tensor.numel() * (4 if name == "rest" else tensor.element_size())
        for entry in entries
        for name, tensor in entry.state.items()
    )
    return Planned(plan, sum(state))


class _Offloading:
    """One call of `offload()`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        options: Options,
        device: Device | None,
        *,
        staged: bool,
    ) -> None:
        """`device` computes, where that is not the host; `staged`: units reach it through chunks."""
        self.model = model
        self.original = optimizer
        self.options = options
        self.device = device
        self.staged = staged
        self.owned = find_owned(model, optimizer, None if device is None else device.torch_device)
        self.named = {name: owned.parameter for name, owned in self.owned.items()}
        require_plain(self.named)
        if options.weights is not None and not any(parameter.is_meta for parameter in self.named.values()):
            raise ConfigError("weights= is for parameters on meta, and the model has none there: leave it out")
        self.arithmetic = Arithmetic(optimizer, options.master_dtype, frozenset(sparse_ids(model)))
        self.buffers = Buffers(model)
        self.meta_buffers = MetaBuffers(model)
        self.weights = None if options.weights is None else open_weights(options.weights)
        self.beginning: Beginning | None = None
        # Where a temporary store went.
        self.folder: Path | None = None
        self.sizes: engines.Sizes
        # The longest row of embeddings that may be read by rows, and the budget from which on they are not.
        self.row_bytes = self.whole_budget = 0

    def decide(self) -> tuple[tuple[Unit, ...], list[Entry], Plan]:
        """Units, what the store holds, and the plan: from shapes alone, and nothing is touched."""
        options = self.options
        units = find_units(self.model, units=options.unit_names)
        entries = self._entries(units)
        paths = list(options.paths or ())
        moves = self._moves_activations()
        if moves and paths and not folders_of(options):
            raise ConfigError(
                f"the storage is a raw device: give offload(scratch=) a folder for activations={options.activations!r}"
            )
        stays = moves and options.activations == "host"
        sizes = self.sizes = engines.sizes(entries, optimizer=type(self.original).__name__, devices=max(1, len(paths)))
        gradients = {name: owned.parameter.nbytes for name, owned in self.owned.items() if owned.group is not None}
        whole = Requirements(
            units=units,
            sizes=sizes,
            gradients="ssd" if options.gradients == "auto" and options.keeps else options.gradients,
            largest_gradient=max(gradients.values()),
            all_gradients=sum(gradients.values()),
            whole_bytes=self.arithmetic.whole_bytes + sizes.other_bytes,
            staging={"unit staging": CHUNKS, "gradient windows": WINDOWS} if self.staged else None,
            activation_chunks=activations.CHUNKS if moves else {},
            activation_group=activations.MORE if stays else 0,
            activation_groups=activations.MORE_USUAL if stays else 0,
            update_values=self.arithmetic.update_values,
        )
        make = functools.partial(make_plan, device_budget=options.device_bytes)
        rows = self._by_rows(units)
        if rows:
            apart = {name for unit in units if unit.name in rows for name in unit.parameters}
            others = [nbytes for name, nbytes in gradients.items() if name not in apart]
            self.row_bytes = max(self.named[name].shape[1] * self.named[name].element_size() for name in apart)
            row_memory = reserved(ROW_CHUNKS) + window_bytes(self.row_bytes)
            largest = max(others, default=0)
            lean = replace(whole, largest_gradient=largest, by_rows=rows, rows_bytes=row_memory)
            easy = self.whole_budget = make(whole).comfortable
            enough = options.host_bytes is not None and options.host_bytes >= easy
            if not enough and make(lean).comfortable < easy:
                return units, entries, make(lean, budget=options.host_bytes)
        plan = make(whole, budget=options.host_bytes)
        if self.staged:
            plan = replace(plan, recurrent_bytes=copied_bytes(self.model))
        return units, entries, plan

    def _by_rows(self, units: Sequence[Unit]) -> tuple[str, ...]:
        """The embeddings that may be read by rows, where the host computes; from a device that takes a wait for it."""
        if self.staged or (self.options.paths and not folders_of(self.options)):
            # What uses all of one needs a folder.
            return ()
        wanted_whole = [identity for identity, kept in self.arithmetic.kept.items() if kept is not None and kept.whole]
        return by_rows(self.model, units, wanted_whole)

    def run(self) -> tuple[torch.nn.Module, OffloadedOptimizer]:
        options = self.options
        units, entries, plan = self.decide()
        paths, sizes = list(options.paths or ()), self.sizes
        with contextlib.ExitStack() as undo:
            self.meta_buffers.install()
            undo.callback(self.meta_buffers.uninstall)
            if not options.resumes:
                self._prepare(created=True)
            store = self._store(paths, entries)
            undo.callback(store.close)
            if store.created:
                # A call that fails leaves nothing behind.
                undo.callback(store.forsake)
            engine = engines.Engine(
                store, chunks=plan.chunks, queue=plan.queue_bytes, whole=self.arithmetic.whole_bytes
            )
            undo.callback(engine.close)
            if options.resumes:
                self._prepare(created=store.created)
            if store.created:
                stored = self._fill(engine, units, plan.queue_bytes, undo)
            else:
                self.buffers.restore(store)
                stored = store.hyperparameters or {}
            take_options(self.original.param_groups, stored.get("groups"), undo)
            # Files stay mapped no longer.
            self.beginning = self.weights = None
            unit_memory = (
                HostUnits(store, plan.classes, self.row_bytes if plan.by_rows else 0)
                if self.device is None
                else DeviceUnits(store, self.device, plan.classes)
            )
            undo.callback(unit_memory.close)
            undo.callback(unit_memory.stop)
            keeper = self._activations(plan.activation_groups)
            if keeper is not None:
                undo.callback(keeper.close, "offload() failed")
            resources = Resources(store, engine, unit_memory, keeper)
            offloaded = Wiring(
                model=self.model,
                original=self.original,
                options=options,
                owned=self.owned,
                arithmetic=self.arithmetic,
                buffers=self.buffers,
                units=units,
                unit_bytes=sizes.unit_bytes,
                plan=plan,
                resources=resources,
                whole_budget=self.whole_budget,
                scratch=scratch_of(options) or self.folder,
            ).run()
            # What is refused is refused by now, and the newest commit still there.
            store.go_back()
            undo.pop_all()
        offloaded._session.heap.model_left()  # noqa: SLF001 - it is ours
        if options.device is None and self.device is not None:
            _log.info("device: %s, since there is one; device='cpu' computes without it", self.device.torch_device)
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

    def _store(self, paths: list[str], entries: list[Entry]) -> Store:
        options = self.options
        kind = type(self.original).__name__

        def create(where: str | list[str]) -> Store:
            # A temporary store is gone with the machine's power anyway.
            durability = options.durability if paths else "close"
            return engines.Store.create(
                where, entries, optimizer=kind, existing=options.existing, durability=durability, fill=False
            )

        if paths:
            return create(paths)
        store, self.folder = temporary(create)
        return store

    # --- what it begins with ------------------------------------------------------------------

    def _beginning(self) -> Beginning:
        trained = {name for name, owned in self.owned.items() if owned.group is not None}
        if self.options.checkpoint is not None:
            checkpoint = Checkpoint(expanded(self.options.checkpoint))
            buffers = {name: self.buffers.tensor(name) for name in self.buffers.names}
            return Continued(checkpoint, self.model, self.named, buffers, self.arithmetic, trained)
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

    # --- what the run is told ------------------------------------------------------------------

    def _moves_activations(self) -> bool:
        """Whether what checkpoints save goes elsewhere; on the host, "host" is where it is."""
        return self.options.activations == "ssd" or (self.options.activations == "host" and self.staged)

    def _activations(self, groups: int) -> activations.Activations | None:
        if not self._moves_activations():
            return None
        folders = folders_of(self.options) or [cast("Path", self.folder)]
        return activations.open_activations(folders, device=self.device, groups=groups)
