"""Decides units, store entries and the plan of a run, from shapes alone; nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

import torch

from memascend import engine as engines
from memascend.activations import activations
from memascend.checkpoint.buffers import Buffers
from memascend.checkpoint.meta import require_plain
from memascend.device.download import WINDOWS
from memascend.device.recurrent import copied_bytes
from memascend.device.upload import CHUNKS
from memascend.errors import BudgetError, ConfigError
from memascend.optimizers.state_formats import StateFormats
from memascend.optimizers.update_rule import Arithmetic
from memascend.optimizers.wrappers import unwrapped
from memascend.planning.log import Log
from memascend.planning.plan import make_plan
from memascend.planning.requirements import Requirements
from memascend.planning.units import find_units
from memascend.ranks.planned_sharding import PlannedSharding
from memascend.residency.aliases import require_unaliased
from memascend.residency.away import dense_strides
from memascend.run.checks import embeddings, find_owned, refuse_sizes, sparse_weights
from memascend.run.locations import folders_of, room_beside
from memascend.run.original_state import require_unaliased_state

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from memascend.device.device import Device
    from memascend.engine import Entry
    from memascend.planning.network import Network
    from memascend.planning.options import Options
    from memascend.planning.table import Plan
    from memascend.planning.units import Unit
    from memascend.ranks.earlier import Earlier
    from memascend.ranks.sharding import Sharding

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
        """`device` computes, where that is not the host.

        `sharding` has the parameters, where ranks share them; `earlier` the stores of another number of ranks, from
        which the run goes on. What is `only_planned` needs neither the device that computes nor a place of its store.
        """
        self.model = model
        self.given = optimizer
        self.original = unwrapped(optimizer)
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
        self.arithmetic = Arithmetic(self.original, options.master_dtype, self._ids(sparse_weights(model)), formats)
        if sharding is not None:
            sharding.require_by_rows(self.arithmetic)
        if not only_planned:
            require_unaliased(self.named, model, () if sharding is None else sharding.held)
            require_unaliased_state(self.original, self.named, model)
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


def planned(model: torch.nn.Module, optimizer: torch.optim.Optimizer, options: Options, ranks: int = 1) -> Planned:
    """Decide as `offload()` with these options would, from shapes alone: the model may be on "meta"; nothing changes.

    Args:
        model: that is trained.
        optimizer: owns its parameters.
        options: of `offload()`; with several ranks, of each.
        ranks: how many share the model: the plan is that of one.

    Raises:
        ConfigError: it would refuse; the message says why.
        BudgetError: the budget is too small; `smallest` is what works.
    """
    with torch.no_grad():
        sharding = PlannedSharding(model, ranks, options) if ranks > 1 else None
        if sharding is not None:
            optimizer = sharding.stand_in(optimizer)
        rows = cast("Sharding | None", sharding)
        subject = Subject(model, optimizer, options, None, sharding=rows, only_planned=True)
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
    sizes = engines.sizes(entries, optimizer=type(subject.original).__name__, devices=devices)
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
            f"there is no room beside the store for a log of {options.log_steps} steps of the gradients of what is "
            f"held: {fits}; make room, or leave log_steps out for as many as go well"
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
