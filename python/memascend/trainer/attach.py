"""Implements `memascend.trainer.offload()`: checks a Trainer, offloads its model, and resumes it at the stored step."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer

from memascend.checkpoint.reader import position_of
from memascend.checkpoint.weights import sources_of
from memascend.distributed.setup import candidates
from memascend.errors import ConfigError, MemascendError, StorageError, UsageError
from memascend.plan.decision import file_of
from memascend.plan.options import AUTO
from memascend.session.optimizer import session_of
from memascend.storage import newest
from memascend.trainer import names
from memascend.trainer.callback import Callback, offloaded_optimizer
from memascend.trainer.description import description, of_ranks, require_same
from memascend.trainer.display import Display, is_shown, print_in_words
from memascend.trainer.forecast import forecast
from memascend.trainer.kept import packed
from memascend.trainer.position import decoded
from memascend.trainer.reference import offload_both
from memascend.trainer.resume import Resume

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from memascend.session.optimizer import OffloadedOptimizer

_Path = str | os.PathLike[str]
_log = logging.getLogger("memascend")
_REFUSED = {
    "deepspeed": "it offloads by itself: leave it out",
    "auto_find_batch_size": "it restarts the training in the midst of a step: give per_device_train_batch_size",
    "sync_ref_model": "it writes to the reference's weights between steps: leave it out",
    "ignore_data_skip": "a resume goes on in the midst of the data: leave it out",
}


def offload(
    trainer: Any,
    *,
    storage: _Path | Sequence[_Path],
    existing: Literal["refuse", "resume", "replace", "previous"] = "resume",
    clipping: Literal["torch", "exact"] | None = None,
    keep: Sequence[str] = (),
    **options: Any,
) -> OffloadedOptimizer | None:
    """Offloads the model and the optimizer of a Trainer: call it right before `trainer.train()`.

    The same script, started again, continues at the next step, bit for bit, whenever and however its process ended. The
    Trainer's arguments decide the optimizer, its groups and its schedule.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers, or your subclass of one.
        storage: see `memascend.offload()`.
        existing: what to do if `storage` already holds a store; see `memascend.offload()`.
        clipping: "torch": the Trainer computes norms and clips with torch, bit-identical to the Trainer in memory.
            "exact": `step()` clips to the arguments' `max_grad_norm`, by a norm that does not depend on the number of
            ranks and needs no second read of accumulated gradients; the Trainer logs this norm. None: a resumed
            training keeps its clipping; a new training uses "torch", but "exact" under FSDP2 or if the option
            `max_grad_norm` is given.
        keep: names of attributes of the Trainer that each commit stores and a resume restores: numbers, texts, and
            containers of them, such as values that a subclass collects for its log. A warning names changing
            attributes that `keep` lacks.
        options: all other options of `memascend.offload()`. The default of `host_memory` is "auto": as much as the
            machine can spare.

    Returns:
        The optimizer that `memascend.offload()` returned; the Trainer uses it from this call on. None under FSDP2,
        where `train()` makes the optimizer.

    Raises:
        ConfigError: the Trainer, an option or the store does not fit; or the store belongs to another run, and the
            message names the differences. Nothing was changed.
    """
    names.require(trainer)
    if clipping not in (None, "torch", "exact"):
        raise ConfigError(f'clipping is "torch" or "exact", not {clipping!r}')
    _require_plain(trainer)
    _require_kept(trainer, keep)
    paths = [os.fspath(one) for one in ([storage] if isinstance(storage, str | os.PathLike) else storage)]
    options |= {"storage": paths if len(paths) > 1 else paths[0], "existing": existing}
    continues = existing in ("resume", "previous")
    if clipping is None:
        clipping = _clipping(trainer, paths if continues else (), options)
    if clipping == "exact":
        options.setdefault("max_grad_norm", trainer.args.max_grad_norm or None)
    if options.get("host_memory") is None:
        options["host_memory"] = AUTO
    before, events = dict(vars(trainer)), dict(vars(trainer.callback_handler))
    try:
        options = {"device": str(trainer.args.device), **prepare_optimizer(trainer), **options}
        if not trainer.is_fsdp_enabled:
            trainer.create_optimizer()
        run = description(trainer, f"{clipping} {options.get('max_grad_norm')}" if clipping == "exact" else clipping)
        if continues:
            _require_this_run(paths, trainer, run)
        return _offloaded(trainer, Resume(trainer, run, exact_norm=clipping == "exact", keep=keep), options)
    except BaseException:
        # Restore the Trainer, so that the caller can correct the options and call offload() again.
        for owner, attributes in ((trainer, before), (trainer.callback_handler, events)):
            vars(owner).clear()
            vars(owner).update(attributes)
        raise


def _offloaded(trainer: Any, resume: Resume, options: dict[str, Any]) -> OffloadedOptimizer | None:
    """Offloads model and optimizer now or, under FSDP2, later within `train()`."""
    if resume.clips_exactly:
        _log.info(
            "clipping: %s within step(), which logs its norm; clipping='torch' clips as the Trainer in memory does",
            options["max_grad_norm"],
        )
    if getattr(trainer.args, "precompute_ref_log_probs", False):
        # TRL hashed the weights through numpy(), so torch marks their memory as shared, which offload() rejects: copy
        # each weight.
        for model in (trainer.model, getattr(trainer, "ref_model", None)):
            for parameter in () if model is None else model.parameters():
                parameter.data = parameter.data.clone()

    resume.display = Display(trainer, resume, forecast(trainer, options) if is_shown(trainer.args) else None)

    def begin() -> OffloadedOptimizer:
        optimizer = trainer.optimizer
        for group in optimizer.param_groups:
            # Without "initial_lr", offload() warns that no scheduler set the stored learning rates.
            group.setdefault("initial_lr", group["lr"])
        offloaded = offload_both(trainer, options)
        if isinstance(optimizer, Optimizer) and not hasattr(optimizer, "optimizer"):
            trainer.optimizer = trainer.callback_handler.optimizer = offloaded
        try:
            _attach(trainer, offloaded, resume)
        except MemascendError:
            offloaded.close()
            raise
        return offloaded

    if trainer.is_fsdp_enabled:
        # Reduce gradients in each micro-batch. Otherwise each rank would accumulate unsharded gradients of the whole
        # model in memory, and in another order than one process does.
        trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        # train() shards the model, which replaces its parameters: offload them afterwards.
        resume.begin_late(begin)
        return None
    return begin()


def _attach(trainer: Any, optimizer: OffloadedOptimizer, resume: Resume) -> None:
    """Connects the Trainer to the offloaded optimizer and resumes at the position in the store, if there is one."""
    metadata = session_of(optimizer).run.metadata
    kept = None
    if metadata.position is not None:
        kept = decoded(metadata.position, "the store")
        require_same(kept, resume.run, trainer)
        kept = of_ranks(kept, trainer.args.world_size)
        if kept.get("left_out"):
            _log.info("%d lines of the log history are older than the store keeps", kept["left_out"])
    elif metadata.step:
        raise ConfigError(
            f"this begins after {metadata.step} steps that no memascend.trainer.offload() made, so its place in the "
            "data is not known: begin from weights alone, or train on with memascend.offload() and Callback()"
        )
    callback = OffloadCallback(resume)
    callback.attach(optimizer)
    callbacks = trainer.callback_handler.callbacks
    for printing in [one for one in callbacks if isinstance(one, names.PRINTING)]:
        print_in_words(printing)
    # Insert `callback` and the display before the callbacks that report the log, so that its lines already have
    # memascend's figures.
    assert resume.display is not None
    callbacks[:0] = [callback, resume.display]
    resume.begin(optimizer, kept)
    metadata.follow(resume.position)
    if not resume.clips_exactly:
        session_of(optimizer).run.gradients.expect_clipping()


class OffloadCallback(Callback):
    """The callback that `memascend.trainer.offload()` adds; `Resume` stores the scheduler in the Trainer's position."""

    def __init__(self, resume: Resume) -> None:
        super().__init__()
        self._resume = resume

    def on_train_begin(self, args: Any, state: Any, *given: Any, **others: Any) -> None:
        """Checks that `train()` uses the offloaded model and optimizer; then restores the training."""
        assert self._session is not None
        model = others["model"]
        if offloaded_optimizer(others.get("optimizer")) is None or self._session.attachment.model is not model:
            raise UsageError(
                "the Trainer has another model or optimizer than memascend.trainer.offload() was given: make that call "
                "right before train(), after any code that replaces them"
            )
        super().on_train_begin(args, state, *given, **others)
        self._resume.begin_training()

    def _schedule(self, scheduler: Any) -> None:
        pass

    def on_optimizer_step(self, *given: Any, **others: Any) -> None:
        """Marks a step that `nonfinite="skip"` dropped as skipped in accelerate: the Trainer advances no scheduler."""
        super().on_optimizer_step(*given, **others)
        assert self._session is not None
        if self._session.nonfinite == "skip":
            setattr(others["optimizer"], names.SKIPPED, self._session.overflowed)

    def on_save(self, args: Any, state: Any, *given: Any, **others: Any) -> None:
        """Adds memascend's files to a checkpoint; under FSDP2 `Resume` has already written them on all ranks."""
        if args.world_size == 1:
            super().on_save(args, state, *given, **others)
        if args.should_save and not args.save_only_model:
            _block_plain_resume(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))


# `_block_plain_resume()` adds this text as a field of trainer_state.json. A Trainer without memascend passes it to
# TrainerState() as an unknown argument, and the TypeError shows the text.
_NOTICE = (
    "the optimizer's state of this checkpoint is memascend's: resume it by memascend.trainer.offload(trainer, "
    "storage=..., existing='replace', checkpoint=THIS FOLDER)"
)


def _block_plain_resume(folder: Path) -> None:
    """Makes a resume without memascend fail with `_NOTICE`: it would silently continue with a fresh optimizer."""
    file = folder / names.STATE
    state = json.loads(file.read_text())
    new = file.with_suffix(".new")
    new.write_text(json.dumps({**state, _NOTICE: True}, indent=2, sort_keys=True) + "\n")
    new.replace(file)


def _require_plain(trainer: Any) -> None:
    """Rejects settings that make an exact resume impossible, or that silently replace model or optimizer."""
    args = trainer.args
    if trainer.model_init is not None:
        raise ConfigError("model_init= makes another model in train(), which was not offloaded: give model=")
    for name, why in _REFUSED.items():
        if getattr(args, name, None) or getattr(trainer, f"is_{name}_enabled", False):
            raise ConfigError(f"memascend.trainer.offload() cannot train with {name}: {why}")
    # GRPOTrainer and RLOOTrainer have these arguments.
    generated = (getattr(args, "steps_per_generation", None) or 1) * getattr(args, "num_iterations", 1)
    if args.gradient_accumulation_steps % generated:
        raise ConfigError(
            f"one generation serves {generated} micro-batches, but a step takes {args.gradient_accumulation_steps}. So "
            "completions would wait for a later step, and a commit does not hold them: give steps_per_generation="
            f"{args.gradient_accumulation_steps} and num_iterations=1"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process are DataParallel, which copies the model to each: give one by "
            "CUDA_VISIBLE_DEVICES, or start a process for each by torchrun, with FSDP2"
        )
    _require_ranks(trainer)
    _require_no_weights_of_loss(trainer)
    if any(isinstance(one, Callback) for one in trainer.callback_handler.callbacks):
        raise ConfigError("memascend.trainer.offload() adds its callback itself: leave Callback() out")


def _require_no_weights_of_loss(trainer: Any) -> None:
    """Rejects a loss of sentence-transformers that has parameters besides those of the model."""
    loss = getattr(trainer, "loss", None)
    if isinstance(loss, torch.nn.Module):
        known = {id(parameter) for parameter in trainer.model.parameters()}
        own = [name for name, parameter in loss.named_parameters() if id(parameter) not in known]
        if own:
            raise ConfigError(
                f"{type(loss).__name__} has weights of its own ({', '.join(own)}), which are no part of the model: "
                "take a loss without weights (CoSENTLoss, MultipleNegativesRankingLoss), or "
                "train this one without memascend"
            )


def _require_kept(trainer: Any, keep: Sequence[str]) -> None:
    """Rejects names of attributes that the Trainer lacks, and values that a commit cannot store."""
    if isinstance(keep, str):
        raise ConfigError(f"keep= takes names of attributes in a list: give keep=[{keep!r}]")
    for name in keep:
        if name not in vars(trainer):
            raise ConfigError(
                f"keep= has {name!r}, and {type(trainer).__name__} has no such attribute: set it in __init__()"
            )
        packed(getattr(trainer, name), f"{name!r} of keep=")


def _require_ranks(trainer: Any) -> None:
    args = trainer.args
    if not trainer.is_fsdp_enabled:
        if args.world_size > 1:
            raise ConfigError(
                f"several processes without FSDP2 are DDP, which copies the model to each: {_FSDP2}, or start it by "
                "`accelerate launch` with fsdp_version: 2"
            )
        return
    if sources_of(trainer.model) is not None:
        raise ConfigError(
            "a model from loading() has no memory yet, and accelerate shards values in memory: make it outside of "
            "loading()"
        )
    plugin = trainer.accelerator.state.fsdp_plugin
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    others = [] if parallel is None else parallel.non_dp_dim_names
    refused = (
        (getattr(plugin, "fsdp_version", 1) != 2, f"FSDP1 flattens parameters: {_FSDP2}"),
        (
            type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
            "cpu_offload of the FSDP settings moves parameters, which offload() does itself: leave it out",
        ),
        (
            args.load_best_model_at_end and not isinstance(trainer.model, names.PreTrainedModel),
            "load_best_model_at_end under FSDP2 takes models of transformers alone: leave it out",
        ),
        (
            bool(plugin.activation_checkpointing),
            "activation_checkpointing of the FSDP settings renames parameters: give gradient_checkpointing=True",
        ),
        (bool(plugin.ignored_modules), "ignored_modules of the FSDP settings are not sharded: leave it out"),
        (
            bool(others),
            f"parallelism_config has {', '.join(others)}, which shards other things than rows: leave it out",
        ),
    )
    for is_so, why in refused:
        if is_so:
            raise ConfigError(why)


_FSDP2 = "give TrainingArguments(fsdp=True, fsdp_config={'version': 2})"


# `optim=` of bitsandbytes' AdamW -> `state=` of `memascend.offload()`. Streaming replaces the paging of "paged_...".
_ADAMW = dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "8bit") | {"paged_adamw_32bit": None}
# Prefixes of `optim=`: bitsandbytes' other optimizers, and LOMO optimizers, which update parameters in the backward.
_CANNOT_STREAM = ("ademamix", "lion", "paged_ademamix", "paged_lion", "rmsprop_bnb", "lomo", "adalomo")
_LAYERWISE = "_layerwise"
_STREAMS = (
    "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_torch_8bit, adamw_torch_4bit, adafactor, sgd, adagrad, rmsprop, "
    "schedule_free_adamw, or one of yours by optimizers=(optimizer, None)"
)


def prepare_optimizer(trainer: Any) -> dict[str, Any]:
    """Replaces bitsandbytes' AdamW by torch's; returns options of `offload()` that store state in the same format.

    Raises:
        ConfigError: `optim=` names an optimizer that cannot stream.
    """
    args = trainer.args
    name = str(getattr(args.optim, "value", args.optim))
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return {}
    if name.startswith(_CANNOT_STREAM) or name.endswith(_LAYERWISE):
        raise ConfigError(f"optim={name!r} cannot stream; these can: {_STREAMS}")
    if name not in _ADAMW:
        return {}
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, options)
    state = _ADAMW[name]
    _log.info("optim=%r is torch's AdamW with state=%r here, and not bitsandbytes'", name, state)
    return {} if state is None else {"state": state}


def _clipping(trainer: Any, paths: Sequence[str], options: Mapping[str, Any]) -> Literal["torch", "exact"]:
    """Chooses the clipping if the caller gave none: the stored training's or checkpoint's, else the default."""
    if "max_grad_norm" in options:
        return "exact"
    # torch's norm of sharded gradients depends on the number of ranks.
    default: Literal["torch", "exact"] = "exact" if trainer.is_fsdp_enabled else "torch"
    positions = [decoded(one, file) for file, one, _ in _commits(paths, trainer) if one is not None]
    if not positions and options.get("checkpoint") is not None:
        position = position_of(options["checkpoint"])
        positions = [] if position is None else [decoded(position, str(options["checkpoint"]))]
    if not positions:
        return default
    stored = positions[0]["run"].get("others", {}).get("clipping", default).partition(" ")[0]
    if stored != default:
        _log.info("clipping=%r, by which the stored training began; new trainings use %r", stored, default)
    return "exact" if stored == "exact" else "torch"


def _require_this_run(paths: Sequence[str], trainer: Any, run: Mapping[str, Any]) -> None:
    """Rejects a store of another run. The first rank also checks stores written with another number of ranks."""
    own = None if trainer.args.process_index == 0 else 1
    for file, position, step in _commits(paths, trainer, own):
        if position is not None:
            require_same(decoded(position, file), run, trainer)
        elif step:
            raise ConfigError(
                f"the store at {file} has {step} steps that no Trainer made, so that its place in the data is not "
                'known: give another storage=, or existing="replace" to begin anew'
            )


def _commits(paths: Sequence[str], trainer: Any, most: int | None = None) -> Iterator[tuple[str, str | None, int]]:
    """Yields file, position and step of each store at this rank's first `most` possible paths; None: at all paths."""
    places = [os.path.expanduser(path) for path in paths]  # noqa: PTH111
    possible = candidates(places, trainer.args.process_index, trainer.args.world_size) if places else []
    for place in possible[:most]:
        files = [str(file_of(path)) for path in place]
        found = _commit_in(files)
        if found is not None:
            yield files[0], *found


def _commit_in(files: Sequence[str]) -> tuple[str | None, int] | None:
    """Returns the position and step of a store; None if it does not exist yet or is in use."""
    try:
        found = newest(files)
    except StorageError as error:
        if error.errno is None:
            raise
        # The store is in use, perhaps by an earlier run of this process: offload() decides what to do.
        return None
    return None if found is None else (found[0].get("position"), found[1])
