"""Implements step(), zero_grad(), backward(), accumulate() and close() of an offloaded optimizer.

[Note: when the norm is known] With a loss scale or `max_grad_norm`, the updates depend on all gradients, so `_step`
computes the norm before it calls `update_all` (`_norm_comes_first`). Otherwise each gradient is measured as it is
stored or used, and `_norm` adds these measures: before the commit if `_norm_precedes_commit`, else after the commit. If
the norm is not finite, `_drops` can drop the step before the commit; after the commit, `_committed` can only warn.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from memascend.device.device import refuse_graphs
from memascend.errors import ConfigError, MemascendError, UsageError
from memascend.grads.norms import of_all_ranks, summands
from memascend.memory import end_heap_step
from memascend.params import module_hooks
from memascend.params.weight_access import BEFORE_FORWARD, DOORS
from memascend.session.run import CLOSED
from memascend.text import listed, warn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from memascend.distributed.control_plane import Exchange
    from memascend.distributed.sharding import Sharding
    from memascend.grads.gradients import Present
    from memascend.grads.microbatches import Accumulation
    from memascend.grads.norms import Numbers
    from memascend.session.attachment import AddedParameters, Attachment, AutocastWatch
    from memascend.session.materialize import Saving
    from memascend.session.report import Measurements, Report
    from memascend.session.run import Run
    from memascend.session.value_edits import Edits


_log = logging.getLogger("memascend")
# The numbers of a rank without gradients, and of a step whose norm is computed later: every gradient is finite, and the
# sum of squares is 0.
_NOTHING: Numbers = (False, 0)
# The remedy if replicas computed different values in RAM. Replicas compare the values of a commit in the next step.
_REPLICAS_DIFFER = (
    "the last commit has these values, so the replicas' stores differ: move the store of one replica aside and start "
    "all ranks again. They make a new store for this replica from the store of the other replica"
)


@dataclass(kw_only=True, eq=False)
class Session:
    """The run of one offloaded model and optimizer; `OffloadedOptimizer` and the module hooks call its methods."""

    run: Run
    added_parameters: AddedParameters
    watch: AutocastWatch
    edits: Edits
    saving: Saving
    attachment: Attachment
    measurements: Measurements
    accumulation: Accumulation
    max_grad_norm: float | None
    # The option `nonfinite` of `offload()`.
    nonfinite: Literal["raise", "skip", "commit"]
    # Bytes of the model's values. 0 if no values are streamed: then the C library's heap is left as it is.
    heap_bytes: int
    # This rank's shards of the model; None for one process.
    sharding: Sharding | None = None
    # Norm of the last step's gradients; None before the first step.
    grad_norm: float | None = None
    overflowed: bool = False
    # True if the norm of the last committed step is not finite, and the user did not pass nonfinite="commit".
    _is_suspect: bool = False
    # The error for a step that `_drops` dropped. `step` raises the error after the `preparing` block.
    _rejection: UsageError | None = None

    # --- forwards -------------------------------------------------------------------------

    def entered(self, module: torch.nn.Module, *, outermost: bool) -> None:
        """Prepares for a module's forward. `outermost` is True if this thread is inside no other module of the model.

        `Frames.enter` calls this method before it materializes the module's units.
        """
        if self.run.resources.units.device is not None:
            # Only a CUDA device can capture graphs.
            refuse_graphs()
        if outermost:
            self.added_parameters.check_before_forward()
            if self.sharding is not None and torch.is_grad_enabled():
                self.sharding.require_exact()
            self.run.residency.copies.forward_begins()
            if module.training and torch.is_grad_enabled():
                self.run.buffers.may_be_of_step = True
        if torch.is_autocast_enabled(self.watch.device):
            self.watch.look()
        self.run.gradients.entered(module)

    # --- the loop --------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """Runs `loss.backward(**options)`, with the loss multiplied by the loss scale, if any."""
        self.run.resources.require_open()
        scale = self.run.metadata.scale
        with self.run.gradients.scaled():
            (loss * scale.scale if scale.enabled else loss).backward(**options)

    def accumulate(
        self,
        loss_of: Callable[[Any], Any],
        batches: Iterable[Any],
        *,
        scale: float,
        by_layer: bool,
        seeded: bool = True,
    ) -> list[Any]:
        """Computes the losses and gradients of all micro-batches of a step; see `OffloadedOptimizer.accumulate`.

        With `by_layer` and `seeded`, each micro-batch gets its own random seed. With `by_layer` but without `seeded`,
        the first call watches for random numbers. If micro-batches draw them, all calls compute one micro-batch after
        the other; if only a later call draws them, it raises UsageError.
        """
        self.run.resources.require_open()
        if self.run.frames.inside:
            raise UsageError(
                "accumulate() was called inside the model's forward, but accumulate() runs the forward itself: call "
                "it outside the forward"
            )
        if not math.isfinite(scale):
            raise ConfigError(
                f"scale is {scale!r}, but must be a finite number: pass 1 / the number of micro-batches, for example"
            )
        loss_scale = self.run.metadata.scale

        def begin(loss: torch.Tensor) -> None:
            loss = loss if scale == 1.0 else loss * scale
            (loss * loss_scale.scale if loss_scale.enabled else loss).backward()

        grad = torch.is_grad_enabled()
        try:
            with self.run.gradients.scaled():
                return self.accumulation.run(loss_of, batches, begin, by_layer=by_layer, seeded=seeded)
        except BaseException:
            # A Ctrl-C while torch.no_grad() is entered or left may have left gradients disabled: restore the mode.
            torch.set_grad_enabled(grad)
            raise

    def schedule(self, schedulers: Sequence[Any], *, restore: bool) -> None:
        """Attaches schedulers, which each committed step then advances; `restore` loads their stored state."""
        self.run.require_quiet()
        self.run.metadata.schedule.attach(schedulers, restore=restore)

    def step(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Commits the step, or drops it because of its norm (see `_drops`); does nothing if no gradient exists.

        `optimizers`: the optimizers for which the user may have made schedulers.
        """
        self.run.resources.require_open()
        began, backwards = time.perf_counter(), self.run.gradients.backwards.count
        with self.run.resources.store.preparing():
            metadata = self.run.metadata
            metadata.schedule.begin_step(optimizers, commits_position=metadata.commits_position)
            committed = self._prepared_step()
        rejection, self._rejection = self._rejection, None
        if rejection is not None:
            # All ranks have the same norm and raise here, so `preparing` need not notify other ranks.
            raise rejection
        if committed:
            self.run.residency.units.end_step()
            self.measurements.step_ended(began)
            if self.heap_bytes:
                end_heap_step(backwards, self.heap_bytes)
            self.run.resources.warn_if_lost()

    def _prepared_step(self) -> bool:
        """Checks that a step may be made now, and makes it; returns True if the step was committed."""
        device = self.run.resources.units.device
        if device is not None:
            device.require_no_capture()
        if self.run.frames.inside:
            raise UsageError(
                "step() was called inside of the model's forward, which uses the parameters: call it after the forward"
            )
        self.added_parameters.require_none()
        self.run.frames.unwind()
        with self.run.residency.turns.alone():
            return self._step()

    def _step(self) -> bool:
        """Makes and commits the step; returns False if no gradient exists, or if `_drops` dropped the step."""
        run, gradients, metadata = self.run, self.run.gradients, self.run.metadata
        engine = run.resources.engine
        present = self._present()
        own = gradients.measured(present) if present and self._norm_comes_first else _NOTHING
        is_any, (bad, squares) = self._of_all_ranks(bool(present), own)
        if not is_any:
            return False
        factor = 1.0
        if self._norm_comes_first:
            norm = gradients.norm(squares)
            if self._drops(present, norm, bad):
                return False
            if self.max_grad_norm is not None:
                # With these arguments in this order, min() returns NaN for a NaN norm. So all gradients become NaN, as
                # under torch's clipping.
                factor = min(self.max_grad_norm / (norm + 1e-6), 1.0)
                # Round to fp32, in which the kernels multiply.
                factor = torch.tensor(factor, dtype=torch.float32, device="cpu").item()
        gradients.update_all(present, factor)
        of_commit = None if self._norm_comes_first else self._norm(present)
        if of_commit is not None and self._norm_precedes_commit:
            if self.figures is not None:
                self.figures.all_gather("the norm", None)
            if self._drops(present, of_commit()):
                return False
            of_commit = None
        step = metadata.step + 1
        run.buffers.stage(engine, step)
        updated = [name for name, kept in gradients.by_name.items() if kept.state.staged]
        give_back = metadata.arithmetic.adopt(updated, engine.finish)
        before, position = metadata.scale.state(), metadata.position
        blocks, metadata.blocks = metadata.blocks, 0
        metadata.scale.update(overflowed=False)

        def failed() -> None:
            metadata.schedule.take_back()
            metadata.scale.load(before)
            metadata.set_position(position)
            metadata.blocks = blocks
            give_back()

        with run.committing(lambda: self._committed(present, of_commit), failed):
            metadata.schedule.advance()
            metadata.update_position()
            engine.commit(step, user_state=metadata.user_state, hyperparameters=metadata.hyperparameters())
        decision = gradients.loop.decide_mode()
        if decision:
            _log.info(decision)
        return True

    @property
    def figures(self) -> Exchange | None:
        """The object that exchanges figures between the ranks of the run; None for one process."""
        return None if self.sharding is None else self.sharding.exchange

    def _of_all_ranks(self, present: bool, own: Numbers) -> tuple[bool, Numbers]:
        """Returns whether any rank has gradients, and the `Numbers` of the gradients of all ranks.

        A rank may have no gradients because it has no rows of the parameters that were used. The exchange also sends
        the figures of reports, and checks that all ranks made the same gathers and reductions, and that replicas
        computed with the same values.
        """
        if self.sharding is None or self.figures is None:
            return present, own
        collectives = self.sharding.collectives
        assert collectives is not None
        is_any = self.figures.add([present])
        sums = self.figures.add(summands(own))
        traffic = self.figures.add(self.measurements.own_figures())
        rows = collectives.take_row_digest()
        apart = self.figures.add([self.run.resources.store.shared.summand_of(rows)])
        collectives.require_same(self.figures.all_gather("the gradients", collectives.take_checksum()))
        if any(apart):
            self.run.resources.store.shared.reject(rows, _REPLICAS_DIFFER)
        self.measurements.note_all_ranks(self.figures.size, traffic)
        return any(is_any), of_all_ranks(own, sums, self.figures)

    def _drops(self, present: Present, norm: float, bad: bool = False) -> bool:
        """Decides whether to drop the step because of its norm; if so, drops its updates and returns True.

        The gradients stay in `p.grad`. Under `nonfinite="raise"`, sets `_rejection`, unless a loss scale drops the
        step. `bad`, which only a loss scale needs, is True if a gradient is not finite. The norm may overflow although
        all gradients are finite.
        """
        gradients, scale = self.run.gradients, self.run.metadata.scale
        self.grad_norm = norm
        is_scaled = scale.enabled and bad
        is_bad = not math.isfinite(norm)
        self.overflowed = is_scaled or (is_bad and self.nonfinite == "skip")
        if is_bad and not is_scaled and self.nonfinite == "raise":
            self._rejection = UsageError(self._nonfinite_message(norm, gradients.nonfinite(present)))
        elif not self.overflowed:
            return False
        gradients.skip()
        if is_scaled:
            scale.update(overflowed=True)
        return True

    def _nonfinite_message(self, norm: float, names: Sequence[str]) -> str:
        """Returns the error text for a norm that is not finite; `names` are the parameters with such gradients."""
        step = self.run.metadata.step
        found = f" (not finite: {listed(names)})" if names else ""
        where = "weights and optimizer state" if self.run.resources.temporary else "the store and the weights"
        return (
            f"step {step + 1} was not committed: the norm of its gradients is {norm}{found}. Nothing is lost: {where} "
            f"are those of step {step}. Look for the cause, such as a batch or the learning rate, call zero_grad() and "
            'continue. Or pass nonfinite="skip" to offload() to drop such steps, or nonfinite="commit" to update as '
            "torch does"
        )

    def _norm(self, present: Present) -> Callable[[], float]:
        """Returns a function that computes the norm of this step's gradients.

        The function uses the measures of the gradients that `update_all` has used, and reads no gradient from storage.
        With several ranks, it may be called only after the next message of `figures`, which adds the sums of all ranks.
        """
        gradients, figures = self.run.gradients, self.figures
        if figures is None:
            return lambda: gradients.norm(gradients.norms.of(present)[1])
        own = gradients.norms.of(present)
        sums = figures.add(summands(own))
        return lambda: gradients.norm(of_all_ranks(own, sums, figures)[1])

    def _present(self) -> Present:
        """Returns the present gradients; raises UsageError if step() cannot use them, or would not be exact."""
        run, gradients, copies = self.run, self.run.gradients, self.run.residency.copies
        present = gradients.present()
        copies.require_unwritten()
        copies.require_followed()
        if not present:
            return present
        if not gradients.is_staged():
            raise UsageError(
                "step() was called again with gradients that the last step() has already used or dropped: call "
                "zero_grad() after each step(), and backward() before the next step()"
            )
        run.residency.require_idle("step()")
        run.buffers.require_same_kinds()
        self._refuse_written()
        copies.require_released({gradient.name for gradient, _ in present})
        return present

    @property
    def _norm_comes_first(self) -> bool:
        """True if `_step` measures all gradients before it calls `update_all`."""
        return self.run.metadata.scale.enabled or self.max_grad_norm is not None

    @property
    def _norm_precedes_commit(self) -> bool:
        """True if `_step` computes the norm before the commit, although the updates do not need it.

        `_step` does so if gradients were kept until step(). It must do so under `nonfinite="skip"`, and for a trainer,
        which logs the norm of each committed step even if the process is killed after the commit.
        """
        kept = self.run.gradients.loop.mode != "fused"
        return kept or self.run.metadata.commits_position or self.nonfinite == "skip"

    def _committed(self, present: Present, norm: Callable[[], float] | None) -> None:
        """After the store's commit, brings position, norm, buffers and cached values of the run up to date."""
        self.run.metadata.advance()
        self.overflowed = False
        if norm is not None:
            self.grad_norm = norm()
        assert self.grad_norm is not None, "a step that is committed has a norm"
        before, self._is_suspect = self._is_suspect, self.nonfinite != "commit" and not math.isfinite(self.grad_norm)
        if self._is_suspect and not before:
            self._warn_of_norm()
        self.run.resources.values_changed()
        self.run.buffers.committed()
        self.run.changed(self.run.gradients.committed(present))

    def _warn_of_norm(self) -> None:
        step, is_gone = self.run.metadata.step, self.run.resources.temporary
        back = f' To go back to step {step - 1}, resume with existing="previous" now (needs durability="step").'
        warn(
            f"step {step} was committed, although the norm of its gradients is {self.grad_norm}, so weights may not be "
            f'finite: gradients="fused" knows the norm only after the updates.{"" if is_gone else back} Pass '
            'max_grad_norm=, gradients="ssd" or nonfinite="skip" to offload() to prevent such commits, or '
            'nonfinite="commit" to allow them without a warning'
        )

    def _refuse_written(self) -> None:
        """Rejects the step if code wrote in place to values with which the model computed."""
        self.run.residency.units.find_written(self.run.residency.units.all)
        if self.run.residency.units.written:
            names = ", ".join(sorted(self.run.residency.units.written))
            raise UsageError(
                f"the values of {names} were written to in place, in a forward or through a view from a forward, but "
                f"storage does not have this change. Call zero_grad(), and then {DOORS} ({BEFORE_FORWARD})"
            )

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Drops the gradients and their staged updates, or zeroes the gradients with `set_to_none=False`."""
        if self.run.resources.closed:
            return
        self.run.resources.process.require_here()
        self.run.frames.unwind()
        if self.run.gradients.is_staged():
            # Forget in-place writes of this step's forward: only the gradients that this call drops or zeroes come from
            # the written values.
            self.run.residency.units.written.clear()
        if set_to_none:
            self.run.discard()
        else:
            self.run.gradients.zero()

    # --- state and report ----------------------------------------------------------------

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a copy of a parameter's optimizer state, read from storage."""
        self.run.resources.require_open()
        rows = parameter if self.sharding is None else self.sharding.local_of(parameter)
        for kept in self.run.gradients.by_name.values():
            if kept.place.parameter is rows:
                return kept.rule.state(*self.run.resources.store.read(kept.name), kept.step)
        raise ConfigError(
            "this tensor is not a parameter that the optimizer updates, so it has no state: pass a parameter of the "
            "optimizer"
        )

    def report(self) -> Report:
        """Returns the figures since `offload()`; after close(), the final figures."""
        self.run.resources.process.require_here()
        return self.measurements.report()

    # --- the end -------------------------------------------------------------------------

    def close(self) -> None:
        """Commits changed buffers and options (`_commit_rest`), drops other uncommitted changes, frees all resources.

        Does nothing in a forked child, and in a second call.
        """
        if self.run.resources.closed or self.run.resources.process.is_elsewhere:
            return
        self.run.frames.unwind(all_of_it=True)
        module_hooks.drain_autograd_queue()
        with contextlib.ExitStack() as afterwards:
            afterwards.callback(self._close)
            # While an exception is handled, an error of this check would hide the exception.
            if sys.exc_info()[0] is None:
                self.run.residency.copies.require_unwritten()
            self._commit_rest()
            self._catch_up()

    def _commit_rest(self) -> None:
        """Commits persistent buffers and options of groups that changed since the last step.

        It commits nothing for a temporary store, and with several ranks. It commits nothing while an exception is
        handled, since a resumed loop repeats the interrupted step. It commits nothing if `_is_suspect`, since the
        commit would overwrite the commit before the last step.
        """
        run, metadata, store = self.run, self.run.metadata, self.run.resources.store
        if run.resources.temporary or sys.exc_info()[0] is not None or self._is_suspect:
            return
        has_buffers = self._takes_buffers()
        if self.figures is not None or not (has_buffers or metadata.has_new_options):
            # A commit needs all ranks, and each rank closes at its own time.
            return
        run.gradients.skip()
        engine = run.resources.engine
        if has_buffers:
            run.buffers.stage(engine, metadata.step)
        # The stored `user_state` stays: a value that was set after the last step belongs to the next step.
        hyperparameters = metadata.hyperparameters() if metadata.has_new_options else None
        engine.commit(metadata.step, user_state=store.user_state, hyperparameters=hyperparameters)

    def _catch_up(self) -> None:
        """Makes the deferred updates of the last step, so that a resume need not replay them.

        If the log has the gradients of these updates, a resume can make the updates instead. So with a log, this method
        logs a MemascendError instead of raising it. With a log, it makes no updates while an exception is handled, and
        none if `_is_suspect`: the updates would overwrite the commit before the last step.
        """
        store, engine = self.run.resources.store, self.run.resources.engine
        if not engine.is_behind or self.run.resources.temporary:
            return
        is_logged = store.info()["log_steps"] > 0
        if is_logged and (sys.exc_info()[0] is not None or self._is_suspect):
            return
        try:
            engine.discard()
            self.run.gradients.catch_up()
        except MemascendError as error:
            if not is_logged:
                raise
            _log.info(
                "deferred updates of the last step were not made. Nothing is lost: the store's gradient log has their "
                "gradients, and a resume makes the updates (%s)",
                error,
            )

    def _takes_buffers(self) -> bool:
        """True if close() commits the buffers. Warns if changes of buffers are lost, unless a staged step made them."""
        gradients, buffers = self.run.gradients, self.run.buffers
        is_of_step = buffers.may_be_of_step or gradients.backwards.count > 0
        if is_of_step and gradients.is_staged():
            return False
        try:
            if not buffers.differ(self.run.resources.store):
                return False
            if self.figures is not None:
                why = (
                    "each rank closes at its own time. To keep them, enter and leave materialized(model, "
                    "modify=True) on all ranks before close()"
                )
            elif is_of_step:
                why = (
                    "a forward ran without a step() after it, and a resume repeats this forward. To keep them, call "
                    "save() before close()"
                )
            else:
                return True
        except MemascendError as error:
            why = str(error)
        warn(f"close() does not keep changes of the model's buffers since the last step: {why}")
        return False

    def _close(self) -> None:
        """Detaches the model and frees all resources; runs even if the last commits of `close` failed."""
        with contextlib.suppress(MemascendError):
            self.measurements.close()
        self.attachment.leave()
        self.run.gradients.unwatch()
        self.run.residency.close(CLOSED)
        self.run.resources.close()
