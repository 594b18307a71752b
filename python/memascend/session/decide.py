"""Decides units, store records and plan of a run without reading values; rejects models that cannot be offloaded."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, cast

import torch

from memascend import storage as engines
from memascend.checkpoint.init import Buffers, require_plain
from memascend.errors import ConfigError, StorageError
from memascend.optim.members import members_of, require_one_owner, title_of, unwrapped
from memascend.optim.rules import Arithmetic
from memascend.optim.state import StateFormats
from memascend.params.aliases import overlapping, require_unaliased
from memascend.params.offloaded_param import dense_strides
from memascend.plan.decision import Facts, decided
from memascend.plan.units import find_units

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from memascend.device.device import Device
    from memascend.distributed.reshard import Earlier
    from memascend.distributed.setup import PlannedSharding
    from memascend.distributed.sharding import Sharding
    from memascend.plan.decision import Decision
    from memascend.plan.options import Options
    from memascend.plan.table import Plan
    from memascend.plan.units import Unit
    from memascend.storage import Record, Store


def temporary(create: Callable[[str], Store], scratch: Path | None = None) -> Store:
    """Creates a store whose data ends with the process: calls `create` on a new folder, and unlinks the store's file.

    The new folder is made in `scratch`. If `scratch` is None, it is made in a system folder for temporary files or, if
    that fails, in the working directory.
    """
    refused: Exception | None = None
    places = (tempfile.gettempdir(), "/var/tmp", os.getcwd()) if scratch is None else (str(scratch),)  # noqa: PTH109, S108
    for place in dict.fromkeys(places):
        try:
            # The folder's random name keeps other processes from opening the file before the file is unlinked.
            with tempfile.TemporaryDirectory(prefix="memascend-", dir=place) as folder:
                store = create(folder)
                store.become_temporary()
        except OSError as error:
            refused = refused or error
        else:
            return store
    raise StorageError(f"a temporary store cannot be created: {refused}. Pass storage= with a folder on a disk")


_TRAINED = {torch.float32, torch.float64, torch.bfloat16, torch.float16}


def _find_trained(
    model: torch.nn.Module,
    named: Mapping[str, torch.nn.Parameter],
    optimizer: torch.optim.Optimizer,
    device: torch.device | None,
    *,
    only_planned: bool,
) -> set[str]:
    """Returns the names of the trained parameters; rejects parameters that cannot be offloaded.

    `device` is the device that computes the model; None: the CPU.
    """
    if not named:
        raise ConfigError("the model has no parameters, so there is nothing to offload: pass a model with parameters")
    require_one_owner(optimizer, named)
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    _refuse_owners(named, owned)
    for name, parameter in named.items():
        if not only_planned and parameter.device.type not in ("cpu", "meta") and parameter.device != device:
            raise ConfigError(
                f"{name} is on {parameter.device}, but offload() needs each parameter on the CPU, on meta, or on the "
                "device that computes the model (device=): move the model to the CPU, or load it without device_map="
            )
        if torch.nn.parameter.is_lazy(parameter):
            raise ConfigError(f"{name} is not initialised yet: run the model once before offload()")
    pair = overlapping([*named.items(), *model.named_buffers()])
    if pair is not None:
        # In torch, a write to one of two tensors that share memory changes both tensors. On storage, the write would
        # change only one tensor.
        raise ConfigError(
            f"{pair[0]} and {pair[1]} share memory, but offload() would store each of them separately: make them one "
            "Parameter (as in head.weight = embedding.weight), or clone one of them"
        )
    # Integer parameters have no gradient: torch's optimizers skip them.
    trained = {
        name
        for name, parameter in named.items()
        if id(parameter) in owned and (parameter.is_floating_point() or parameter.is_complex())
    }
    for name, parameter in named.items():
        if name in trained and parameter.dtype not in _TRAINED:
            raise ConfigError(
                f"{name} is {parameter.dtype}, but only parameters of float32, float64, bfloat16 and float16 can be "
                "trained: freeze this parameter with requires_grad_(False), and make the optimizer without it"
            )
    return trained


def _refuse_kinds(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, only_planned: bool) -> None:
    """Rejects a model or optimizer whose class `offload()` does not support, or that is offloaded already.

    Also rejects an optimizer whose `step` was replaced, and a model whose weights accelerate offloaded.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
    members = members_of(optimizer)
    replaced = next(filter(_has_own_step, members), None)
    if replaced is not None:
        raise ConfigError(
            f"step() of this {type(replaced).__name__} object was replaced, and would not run after offload(): use "
            "register_step_pre_hook() or register_step_post_hook(), or override step() in a subclass"
        )
    if not only_planned:
        # These imports load torch's compiler, which takes seconds. A call that only plans does not need them.
        from memascend.params.module_hooks import has_hooks
        from memascend.session.materialize import is_materialized
        from memascend.session.optimizer import OffloadedOptimizer

        if any(isinstance(one, OffloadedOptimizer) for one in members) or has_hooks(model) or is_materialized(model):
            raise ConfigError("this model or optimizer is offloaded already: call optimizer.close() first")
    wrappers = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    if isinstance(model, wrappers) or type(model).__name__ == "FullyShardedDataParallel":
        raise ConfigError(
            f"{type(model).__name__} does not work with offload(): pass the module inside it. On several ranks, "
            "offload() itself shards that module by torch.distributed.fsdp.fully_shard() if you have not"
        )
    _refuse_placed(model)


def _refuse_placed(model: torch.nn.Module) -> None:
    """Rejects a model whose weights were offloaded by the library accelerate.

    Such weights look like parameters on meta, so `offload()` would initialise them again and lose their values.
    """
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        if any(getattr(part, "offload", False) for part in (hook, *getattr(hook, "hooks", ()))):
            raise ConfigError(
                f"accelerate moved weights of {name or 'the model'} to the CPU or to disk (device_map=, cpu_offload): "
                "load the model without device_map=. offload() itself streams weights that do not fit in memory"
            )


def _has_own_step(optimizer: torch.optim.Optimizer) -> bool:
    """True if user code replaced `step` on this optimizer object.

    torch's schedulers wrap `step` only to record its calls. Such a wrapper is not a replacement.
    """
    step = vars(optimizer).get("step")
    if step is not None and hasattr(step, "_wrapped_by_lr_sched"):
        step = getattr(step, "__wrapped__", None)
    return step is not None and getattr(step, "__func__", step) is not type(optimizer).step


def _refuse_owners(named: Mapping[str, torch.nn.Parameter], owned: set[int]) -> None:
    """Rejects an optimizer that owns foreign parameters, no parameters, or not all trainable parameters of the model.

    `named` has the model's parameters, and `owned` has the ids of the optimizer's parameters.
    """
    strangers = owned - {id(parameter) for parameter in named.values()}
    if strangers:
        raise ConfigError(
            f"the optimizer has {len(strangers)} parameters that do not belong to this model: make the optimizer from "
            "model.parameters()"
        )
    orphans = [name for name, parameter in named.items() if parameter.requires_grad and id(parameter) not in owned]
    if orphans:
        raise ConfigError(
            f"the optimizer does not own {len(orphans)} trainable parameters ({', '.join(orphans[:3])}...): freeze "
            "these parameters with requires_grad_(False), add them to the optimizer, or make a second optimizer for "
            "them and pass both optimizers: offload(model, [first, second])"
        )
    if not owned:
        raise ConfigError(
            "the optimizer owns no parameters of this model, so nothing would be updated: make the optimizer from "
            "model.parameters()"
        )


class Subject:
    """The checked arguments of one call of `offload()`: model, optimizer, options and device, and facts about them."""

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
        """Checks the arguments of `offload()`; changes nothing.

        `optimizer` is the user's optimizer, or several optimizers of the user that are joined to one. `device` computes
        the model; None: the CPU. `sharding` has this rank's rows of the parameters; None: one process has the whole
        model. If the run resumes with a different number of ranks, `earlier` has the stores of the earlier ranks.
        With `only_planned`, the call makes only a plan, and needs no device and no path of a store.
        """
        self.model = model
        self.original = optimizer
        self.options = options
        self.device = device
        # True if units are copied to a device through chunks in host memory.
        self.staged = device is not None or (only_planned and options.where.type != "cpu")
        # True if the store's path is unknown. Then the free disk space for the store is unknown, too.
        self.unplaced = only_planned and options.paths is None
        self.sharding = sharding
        _refuse_kinds(model, optimizer, only_planned=only_planned)
        self.named = dict(model.named_parameters() if sharding is None else sharding.named)
        self.trained = _find_trained(
            model, self.named, optimizer, None if device is None else device.torch_device, only_planned=only_planned
        )
        require_plain(self.named)
        if options.weights is not None and not any(parameter.is_meta for parameter in self.named.values()):
            raise ConfigError(
                "weights= gives values to parameters on meta, but this model has no parameters on meta: leave "
                "weights= out"
            )
        rows = {} if sharding is None else sharding.rows
        formats = StateFormats(
            state=options.state,
            stochastic=options.rounding == "stochastic",
            seed=options.seed,
            whole=self._embeddings(),
            elements={id(self.named[name]): one.whole.numel() for name, one in rows.items()},
        )
        names = {id(parameter): name for name, parameter in self.named.items()}
        sparse = self._embeddings(sparse=True)
        self.arithmetic = Arithmetic(self.original, options.master, sparse, formats, names)
        if sharding is not None:
            sharding.require_by_rows(self.arithmetic)
        if not only_planned:
            if sharding is not None:
                sharding.require_unaliased()
            require_unaliased(self.named, model, () if sharding is None else sharding.held)
            from memascend.session.original_state import require_unaliased_state

            for member in members_of(self.original):
                require_unaliased_state(member, self.named, model)
        self.buffers = Buffers(model)
        self.earlier = earlier
        # `refill` copies the store of a replica to each rank that has lost its store. `refilled` is `refill` if this
        # rank has lost its store, and None otherwise.
        self.refill = None if sharding is None else sharding.refill
        self.refilled = self.refill if self.refill is not None and self.refill.source is not None else None

    def _embeddings(self, *, sparse: bool = False) -> frozenset[int]:
        """Returns the ids of the weights of all embeddings, or only of embeddings with `sparse` gradients.

        With `sharding`, the ids are those of this rank's rows of these weights, because the optimizer updates the rows.
        """
        modules = [one for one in self.model.modules() if isinstance(one, torch.nn.Embedding | torch.nn.EmbeddingBag)]
        weights = [module.weight for module in modules if module.sparse or not sparse]
        return frozenset(id(one if self.sharding is None else self.sharding.local_of(one)) for one in weights)

    @property
    def durability(self) -> Literal["step", "none"]:
        """The durability of the store: the user's option, or "none" for a temporary store."""
        return self.options.durability if self.options.paths or self.unplaced else "none"

    @property
    def streamed(self) -> dict[str, str]:
        """The trained parameters that are never kept in RAM, each with the name of its optimizer's class.

        With durability "none", an update in the RAM tier changes the only copy of a record. An optimizer that is not
        torch's own may raise in the middle of the update, so its parameters stay out of the RAM tier.
        """
        if self.durability != "none":
            return {}
        owners = {name: self.arithmetic.of(self.named[name]).code for name in self.trained}
        return {name: type(owner.optimizer).__qualname__ for name, owner in owners.items() if not owner.is_known}


def planned(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    options: Options,
    ranks: int = 1,
) -> Decision:
    """Makes the decision of `offload()` without reading values. The model may be on "meta", and does not change.

    If several `ranks` shard the model, `options` and the returned decision are for one rank.
    """
    with torch.no_grad():
        original = unwrapped(optimizer)
        sharding: PlannedSharding | None = None
        if ranks > 1:
            # The import loads torch's FSDP2, which takes seconds.
            from memascend.distributed.setup import PlannedSharding

            sharding = PlannedSharding(model, ranks, options)
            original = sharding.use_local_rows(original)
        rows = cast("Sharding | None", sharding)
        subject = Subject(model, original, options, None, sharding=rows, only_planned=True)
        decision = decide(subject)
    return decision if sharding is None else replace(decision, network=sharding.network)


def decide(subject: Subject) -> Decision:
    """Finds the units, describes the records of the store, and makes the plan."""
    options = subject.options
    sharding = subject.sharding
    units = find_units(subject.model, units=options.unit_names) if sharding is None else sharding.units()
    records = _records(subject, units)
    facts = Facts(
        options=options,
        units=tuple(units),
        records=records,
        optimizer=title_of(subject.original),
        staged=subject.staged,
        durability=subject.durability,
        unplaced=subject.unplaced,
        whole_bytes=subject.arithmetic.whole_bytes,
        whole_next_bytes=subject.arithmetic.whole_next_bytes,
        update_values=subject.arithmetic.update_values,
        gradient_bytes={name: subject.named[name].nbytes for name in subject.trained},
        streamed=subject.streamed.keys(),
        replayed=_replayed(subject),
    )
    return decided(facts)


def _replayed(subject: Subject) -> frozenset[str]:
    """Returns the trained parameters that memascend's own kernels update.

    These kernels cannot fail half-way, so they may update records in RAM, and replay gradients from the log.
    """
    return frozenset(name for name in subject.trained if subject.arithmetic.of(subject.named[name]).is_replayed)


def deferrable(subject: Subject, plan: Plan) -> list[str]:
    """Returns the names of the parameters whose updates may be deferred.

    Updates of a parameter may be deferred if the parameter is streamed, memascend's own kernels update it, and its
    gradient may be spilled (`gradients` is "auto" or "ssd").
    """
    if subject.options.gradients not in ("auto", "ssd"):
        return []
    in_ram = frozenset(plan.ram_tier)
    return [name for name in sorted(_replayed(subject)) if name not in in_ram]


def _records(subject: Subject, units: Sequence[Unit]) -> list[Record]:
    """Describes the records of the store: parameters in the order of units, then persistent buffers."""
    records = []
    sharding = subject.sharding
    rows = {} if sharding is None or sharding.layout.size == 1 else sharding.rows
    for unit in units:
        for name in unit.parameters:
            parameter = subject.named[name]
            trained = name in subject.trained
            meta = torch.empty_strided(parameter.shape, dense_strides(parameter), dtype=parameter.dtype, device="meta")
            records.append(
                engines.Record(
                    name=name,
                    values=meta,
                    state=subject.arithmetic.of(parameter).describe() if trained else {},
                    unit=unit.name,
                    order=engines.order_of(meta),
                    # The store reserves space for spilled gradients whatever the option `gradients` is, because a
                    # resume may pass a different value of `gradients`.
                    spill=parameter.dtype if trained else None,
                    format=subject.arithmetic.of(parameter).format if trained else None,
                    first_element=rows[name].first_element if name in rows else None,
                )
            )
    return records + subject.buffers.records()
