"""Builds the parts of a run for one model and plan, and connects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from memascend.checkpoint.init import materialize_parameter, move_buffers
from memascend.grads.gradients import Gradients
from memascend.grads.loop import Loop, Speculation
from memascend.grads.loss_scale import LossScale
from memascend.grads.microbatches import Accumulation
from memascend.grads.norms import Norms
from memascend.memory import settle_heap
from memascend.optim.members import members_of
from memascend.params.offloaded_param import Place
from memascend.params.residency import Residency
from memascend.params.unit import Limits
from memascend.plan.units import forward_order
from memascend.session import original_state
from memascend.session.attachment import AddedParameters, Attachment, AutocastWatch
from memascend.session.materialize import Saving
from memascend.session.optimizer import OffloadedOptimizer
from memascend.session.report import Measurements
from memascend.session.run import Metadata, Run
from memascend.session.schedule import Schedule
from memascend.session.session import Session
from memascend.session.value_edits import Edits

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import ExitStack
    from pathlib import Path
    from typing import Any

    from memascend.params.unit import CachedUnit
    from memascend.plan.decision import Decision
    from memascend.session.decide import Subject
    from memascend.session.run import Resources


@dataclass(frozen=True)
class Assembly:
    """Builds a run from prepared parts. Only the method `offload` changes the model's parameters."""

    subject: Subject  # model and optimizer
    decision: Decision  # units and plan
    resources: Resources  # store, engine and memory
    given: list[dict[str, Any]]  # the user's options of each parameter group, before stored options replaced them
    # the folder for copies of the weights; None: making a copy raises an error that asks for a folder
    scratch: Path | None

    def session(self, undo: ExitStack) -> Session:
        """Builds the session of the run, and moves the model's buffers to the device; `undo` moves the buffers back.

        Raises:
            torch.OutOfMemoryError: the device has too little memory for the buffers.
        """
        session = self._session()
        move_buffers(self.subject.model, self._device, undo)
        return session

    def offload(self, session: Session) -> OffloadedOptimizer:
        """Offloads the parameters; returns the optimizer for the user."""
        subject, resources = self.subject, self.resources
        offloaded = OffloadedOptimizer(subject.original, session)
        for unit in session.run.residency.units.all:
            for place in unit.places:
                if not torch._has_compatible_shallow_copy_type(place.parameter, place.nothing):  # noqa: SLF001
                    # torch rejects `place.nothing` as the `.data` of a parameter that is on meta, or on another type of
                    # device than `place.nothing`.
                    materialize_parameter(place.parameter, place.nothing)
                place.offload()
                if place.name in subject.trained:
                    rule = subject.arithmetic.of(place.parameter)
                    session.run.gradients.watch(place, rule, resources.store.record(place.name)["step"])
        if subject.sharding is not None:
            places = {place.name: place for unit in session.run.residency.units.all for place in unit.places}
            subject.sharding.install(session.run.residency, places, session.run.gradients)
        for member in members_of(subject.original):
            original_state.leave(member, offloaded)
        session.attachment.enter(offloaded)
        return offloaded

    def _session(self) -> Session:
        # None of the objects that are built here refers to `subject`. Otherwise the run would keep the subject's tables
        # of all parameters in memory.
        subject, plan, resources = self.subject, self.decision.plan, self.resources
        residency = self._residency()
        scale = self._scale()
        gradients = self._gradients(residency, scale)
        added_parameters = AddedParameters(subject.model, look=subject.sharding is None)
        resumed = not resources.store.created or subject.earlier is not None or subject.refilled is not None
        schedule = Schedule(subject.original.param_groups, self.given, resources.store, resumed)
        run = Run(
            resources=resources,
            residency=residency,
            frames=residency.frames,
            gradients=gradients,
            buffers=subject.buffers,
            metadata=Metadata(resources.store, subject.arithmetic, scale, schedule, self._stored_budget),
        )
        edits = Edits(run, None if subject.sharding is None else subject.sharding.exchange)
        attachment = Attachment(subject.model, self._hooked_modules(residency), run)
        heap_bytes = sum(p.nbytes for p in subject.named.values()) if any(plan.read_bytes.values()) else 0
        if heap_bytes:
            # From here on, the C library serves large allocations by mmap. `_offloaded` calls `settle_heap` again after
            # the memory of the model's parameters was freed.
            settle_heap()
        session = Session(
            run=run,
            added_parameters=added_parameters,
            watch=AutocastWatch(subject.named.values(), self._device.type),
            edits=edits,
            saving=Saving(subject.model, run, added_parameters, subject.sharding),
            attachment=attachment,
            measurements=Measurements(run, self.decision, mentions=subject.options.host_memory is None),
            accumulation=self._accumulation(gradients, residency),
            max_grad_norm=subject.options.max_grad_norm,
            nonfinite=subject.options.nonfinite,
            heap_bytes=heap_bytes,
            sharding=subject.sharding,
        )
        residency.serve(session)
        return session

    @property
    def _stored_budget(self) -> int | None:
        """The budget that each commit stores for a resume with "auto"; None if `host_memory` is None or "default"."""
        options = self.subject.options
        if options.spare is not None:
            return options.spare.stored or self.decision.plan.budget
        return None if options.host_bytes is None else self.decision.plan.budget

    @property
    def _grows(self) -> bool:
        """True if a step may allocate memory beyond the plan, because no size limits the memory of units.

        The size is `host_memory`, or with a device `device_memory`; "auto" and "default" are no sizes.
        """
        options = self.subject.options
        return (options.host_bytes if self.resources.units.device is None else options.device_bytes) is None

    @property
    def _device(self) -> torch.device:
        device = self.resources.units.device
        return torch.device("cpu") if device is None else device.torch_device

    def _residency(self) -> Residency:
        plan, resources = self.decision.plan, self.resources
        limits = Limits(
            lookahead=max(0, plan.window - 1),
            slots=plan.classes,
            option="device_memory" if plan.device else "host_memory",
            larger=plan.larger_budget,
            add=resources.units.arena.add if self._grows else None,
        )
        model, keeper = self.subject.model, resources.activations
        residency = Residency(resources.units, limits, resources.engine, model, self.scratch, keeper)
        for planned in self.decision.plan.units:
            places = [
                Place(
                    self.subject.named[name], name, resources.store.record(name)["unit_offset"], residency, self._device
                )
                for name in planned.parameters
            ]
            nbytes = self.decision.sizes.unit_bytes[planned.name]
            in_ram = planned.name in plan.ram_tier_units
            residency.units.add(planned.name, places, nbytes, pinned=planned.pinned, in_ram=in_ram)
        index = {unit.name: unit.index for unit in residency.units.all}
        forward = [index[unit.name] for unit in forward_order(plan.units)]
        residency.units.order.expect(forward + forward[::-1])
        return residency

    def _accumulation(self, gradients: Gradients, residency: Residency) -> Accumulation:
        plan = self.decision.plan
        return Accumulation(
            model=self.subject.model,
            gradients=gradients,
            residency=residency,
            engine=self.resources.engine,
            device=self._device,
            limit=plan.queue_bytes,
            strict=not self._grows,
            never=None if self.subject.sharding is None else "several ranks share the model",
        )

    def _gradients(self, residency: Residency, scale: LossScale) -> Gradients:
        subject, plan, resources = self.subject, self.decision.plan, self.resources
        options = subject.options
        sharding = subject.sharding
        figures = None if sharding is None else sharding.exchange
        loop = Loop(options.gradients, options.accumulation_steps, keeps=options.keeps, figures=figures)
        ram_tier = frozenset(plan.ram_tier)
        # An update may read its values from a unit that is cached in host memory. The unit then cannot be evicted until
        # the update ends. With a window of one unit, each unit must be evicted before the next unit is read, so updates
        # read their values from storage.
        units = residency.units if plan.window > 1 and not plan.device else None
        return Gradients(
            engine=resources.units.engine(resources.engine),
            units=units,
            ram_tier=ram_tier,
            scale=scale,
            loop=loop,
            speculation=Speculation(loop, ram_tier),
            norms=Norms(counts=sharding is None or sharding.layout.replica == 0),
            residency=residency,
        )

    def _hooked_modules(self, residency: Residency) -> list[tuple[torch.nn.Module, tuple[CachedUnit, ...]]]:
        """Returns the modules to hook, each with the units that its hook materializes.

        Without FSDP2, a module needs a hook if it owns a parameter (also in a ParameterList or ParameterDict), is a
        whole unit, or is the model itself.
        """
        if self.subject.sharding is not None:
            # FSDP2's all-gather materializes the rows of this rank when copying them, so only the whole model needs a
            # hook.
            return [(self.subject.model, ())]
        units = {unit.name: unit for unit in residency.units.all}
        unit_of = {id(place.parameter): unit for unit in units.values() for place in unit.places}
        whole = {
            planned.module: units[planned.name] for planned in self.decision.plan.units if planned.module is not None
        }
        hooked = []
        # Modules that materialize the same units share one tuple.
        shared_tuples: dict[tuple[CachedUnit, ...], tuple[CachedUnit, ...]] = {}
        for name, module in self.subject.model.named_modules():
            needed = [whole[name]] if name in whole else []
            needed += [unit_of[id(own)] for own in module._parameters.values() if own is not None]  # noqa: SLF001
            for child in module.children():
                # torch never calls a ParameterList or ParameterDict, so the parent's hook materializes the parameters
                # of the list or dict.
                if isinstance(child, torch.nn.ParameterList | torch.nn.ParameterDict):
                    needed += [unit_of[id(own)] for own in child.parameters()]
            if needed or module is self.subject.model:
                needs = tuple(dict.fromkeys(needed))
                hooked.append((module, shared_tuples.setdefault(needs, needs)))
        return hooked

    def _scale(self) -> LossScale:
        subject = self.subject
        asked = subject.options.loss_scale
        if asked is None and any(subject.named[name].dtype == torch.float16 for name in subject.trained):
            asked = "dynamic"
        scale = LossScale(asked)
        stored: Mapping[str, Any] | None = (self.resources.store.hyperparameters or {}).get("loss_scale")
        if stored and scale.mode == "dynamic" and stored.get("mode") == "dynamic":
            scale.load(stored)
        return scale
