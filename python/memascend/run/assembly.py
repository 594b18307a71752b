"""Builds the parts of a run for one model and plan, and connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend import kernels
from memascend.checkpoint.buffers import move_buffers
from memascend.checkpoint.meta import embody
from memascend.device.graphs import refuse_graphs
from memascend.device.recurrent import Flattening
from memascend.gradients.gradients import Gradients, Loop
from memascend.gradients.loss_scale import LossScale
from memascend.gradients.row_engine import RowEngine
from memascend.optimizers.update_rule import Updates
from memascend.residency.debug_checksums import Sums, wanted
from memascend.residency.gates import Frames, close_gates, open_gates
from memascend.residency.placeholder import Place
from memascend.residency.residency import Residency
from memascend.run.autocast import AutocastWatch
from memascend.run.heap import Heap
from memascend.run.meter import Meter
from memascend.run.optimizer import OffloadedOptimizer
from memascend.run.session import Session
from memascend.run.state_dicts import Surgery

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from typing import Any

    from memascend.checkpoint.buffers import Buffers
    from memascend.engine import Store
    from memascend.gradients.gradient import Arrival
    from memascend.optimizers.update_rule import Arithmetic
    from memascend.planning.options import Options
    from memascend.planning.plan import Plan
    from memascend.planning.units import Unit
    from memascend.residency.unit_slot import Home
    from memascend.run.checks import Owned
    from memascend.run.session import Resources

__all__ = ["Wiring"]


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """What a run is made of. Nothing of the model has changed before `run`."""

    model: torch.nn.Module
    original: torch.optim.Optimizer
    options: Options
    owned: Mapping[str, Owned]
    arithmetic: Arithmetic
    buffers: Buffers
    units: Sequence[Unit]
    unit_bytes: Mapping[str, int]
    plan: Plan
    resources: Resources
    # The budget with which embeddings are not read by rows.
    whole_budget: int
    # Where copies of the weights go.
    scratch: Path | None

    def run(self) -> OffloadedOptimizer:
        """Let the parameters go, and hand out the optimizer that has charge of them."""
        # What lives as long as the run holds these, and not all that is known of each parameter here.
        options, plan, resources, model = self.options, self.plan, self.resources, self.model
        store = resources.store
        engine = resources.units.engine(resources.engine)
        if resources.units.rows is not None:
            names = [name for unit in self.units if unit.name in plan.by_rows for name in unit.parameters]
            engine = RowEngine(engine, names, plan.queue_bytes)
        known = {entry["name"]: entry for entry in store.entries()}
        residency = self._residency(known)

        def resident(kept: Arrival) -> torch.Tensor | None:
            # Where one unit at a time is held, an update must not keep it from making room.
            return residency.values_of(kept.place) if plan.window > 1 and not plan.device else None

        rule = Updates(self.arithmetic, engine, store, resident)
        meter = Meter(lambda: residency.lent_bytes, lambda: resources.engine.queued_bytes)

        def arrived(name: str, nbytes: int, began: float) -> None:
            meter.arrived(name, nbytes, began)
            # Updates may have let go of units since the last one was used.
            residency.look_ahead()

        scale = self._scale(store)
        loop = Loop(mode=options.gradients, accumulation_steps=options.accumulation_steps, keeps=options.keeps)
        gradients = Gradients(engine, rule, kernels.check_and_unscale, scale, loop, arrived)
        watch = AutocastWatch([owned.parameter for owned in self.owned.values()], self._device.type)

        # Elsewhere torch makes none.
        on_device = resources.units.device is not None

        def entered(module: torch.nn.Module) -> None:
            if on_device and not frames.stack:
                refuse_graphs(module, whole=module is model)
            watch.look()
            gradients.entered(module)

        frames = Frames(residency, entered)
        residency.on_borrowed = gradients.touched
        gates = self._gates(residency)
        modules = [module for module, _ in gates]
        flattening = Flattening(model)

        def leave() -> None:
            close_gates(modules)
            flattening.resume()
            model.__dict__.pop("_memascend", None)

        surgery = residency.surgery = Surgery(self.model, residency, self.scratch)
        session = Session(
            resources=resources,
            residency=residency,
            frames=frames,
            gradients=gradients,
            scale=scale,
            buffers=self.buffers,
            plan=plan,
            groups=self.original.param_groups,
            surgery=surgery,
            meter=meter,
            heap=Heap(sum(self.unit_bytes.values())),
            max_grad_norm=options.max_grad_norm,
            leave=leave,
        )
        resources.temporary = not options.paths
        offloaded = OffloadedOptimizer(self.original, session)

        def enter() -> None:
            open_gates(model, gates, residency, frames)
            if on_device:
                flattening.stop()
            model.__dict__["_memascend"] = offloaded

        session.checkpoint = options.checkpoint
        surgery.attach(session, leave=leave, enter=enter)
        # What may not fit there, before anything is let go.
        move_buffers(self.model, self._device)
        for home in residency.homes:
            for place in home.places:
                if not torch._has_compatible_shallow_copy_type(place.parameter, place.nothing):  # noqa: SLF001
                    # On meta, and on devices whose tensors are of another kind.
                    embody(place.parameter, place.nothing)
                place.unbind()
                owned = self.owned[place.name]
                if owned.group is not None:
                    gradients.watch(place, owned.group, known[place.name]["step"])
        self.original.state.clear()
        enter()
        return offloaded

    @property
    def _device(self) -> torch.device:
        """The one that computes."""
        device = self.resources.units.device
        return torch.device("cpu") if device is None else device.torch_device

    def _residency(self, known: Mapping[str, Any]) -> Residency:
        """The units' homes, and the order in which they are expected to be used."""
        plan, engine, memory = self.plan, self.resources.engine, self.resources.units
        residency = Residency(
            memory.arena,
            lambda: engine.queued_bytes > 0,
            memory.begin,
            lookahead=max(0, plan.window - 1),
            slots=plan.classes,
            used=memory.used,
            require=None if memory.device is None else memory.device.require_no_capture,
        )
        for unit in self.units:
            by_rows = unit.name in plan.by_rows
            home = residency.add(unit.name, self.unit_bytes[unit.name], pinned=unit.pinned, by_rows=by_rows)
            home.places = [
                Place(self.owned[name].parameter, name, known[name]["unit_offset"], residency, self._device)
                for name in unit.parameters
            ]
        residency.settle()
        residency.rows, residency.whole_budget = memory.rows, self.whole_budget
        residency.hooks.keeper = self.resources.activations
        residency.larger_budget = plan.larger_budget
        residency.budget_option = "device_memory" if plan.device else "host_memory"
        residency.sums = Sums() if wanted() else None
        index = {home.name: home.index for home in residency.homes}
        forward = [index[name] for name in plan.order]
        residency.order.expect(forward + forward[::-1])
        return residency

    def _gates(self, residency: Residency) -> list[tuple[torch.nn.Module, tuple[Home, ...]]]:
        """Every module that owns a parameter, and every unit that is one module, with the units that it binds."""
        homes = {home.name: home for home in residency.homes}
        home_of = {id(place.parameter): home for home in homes.values() for place in home.places}
        whole = {unit.module: homes[unit.name] for unit in self.units if unit.module is not None}
        gates = []
        # One tuple for all modules of a unit.
        alike: dict[tuple[Home, ...], tuple[Home, ...]] = {}
        for name, module in self.model.named_modules():
            needed = [whole[name]] if name in whole else []
            needed += [home_of[id(own)] for own in module._parameters.values() if own is not None]  # noqa: SLF001
            needed += [home_of[id(own)] for own in _listed(module)]
            if needed or module is self.model:
                needs = tuple(dict.fromkeys(needed))
                gates.append((module, alike.setdefault(needs, needs)))
        return gates

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


def _listed(module: torch.nn.Module) -> Iterator[torch.nn.Parameter]:
    """Parameters that a module reaches through a ParameterList or ParameterDict of its own, which is never called."""
    for child in module.children():
        if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
            yield from child.parameters()
