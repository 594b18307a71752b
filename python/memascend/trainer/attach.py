"""Implements `memascend.trainer.offload()`: checks a Trainer, offloads its model, and resumes at the stored step."""

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
from memascend.trainer.callback import Callback, is_offloaded
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
    "deepspeed": "DeepSpeed offloads the model itself. Remove the DeepSpeed settings",
    "auto_find_batch_size": "it restarts the training in the middle of a step. Set per_device_train_batch_size instead",
    "sync_ref_model": "it changes the reference model's weights between steps. Remove this argument",
    "ignore_data_skip": "memascend resumes in the middle of the data. Remove this argument",
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
    """Offloads the model and the optimizer of a Trainer. Call this function right before `trainer.train()`.

    If the process ends early, start the same script again. The training then continues at the next step, with the same
    bits as an uninterrupted training. The Trainer's arguments determine the optimizer, its parameter groups and its
    learning-rate schedule.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers, or your subclass of one of these Trainers.
        storage: the path or the paths of the store; see `memascend.offload()`.
        existing: what to do if `storage` already holds a store; see `memascend.offload()`.
        clipping: "torch": the Trainer computes the gradient norm and clips with torch. The results are bit-identical to
            training in memory. "exact": `step()` clips to the option `max_grad_norm`, or to that of the Trainer's
            arguments, and the Trainer logs the norm that `step()` computed. This norm does not depend on the number of
            ranks, and `step()` reads accumulated gradients only once. None: "exact" if you pass the option
            `max_grad_norm`. Otherwise a resumed training keeps its clipping, and a new training uses "exact" under
            FSDP2 and "torch" without FSDP2.
        keep: names of attributes of the Trainer. Each commit stores these attributes, and a resume restores them. Their
            values must be numbers, texts, or containers of numbers and texts. For example, use `keep` for values that a
            subclass collects for its log. A warning lists attributes that change during training but are missing in
            `keep`.
        options: all other options of `memascend.offload()`. The default of `host_memory` is "auto", which uses as much
            memory as the machine can spare.

    Returns:
        The optimizer that `memascend.offload()` returned; the Trainer uses it from this call on. Under FSDP2 returns
        None, because `train()` makes the optimizer later.

    Raises:
        ConfigError: the Trainer or an option is not supported, or the store belongs to another run. The message lists
            the differences between the runs. Nothing was changed, unless the option `checkpoint` has a run without
            `memascend.trainer.offload()`: then the store was already made from the checkpoint.
        MemascendError: `memascend.offload()` failed, as its documentation describes.
    """
    names.require(trainer)
    if clipping not in (None, "torch", "exact"):
        raise ConfigError(f'clipping must be "torch" or "exact", not {clipping!r}')
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
        _require_this_run(paths if continues else (), options.get("checkpoint"), trainer, run)
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
            "step() computes the norm that the Trainer logs, and clips to max_grad_norm=%s (None: no clipping). Pass "
            "clipping='torch' to do both with torch",
            options["max_grad_norm"],
        )
    if getattr(trainer.args, "precompute_ref_log_probs", False):
        # TRL called numpy() on the weights to hash them, so torch marks the memory of the weights as shared. offload()
        # rejects shared memory: copy each weight into memory that is not shared.
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
        # model in memory, and would add them in a different order than a single process.
        trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        # train() shards the model, which replaces the model's parameters. So `begin()` runs after the sharding.
        resume.begin_late(begin)
        return None
    return begin()


def _attach(trainer: Any, optimizer: OffloadedOptimizer, resume: Resume) -> None:
    """Connects the Trainer to the offloaded optimizer. Resumes at the store's position, if the store has one."""
    metadata = session_of(optimizer).run.metadata
    kept = None
    if metadata.position is not None:
        kept = decoded(metadata.position, "the store")
        require_same(kept, resume.run, trainer)
        kept = of_ranks(kept, trainer.args.world_size)
        if kept.get("left_out"):
            _log.info(
                "the Trainer's log history lacks its oldest %d lines, because a commit had no room for them",
                kept["left_out"],
            )
    elif metadata.step:
        raise ConfigError(
            f"the store or the checkpoint has {metadata.step} steps that were trained without "
            "memascend.trainer.offload(), so the position in the data is not known. To start a new training "
            "from the weights alone, load them into the model, and pass another storage= and no checkpoint=. To "
            "continue the training, use memascend.offload() and Callback()"
        )
    callback = OffloadCallback(resume)
    callback.attach(optimizer)
    callbacks = trainer.callback_handler.callbacks
    for printing in [one for one in callbacks if isinstance(one, names.PRINTING)]:
        print_in_words(printing)
    # Insert `callback` and the display before the callbacks that report the log, so that the reported lines have
    # memascend's figures.
    assert resume.display is not None
    callbacks[:0] = [callback, resume.display]
    resume.begin(optimizer, kept)
    metadata.follow(resume.position)
    if not resume.clips_exactly:
        session_of(optimizer).run.gradients.expect_clipping()


class OffloadCallback(Callback):
    """The callback that `memascend.trainer.offload()` adds.

    This callback does not store the scheduler, because `Resume` stores the scheduler in the Trainer's position.
    """

    def __init__(self, resume: Resume) -> None:
        super().__init__()
        self._resume = resume

    def on_train_begin(self, args: Any, state: Any, *given: Any, **others: Any) -> None:
        """Checks that `train()` uses the offloaded model and optimizer. Restores the Trainer's state at a resume."""
        assert self._session is not None
        model = others["model"]
        if not is_offloaded(others.get("optimizer")) or self._session.attachment.model is not model:
            raise UsageError(
                "the Trainer's model or optimizer was replaced after memascend.trainer.offload(). Call "
                "memascend.trainer.offload() right before train(), after any code that replaces the model or optimizer"
            )
        super().on_train_begin(args, state, *given, **others)
        self._resume.begin_training()

    def _schedule(self, scheduler: Any) -> None:
        pass

    def on_optimizer_step(self, *given: Any, **others: Any) -> None:
        """With `nonfinite="skip"`, sets accelerate's mark that says whether the optimizer skipped this step.

        If the step was skipped, the Trainer does not advance the scheduler.
        """
        super().on_optimizer_step(*given, **others)
        assert self._session is not None
        if self._session.nonfinite == "skip":
            setattr(others["optimizer"], names.SKIPPED, self._session.overflowed)

    def on_save(self, args: Any, state: Any, *given: Any, **others: Any) -> None:
        """Adds memascend's files to a checkpoint; under FSDP2 `Resume` has already written these files on all ranks."""
        if args.world_size == 1:
            super().on_save(args, state, *given, **others)
        if args.should_save and not args.save_only_model:
            _block_plain_resume(Path(str(args.output_dir), f"checkpoint-{state.global_step}"))


# `_block_plain_resume()` adds this text as a field of trainer_state.json. A Trainer without memascend passes this field
# to TrainerState() as an unknown argument, and the TypeError shows the text.
_NOTICE = (
    "the optimizer's state of this checkpoint is memascend's: resume it by memascend.trainer.offload(trainer, "
    "storage=..., existing='replace', checkpoint=THIS FOLDER)"
)


def _block_plain_resume(folder: Path) -> None:
    """Makes a resume without memascend fail with `_NOTICE`. The resume would otherwise silently use a new optimizer."""
    file = folder / names.STATE
    state = json.loads(file.read_text())
    new = file.with_suffix(".new")
    new.write_text(json.dumps({**state, _NOTICE: True}, indent=2, sort_keys=True) + "\n")
    new.replace(file)


def _require_plain(trainer: Any) -> None:
    """Rejects settings, losses and callbacks that `memascend.trainer.offload()` does not support."""
    args = trainer.args
    if trainer.model_init is not None:
        raise ConfigError(
            "with model_init=, train() makes a new model that is not offloaded. Pass model= to the Trainer"
        )
    for name, why in _REFUSED.items():
        if getattr(args, name, None) or getattr(trainer, f"is_{name}_enabled", False):
            raise ConfigError(f"memascend.trainer.offload() cannot train with {name}: {why}")
    # Only GRPOTrainer and RLOOTrainer have `steps_per_generation` and `num_iterations`.
    generated = (getattr(args, "steps_per_generation", None) or 1) * getattr(args, "num_iterations", 1)
    if args.gradient_accumulation_steps % generated:
        raise ConfigError(
            f"one generation serves {generated} micro-batches, but a step takes {args.gradient_accumulation_steps}. So "
            "completions would remain for a later step, but a commit cannot store completions. Set "
            f"steps_per_generation={args.gradient_accumulation_steps} and num_iterations=1"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"with {args.n_gpu} GPUs in one process, the Trainer uses DataParallel, which copies the model to each "
            "GPU. Select one GPU with CUDA_VISIBLE_DEVICES, or start one process per GPU with torchrun and FSDP2"
        )
    _require_ranks(trainer)
    _require_no_weights_of_loss(trainer)
    if any(isinstance(one, Callback) for one in trainer.callback_handler.callbacks):
        raise ConfigError("memascend.trainer.offload() adds its callback itself. Remove Callback() from callbacks=")


def _require_no_weights_of_loss(trainer: Any) -> None:
    """Rejects a loss of sentence-transformers if some parameters of the loss do not belong to the model."""
    loss = getattr(trainer, "loss", None)
    if isinstance(loss, torch.nn.Module):
        known = {id(parameter) for parameter in trainer.model.parameters()}
        own = [name for name, parameter in loss.named_parameters() if id(parameter) not in known]
        if own:
            raise ConfigError(
                f"{type(loss).__name__} has weights ({', '.join(own)}) that are not part of the model, so memascend "
                "would not train them. Use a loss without weights (CoSENTLoss, MultipleNegativesRankingLoss), or train "
                "with this loss without memascend"
            )


def _require_kept(trainer: Any, keep: Sequence[str]) -> None:
    """Rejects names in `keep` that are not attributes of the Trainer, and attributes that a commit cannot store."""
    if isinstance(keep, str):
        raise ConfigError(f"keep= must be a list of attribute names: pass keep=[{keep!r}]")
    for name in keep:
        if name not in vars(trainer):
            raise ConfigError(
                f"keep= has {name!r}, but {type(trainer).__name__} has no attribute of this name. Set the attribute in "
                "__init__(), or remove the name from keep="
            )
        packed(getattr(trainer, name), f"{name!r} of keep=")


def _require_ranks(trainer: Any) -> None:
    args = trainer.args
    if not trainer.is_fsdp_enabled:
        if args.world_size > 1:
            raise ConfigError(
                "several processes without FSDP2 use DDP, which copies the whole model to each process, so "
                f"memascend does not support DDP: {_FSDP2}, or start the script with `accelerate launch` and "
                "fsdp_version: 2"
            )
        return
    if sources_of(trainer.model) is not None:
        raise ConfigError(
            "a model from loading() has no values in memory yet, but accelerate can only shard values in memory. Make "
            "the model outside of loading()"
        )
    plugin = trainer.accelerator.state.fsdp_plugin
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    others = [] if parallel is None else parallel.non_dp_dim_names
    refused = (
        (
            getattr(plugin, "fsdp_version", 1) != 2,
            f"FSDP1 flattens parameters, which memascend does not support: {_FSDP2}",
        ),
        (
            type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy",
            "cpu_offload in the FSDP settings moves parameters, which offload() does itself. Remove cpu_offload",
        ),
        (
            args.load_best_model_at_end and not isinstance(trainer.model, names.PreTrainedModel),
            "load_best_model_at_end under FSDP2 works only with models of transformers. Remove load_best_model_at_end",
        ),
        (
            bool(plugin.activation_checkpointing),
            "activation_checkpointing in the FSDP settings renames parameters. Set gradient_checkpointing=True instead",
        ),
        (bool(plugin.ignored_modules), "FSDP does not shard ignored_modules. Remove it from the FSDP settings"),
        (
            bool(others),
            f"parallelism_config has {', '.join(others)}, but memascend supports only sharding by rows. Remove it",
        ),
    )
    for is_so, why in refused:
        if is_so:
            raise ConfigError(why)


_FSDP2 = "set TrainingArguments(fsdp=True, fsdp_config={'version': 2})"


# Value of `optim=` for bitsandbytes' AdamW -> value of `state=` for `memascend.offload()`. memascend streams all
# optimizer state, so the "paged_..." optimizers need no paging.
_ADAMW = dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit"), "8bit") | {"paged_adamw_32bit": None}
# Prefixes of `optim=` for optimizers that cannot stream: bitsandbytes' optimizers besides AdamW, and the LOMO
# optimizers, which update parameters in the backward.
_CANNOT_STREAM = ("ademamix", "lion", "paged_ademamix", "paged_lion", "rmsprop_bnb", "lomo", "adalomo")
_LAYERWISE = "_layerwise"
_STREAMS = (
    "adamw_torch, adamw_torch_fused, adamw_8bit, adamw_torch_8bit, adamw_torch_4bit, adafactor, sgd, adagrad, rmsprop, "
    "schedule_free_adamw, or your own, as optimizers=(optimizer, None)"
)


def prepare_optimizer(trainer: Any) -> dict[str, Any]:
    """Replaces bitsandbytes' AdamW by torch's AdamW.

    Returns the options with which `offload()` stores the optimizer state in the format of the replaced optimizer.

    Raises:
        ConfigError: `optim=` names an optimizer that cannot stream.
    """
    args = trainer.args
    name = str(getattr(args.optim, "value", args.optim))
    if trainer.optimizer is not None or trainer.optimizer_cls_and_kwargs is not None:
        return {}
    if name.startswith(_CANNOT_STREAM) or name.endswith(_LAYERWISE):
        raise ConfigError(f"memascend cannot stream optim={name!r}. Use one of these optimizers: {_STREAMS}")
    if name not in _ADAMW:
        return {}
    options = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, options)
    state = _ADAMW[name]
    _log.info("optim=%r: memascend uses torch's AdamW with state=%r instead of bitsandbytes' AdamW", name, state)
    return {} if state is None else {"state": state}


def _clipping(trainer: Any, paths: Sequence[str], options: Mapping[str, Any]) -> Literal["torch", "exact"]:
    """Chooses the clipping if the caller gave none.

    With the option `max_grad_norm`, the clipping is "exact". Otherwise a stored training or a checkpoint keeps its
    clipping, and a new training gets the default.
    """
    if "max_grad_norm" in options:
        return "exact"
    # torch's norm of sharded gradients depends on the number of ranks, so the default under FSDP2 is "exact".
    default: Literal["torch", "exact"] = "exact" if trainer.is_fsdp_enabled else "torch"
    positions = [decoded(one, file) for file, one, _ in _commits(paths, trainer) if one is not None]
    if not positions and options.get("checkpoint") is not None:
        position = position_of(options["checkpoint"])
        positions = [] if position is None else [decoded(position, str(options["checkpoint"]))]
    if not positions:
        return default
    stored = positions[0]["run"].get("others", {}).get("clipping", default).partition(" ")[0]
    if stored != default:
        _log.info("clipping=%r, because the stored training began with it; new trainings use %r", stored, default)
    return "exact" if stored == "exact" else "torch"


def _require_this_run(paths: Sequence[str], checkpoint: Any, trainer: Any, run: Mapping[str, Any]) -> None:
    """Rejects a store of another run or, if there is no store, a checkpoint of another run.

    The first rank also checks stores written with another number of ranks.
    """
    own = None if trainer.args.process_index == 0 else 1
    commits = [*_commits(paths, trainer, own)]
    if not commits and checkpoint is not None and (position := position_of(checkpoint)) is not None:
        require_same(decoded(position, str(checkpoint)), run, trainer)
    for file, position, step in commits:
        if position is not None:
            require_same(decoded(position, file), run, trainer)
        elif step:
            raise ConfigError(
                f"the store at {file} has {step} steps that were trained without memascend.trainer.offload(), so the "
                'position in the data is not known. Pass another storage=, or existing="replace" to start a new '
                "training"
            )


def _commits(paths: Sequence[str], trainer: Any, most: int | None = None) -> Iterator[tuple[str, str | None, int]]:
    """Yields the file, the position and the step of each store that exists.

    A rank's store may be at one of several paths. `most`: check only the first `most` paths; None to check all.
    """
    places = [os.path.expanduser(path) for path in paths]  # noqa: PTH111
    possible = candidates(places, trainer.args.process_index, trainer.args.world_size) if places else []
    for place in possible[:most]:
        files = [str(file_of(path)) for path in place]
        found = _commit_in(files)
        if found is not None:
            yield files[0], *found


def _commit_in(files: Sequence[str]) -> tuple[str | None, int] | None:
    """Returns the position and the step of a store; None if the store does not exist yet or cannot be opened now."""
    try:
        found = newest(files)
    except StorageError as error:
        if error.errno is None:
            raise
        # The store may be in use by an earlier run of this process, which offload() closes later. If the cause of the
        # error remains, offload() raises the error again.
        return None
    return None if found is None else (found[0].get("position"), found[1])
