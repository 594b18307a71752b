"""Commits where a Trainer is with each step, and goes on there in a new process.

A resume enters the Trainer's own loop at the last committed step and repeats it without computing: batches are empty,
losses are zero, and `step()` does nothing but bring back what the real one left. So all that follows a commit (the
scheduler, callbacks, a line of the log, an evaluation, a checkpoint, the end of an epoch or of the training) is done by
the Trainer itself, in its order, and what was done before the process ended is done again.
"""

from __future__ import annotations

import contextlib
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
from memascend.session.optimizer import session_of
from memascend.text import replaced
from memascend.trainer import names
from memascend.trainer.by_layer import Steps
from memascend.trainer.callback import is_streamed
from memascend.trainer.feed import Feed
from memascend.trainer.position import Figures, RandomNumbers, decoded, encoded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memascend.session.optimizer import OffloadedOptimizer

# Stands for a checkpoint to the Trainer's loop.
_FROM_STORE = "the store"


class Resume:
    """Stands in for methods of a Trainer object, from before its training on."""

    def __init__(self, trainer: Any, run: dict[str, Any], *, exact_norm: bool) -> None:
        """`run` describes the run in each commit; `exact_norm`: `step()` clips, and the log has its norm."""
        self._trainer, self.run, self._exact_norm = trainer, run, exact_norm
        self._figures = Figures(trainer)
        self._optimizer: OffloadedOptimizer | None = None
        self._late: Callable[[], object] | None = None
        # `resume_from_checkpoint` of train().
        self._wanted: Any = None
        # The position to go on at; the step there is repeated until `step()`.
        self._kept: dict[str, Any] | None = None
        self._repeats = False
        # The checkpoint with the best weights, once the store has those.
        self._best: str | None = None
        self._feed: Feed | None = None
        # The epoch, the batches in it that the Trainer had before this step, and those of this step.
        self._epoch, self._passed, self._group = 0, 0, 0
        self._norm: float | None = None
        self._steps = None if trainer.is_fsdp_enabled else Steps(trainer)
        self._began, self._seconds_before = 0.0, 0.0
        self._trains = False
        self._own: dict[str, Callable[..., Any]] = {}
        for name in names.METHODS:
            if hasattr(self, name):
                self._own[name] = getattr(trainer, name)
                setattr(trainer, name, getattr(self, name))

    def begin(self, optimizer: OffloadedOptimizer, kept: dict[str, Any] | None) -> None:
        """Train with this optimizer, from the position `kept` on, if there is one."""
        self._optimizer, self._kept = optimizer, kept
        self._seconds_before = 0.0 if kept is None else kept["seconds"]
        self._best = None if kept is None else kept.get("best")

    def begin_late(self, begin: Callable[[], object]) -> None:
        """Let `train()` call `begin`, which calls the method of this name, once it has prepared model and optimizer."""
        self._late = begin

    def position(self) -> str:
        """The position after the step that is being made."""
        assert self._feed is not None
        assert self._optimizer is not None
        if self._exact_norm:
            self._norm = self._optimizer.grad_norm
        taken = {
            **self._figures.taken(),
            "run": self.run,
            "step": self._trainer.state.global_step + 1,
            "epoch": self._epoch,
            "passed": self._passed,
            "group": self._group,
            "feed": self._feed.taken(),
            "random": RandomNumbers.now().said(),
            "scheduler": plain(self._trainer.lr_scheduler.state_dict()),
            "groups": [options_of(group) for group in self._optimizer.param_groups],
            "norm": self._norm,
            "seconds": self._seconds_before + time.monotonic() - self._began,
        }
        return encoded(taken)

    # --- the beginning of a training ------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *given: Any, **named: Any) -> Any:
        """Train once; where the store has a position, that counts."""
        if self._trains:
            raise UsageError(
                "train() was called again, and the store holds one training: make another Trainer with another "
                "storage=, or give more steps to the first (under a constant schedule) and start the script again"
            )
        if resume_from_checkpoint and self._late is None:
            self._require_here(resume_from_checkpoint)
        self._trains, self._wanted = True, resume_from_checkpoint
        return self._own["train"](None, *given, **named)

    def _require_here(self, folder: Any) -> None:
        """Reject a checkpoint of the Trainer that is not at the store's position."""
        last: Any = names.last_checkpoint
        found = last(str(self._trainer.args.output_dir)) if folder is True else folder
        metadata = None if self._optimizer is None else session_of(self._optimizer).run.metadata
        if found is None or metadata is None or not metadata.is_at(identity_of(Path(found))):
            raise UsageError(
                f"the store has this training after step {0 if metadata is None else metadata.step}, and "
                f"resume_from_checkpoint={folder!r} is of another position: call train() without it, which goes on "
                'there; or begin at the checkpoint, with existing="replace" and checkpoint= in memascend.trainer.'
                "offload()"
            )

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        """Reject it."""
        raise UsageError(
            "hyperparameter_search() makes a model for each trial, and the store holds one: start a process with a "
            "storage= of its own for each trial"
        )

    def get_train_dataloader(self) -> Any:
        """The loader; the first one of a training is watched."""
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
        found = self._own["_init_training_state"](*given, **named)
        return found if self._kept is None else (self._kept["epoch"], self._kept["passed"])

    def _prepare_for_training(self, *given: Any, **named: Any) -> Any:
        prepared = self._own["_prepare_for_training"](*given, **named)
        if self._late is not None:
            self._late()
            if self._wanted:
                self._require_here(self._wanted)
        scheduler = self._trainer.lr_scheduler
        state = scheduler.state_dict()
        if not storable(state):
            raise ConfigError(
                f"the state of {type(scheduler).__name__} has objects, which a commit cannot hold: let its "
                "state_dict() have numbers, texts, lists and dicts alone"
            )
        if self._kept is not None:
            assert self._optimizer is not None
            # The loop counts the repeated step itself.
            self._trainer.state.global_step = self._kept["step"] - 1
            # Making the scheduler changed the rates.
            scheduler.load_state_dict(restored(self._kept["scheduler"], state))
            for group, options in zip(self._optimizer.param_groups, self._kept["groups"], strict=True):
                for name, value in options.items():
                    put(group, name, restored(value, group.get(name)))
        self._began = time.monotonic()
        return prepared

    def _load_rng_state(self, *given: Any, **named: Any) -> None:
        if self._kept is None:
            self._own["_load_rng_state"](*given, **named)

    # --- an epoch -----------------------------------------------------------------------------------

    def _run_epoch(self, **named: Any) -> None:
        assert self._feed is not None
        self._epoch, self._passed, self._group = named["epoch"], 0, 0
        kept, run = self._kept, self._own["_run_epoch"]
        if kept is None:
            run(**named)
            return
        if self._epoch < kept["epoch"]:
            # The position was not known when the loop began.
            return
        self._passed, self._group = kept["passed"], kept["group"]
        self._feed.resume(kept["feed"], self._passed + self._group)
        named |= {"resume_from_checkpoint": _FROM_STORE, "epochs_trained": self._epoch}
        with self._repeating():
            run(**named | {"steps_trained_in_current_epoch": self._passed})
        # The Trainer may have asked for no further batch of this epoch.
        self._feed.begin_anew()

    @contextlib.contextmanager
    def _repeating(self) -> Iterator[None]:
        """Inside, the first step is repeated, and the loop skips no batches itself."""
        module: Any = names.transformers_trainer
        with replaced(module, names.SKIP, lambda loader, _: loader), contextlib.ExitStack() as stands:
            # The first step alone.
            step = replaced(self._trainer.optimizer, "step", lambda *_, **__: self._repeated(stands))
            stands.enter_context(step)
            self._repeats = True
            yield

    def _repeated(self, stands: contextlib.ExitStack) -> None:
        """Bring back what the real step left."""
        stands.close()
        kept = self._kept
        assert kept is not None
        self._figures.bring_back(kept)
        self._norm = kept["norm"]
        # torch warns of schedulers that are advanced before any step.
        self._trainer.lr_scheduler.optimizer._opt_called = True  # noqa: SLF001
        self._repeats, self._kept = False, None
        RandomNumbers.of(kept["random"]).bring_back()

    # --- a step -------------------------------------------------------------------------------------

    def get_batch_samples(self, *given: Any, **named: Any) -> Any:
        """The batches of a step."""
        if self._repeats:
            return [{} for _ in range(self._group)], None
        found = self._own["get_batch_samples"](*given, **named)
        self._norm = None
        self._passed += self._group
        self._group = len(found[0])
        if self._steps is not None:
            self._steps.begin(found[0])
        return found

    def training_step(self, *given: Any, **named: Any) -> Any:
        """The loss of a batch."""
        if self._repeats:
            return torch.zeros((), device=self._trainer.args.device)
        own = self._own["training_step"]
        return own(*given, **named) if self._steps is None else self._steps.training_step(own, *given, **named)

    def floating_point_ops(self, *given: Any, **named: Any) -> Any:
        """Those of a batch."""
        return 0 if self._repeats else self._own["floating_point_ops"](*given, **named)

    def _track_num_input_tokens(self, *given: Any, **named: Any) -> None:
        if not self._repeats:
            self._own["_track_num_input_tokens"](*given, **named)

    def _clip_grad_norm(self, *given: Any, **named: Any) -> Any:
        """Clip; where `step()` does, it is not done twice."""
        return None if self._repeats or self._exact_norm else self._own["_clip_grad_norm"](*given, **named)

    def _get_grad_norm(self, *given: Any, **named: Any) -> Any:
        """The norm for the log; `step()` takes its own later."""
        if self._repeats or self._exact_norm:
            return None
        found = self._own["_get_grad_norm"](*given, **named)
        self._norm = float(found)
        return found

    def _maybe_log_save_evaluate(self, losses: Any, norm: Any, *given: Any, **named: Any) -> None:
        if norm is None:
            norm = self._norm
        if self._best is not None:
            # The store no longer has the weights to evaluate and to save.
            self._trainer.control.should_training_stop = True
            return
        self._own["_maybe_log_save_evaluate"](losses, norm, *given, **named)

    # --- files, where all ranks write them ----------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model. Under FSDP2 the Trainer would gather it in the memory of the first rank."""
        trainer = self._trainer
        if not (trainer.is_fsdp_enabled and self._optimizer is not None and self._is_streamed()):
            self._own["save_model"](output_dir, _internal_call)
            return
        folder, model = Path(output_dir or trainer.args.output_dir), trainer.model
        if _internal_call and not trainer.args.save_only_model:
            session_of(self._optimizer).saving.save(folder, among_others=True)
        else:
            is_first = trainer.is_world_process_zero()
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
                for old in folder.glob("model*.safetensors*"):
                    old.unlink()
            session_of(self._optimizer).saving.save_weights(folder if is_first else None)
        if trainer.args.should_save:
            # What a Trainer writes beside weights.
            with replaced(model, "save_pretrained", lambda *_, **__: None):
                trainer._save(str(folder), state_dict={})  # noqa: SLF001
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    def _is_streamed(self) -> bool:
        assert self._optimizer is not None
        session = session_of(self._optimizer)
        return not session.run.resources.closed and is_streamed(self._trainer.model, session)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Write the state. Under FSDP2 torch would gather it, and it is on storage."""
        trainer = self._trainer
        if not trainer.is_fsdp_enabled:
            self._own["_save_optimizer_and_scheduler"](output_dir)
            return
        if not self._is_streamed():
            assert self._optimizer is not None
            session_of(self._optimizer).saving.save(output_dir, among_others=True)
        if trainer.args.should_save:
            torch.save(trainer.lr_scheduler.state_dict(), Path(output_dir, names.SCHEDULER))

    def _load_best_model(self) -> None:
        """Load the best checkpoint, tensor by tensor, in one commit that says so."""
        assert self._optimizer is not None
        if self._best is not None:
            # The store has it.
            return
        trainer, session = self._trainer, session_of(self._optimizer)
        self._best = str(trainer.state.best_model_checkpoint)
        now, position = self._figures.taken(), session.run.metadata.position
        assert position is not None
        reported = {name: now[name] for name in ("state", "log_history", "callbacks")}
        # The end of the training is reported once more.
        reported["log_history"] = [line for line in reported["log_history"] if "train_runtime" not in line]
        with session.edits.load(encoded({**decoded(position, "the store"), **reported, "best": self._best})):
            if not isinstance(trainer.model, names.PreTrainedModel):
                self._own["_load_best_model"]()
                return
            files = WeightFiles(Path(self._best))
            found = files.matched(Names(trainer.model))
            lost = [name for name, _ in trainer.model.named_parameters() if name not in found.of]
            if lost:
                raise UsageError(f"the best checkpoint, {self._best}, lacks {lost[0]}, and nothing was loaded of it")
            if trainer.is_fsdp_enabled:
                for module in trainer.model.modules():
                    if isinstance(module, FSDPModule):
                        # What an evaluation left gathered would not be loaded as shards.
                        module.reshard()
                values: dict[str, Any] = {name: files.at(keys[0]) for name, keys in found.of.items()}
                set_model_state_dict(
                    trainer.model, values, options=StateDictOptions(full_state_dict=True, strict=False)
                )
                return
            trainer.model.load_state_dict({name: files.at(keys[0]) for name, keys in found.of.items()}, strict=False)

    def _finalize_training(self, trial: Any, samples: Any, start: float) -> Any:
        # The run's time is that of all its processes.
        return self._own["_finalize_training"](trial, samples, start - self._seconds_before)
