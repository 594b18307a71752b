"""Trains by TRL's Trainer of a kind with `memascend.trainer.offload()`, and saves the model of the last step."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import functools
import inspect
import json
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import torch
import transformers
import trl
from accelerate.utils import broadcast_object_list  # type: ignore[import-untyped]

from memascend import trainer as trainers
from memascend.checkpoint.files import file_errors
from memascend.cli.plan.answer import GAPS
from memascend.cli.plan.model import trace
from memascend.cli.plan.subject import Batch
from memascend.cli.train.arguments import KINDS, OFFLOAD
from memascend.cli.train.data import read, token_counts
from memascend.errors import ConfigError, MemascendError
from memascend.plan.options import AUTO, Options
from memascend.plan.spare import Spare
from memascend.session.decide import planned
from memascend.session.optimizer import session_of
from memascend.text import bytes_shown
from memascend.trainer.attach import prepare_optimizer
from memascend.trainer.callback import offloaded_optimizer
from memascend.trainer.display import Display

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memascend.cli.plan.subject import Loss, Trace
    from memascend.cli.train.arguments import Command

# Calls in chat templates that insert the date; their formats are literals.
_TIME = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# The picture of a run, beside its log.
_PICTURE = "training.png"
# When the run began, and of which store and step the saved model is.
_RECORD = "memascend-train.json"


def train(command: Command) -> int:
    """Train to the end, from the step that the store has."""
    args, own = command.training, command.own
    chosen = {name: getattr(own, name) for name in OFFLOAD if getattr(own, name) is not None}
    options = Options(storage=own.storage, **{name: value for name, value in chosen.items() if name != "clipping"})
    file = Path(args.output_dir, _RECORD)
    record = json.loads(file.read_text()) if file.exists() else {"began": dt.datetime.now().astimezone().isoformat()}
    with _stop_reported(own.existing) as made:
        with _unchanged(file.parent) if own.dry_run else contextlib.nullcontext():
            trainer, words = _made(command, dt.datetime.fromisoformat(record["began"]))
            if own.dry_run:
                _print_plan(trainer, command.kind, options, words)
                return 0
        made.append(trainer)
        if options.host_memory in (None, AUTO):
            chosen["host_memory"] = _spare(trainer, command.kind, options)
        trainers.offload(trainer, storage=own.storage, **chosen)
        for display in filter(lambda one: isinstance(one, Display), trainer.callback_handler.callbacks):
            display.examples = words
        with file_errors(file.parent, "cannot be written (no step is lost: give the same command again)"):
            _write(trainer, file, record)
            trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
            _save(trainer, file, record)
    return 0


def _spare(trainer: Any, kind: str, options: Options) -> Spare:
    """The machine's spare memory: on a CPU, as far as it is known, less what torch needs."""
    if options.computes_on != "cpu":
        return Spare()
    try:
        found = _traced(trainer, kind, options)
    except Exception:  # noqa: BLE001
        # A model of which no copy can be traced trains all the same.
        return Spare()
    if isinstance(found, str):
        return Spare()
    # By layer each micro-batch keeps its own checkpoints.
    more = (trainer.args.gradient_accumulation_steps - 1) * found.kept
    return Spare(torch_bytes=int((1 + GAPS) * (found.peak + more)))


@contextlib.contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    """Remove the folder that a Trainer makes where there was none."""
    was_there = folder.exists()
    try:
        yield
    finally:
        if not was_there:
            with contextlib.suppress(OSError):
                folder.rmdir()


def _print_plan(trainer: Any, kind: str, options: Options, examples: str | None) -> None:
    found = prepare_optimizer(trainer)
    if options.state is None and found:
        options = dataclasses.replace(options, **found)
    if options.host_memory in (None, AUTO):
        options = dataclasses.replace(options, host_memory=_spare(trainer, kind, options))
    trainer.create_optimizer()
    print(planned(trainer.model, trainer.optimizer, options, trainer.args.world_size).plan)
    print(f"\n{_torchs_memory(trainer, kind, options)}")
    if examples is not None:
        print(f"examples: {examples}")
    print("this was a dry run: nothing was changed")


def batch_of(trainer: Any, kind: str, *, on_host: bool) -> Batch:
    """The largest micro-batch of a Trainer of this kind, and its loss."""
    args = trainer.args
    longest = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    # TRL's older versions have the logits of all tokens.
    loss: Loss = "chunked" if hasattr(trl.trainer.utils, "add_fused_lm_head") else "full"
    return Batch(
        # Answers that are compared are one batch.
        sequences=args.per_device_train_batch_size * (2 if kind in ("dpo", "reward") else 1),
        length=min(one for one in (args.max_length, longest) if one),
        loss="score" if kind == "reward" else loss,
        on_host=on_host,
    )


def _traced(trainer: Any, kind: str, options: Options) -> Trace | str:
    """A micro-batch of the Trainer; or why it is not known."""
    if not getattr(trainer.args, "max_length", None):
        return "it is not known without --max_length"
    if trainer.args.world_size > 1:
        return "it is counted on one rank alone"
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    batch = batch_of(trainer, kind, on_host=options.computes_on == "cpu")
    return trace(model, batch, recomputes=trainer.args.gradient_checkpointing)


def _torchs_memory(trainer: Any, kind: str, options: Options) -> str:
    """What torch takes of a micro-batch beside the plan, in words."""
    found = _traced(trainer, kind, options)
    if isinstance(found, str):
        return f"torch's memory is not counted: {found}"
    batch = batch_of(trainer, kind, on_host=options.computes_on == "cpu")
    losses = {"full": "with the logits of all tokens", "chunked": "with a chunked loss", "score": "with scores"}
    return (
        f"beside it torch takes {bytes_shown(found.peak)} for a micro-batch of {batch.sequences} x {batch.length:,} "
        f"tokens {losses[found.loss]}"
    )


class Terminated(KeyboardInterrupt):
    """SIGTERM was received: what Ctrl-C leaves whole stays whole."""

    exit_code = 128 + signal.SIGTERM


@contextlib.contextmanager
def _stop_reported(existing: str | None) -> Iterator[list[Any]]:
    """Print which step is committed where Ctrl-C or, in one process, SIGTERM ends the block.

    The block adds its Trainer to the list.
    """
    made: list[Any] = []
    before: Any = None
    # A rank that waits in a collective call runs no handler, and torchrun would wait for its end.
    if threading.current_thread() is threading.main_thread() and "RANK" not in os.environ:
        before = signal.signal(signal.SIGTERM, functools.partial(_terminate, os.getpid()))
    try:
        yield made
    except KeyboardInterrupt:
        _report_stop(made[0] if made else None, existing)
        raise
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def _report_stop(trainer: Any, existing: str | None) -> None:
    where = "before the training began: the same command starts it"
    # Other values would not go on from the store.
    without = "" if existing in (None, "resume") else f" without --existing {existing}"
    with contextlib.suppress(ConfigError, AttributeError):
        # Not offloaded yet.
        optimizer = offloaded_optimizer(trainer.optimizer)
        # It may write for a while, and show its progress.
        optimizer.close()
        where = f"after step {optimizer.steps}, which is committed: the same command{without} goes on there"
    if trainer is None or trainer.is_local_process_zero():
        for callback in [] if trainer is None else trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                # Else it is drawn again, behind the message.
                bar.close()
        print(f"memascend train: stopped {where}", file=sys.stderr)


def _terminate(process: int, *_: object) -> None:
    if os.getpid() == process:
        raise Terminated
    # A worker of a data loader or of `datasets`, which has inherited the handler.
    os._exit(Terminated.exit_code)


def _made(command: Command, began: dt.datetime) -> tuple[Any, str | None]:
    """TRL's Trainer, with the model of the folder, and its examples in words."""
    model, args = command.model, command.training
    name = model.model_name_or_path
    if Path(name).resolve() == Path(args.output_dir).resolve():
        raise ConfigError("--model and --output are one folder, and training would overwrite the model")
    for option in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, option):
            raise ConfigError(
                f"--{option} quantizes the model by bitsandbytes, whose weights are not offloaded: leave it out; "
                "--use_peft trains adapters on the 16-bit model, whose weights are streamed"
            )
    given = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code}
    more = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    args.model_init_kwargs = {**given, **more, **(args.model_init_kwargs or {})}
    try:
        processor = transformers.AutoProcessor.from_pretrained(name, **given)  # type: ignore[no-untyped-call]
        tokenizer = getattr(processor, "tokenizer", processor)
        template = tokenizer.chat_template
        if isinstance(template, str):
            # Another day than the first would change the tokens, and so the data of the run.
            tokenizer.chat_template = _TIME.sub(lambda call: json.dumps(began.strftime(call[2])), template)
        examples = read(command, tokenizer)
        held_out = read(command, tokenizer, held_out=True) if args.eval_strategy != "no" else None
        # FSDP2 makes parameters of its own from the values.
        with trainers.loading() if args.world_size == 1 else contextlib.nullcontext():
            trainer = getattr(trl, f"{KINDS[command.kind]}Trainer")(
                model=name,
                args=args,
                train_dataset=examples,
                eval_dataset=held_out,
                processing_class=processor,
                peft_config=trl.get_peft_config(model),
            )
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, OSError) as error:
        if isinstance(error, MemascendError) or getattr(error, "errno", None):
            raise
        raise ConfigError(f"{name} cannot be trained: {' '.join(str(error).split())}") from error
    tokenizer.chat_template = template
    _require_exact(trainer)
    words = _examples_in_words(trainer, command.kind, examples)
    held = _require_some(trainer, "eval", held_out, trainer.eval_dataset)
    return trainer, f"{words}; of --eval {held}" if words and held else words


def _require_some(trainer: Any, option: str, given: Any, kept: Any) -> str:
    """Reject data of which TRL dropped all examples; returns how many it dropped, in words, or ""."""
    if given is None or isinstance(given, datasets.IterableDataset) or getattr(trainer.args, "packing", False):
        # A stream has no length, and packing drops none.
        return ""
    dropped, count = len(given) - len(kept), len(given)
    if not dropped:
        return ""
    length = f"--max_length {trainer.args.max_length}"
    is_whole = isinstance(trainer.args, trl.RewardConfig)
    reason = f"is longer than {length}" if is_whole else f"has no token with a loss within {length}"
    if count == dropped:
        raise ConfigError(f"no example of --{option} is left: each {reason}: give a larger one, or shorter examples")
    return f"{dropped:,} dropped of {count:,}: each {reason}"


def _examples_in_words(trainer: Any, kind: str, given: Any) -> str | None:
    """The examples that are trained: kept, cut and dropped; None for a stream."""
    dropped = _require_some(trainer, "data", given, trainer.train_dataset)
    if isinstance(given, datasets.IterableDataset):
        return None
    kept, longest = trainer.train_dataset, getattr(trainer.args, "max_length", None)
    if getattr(trainer.args, "packing", False):
        return f"{len(given):,}, packed into {len(kept):,} rows of --max_length {longest}"
    words = [f"{len(kept):,} kept", *([dropped] if dropped else [])]
    lengths = None if longest is None else token_counts(kept)
    if lengths is not None:
        # Shorter rows were cut by TRL already; of pairs the collator cuts them.
        is_cut = kind != "sft"
        count = int((lengths > longest).sum() if is_cut else (lengths == longest).sum())
        what = (
            f"cut to --max_length {longest}" if is_cut else f"fill --max_length {longest}, to which longer ones are cut"
        )
        words[1:1] = [f"{count:,} {what}"] if count else []
    return "; ".join(words)


def _require_exact(trainer: Any) -> None:
    """Reject models whose loss would mean nothing, or whose attention would mix packed examples."""
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    config, name, source = model.config, type(model).__name__, inspect.getsource(sys.modules[type(model).__module__])
    # Some configs have is_decoder although the model's code does not read it.
    sees_all = "config.is_decoder" in source and not getattr(config, "is_decoder", True)
    decodes = name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    if sees_all or config.is_encoder_decoder or not (decodes or name.endswith("ForSequenceClassification")):
        raise ConfigError(
            f"{name} is no causal decoder, so that this loss means nothing: train it in a loop of your own"
        )
    layers = {*(getattr(config, "layer_types", None) or ())}
    if getattr(trainer.args, "packing", False) and not (
        # Position ids keep attention within an example, unless a layer is recurrent or convolves.
        ("position_ids=position_ids" in source and "causal_mask" in source)
        and layers <= {"full_attention", "sliding_attention", "chunked_attention"}
        and not any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    ):
        raise ConfigError(f"{name} would mix examples that share a sequence: leave --packing out")


def _write(trainer: Any, file: Path, record: dict[str, Any]) -> None:
    if trainer.is_world_process_zero():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".new").write_text(json.dumps(record))
        file.with_suffix(".new").replace(file)


def _save(trainer: Any, file: Path, record: dict[str, Any]) -> None:
    """Save the model of the last step, unless it is there."""
    optimizer = offloaded_optimizer(trainer.optimizer)
    made = session_of(optimizer).run.metadata.identity()
    (is_there,) = broadcast_object_list([record.get("saved") == made])
    if not is_there:
        trainer.save_model(str(file.parent))
        trainer.save_state()
        # A record without its model would pass for a whole one.
        os.sync()
        _write(trainer, file, record | {"saved": made})
    done = "this run is finished" if is_there else "the training is done"
    trainer.accelerator.print(f"{done}: {file.parent} holds the model of step {optimizer.steps}")
    optimizer.close()
    if trainer.is_world_process_zero() and not is_there:
        # The run is over: without matplotlib, or with one that fails, there is no picture.
        with contextlib.suppress(Exception):
            optimizer.report().plot(file.parent / _PICTURE)
            print(f"{file.parent / _PICTURE} shows loss, seconds a step and GB/s")
