"""Commits a Trainer's position with each step, and resumes at this position in a new process.

[Note: the repeated step] A resume enters the Trainer's own loop at the last committed step N and repeats step N without
computing. The repeated step gets empty batches and zero losses, its events before `step()` are muted, and its `step()`
restores the values of the commit. After the repeated step, the Trainer itself runs everything that follows a commit, in
its usual order: the scheduler, callbacks, a line of the log, an evaluation, a checkpoint, the end of an epoch or of the
training.

- In step N, the callbacks and computations before `step()` do not run again. The code after `step()` may run again.
- In `on_train_begin`, the Trainer has the state of a checkpoint at step N. In `on_epoch_begin`, the Trainer has the
  state at the start of the resumed epoch. If callbacks change weights in these two events, `session.edits.repeat()`
  drops the changes, because the store already has them.
- When a training ends, one more commit at the last step records the end. The next start then repeats no step, unless
  the Trainer's arguments make the training longer.
"""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule

from memascend.checkpoint.files import Names
from memascend.checkpoint.reader import identity_of
from memascend.checkpoint.weights import WeightFiles
from memascend.errors import ConfigError, UsageError
from memascend.optim.shared import options_of, plain, put, restored, storable
from memascend.session import schedule
from memascend.session.optimizer import session_of
from memascend.text import replaced
from memascend.trainer import names
from memascend.trainer.by_layer import Steps
from memascend.trainer.callback import counted_in, is_streamed
from memascend.trainer.description import require_same, require_same_arguments
from memascend.trainer.feed import Feed
from memascend.trainer.kept import Watch
from memascend.trainer.position import RandomNumbers, TrainerSnapshot, decoded, encoded, numbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from memascend.session.optimizer import OffloadedOptimizer
    from memascend.session.session import Session
    from memascend.trainer.display import Display

_log = logging.getLogger("memascend")
# The smallest number of steps whose average time is used to predict the time of later steps.
_FEW_STEPS = 3
# The value of `resume_from_checkpoint` that the Trainer's loop gets. The loop only tests whether the argument is set.
_FROM_STORE = "the store"


class Resume:
    """Replaces methods of a Trainer object, so that the Trainer resumes at the store's position."""

    def __init__(self, trainer: Any, run: dict[str, Any], *, exact_norm: bool, keep: Sequence[str] = ()) -> None:
        """Replaces the methods; `begin()` connects the offloaded optimizer later.

        `run`: the description of the run; each commit stores it. `exact_norm`: True if `step()` clips, so that the
        Trainer logs the norm that `step()` computed. `keep`: names of attributes of the Trainer that each commit
        stores.
        """
        self._trainer, self.run, self.clips_exactly = trainer, run, exact_norm
        self._figures = TrainerSnapshot(trainer, keep)
        self._watch = Watch(trainer, keep)
        self._optimizer: OffloadedOptimizer | None = None
        self._late: Callable[[], object] | None = None
        # The argument `resume_from_checkpoint` that the user passed to train().
        self._wanted: Any = None
        # The position to resume at, as JSON. None in a new training, and None again after the repeated step.
        self._kept: Any = None
        # True while the Trainer's loop repeats a step (see [Note: the repeated step]).
        self._repeats = False
        # The path of the best checkpoint if its weights were loaded into the store, otherwise None.
        self._best: str | None = None
        self._feed: Feed | None = None
        # The number of the epoch, the number of its batches before the current step, and the number of batches in the
        # current step.
        self._epoch, self._passed, self._group = 0, 0, 0
        # `_batches`: the number of batches in the epoch. `_begun`: `global_step` and `epoch` of TrainerState when the
        # epoch began.
        self._batches, self._begun = 0, (0, 0.0)
        # The number of the epoch that the next `on_epoch_begin` event begins.
        self._next_epoch = 0
        # If the user makes an ended training longer: the lines that the training logged at its earlier end.
        # `_add_lines()` adds these lines to the log.
        self._lines: list[dict[str, Any]] = []
        # The result of `TrainerSnapshot.taken()` after the last step's events. The entry "blocks" has the number of
        # `session.edits` blocks that were committed before this moment.
        self._ended: dict[str, Any] = {}
        # The gradient norm of the current step, for the log.
        self._norm: float | None = None
        self._steps = None if trainer.is_fsdp_enabled else Steps(trainer)
        self._start, self._seconds_before, self._written_before = 0.0, 0.0, 0
        # The average seconds of a step in earlier processes; None if these processes trained fewer than `_FEW_STEPS`
        # steps.
        self.seconds_of_step: float | None = None
        self._trains = False
        self.display: Display | None = None
        self._own: dict[str, Callable[..., Any]] = {}
        for name in names.METHODS:
            if hasattr(self, name):
                self._own[name] = getattr(trainer, name)
                setattr(trainer, name, getattr(self, name))
        handler = trainer.callback_handler
        self._own["on_epoch_begin"], handler.on_epoch_begin = handler.on_epoch_begin, self._on_epoch_begin

    @property
    def _session(self) -> Session:
        assert self._optimizer is not None
        return session_of(self._optimizer)

    def begin(self, optimizer: OffloadedOptimizer, kept: dict[str, Any] | None) -> None:
        """Connects the offloaded optimizer. `kept`: the position to resume at; None for a new training."""
        self._optimizer, self._kept = optimizer, kept
        if kept is not None:
            self._seconds_before, self._written_before = kept["seconds"], kept.get("written", 0)
            self.seconds_of_step = kept["seconds"] / kept["step"] if kept["step"] >= _FEW_STEPS else None
        self._best = None if kept is None else kept.get("best")
        session = self._session
        session.edits.repeat(session.run.metadata.blocks if kept is None else None)

    @property
    def written(self) -> int:
        """The bytes that this and earlier processes of this training have written, without the first values."""
        return self._written_before + counted_in(self._session.report())[1]

    def begin_late(self, begin: Callable[[], object]) -> None:
        """Makes `train()` call `begin` after `train()` has sharded the model. `begin` must call `self.begin()`."""
        self._late = begin

    def position(self) -> str:
        """Returns the encoded position after the current step. `session.step()` calls this method during the commit."""
        assert self._feed is not None
        assert self._optimizer is not None
        if self.clips_exactly:
            self._norm = self._optimizer.grad_norm
        self._watch.look()
        done = self._passed + self._group
        taken = {
            **self._figures.taken(),
            "run": self.run,
            "step": self._trainer.state.global_step + 1,
            "epoch": self._epoch,
            "passed": self._passed,
            "group": self._group,
            "begun": self._begun,
            "epoch_after": self._epoch + done / max(1, self._batches),
            "ends_epoch": done >= self._batches,
            "accumulation": self._trainer.args.gradient_accumulation_steps,
            "feed": self._feed.taken(),
            "random": RandomNumbers.now().to_json(),
            "scheduler": plain(self._trainer.lr_scheduler.state_dict()),
            "groups": [options_of(group) for group in self._optimizer.param_groups],
            "norm": self._norm,
            "seconds": self._seconds_before + time.monotonic() - self._start,
            "written": self.written,
        }
        return encoded(taken)

    # --- the beginning of a training ------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *given: Any, **named: Any) -> Any:
        """Trains; resumes at the store's position even if `resume_from_checkpoint` is given.

        Raises:
            UsageError: `train()` was called before, the Trainer's arguments were changed after
                `memascend.trainer.offload()`, or the checkpoint belongs to another training or to another position.
            ConfigError: a commit cannot store the scheduler, or random numbers of the data; or the run or its data
                differs from the stored run.
        """
        if self._trains:
            raise UsageError(
                "train() was called twice, but a store holds only one training. To continue after an interrupt, make a "
                "new Trainer and call memascend.trainer.offload() with the same storage=. For another training, pass "
                "another storage="
            )
        require_same_arguments(self.run, self._trainer)
        if resume_from_checkpoint and self._late is None:
            self._require_here(resume_from_checkpoint)
        self._trains, self._wanted = True, resume_from_checkpoint
        try:
            result = self._own["train"](None, *given, **named)
        except KeyboardInterrupt as stop:
            if self._optimizer is not None:
                # Python prints a note as the last line of the traceback.
                stop.add_note(
                    f"stopped after step {self._optimizer.steps}, which is committed: start the same script again to "
                    'continue, with existing="resume" (the default)'
                )
            raise
        self._end_training()
        if self.display is not None:
            self.display.end()
        return result

    def _require_here(self, folder: Any) -> None:
        """Rejects a checkpoint of another training or position.

        At a resume, accepts the newest checkpoint if it has an earlier step of the store's training, because the store
        may have committed more steps after this checkpoint. Also accepts True if `output_dir` has no checkpoint.
        """
        found: Any = names.newest_checkpoint(self._trainer.args.output_dir) if folder is True else folder
        metadata = self._session.run.metadata
        identity = None if found is None else identity_of(Path(found))
        if metadata.is_at(identity):
            return
        if self._kept is not None:
            here = metadata.identity()
            is_newest = found is None or names.is_newest_checkpoint(found)
            is_before = identity is not None and identity["store"] == here["store"] and identity["step"] < here["step"]
            if is_newest and (found is None or is_before):
                _log.warning(
                    "the store has more steps than the newest checkpoint (%s), so the training continues after the "
                    "store's step %d",
                    found or "no checkpoint found",
                    here["step"],
                )
                return
        raise UsageError(
            f"the store has this training after step {metadata.step}, but resume_from_checkpoint={folder!r} gives no "
            "checkpoint of this training at this step. To continue after the store's step, call train() without "
            'resume_from_checkpoint. To start from a checkpoint, pass existing="replace" and checkpoint= to '
            "memascend.trainer.offload()"
        )

    def create_optimizer(self, *given: Any, **named: Any) -> Any:
        """Returns the Trainer's optimizer. Makes an optimizer only if none is offloaded yet."""
        if self._optimizer is None:
            return self._own["create_optimizer"](*given, **named)
        return self._trainer.optimizer

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Raises UsageError, because a store holds only one training."""
        raise UsageError(
            "hyperparameter_search() makes a new model for each trial, but a store holds only one model. Start one "
            "process per trial, each with a different storage="
        )

    def get_train_dataloader(self) -> Any:
        """Returns the Trainer's data loader. The first loader within `train()` reads its batches through a `Feed`."""
        loader = self._own["get_train_dataloader"]()
        if not self._trains or self._feed is not None:
            return loader
        base = getattr(loader, "base_dataloader", None)
        self._feed = Feed(loader if base is None else base)
        if base is None:
            return self._feed
        loader.base_dataloader = self._feed
        return loader

    def _init_training_state(self, *given: Any, **named: Any) -> Any:
        """Restores TrainerState at a resume. Returns the first epoch, and the number of its batches to skip."""
        found = self._own["_init_training_state"](*given, **named)
        if self._kept is None:
            return found
        if self._trainer.state.max_steps < self._kept["step"]:
            raise ConfigError(
                f"the store has this training after step {self._kept['step']}, but the arguments end it after step "
                f"{self._trainer.state.max_steps}. Set at least as many steps or epochs as before"
            )
        self._install()
        # An ended training has no epochs left.
        self._next_epoch = self._trainer.state.num_train_epochs if self._has_ended() else self._kept["epoch"]
        return self._next_epoch, self._kept["passed"]

    def _install(self) -> None:
        """Sets TrainerState to the values that a checkpoint at the last committed step would have."""
        self._figures.install(self._known())
        state, after = self._trainer.state, self._kept.get("epoch_after")
        state.global_step = self._kept["step"]
        if after is not None:
            state.epoch = after

    def _has_ended(self) -> bool:
        """True if the stored training has ended, and the Trainer's arguments do not make the training longer."""
        ended = self._kept.get("ended")
        if ended is None:
            return self._best is not None
        return bool(self._trainer.state.max_steps <= ended["steps"])

    def _known(self) -> dict[str, Any]:
        """Returns the stored values of the training's end if `_has_ended()`, otherwise of the last step."""
        kept: dict[str, Any] = self._kept
        if "ended" not in kept or not self._has_ended():
            return kept
        return {**kept, **kept["ended"], "log_history": [*kept["log_history"], *kept["ended"]["lines"]]}

    def _prepare_for_training(self, *given: Any, **named: Any) -> Any:
        """Offloads the sharded model under FSDP2. At a resume, restores the Trainer's scheduler.

        Raises:
            ConfigError: a commit cannot store the scheduler, or the run differs from the stored run.
            UsageError: under FSDP2, the checkpoint belongs to another training or to another position.
            MemascendError: under FSDP2, `memascend.offload()` failed.
        """
        prepared = self._own["_prepare_for_training"](*given, **named)
        if self._late is not None:
            self._late()
            if self._wanted:
                self._require_here(self._wanted)
            if self._kept is not None:
                self._install()
        scheduler = self._trainer.lr_scheduler
        if not storable(scheduler.state_dict()):
            raise ConfigError(
                f"the state of {type(scheduler).__name__} has objects that a commit cannot store: let the scheduler's "
                "state_dict() return only numbers, texts, lists and dicts"
            )
        self.run["schedule"] = schedule.described(scheduler)
        if self._kept is not None:
            # Compare again, because `run` also describes the schedule now.
            require_same(self._kept, self.run, self._trainer)
            # The scheduler's constructor changed the learning rates, so restore the learning rates, too.
            self._restore_schedule()
            if schedule.steps_alone(scheduler):
                # A commit stores the scheduler before the Trainer advances the scheduler. Advance the restored
                # scheduler here, so that callbacks see the scheduler as in a checkpoint of the same step.
                scheduler.step()
        self._start = time.monotonic()
        return prepared

    def _restore_schedule(self) -> None:
        """Sets the scheduler and the options of the groups to their values in the last commit."""
        assert self._optimizer is not None
        scheduler = self._trainer.lr_scheduler
        # Without this attribute, torch would warn that the scheduler is advanced before the optimizer's first step.
        scheduler.optimizer._opt_called = True  # noqa: SLF001
        scheduler.load_state_dict(restored(self._kept["scheduler"], scheduler.state_dict()))
        for group, options in zip(self._optimizer.param_groups, self._kept["groups"], strict=True):
            for name, value in options.items():
                put(group, name, restored(value, group.get(name)))

    def begin_training(self) -> None:
        """At a resume, restores sums and callbacks.

        The first callback, `OffloadCallback`, calls this method in `on_train_begin`.
        """
        if self._kept is not None:
            # Do not restore TrainerControl: a restored `should_training_stop` would end the loop before the repeated
            # step.
            self._figures.restore(self._known(), control=False)
            self._install()

    def _load_rng_state(self, *given: Any, **named: Any) -> None:
        """Loads the random states of a checkpoint.

        Does nothing at a resume: if a step is repeated, `_repeated()` restores the random states of the commit.
        """
        if self._kept is None:
            self._own["_load_rng_state"](*given, **named)

    # --- an epoch -----------------------------------------------------------------------------------

    def _on_epoch_begin(self, args: Any, state: Any, control: Any, **named: Any) -> Any:
        """Fires `on_epoch_begin` of the resumed epoch with the TrainerState of that epoch's start.

        Mutes the events of epochs that have finished.
        """
        epoch, self._next_epoch = self._next_epoch, self._next_epoch + 1
        kept, own = self._kept, self._own["on_epoch_begin"]
        if kept is None:
            self._begun = state.global_step, state.epoch
            return own(args, state, control, **named)
        if epoch < kept["epoch"] or kept.get("ends_epoch") or self._has_ended():
            return control
        now = state.global_step, state.epoch
        self._begun = state.global_step, state.epoch = tuple(kept.get("begun", now))
        try:
            return own(args, state, control, **named)
        finally:
            state.global_step, state.epoch = now

    def _run_epoch(self, **named: Any) -> None:
        """Runs an epoch.

        Skips epochs before the resumed epoch; in the resumed epoch, repeats the last committed step.
        """
        assert self._feed is not None
        self._epoch, self._passed, self._group = named["epoch"], 0, 0
        self._batches = named["steps_in_epoch"]
        kept, run = self._kept, self._own["_run_epoch"]
        if kept is not None and self._epoch > kept["epoch"]:
            # A callback ended the resumed epoch before the repeated step.
            self._go_on(0)
            kept = None
        if kept is None:
            run(**named)
            return
        if self._epoch < kept["epoch"] or self._has_ended():
            # Under FSDP2 the loop chose its first epoch before the position was known, so skip finished epochs here.
            return
        self._passed, self._group = kept["passed"], kept["group"]
        # A callback may set gradient_accumulation_steps in `on_epoch_begin`. This event is muted if the repeated step
        # is the last step of its epoch, so set the committed value here.
        args = self._trainer.args
        args.gradient_accumulation_steps = kept.get("accumulation", args.gradient_accumulation_steps)
        self._feed.resume(kept["feed"], self._passed + self._group)
        named |= {"resume_from_checkpoint": _FROM_STORE, "epochs_trained": self._epoch}
        with self._repeating():
            run(**named | {"steps_trained_in_current_epoch": self._passed})
        # If the loop fetched no batch after the repeated step, drop the position that the feed still has.
        self._feed.forget_position()

    @contextlib.contextmanager
    def _repeating(self) -> Iterator[None]:
        """Inside the block, makes the first step of the Trainer's loop repeat the last committed step.

        Also replaces the function by which the loop skips batches, because `Feed` skips the batches.
        """
        module: Any = names.transformers_trainer
        with replaced(module, names.SKIP, lambda loader, _: loader), contextlib.ExitStack() as stands:
            # `_repeated()` closes `stands`, so that events are muted only in the first step.
            for event in names.BEFORE_STEP:
                mute = replaced(self._trainer.callback_handler, event, lambda _args, _state, control, **_: control)
                stands.enter_context(mute)
            step = replaced(self._trainer.optimizer, "step", lambda *_, **__: self._repeated(stands))
            stands.enter_context(step)
            self._repeats = True
            try:
                yield
            finally:
                self._repeats = False

    def _repeated(self, stands: contextlib.ExitStack) -> None:
        """Replaces `optimizer.step()` in the repeated step: restores the values of the commit."""
        stands.close()
        kept = self._kept
        self._figures.restore(kept)
        # The loop adds 1 to `global_step` after this step.
        self._trainer.state.global_step = kept["step"] - 1
        self._norm = kept["norm"]
        self._restore_schedule()
        ended = kept.get("ended", {})
        self._lines = [*ended.get("lines", ()), *ended.get("summary", ())]
        self._go_on(ended.get("blocks", self._session.run.metadata.blocks))
        if kept["feed"]["fetched"]:
            assert self._feed is not None
            self._feed.restore_generators()
        RandomNumbers.of(kept["random"]).restore()

    def _go_on(self, blocks: int) -> None:
        """Ends the resume.

        Makes `session.edits` drop its next `blocks` blocks, because the last commit has their changes.
        """
        self._repeats, self._kept = False, None
        self._session.edits.repeat(blocks)

    # --- a step -------------------------------------------------------------------------------------

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        """Returns the batches of a step and their number of items. Returns empty batches for the repeated step."""
        if self._repeats:
            assert self._feed is not None
            if self._kept["feed"]["fetched"]:
                # Move the feed now: `_repeated()` then restores the program's generators, from which an evaluation
                # after this step may draw.
                self._feed.go_on()
            return [{} for _ in range(self._group)], None
        self._add_lines()
        found = self._own["get_batch_samples"](*given, **named)
        self._norm = None
        self._passed += self._group
        self._group = len(found[0])
        if self.display is not None:
            self.display.count(found[0])
        if self._steps is not None:
            self._steps.begin(found[0])
        return found

    def training_step(self, *given: Any, **named: Any) -> Any:
        """Returns the loss of a micro-batch; returns zero in the repeated step."""
        if self._repeats:
            # Switch the model to training mode, as the Trainer's own training_step() does. TRL's log() chooses metrics
            # by `model.training`.
            self._trainer.model.train()
            return torch.zeros((), device=self._trainer.args.device)
        own = self._own["training_step"]
        return own(*given, **named) if self._steps is None else self._steps.training_step(own, *given, **named)

    def floating_point_ops(self, *given: Any, **named: Any) -> Any:
        """Returns the number of floating-point operations of a batch; returns 0 in the repeated step."""
        return 0 if self._repeats else self._own["floating_point_ops"](*given, **named)

    def _track_num_input_tokens(self, *given: Any, **named: Any) -> None:
        if not self._repeats:
            self._own["_track_num_input_tokens"](*given, **named)

    def _clip_grad_norm(self, *given: Any, **named: Any) -> Any:
        """Clips with the Trainer's own code. Does nothing if `step()` clips, and in the repeated step."""
        return None if self._repeats or self.clips_exactly else self._own["_clip_grad_norm"](*given, **named)

    def _get_grad_norm(self, *given: Any, **named: Any) -> Any:
        """Returns the gradient norm for the log; None in the repeated step, or if `step()` computes the norm later."""
        if self._repeats or self.clips_exactly:
            return None
        found = self._own["_get_grad_norm"](*given, **named)
        self._norm = float(found)
        return found

    def _maybe_log_save_evaluate(self, losses: Any, norm: Any, *given: Any, **named: Any) -> None:
        norm = self._norm if norm is None else norm
        self._own["_maybe_log_save_evaluate"](losses, norm, *given, **named)

    def _add_lines(self) -> None:
        """Adds `_lines` to the log.

        A training that is made longer keeps the lines that it logged at its earlier end.
        """
        lines, self._lines = self._lines, []
        log = self._trainer.state.log_history
        again = {(line.get("step"), *line) for line in log}
        log += [line for line in lines if (line.get("step"), *line) not in again]

    # --- the end of a training ----------------------------------------------------------------------

    def _finalize_training(self, trial: Any, samples: Any, start: float) -> Any:
        """Records the Trainer's values after the last step's events.

        Then runs the Trainer's own `_finalize_training()`.
        """
        metadata, kept = self._session.run.metadata, self._kept
        blocks = metadata.blocks
        if kept is not None:
            # No step was repeated, because the training had ended or a callback stopped it. The events of the last step
            # do not run again in this process, so drop only the blocks that were committed after these events.
            blocks = kept.get("ended", {}).get("blocks", 0)
            self._go_on(metadata.blocks - blocks)
        # Record the values before the Trainer reports the end. Each start of an ended training reports the end again.
        self._ended = {**self._figures.taken(), "blocks": blocks}
        # Subtract the seconds of earlier processes, so that the Trainer reports the time of all processes of the run.
        return self._own["_finalize_training"](trial, samples, start - self._seconds_before)

    def _end_training(self) -> None:
        """Commits the end of the training, unless the store already has it.

        Does nothing if a callback stopped the training before its last step, or if the store is closed.
        """
        session, state = self._session, self._trainer.state
        position = session.run.metadata.position
        is_over = state.global_step >= state.max_steps or not self._trainer.control.should_training_stop
        if not is_over or position is None or session.run.resources.closed:
            return
        if decoded(position, "the store").get("ended", {}).get("steps") != state.max_steps:
            with session.edits.load(self._position_of_end()):
                pass

    def _position_of_end(self, **others: Any) -> str:
        """Returns the last commit's position with a new entry "ended": the values after the last step's events."""
        metadata = self._session.run.metadata
        assert metadata.position is not None
        kept = decoded(metadata.position, "the store")
        ended = {name: value for name, value in self._ended.items() if name not in ("log_history", "left_out")}
        ended["lines"] = [line for line in self._ended["log_history"] if line.get("step", 0) >= kept["step"]]
        log = self._trainer.state.log_history
        ended["summary"] = [numbers(line) for line in log[-2:] if "train_runtime" in line]
        return encoded({**kept, "ended": {**ended, "steps": self._trainer.state.max_steps}, **others})

    # --- files that all ranks write together --------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model.

        Under FSDP2, streams a plain transformers model from the store, because the Trainer would gather the whole model
        in rank 0's memory.
        """
        trainer = self._trainer
        if not (trainer.is_fsdp_enabled and self._optimizer is not None and self._is_streamed()):
            self._own["save_model"](output_dir, _internal_call)
            return
        folder, model = Path(output_dir or trainer.args.output_dir), trainer.model
        if _internal_call and not trainer.args.save_only_model:
            self._session.saving.save(folder, among_others=True)
        else:
            is_first = trainer.is_world_process_zero()
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.glob("model*.safetensors*"):
                    old.unlink()
            self._session.saving.save_weights(folder if is_first else None)
        if trainer.args.should_save:
            # Let the Trainer write its other files (tokenizer, arguments), but no weights.
            with replaced(model, "save_pretrained", lambda *_, **__: None):
                trainer._save(str(folder), state_dict={})  # noqa: SLF001
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _is_streamed(self) -> bool:
        session = self._session
        return not session.run.resources.closed and is_streamed(self._trainer.model, session)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Writes optimizer state and scheduler.

        Under FSDP2, streams the optimizer state, because torch would gather the whole state in memory. If the model is
        streamed, `save_model()` has already written the optimizer state.
        """
        trainer = self._trainer
        if not trainer.is_fsdp_enabled:
            self._own["_save_optimizer_and_scheduler"](output_dir)
            return
        if not self._is_streamed():
            self._session.saving.save(output_dir, among_others=True)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, names.SCHEDULER))

    def _load_best_model(self) -> None:
        """Loads the best checkpoint into the store, in one commit. The position of this commit names the checkpoint."""
        if self._best is not None:
            # The store already has the weights of the best checkpoint.
            return
        trainer, session = self._trainer, self._session
        best = str(trainer.state.best_model_checkpoint)
        if not Path(best).is_dir():
            _log.warning(
                "the best checkpoint, %s, does not exist any more, so the model keeps the weights of the last step",
                best,
            )
            return
        self._best = best
        with session.edits.load(self._position_of_end(best=best)):
            if not isinstance(trainer.model, names.PreTrainedModel):
                self._own["_load_best_model"]()
                return
            files = WeightFiles(Path(self._best))
            found = files.matched(Names(trainer.model))
            lost = [name for name, _ in trainer.model.named_parameters() if name not in found.of]
            if lost:
                raise UsageError(
                    f"the best checkpoint, {self._best}, does not contain {lost[0]}, so nothing was loaded from it. "
                    "Set load_best_model_at_end=False to keep the weights of the last step, or load a complete "
                    "checkpoint"
                )
            values: dict[str, Any] = {name: files.at(keys[0]) for name, keys in found.of.items()}
            if not trainer.is_fsdp_enabled:
                trainer.model.load_state_dict(values, strict=False)
                return
            for module in trainer.model.modules():
                if isinstance(module, FSDPModule):
                    # An evaluation may leave parameters gathered. Shard these parameters again, so that the load writes
                    # to the shards.
                    module.reshard()
            set_model_state_dict(trainer.model, values, options=StateDictOptions(full_state_dict=True, strict=False))
