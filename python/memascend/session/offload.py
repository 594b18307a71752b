"""Implements `memascend.offload()`: checks, plans and starts a run."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from memascend import storage as engines
from memascend.activations import activations as activation_files
from memascend.checkpoint.weights import forget_sources
from memascend.device import device as devices
from memascend.device.unit_memory import DeviceUnits, HostUnits
from memascend.distributed.control_plane import exchange_of
from memascend.distributed.setup import begin
from memascend.memory import settle_heap
from memascend.optim.members import unwrapped, wrap_again
from memascend.optim.shared import take_options
from memascend.plan.cost import moves
from memascend.plan.decision import folders_of
from memascend.plan.options import Options
from memascend.session.build import Assembly
from memascend.session.decide import Subject, decide, deferrable
from memascend.session.open_store import RUNS, FirstValues, begin_log, begin_places, end_log, open_store
from memascend.session.process_hooks import ProcessHooks
from memascend.session.run import Resources
from memascend.session.schedule import options_set
from memascend.session.spare import Turn, agreed
from memascend.text import bytes_shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memascend.device.unit_memory import UnitMemory
    from memascend.plan.decision import Decision
    from memascend.plan.table import Plan
    from memascend.session.optimizer import OffloadedOptimizer
    from memascend.storage import Engine, Store


_Path = str | os.PathLike[str]
# With this variable, type checkers infer that `offload` returns the class of the given model.
_Model = TypeVar("_Model", bound=torch.nn.Module)
_log = logging.getLogger("memascend")


def offload(  # noqa: PLR0913 - options are keywords
    model: _Model,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    storage: _Path | Sequence[_Path] | None = None,
    existing: Literal["refuse", "resume", "replace", "previous"] = "refuse",
    host_memory: float | str | None = None,
    device: str | torch.device | None = None,
    gradients: Literal["auto", "fused", "ssd", "ram"] = "auto",
    nonfinite: Literal["raise", "skip", "commit"] = "raise",
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
    durability: Literal["step", "none"] = "step",
    state: Literal["fp32", "bf16", "8bit"] | None = None,
    rounding: Literal["nearest", "stochastic"] = "nearest",
    seed: int = 0,
    log_steps: int | None = None,
    reduction: Literal["ordered", "native"] = "ordered",
    timeout: float | None = None,
) -> tuple[_Model, OffloadedOptimizer]:
    """Moves a model's parameters and an optimizer's state to storage; the training loop continues as before.

    The loop needs no changes, and host memory stays within the budget. Results are bit-identical to the same update in
    memory: for Adam and AdamW on float32 parameters, to torch's update with `fused=True`. 16-bit parameters get fp32
    master weights, which plain torch does not have; `master_dtype=None` adds none. docs/how-it-works.md lists all
    cases.

    Args:
        model: any module on the CPU, on meta, or on the device that computes. `offload` returns the same object.
        optimizer: a torch.optim optimizer that owns every trainable parameter of the model. Its existing state moves
            into the store. You can also pass several optimizers (such as Muon and AdamW) that together own all
            trainable parameters. They become one optimizer: `step()` of the returned optimizer steps all of them in one
            commit, and its `members` are the given optimizers.
        storage: a folder, file or raw block device, or a list of these, over which the store is striped; None: a
            temporary file, whose data is lost when the process ends. "~" is the user's home. A path that ends in "/"
            names a folder, which is created if it is missing. In one process, any other missing path becomes a file.
            With several ranks, a path without "{rank}" and "{local_rank}" names a folder with the stores of all ranks.
        existing: the action if `storage` already has a store. "refuse": raise an error. "resume": continue from the
            store's last committed step, or create a store if there is none. "replace": overwrite the store. "previous":
            drop the last commit, and resume from the commit before it. Every byte of that earlier commit is first read
            and checked. "previous" is for a store whose newest commit is damaged, and works until the next step begins.
            If another run of this process has the store open, "resume" and "replace" close that run, with a warning;
            "replace" is rejected if that run has a different model or optimizer. "resume" and "previous" reject an
            empty file, because it is probably a store that lost its contents.
        host_memory: a hard budget of host memory: in bytes, as "8GiB", or as "75%" of the memory that process and
            cgroup have now. None or "default": the smallest budget that keeps disk and compute busy. "auto": the memory
            that the machine can spare, in whole GiB, divided among the machine's ranks; if the CPU computes the model,
            half of that memory, because torch needs memory there, too. A resume with "auto" uses the store's earlier
            budget if that much memory is free. None, "default" and "auto" are not hard limits: a step that needs more
            memory gets it. Memory of the budget that streaming does not need keeps parameters and their optimizer state
            in RAM: first those of the model's first unit, if they fit, then those of units at equal distances.
        device: the device that computes the model: "cpu", "cuda", "cuda:1"; None: CUDA if the machine has it. `offload`
            moves the model's buffers to the device; your loop moves the batches, as it does without offloading. Updates
            run on the CPU.
        gradients: "fused": each parameter is updated during the backward, as soon as its gradient is complete. "ssd":
            gradients are kept on storage until `step()`. "ram": gradients are kept in memory until `step()`. "auto":
            memascend chooses after the first step, by what the loop did in that step, such as clipping.
        nonfinite: the action of `step()` if the norm of all gradients is infinite or NaN. "raise": raise an error, and
            change nothing. "skip": drop the step and set `overflowed`. "commit": update, as torch does. With
            gradients="fused", which "auto" may choose, `step()` may know the norm only after the commit; "raise" then
            only warns. With a loss scale, a step that overflows is always skipped.
        max_grad_norm: clip the global norm of the gradients to this value in `step()`; None: do not clip.
        accumulation_steps: number of `backward()` calls per `step()`. gradients="ssd" and "ram" do not need this
            number, because they allow any number of calls.
        loss_scale: "dynamic" or a number, for `optimizer.backward()`; None: dynamic for fp16 models, off otherwise.
        master_dtype: dtype of the master weights of 16-bit parameters; None: no master weights, as in plain torch.
        units: names of modules. The parameters of each module are read and evicted together. None: `offload` chooses
            modules.
        weights: values for parameters on "meta": a safetensors file, a folder of such files with their index, or a
            function of (name, parameter) that returns a tensor and is called for one parameter at a time. None: the
            model's own code initialises these parameters, from torch's default generator. A resumed store needs no
            `weights`.
        checkpoint: a folder that `OffloadedOptimizer.save` wrote: the run starts with the checkpoint's values, state,
            options and step. If a store is resumed, `checkpoint` is ignored.
        scratch: a folder for the files in which `state_dict()` and `materialized()` copy the weights, and for the store
            if `storage` is None. None: these files are made beside the store.
        device_memory: with CUDA, a hard budget of device memory for units, and for gradients that wait for their
            update; in bytes or as "8GiB". None: the smallest budget that keeps disk and compute busy. Activations and
            torch's other device memory are not part of this budget.
        activations: where checkpointed activations of the model's forward are stored. Their bits do not change.
            "device": on the device, as torch does. "host": in pinned host memory within the budget (1 GiB if
            `host_memory` is None), and the rest in files. "ssd": in files beside the store, or in `scratch` if that is
            given. On the CPU, "host" is the same as "device".
        durability: "step": every step survives a power loss. "none": steps are kept only after `close()`.
            Without `storage` the durability is "none", and `close()` keeps nothing.
        state: the format of the moments of Adam, AdamW and SGD with momentum. None: the optimizer's own format, exact.
            "bf16" and "8bit" move fewer bytes and change the results. "bf16": 16 bits, with the second moment rounded
            stochastically. "8bit": bitsandbytes' blocks of 8 bits, except for embeddings and parameters of fewer than
            4,096 elements, which keep 32 bits. "fp32": 32 bits, given explicitly. A store can be resumed only in its
            own format; `checkpoint` converts.
        rounding: how an update rounds 16-bit parameters. "nearest": to the nearest number. "stochastic": up or down at
            random, so that small updates are not lost without fp32 master weights; needs `master_dtype=None`.
        seed: seed of stochastic rounding. The store and checkpoints keep it; a resumed run uses the stored seed.
        log_steps: number of steps whose gradients the store's gradient log holds. A parameter kept in RAM is written
            whole once every `log_steps` steps, or with 0 in every step. None: 16 steps, or fewer if the log of 16 steps
            exceeds half of the free disk space (on a raw device, all of it). A given number that does not fit is
            rejected.
        reduction: the order in which the gradients of several ranks are added under `fully_shard`. "ordered": in the
            order of ranks, as one process accumulates them, so that the bits do not depend on the number of ranks.
            "native": in the order of torch's backend.
        timeout: seconds that the ranks wait for each other in `offload()`, in `step()` and in other calls that all
            ranks make together; None: ten minutes.

    Returns:
        The model, and a `memascend.OffloadedOptimizer`. The returned optimizer shares the `param_groups` of the given
        optimizer. For several given optimizers, it has the groups of all of them in order.

    Raises:
        ConfigError: an option, the model, the optimizer or the existing store does not fit. Nothing was changed, except
            that a model that `offload()` sharded stays sharded.
        BudgetError: `host_memory` or `device_memory` is too small; `smallest` is the smallest budget that works.
        MemoryLimitError: the machine or the device does not have the memory that the plan needs.
        StorageError: storage failed, is full, is in use or has foreign contents.
        RankError: another rank failed or is gone.
    """
    # `Options` has a field for each argument except `model` and `optimizer`.
    given = locals()
    options = Options(**{option.name: given[option.name] for option in fields(Options)})
    # The user's torch.set_default_device() must not affect tensors that `offload` makes, which are on the CPU.
    with torch.no_grad(), torch.device("cpu"), contextlib.ExitStack() as undo:
        opened = devices.open_device(options.where)
        original = unwrapped(optimizer)
        sharding, options, earlier = begin(model, original, options, undo)
        exchange, turn = exchange_of(sharding), Turn()
        undo.callback(turn.end)
        own = agreed(options, exchange, turn, on_host=opened is None)
        subject = exchange.together(lambda: Subject(model, original, own, opened, sharding=sharding, earlier=earlier))
        offloaded = _offloaded(subject, turn)
        undo.pop_all()
    wrap_again(optimizer, offloaded)
    if device is None and opened is not None:
        _log.info(
            "device: %s, which was found on this machine; pass device='cpu' to compute on the CPU instead",
            opened.torch_device,
        )
    if master_dtype is not None and any(subject.named[name].dtype.itemsize == 2 for name in subject.trained):
        _log.info(
            "16-bit parameters get fp32 master weights, which plain torch does not have; pass master_dtype=None to "
            "train without them"
        )
    why = "" if options.host_bytes else ", the smallest that keeps disk and compute busy"
    if own.spare is not None:
        is_stored = own.spare.stored == offloaded.plan.budget
        why = ", as this run had before" if is_stored else ", which this machine can spare"
    _log.info("host_memory: %s%s; %s", bytes_shown(offloaded.plan.budget), why, moves(offloaded.plan))
    if subject.streamed:
        _log.info(
            "%d parameters of %s are never kept in RAM, because no step of this run is durable: an optimizer that is "
            "not torch's own may fail within an update, which would damage the only copy of a parameter. To keep these "
            'parameters in RAM, pass storage= and durability="step"',
            len(subject.streamed),
            " and ".join(sorted(set(subject.streamed.values()))),
        )
    return model, offloaded


def _offloaded(subject: Subject, turn: Turn) -> OffloadedOptimizer:
    """Plans, opens the store, and offloads the parameters.

    If an error occurs before `Assembly.offload` is called, `undo` reverts all changes to the model. After a later
    error, parameters that were offloaded stay offloaded.
    """
    exchange = exchange_of(subject.sharding)
    with contextlib.ExitStack() as undo:
        assembly = exchange.together(lambda: _prepared(subject, turn, undo))
        session = assembly.session(undo)
        # With `existing="previous"`, drop the newest commit here, after every check that may reject the call. If
        # `end_log` replayed a gradient log, it has dropped the commit already.
        store = assembly.resources.store
        store.go_back()
        plan = assembly.decision.plan
        left = begin_places(store, deferrable(subject, plan))
        # Replicas compare their staged bytes at each commit, so updates are deferred on all ranks or on none.
        if all(exchange.all_values(left is not None)):
            session.run.gradients.deferrable = frozenset(left or ())
        session.measurements.log_began(begin_log(store, plan))
        offloaded = assembly.offload(session)
        if subject.earlier is not None:
            # All ranks wait here. After this point no rank drops its new store, so the earlier stores can be removed.
            exchange.all_values(None)
        undo.pop_all()
    forget_sources(subject.named.values())
    if subject.earlier is not None:
        subject.earlier.remove()
    if subject.sharding is not None:
        subject.sharding.retire_replicas()
    if session.heap_bytes:
        # The memory of the model's own parameters was freed: give the heap's free pages back to the system.
        settle_heap()
    RUNS.add(offloaded)
    return offloaded


def _prepared(subject: Subject, turn: Turn, undo: contextlib.ExitStack) -> Assembly:
    """Plans, opens the store, fills a new store or reads an existing one, and allocates the memory of the run.

    Does not change the model's parameters.
    """
    sharding, exchange = subject.sharding, exchange_of(subject.sharding)
    decision, first = exchange.together(lambda: _decided(subject, undo))
    opening = None if sharding is None else sharding.opening
    if opening is None:
        store = open_store(subject, decision.records)
    else:
        earlier = None if subject.earlier is None else subject.earlier.identity
        store, _ = opening.open(lambda _: open_store(subject, decision.records), earlier)
    undo.callback(store.close)
    if store.created:
        # If the call fails, `close()` removes the new store.
        undo.callback(store.forsake)
    # `end_log` overwrites the commit before the newest commit. If the log of one rank is damaged, all ranks must resume
    # from that earlier commit. So no rank may replay its log before all ranks have checked their logs.
    exchange.together(store.check_log)
    engine = exchange.together(lambda: _engine(subject, decision.plan, store, undo))
    # This run has allocated most of its memory, so another run may now read how much memory is free.
    turn.end()
    return exchange.together(lambda: _begun(subject, decision, first, (store, engine), undo))


def _decided(subject: Subject, undo: contextlib.ExitStack) -> tuple[Decision, FirstValues]:
    """Plans the run. Checks the first values before the store is opened, unless an existing store may be resumed."""
    decision = decide(subject)
    first = FirstValues(subject, undo)
    if not subject.options.resumes:
        first.prepare(created=True)
    return decision, first


def _engine(subject: Subject, plan: Plan, store: Store, undo: contextlib.ExitStack) -> Engine:
    """Allocates the memory of the RAM tier, and makes the engine with its chunks."""
    store.hold(plan.ram_tier, registered=subject.device is not None)
    engine = engines.Engine(
        store,
        chunks=plan.chunks,
        queue=plan.queue_bytes,
        whole=subject.arithmetic.whole_bytes,
        whole_next=plan.whole_next_bytes,
        threads=torch.get_num_threads(),
    )
    undo.callback(engine.close)
    return engine


def _begun(
    subject: Subject,
    decision: Decision,
    first: FirstValues,
    opened: tuple[Store, Engine],
    undo: contextlib.ExitStack,
) -> Assembly:
    """Fills a new store, or replays the log of an existing store and restores RAM tier, buffers and options from it.

    Then allocates the memory of units.
    """
    options, plan = subject.options, decision.plan
    store, engine = opened
    end_log(store, engine)
    if options.resumes:
        first.prepare(created=store.created)
    if subject.sharding is not None:
        subject.sharding.compare(store, plan.ram_tier)
    with contextlib.nullcontext() if subject.refill is None else subject.refill.between(store):
        stored = first.write(engine, decision) if store.created else first.read(store, plan.ram_tier)
    subject.arithmetic.require_members(stored, f"the store at {store.info()['devices'][0]}")
    subject.arithmetic.take_seed(stored)
    groups, scheduled = subject.original.param_groups, options_set(stored)
    given = take_options(groups, stored.get("groups"), undo, subject.arithmetic.examples, scheduled)
    subject.arithmetic.restore(stored.get("attributes") or {}, undo)
    first.drop_sources()
    folders = folders_of(options)
    if not folders and not options.paths:
        # The folder that contained the temporary store was removed, so use the parent of that folder.
        folders = [Path(store.info()["devices"][0]).parents[1]]
    resources = _resources(subject, plan, opened, folders, undo)
    return Assembly(subject, decision, resources, given, folders[0] if folders else None)


def _resources(
    subject: Subject, plan: Plan, opened: tuple[Store, Engine], folders: Sequence[Path], undo: contextlib.ExitStack
) -> Resources:
    """Allocates the memory of units; opens files for checkpointed activations if `activations=` moves them."""
    store, engine = opened
    memory: UnitMemory
    if subject.device is None:
        memory = HostUnits(engine, plan.classes)
    else:
        memory = DeviceUnits(engine, subject.device, plan.classes, plan.ram_tier)
    undo.callback(memory.close)
    undo.callback(memory.stop)
    keeper = None
    if subject.options.moves_activations(staged=subject.staged):
        keeper = activation_files.Activations(folders, device=subject.device, groups=plan.activation_groups)
        undo.callback(keeper.close, "offload() failed")
    hooks = ProcessHooks()
    undo.callback(hooks.release)
    last_first = contextlib.ExitStack()
    sharding = subject.sharding
    if sharding is not None and sharding.exchange is not None and sharding.collectives is not None:
        last_first.callback(sharding.exchange.close)
        last_first.callback(sharding.collectives.close)
    last_first.callback(hooks.release)
    return Resources(
        store=store,
        engine=engine,
        units=memory,
        activations=keeper,
        release=last_first.close,
        temporary=not subject.options.paths,
    )
