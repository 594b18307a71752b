"""Implements `memascend.trainer.offload()`: checks a Trainer, offloads what it trains, and finds where it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from memascend.checkpoint.weights import sources_of
from memascend.distributed.setup import candidates
from memascend.errors import ConfigError, MemascendError, StorageError, UsageError
from memascend.plan.decision import file_of
from memascend.session.optimizer import session_of
from memascend.storage import commits, look
from memascend.trainer import names
from memascend.trainer.callback import Callback, offloaded_optimizer
from memascend.trainer.feed import digest_of
from memascend.trainer.optimizers import prepare_optimizer
from memascend.trainer.position import RandomNumbers, decoded
from memascend.trainer.reference import offload_both
from memascend.trainer.resume import Resume

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from memascend.session.optimizer import OffloadedOptimizer

_Path = str | os.PathLike[str]
_log = logging.getLogger("memascend")
_ROWS = 64
# Entries of a configuration that tell where it came from.
_OF_NO_MODEL = ("_name_or_path", "transformers_version")
# Arguments that decide no result, by their beginnings.
_FREE = (
    *("output_dir", "log", "save_", "eval_", "report_to", "run_name", "project", "trackio", "hub", "push_to_hub"),
    *("disable_tqdm", "do_", "dataloader_", "local_rank", "ddp_", "resume_from", "overwrite", "skip_memory_metrics"),
    *("load_best_model", "metric_for_best", "greater_is_better", "include_", "restore_callback", "use_cpu", "debug"),
    *("per_device_eval", "prediction_loss_only", "batch_eval_metrics", "torch_empty_cache", "dataset_num_proc"),
    *("ignore_data_skip", "enable_jit_checkpoint", "auto_find_batch_size", "place_model", "fsdp"),
)
_MICRO = "gradient_accumulation_steps"
_LENGTH = ("max_steps", "num_train_epochs")
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
    clipping: Literal["exact", "torch"] = "exact",
    **options: Any,
) -> OffloadedOptimizer | None:
    """Offload what a Trainer trains; it is one line before `trainer.train()`.

    The same script started again goes on at the next step, bit for bit, whenever and however its process ended. The
    optimizer, its groups and its schedule are those of the Trainer's arguments.

    Args:
        trainer: a Trainer of transformers, TRL or sentence-transformers, or a subclass of yours.
        storage: as of `memascend.offload()`.
        existing: as of `memascend.offload()`, where a store is there already.
        clipping: "exact": `max_grad_norm` of the arguments clips within `step()`, so that updates run beneath the
            backward where nothing clips; the log has the norm of `step()`. "torch": the Trainer clips and takes norms
            by torch, with its bits, and every update waits for that.
        options: all others of `memascend.offload()`.

    Returns:
        The optimizer, as `memascend.offload()` returns it; it is the Trainer's from now on. None under FSDP2: there
        `train()` makes the optimizer.

    Raises:
        ConfigError: the Trainer, an option or the store does not fit; or the store is that of another run, and the
            message names what differs. Nothing was changed.
    """
    names.require(trainer)
    if clipping not in ("exact", "torch"):
        raise ConfigError(f'clipping is "exact" or "torch", not {clipping!r}')
    _require_plain(trainer)
    run = description(trainer)
    paths = [os.fspath(one) for one in ([storage] if isinstance(storage, str | os.PathLike) else storage)]
    if existing in ("resume", "previous"):
        _require_this_run(paths, trainer, run)
    options |= {"storage": paths if len(paths) > 1 else paths[0], "existing": existing}
    before = dict(vars(trainer))
    try:
        return _offloaded(trainer, run, options, clipping)
    except BaseException:
        # The same call may be made again.
        vars(trainer).clear()
        vars(trainer).update(before)
        raise


def _offloaded(trainer: Any, run: dict[str, Any], options: dict[str, Any], clipping: str) -> OffloadedOptimizer | None:
    """Have the optimizer made, offload it with its model, and stand in for methods of the Trainer."""
    if clipping == "exact":
        options.setdefault("max_grad_norm", trainer.args.max_grad_norm or None)
        _log.info(
            "clipping: %s within step(), whose norm the log has; clipping='torch' clips as torch does, after the "
            "backward",
            options["max_grad_norm"],
        )
    options = {"device": str(trainer.args.device), **prepare_optimizer(trainer), **options}
    if getattr(trainer.args, "precompute_ref_log_probs", False):
        # TRL hashed the weights as arrays of numpy, which are gone, and their memory still counts as numpy's.
        for parameter in trainer.model.parameters():
            parameter.data = parameter.data.clone()
    resume = Resume(trainer, run, exact_norm=clipping == "exact")

    def begin() -> OffloadedOptimizer:
        optimizer = trainer.optimizer
        for group in optimizer.param_groups:
            # offload() warns of stored rates that no scheduler set.
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
        # Else each rank would add whole gradients of the whole model in memory, and in another order than one process.
        trainer.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True
        # FSDP2 makes other parameters of the model's within train().
        resume.begin_late(begin)
        return None
    trainer.create_optimizer()
    return begin()


def _attach(trainer: Any, optimizer: OffloadedOptimizer, resume: Resume) -> None:
    """Let the Trainer train with this optimizer, from the store's position on."""
    metadata = session_of(optimizer).run.metadata
    kept = None
    if metadata.position is not None:
        kept = decoded(metadata.position, "the store")
        _require_same(kept, resume.run, trainer)
        kept = of_ranks(kept, trainer.args.world_size)
        _log.info("the training goes on after step %d", kept["step"])
        if kept.get("left_out"):
            _log.info("%d lines of the log history are older than the store keeps", kept["left_out"])
    elif metadata.step:
        raise ConfigError(
            f"this begins after {metadata.step} steps that no memascend.trainer.offload() made, so that its place in "
            "the data is not known: begin from weights alone, or train on by memascend.offload() and Callback()"
        )
    callback = Attached()
    callback.attach(optimizer)
    # Before those that report the log.
    trainer.callback_handler.callbacks.insert(0, callback)
    resume.begin(optimizer, kept)
    metadata.follow(resume.position)


class Attached(Callback):
    """The callback of a Trainer that was offloaded whole: its position has the scheduler."""

    def on_train_begin(self, args: Any, state: Any, *given: Any, **others: Any) -> None:
        """Check that model and optimizer are those that were offloaded."""
        assert self._session is not None
        model = others["model"]
        if offloaded_optimizer(others.get("optimizer")) is None or self._session.attachment.model is not model:
            raise UsageError(
                "the Trainer has another model or optimizer than memascend.trainer.offload() was given: make that call "
                "after all that replaces them, right before train()"
            )
        super().on_train_begin(args, state, *given, **others)

    def _schedule(self, scheduler: Any) -> None:
        pass

    def on_save(self, args: Any, state: Any, *given: Any, **others: Any) -> None:
        """Add our files to a checkpoint; under FSDP2 all ranks did that before."""
        if args.world_size == 1:
            super().on_save(args, state, *given, **others)


def _require_plain(trainer: Any) -> None:
    """Reject what cannot be exact, or would replace model and optimizer in silence."""
    args = trainer.args
    if trainer.model_init is not None:
        raise ConfigError("model_init= makes another model in train(), which was not offloaded: give model=")
    for name, why in _REFUSED.items():
        if getattr(args, name, None) or getattr(trainer, f"is_{name}_enabled", False):
            raise ConfigError(f"memascend.trainer.offload() cannot train with {name}: {why}")
    # Of GRPOTrainer and RLOOTrainer.
    generated = (getattr(args, "steps_per_generation", None) or 1) * getattr(args, "num_iterations", 1)
    if args.gradient_accumulation_steps % generated:
        raise ConfigError(
            f"one generation serves {generated} micro-batches and a step takes {args.gradient_accumulation_steps}: a "
            "commit does not hold completions for later steps: give steps_per_generation="
            f"{args.gradient_accumulation_steps} and num_iterations=1"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"{args.n_gpu} GPUs in one process are DataParallel, which copies the model to each: give one by "
            "CUDA_VISIBLE_DEVICES, or start a process for each by torchrun, with FSDP2"
        )
    _require_ranks(trainer)
    if any(isinstance(one, Callback) for one in trainer.callback_handler.callbacks):
        raise ConfigError("memascend.trainer.offload() adds its callback itself: leave Callback() out")


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
            "a model from loading() has no memory yet, by which accelerate shards: make it outside of loading()"
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


# --- which run it is ------------------------------------------------------------------------------------


def description(trainer: Any) -> dict[str, Any]:
    """What decides a run's results: the arguments, the model, the data."""
    kept = {name: value for name, value in trainer.args.to_dict().items() if not name.startswith(_FREE)}
    return {
        "arguments": {
            name: value if isinstance(value, int | float | str) else str(value) for name, value in kept.items()
        },
        "model": _model(trainer.model),
        "data": _data(trainer.train_dataset),
        "ranks": trainer.args.world_size,
    }


def _model(model: Any) -> str:
    """The class of a model, and a digest of its configuration and, where it was loaded, of rows of its embeddings."""
    config = getattr(model, "config", None)
    settings: dict[str, Any] = {} if config is None or not hasattr(config, "to_dict") else config.to_dict()
    parts: list[Any] = [{name: one for name, one in settings.items() if name not in _OF_NO_MODEL}]
    if getattr(config, "_name_or_path", "") and hasattr(model, "get_input_embeddings"):
        with contextlib.suppress(NotImplementedError, AttributeError):
            weight = model.get_input_embeddings().weight
            parts.append(None if weight.is_meta else weight.detach()[:_ROWS])
    return f"{type(model).__name__} {digest_of(parts)}"


def _data(data: Any) -> str:
    """The length of a data set and a digest of rows; a stream is compared batch by batch."""
    if data is None or isinstance(data, IterableDataset) or not hasattr(data, "__getitem__") or isinstance(data, dict):
        return "a stream"
    own, count = RandomNumbers.now(), len(data)
    compared = min(_ROWS, count)
    rows = [digest_of(data[number * count // compared]) for number in range(compared)]
    again = digest_of(data[0]) if count else ""
    own.bring_back()
    # Rows that are drawn anew each time have no digest.
    return f"{count} rows {digest_of(rows) if rows[:1] == [again] else ''}".strip()


def _require_this_run(paths: Sequence[str], trainer: Any, run: Mapping[str, Any]) -> None:
    """Reject the store of another run; the first rank also looks at stores of another number of ranks."""
    rank, count = trainer.args.process_index, trainer.args.world_size
    places = candidates([os.path.expanduser(path) for path in paths], rank, count)  # noqa: PTH111
    for place in places[: None if rank == 0 else 1]:
        _require_run_at(place, run, trainer)


def _require_run_at(place: Sequence[str], run: Mapping[str, Any], trainer: Any) -> None:
    files = [str(file_of(path)) for path in place]
    if not any(Path(file).is_block_device() or (Path(file).is_file() and Path(file).stat().st_size) for file in files):
        return
    try:
        named = commits(files)
        if named is None or not named[0]:
            # Blank, or without a first commit: offload() knows which.
            return
        with look(files) as store:
            position, step = (store.hyperparameters or {}).get("position"), store.step
    except StorageError as error:
        if error.errno is None:
            raise
        # In use, also by an earlier run of this process: offload() knows.
        return
    if position is not None:
        _require_same(decoded(position, files[0]), run, trainer)
    elif step:
        raise ConfigError(
            f"the store at {files[0]} has {step} steps that no Trainer made, so that its place in the data is not "
            'known: give another storage=, or existing="replace" to begin anew'
        )


def _require_same(kept: Mapping[str, Any], run: Mapping[str, Any], trainer: Any) -> None:
    """Reject another run than the one that has this position; under a constant schedule it may get longer."""
    before, now = kept["run"]["arguments"], run["arguments"]
    changed = {name for name in {**before, **now} if before.get(name) != now.get(name)}
    args = trainer.args
    may_grow = args.lr_scheduler_type.value.startswith("constant") and not 0 < args.warmup_steps < 1
    best = kept.get("best")
    if may_grow and best is None:
        changed -= {*_LENGTH}
    earlier, ranks = kept["run"]["ranks"], run["ranks"]
    batches = before[_MICRO] * earlier
    if earlier != ranks and now[_MICRO] * ranks == batches:
        changed -= {_MICRO}
    found = [f"{name} {before.get(name)} -> {now.get(name)}" for name in sorted(changed)]
    others = [(name, kept["run"][name], run[name]) for name in ("model", "data")]
    found += [f"{name} {was} -> {own}" for name, was, own in others if was != own]
    if earlier != ranks and now[_MICRO] * ranks != batches:
        fit = ", ".join(f"{one} with {batches // one}" for one in range(1, batches + 1) if batches % one == 0)
        found.append(f"ranks {earlier} -> {ranks}, where a step has other examples ({_MICRO} that fit ranks: {fit})")
    if found:
        longer = "only a constant schedule may get longer; " if changed and changed <= {*_LENGTH} else ""
        if longer and best is not None:
            longer = f"it has the best weights, those of {best}, and no longer the last ones; "
        raise ConfigError(
            f"the store holds another training, after step {kept['step']}: {'; '.join(found)}; nothing was changed: "
            f'{longer}start it as it was, or give another storage=, or existing="replace" to begin anew'
        )


def of_ranks(kept: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The position for another number of ranks: batches of each, with the random numbers of the first rank."""
    earlier = kept["run"]["ranks"]
    if earlier == ranks:
        return kept
    passed, group = kept["passed"] * earlier // ranks, -(-kept["group"] * earlier // ranks)
    # Which batch was fetched ahead differs, so that none is compared.
    feed = {**kept["feed"], "fetched": passed + group + 1, "digest": None}
    return {**kept, "passed": passed, "group": group, "feed": feed}
