"""Sequences one run: what step(), zero_grad(), backward() and close() do, in which order."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import warnings
from typing import TYPE_CHECKING, Any

import torch

from memascend.checkpoint.reader import identity_of
from memascend.checkpoint.writer import save
from memascend.errors import ConfigError, MemascendError, UsageError
from memascend.optimizers.group_options import options_of
from memascend.residency import leftovers
from memascend.run.report import Baseline, Report, make_report

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.activations.activations import Activations
    from memascend.checkpoint.buffers import Buffers
    from memascend.device.unit_memory import UnitMemory
    from memascend.engine import Engine, Store
    from memascend.gradients.gradient import Arrival
    from memascend.gradients.gradients import Gradients
    from memascend.gradients.loss_scale import LossScale
    from memascend.planning.plan import Plan
    from memascend.residency.gates import Frames
    from memascend.residency.residency import Residency
    from memascend.run.heap import Heap
    from memascend.run.meter import Meter
    from memascend.run.state_dicts import Surgery

__all__ = ["Resources", "Session"]

_log = logging.getLogger("memascend")

_USER_BYTES_MAX = 64 << 10
_CLOSED = "this model was offloaded, and its optimizer has been closed; open its storage again to go on"


class Resources:
    """What has to be let go: it knows neither model nor optimizer, so that both can be collected."""

    def __init__(self, store: Store, engine: Engine, units: UnitMemory, activations: Activations | None = None) -> None:
        self.store = store
        self.engine = engine
        self.units = units
        # Where checkpointed activations are kept on storage.
        self.activations = activations
        # Where the store is a temporary one: steps were committed that nobody has read out.
        self.temporary = False
        self.unread = False
        self.closed = False
        self._process = os.getpid()

    def close(self) -> None:
        """Drain, drop what is not committed, free. Twice is fine."""
        if self.closed:
            return
        self.closed = True
        if os.getpid() != self._process:
            # A forked child has none of the threads, and what it would write is its parent's.
            return
        with contextlib.ExitStack() as last_first:
            # Each of them also where another fails.
            if self.activations is not None:
                last_first.callback(self.activations.close, _CLOSED)
            last_first.callback(self.units.close)
            last_first.callback(self.store.close)
            last_first.callback(self.units.stop)
            last_first.callback(self.engine.close)
        if self.temporary and self.unread:
            warnings.warn(
                "the trained weights were in a temporary store and are gone, for nobody read them out: give storage=, "
                "or save model.state_dict() before close()",
                stacklevel=4,
            )


class Session:
    """A model and an optimizer that are offloaded."""

    def __init__(
        self,
        *,
        resources: Resources,
        residency: Residency,
        frames: Frames,
        gradients: Gradients,
        scale: LossScale,
        buffers: Buffers,
        plan: Plan,
        groups: list[dict[str, Any]],
        surgery: Surgery,
        meter: Meter,
        heap: Heap,
        max_grad_norm: float | None,
        leave: Callable[[], None],
    ) -> None:
        self.resources = resources
        self.store = resources.store
        self.engine = resources.engine
        self.residency = residency
        self.frames = frames
        self.gradients = gradients
        self.scale = scale
        self.buffers = buffers
        self.surgery = surgery
        self.heap = heap
        self.plan = plan
        self.groups = groups
        self.grad_norm: float | None = None
        self.overflowed = False
        self.steps = self.store.step
        self.began_at = self.steps
        # Store and step of the checkpoint that it began from, where no step was made since.
        self.origin: dict[str, Any] | None = (self.store.hyperparameters or {}).get("origin")
        # The checkpoint that offload() was given, also where the store stood before it.
        self.checkpoint: str | os.PathLike[str] | None = None
        # Whether a load_state_dict() of other weights is refused.
        self.weights_stand = False
        self.user_state: Any = self.store.user_state
        self.seconds = {"step": 0.0}
        self._max_grad_norm = max_grad_norm
        self._leave = leave
        self._rewritten: list[str] = []
        self._told_of_loss = False
        self._last_report: Report | None = None
        self.baseline = Baseline(self.engine.counters(), self.store.counters())
        self.meter = meter
        self.meter.keeps_all = gradients.mode == "ram"
        residency.on_used = self.meter.used

    # --- the loop --------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """A backward from the scaled loss."""
        self.require_open()
        with self.gradients.scaled():
            (loss * self.scale.scale if self.scale.enabled else loss).backward(**options)

    def step(self) -> None:
        """Commit the step, or skip it where a scaled gradient overflowed."""
        self.require_open()
        if self.resources.units.device is not None:
            self.resources.units.device.require_no_capture()
        if self.frames.inside:
            raise UsageError(
                "step() was called inside of the model's forward, which uses the parameters; call it after"
            )
        self.frames.unwind()
        self.surgery.forget()
        began = time.perf_counter()
        with self.residency.turns.alone():
            committed = self._step()
        if committed:
            self.residency.end_step()
            self.seconds["step"] += time.perf_counter() - began
            self.meter.step_ended()
            self.heap.step_ended()
            self._tell_of_loss()

    def _step(self) -> bool:
        """Whether there was a step, and it did not overflow."""
        gradients = self.gradients
        present = gradients.present()
        if not present or not gradients.is_staged():
            return False
        self.residency.require_idle("step()")
        self.residency.find_written()
        if self.residency.written:
            names = ", ".join(sorted(self.residency.written))
            raise UsageError(
                f"the values of {names} were written to in place while the model computed, and storage does not know: "
                "call zero_grad(), and change them within memascend.materialized(model, modify=True)"
            )
        factor = 1.0
        if self._norm_comes_first:
            finite, self.grad_norm = gradients.measured(present)
            self.overflowed = self.scale.enabled and not finite
            if self.overflowed:
                gradients.skip()
                self.scale.update(overflowed=True)
                return False
            if self._max_grad_norm is not None:
                factor = clip_factor(self._max_grad_norm, self.grad_norm)
        gradients.update_all(present, factor)
        self.buffers.stage(self.store, self.steps + 1)
        before = self.scale.state()
        self.scale.update(overflowed=False)
        generation = self.store.info()["generation"]
        try:
            self.engine.commit(self.steps + 1, user_state=self.user_state, hyperparameters=self.hyperparameters())
        except BaseException:
            if self.store.info()["generation"] == generation:
                self.scale.load(before)
            else:
                # Ctrl-C is heard once the commit has returned: it stands.
                self._committed(present)
            raise
        self._committed(present)
        learnt = gradients.learn()
        if learnt:
            _log.info(learnt)
        return True

    @property
    def _norm_comes_first(self) -> bool:
        """Whether the step depends on the norm; else nothing waits for it, and it is taken once the step is made."""
        return self.scale.enabled or self._max_grad_norm is not None

    def _committed(self, present: Sequence[tuple[Arrival, torch.Tensor]]) -> None:
        self.steps += 1
        if not self._norm_comes_first:
            self.grad_norm = self.gradients.norm(present)
        self.resources.unread = True
        self.buffers.committed()
        self.residency.changed(self.gradients.committed(present))

    def _tell_of_loss(self) -> None:
        """Warn once where the store's file lost its name: all goes well until the end of the process."""
        lost = None if self._told_of_loss else self.store.lost()
        if lost is not None:
            self._told_of_loss = True
            warnings.warn(str(lost), stacklevel=4)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drop or zero the gradients."""
        if self.resources.closed:
            return
        self.frames.unwind()
        self.surgery.forget()
        self.residency.written.clear()
        if set_to_none:
            self.gradients.clear()
            self.meter.cleared()
        else:
            self.gradients.zero()

    def require_open(self) -> None:
        """Refuse what comes after close()."""
        if self.resources.closed:
            raise UsageError(_CLOSED)

    # --- what is committed with a step ----------------------------------------------------

    def hyperparameters(self) -> dict[str, Any]:
        """The groups' options and the loss scale, as JSON."""
        return {"groups": [options_of(group) for group in self.groups], "loss_scale": self.scale.state()}

    def set_user_state(self, value: Any) -> None:
        """Keep a JSON value for the next commit."""
        try:
            size = len(json.dumps(value).encode())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"user_state must be a JSON value: {error}") from error
        if size > _USER_BYTES_MAX:
            raise ConfigError(f"user_state has {size} bytes as JSON, at most {_USER_BYTES_MAX} are kept")
        self.user_state = value

    def save(self, folder: str | os.PathLike[str], *, among_others: bool = False) -> None:
        """Write a whole checkpoint of what is committed, with the options that the groups have now."""
        with self.quiet():
            facts = {**self.identity(), **self.hyperparameters(), "user_state": self.user_state}
            facts["optimizer"] = self.store.info()["optimizer"]
            trained = self.gradients.kept.keys()
            save(folder, self.store, self.surgery.model, trained, facts, among_others=among_others)
            self.resources.unread = False

    def identity(self) -> dict[str, Any]:
        """Which store this is, and where it stands."""
        return {"store": self.store.info()["uuid"], "step": self.steps}

    def check_identity(self, identity: dict[str, Any] | None) -> None:
        """Refuse a state that is not what the store holds."""
        here = self.identity()
        if identity is None:
            raise UsageError(
                "this state dict was not made by an offloaded optimizer; give the optimizer that holds the state to "
                "offload()"
            )
        # What began from a checkpoint is what was saved there, until the next step.
        if identity != here and not (identity == self.origin and self.steps == self.began_at):
            began = f" (begun from a checkpoint of {_named(self.origin)})" if self.origin else ""
            given = None if self.checkpoint is None else identity_of(self.checkpoint)
            other = f", and the checkpoint {self.checkpoint} is of {_named(given)}" if given else ""
            raise UsageError(
                f"this state dict is of {_named(identity)}, and the storage holds {_named(here)}{began}{other}: go on "
                'from the storage (existing="resume") with the data of its step, or begin from the checkpoint of the '
                'state dict: offload(existing="replace", checkpoint=...)'
            )

    def refuse_weights(self, name: str) -> None:
        """Say that weights are being loaded that the store does not hold, before they are written over them."""
        given = "" if self.checkpoint is None else f" (offload() was given checkpoint={str(self.checkpoint)!r})"
        raise UsageError(
            f"a Trainer loads other weights ({name} differs) than those of {_named(self.identity())}, which the "
            f"storage holds{given}, and storage was left as it is: to resume from a checkpoint, begin from it with "
            'offload(existing="replace", checkpoint=...); to take weights alone, load them before the Trainer is made'
        )

    # --- looking -----------------------------------------------------------------------

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """A copy of the state of a parameter."""
        self.require_open()
        for kept in self.gradients.kept.values():
            if kept.place.parameter is parameter:
                return self.gradients.rule.state(kept)
        raise ConfigError("this tensor is no parameter that the optimizer updates")

    def report(self) -> Report:
        """What was measured so far."""
        return self._last_report or make_report(self)

    def rewrite(self, name: str, values: torch.Tensor) -> None:
        """Stage other values for a parameter, and for its master; its moments stay."""
        kept = self.gradients.kept.get(name)
        self.gradients.rule.rewrite(name, values, kept.step if kept else 0)
        self._rewritten.append(name)

    def drop_rewritten(self) -> None:
        """Forget what was rewritten, and nothing else."""
        rewritten, self._rewritten = self._rewritten, []
        for name in rewritten:
            self.engine.discard(name)

    def commit_rewritten(self) -> None:
        """Make what was rewritten live, as a part of the step that is committed."""
        try:
            # Both are of one moment: new weights never stand beside old statistics.
            self.buffers.stage(self.store, self.steps)
            self.engine.commit(self.steps)
            self.buffers.committed()
        finally:
            # Also where Ctrl-C is heard once the commit has returned; to read a unit again is never wrong.
            rewritten, self._rewritten = self._rewritten, []
            self.residency.changed(rewritten)

    # --- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Keep what was committed, drop the rest, free everything."""
        if self.resources.closed:
            return
        self.frames.unwind(all_of_it=True)
        leftovers.let_go()
        with contextlib.suppress(MemascendError):
            # It can be asked for afterwards, too.
            self._last_report = make_report(self)
        self.surgery.remove()
        self._leave()
        self.gradients.unwatch()
        self.residency.close(_CLOSED)
        self.resources.close()
        self.heap.close()

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Nothing staged, nothing in flight: for reading or changing what is committed."""
        self.require_open()
        self.frames.unwind()
        if self.gradients.is_staged():
            raise UsageError("a step is staged: call step() or zero_grad() first")
        self.residency.require_idle("this")
        self.engine.finish()
        yield


def _named(identity: dict[str, Any]) -> str:
    return f"step {identity.get('step')} of store {identity.get('store')}"


def clip_factor(max_norm: float, norm: float) -> float:
    """What clipping multiplies gradients of this norm by: a number of fp32."""
    factor = max_norm / (norm + 1e-6)
    # In this order a NaN stays one: torch's clipping makes NaN of everything.
    return torch.tensor(min(factor, 1.0), dtype=torch.float32, device="cpu").item()
