"""Runs one of TRL's Trainers with `memascend.trainer.offload()`, and saves the model of the last step."""

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

# Matches calls in chat templates that insert the date. Group 2 is the format of the date.
_TIME = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
# The name of the picture, in the output folder, that plots the run's loss and speeds.
_PICTURE = "training.png"
# The name of a file in the output folder. The file has the time at which the run began, and the store and step of the
# saved model.
_RECORD = "memascend-train.json"


def train(command: Command) -> int:
    """Trains to the end of the training, and saves the model; with --dry_run, only prints the plan.

    By default, training continues after the last step in the store. Returns the exit code.
    """
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
    """Returns the memory that the machine can spare. If the CPU computes, leaves room for torch's memory, if known."""
    if options.computes_on != "cpu":
        return Spare()
    try:
        found = _traced(trainer, kind, options)
    except Exception:  # noqa: BLE001
        # The memory that torch needs is not known, but the model can still be trained.
        return Spare()
    if isinstance(found, str):
        return Spare()
    # If micro-batches are computed by layer, each further micro-batch also keeps its own checkpointed activations.
    more = (trainer.args.gradient_accumulation_steps - 1) * found.kept
    return Spare(torch_bytes=int((1 + GAPS) * (found.peak + more)))


@contextlib.contextmanager
def _unchanged(folder: Path) -> Iterator[None]:
    """Removes `folder` at the end if it is empty and did not exist before. A Trainer's constructor creates it."""
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
    """Returns the largest micro-batch of a Trainer, and how the loss is computed. `kind` is a key of `KINDS`."""
    args = trainer.args
    longest = getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)
    # Versions of TRL without `add_fused_lm_head` compute the logits of all tokens at once.
    loss: Loss = "chunked" if hasattr(trl.trainer.utils, "add_fused_lm_head") else "full"
    return Batch(
        # In DPO and reward training, an example is a pair of answers, and one batch has the two answers of each pair.
        sequences=args.per_device_train_batch_size * (2 if kind in ("dpo", "reward") else 1),
        length=min(one for one in (args.max_length, longest) if one),
        loss="score" if kind == "reward" else loss,
        on_host=on_host,
    )


def _traced(trainer: Any, kind: str, options: Options) -> Trace | str:
    """Returns the trace of one micro-batch of the Trainer, or the reason why there is no trace."""
    if not getattr(trainer.args, "max_length", None):
        return "pass --max_length to estimate it"
    if trainer.args.world_size > 1:
        return "it can be estimated only for a single rank"
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    batch = batch_of(trainer, kind, on_host=options.computes_on == "cpu")
    return trace(model, batch, recomputes=trainer.args.gradient_checkpointing)


def _torchs_memory(trainer: Any, kind: str, options: Options) -> str:
    """Describes the memory that torch takes for a micro-batch. The plan does not include this memory."""
    found = _traced(trainer, kind, options)
    if isinstance(found, str):
        return f"torch's memory is not known: {found}"
    batch = batch_of(trainer, kind, on_host=options.computes_on == "cpu")
    losses = {"full": "with the logits of all tokens", "chunked": "with a chunked loss", "score": "with scores"}
    return (
        f"in addition, torch takes {bytes_shown(found.peak)} for a micro-batch of {batch.sequences} x "
        f"{batch.length:,} tokens {losses[found.loss]}"
    )


class Terminated(KeyboardInterrupt):
    """Raised after SIGTERM. As a subclass of KeyboardInterrupt, this exception ends the process as Ctrl-C does."""

    exit_code = 128 + signal.SIGTERM


@contextlib.contextmanager
def _stop_reported(existing: str | None) -> Iterator[list[Any]]:
    """Prints where the training stopped if Ctrl-C ends the block. Without torchrun, does the same for SIGTERM.

    Yields an empty list. The block appends the Trainer to this list when the Trainer exists.
    """
    made: list[Any] = []
    before: Any = None
    # With torchrun, SIGTERM keeps its default action. Python runs no handler while a rank waits in a collective call,
    # so torchrun would wait for this rank in vain.
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
    """Closes the optimizer, and prints how to continue. Only the first rank of each machine prints."""
    where = "before the training began: run the same command to start the training"
    # A command with another value of --existing would not resume from the store's last step.
    without = "" if existing in (None, "resume") else f" without --existing {existing}"
    with contextlib.suppress(ConfigError, AttributeError):
        # If no offloaded Trainer exists yet, the next line raises an error, and `where` keeps its value.
        optimizer = offloaded_optimizer(trainer.optimizer)
        # close() may write for a while and show its progress, so the message is printed afterwards.
        optimizer.close()
        where = f"after step {optimizer.steps}, which is committed: run the same command{without} to continue"
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for callback in [] if trainer is None else trainer.callback_handler.callbacks:
            if (bar := getattr(callback, "training_bar", None)) is not None:
                # An open progress bar would be drawn again after the message.
                bar.close()
        print(f"memascend train: stopped {where}", file=sys.stderr)


def _terminate(process: int, *_: object) -> None:
    if os.getpid() == process:
        raise Terminated
    # Here, the process is a forked child that inherited the handler, such as a worker of a DataLoader. End without
    # cleanup.
    os._exit(Terminated.exit_code)


def _made(command: Command, began: dt.datetime) -> tuple[Any, str | None]:
    """Makes TRL's Trainer for the command. Returns the Trainer, and a description of its examples.

    The description is None if the examples are a stream.
    """
    model, args = command.model, command.training
    name = model.model_name_or_path
    if Path(name).resolve() == Path(args.output_dir).resolve():
        raise ConfigError("--model and --output are the same folder, but must differ: pass another folder as --output")
    for option in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, option):
            raise ConfigError(
                f"--{option} quantizes the model with bitsandbytes, and memascend cannot offload quantized weights: "
                f"remove --{option}. To train adapters on the 16-bit model, pass --use_peft"
            )
    given = {"revision": model.model_revision, "trust_remote_code": args.trust_remote_code}
    more = {"attn_implementation": model.attn_implementation, "dtype": model.dtype}
    args.model_init_kwargs = {**given, **more, **(args.model_init_kwargs or {})}
    try:
        processor = transformers.AutoProcessor.from_pretrained(name, **given)  # type: ignore[no-untyped-call]
        tokenizer = getattr(processor, "tokenizer", processor)
        template = tokenizer.chat_template
        if isinstance(template, str):
            # Insert the day on which the run began. The day of a resume would change the tokens of all examples.
            tokenizer.chat_template = _TIME.sub(lambda call: json.dumps(began.strftime(call[2])), template)
        examples = read(command, tokenizer)
        held_out = read(command, tokenizer, held_out=True) if args.eval_strategy != "no" else None
        # With several ranks, accelerate shards values that are in memory, so the model is loaded with its values.
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
        raise ConfigError(f"{name} cannot be trained with these options: {' '.join(str(error).split())}") from error
    tokenizer.chat_template = template
    _require_exact(trainer)
    words = _examples_in_words(trainer, command.kind, examples)
    held = _require_some(trainer, "evaluation", held_out, trainer.eval_dataset)
    return trainer, f"{words}; for evaluation, {held}" if words and held else words


def _require_some(trainer: Any, use: str, given: Any, kept: Any) -> str:
    """Describes how many examples TRL dropped; "" if TRL dropped none, or if the number is not known.

    Raises:
        ConfigError: TRL dropped all examples.
    """
    if given is None or isinstance(given, datasets.IterableDataset) or getattr(trainer.args, "packing", False):
        # A stream has no length, and packing drops no examples.
        return ""
    dropped, count = len(given) - len(kept), len(given)
    if not dropped:
        return ""
    length = f"--max_length {trainer.args.max_length}"
    is_whole = isinstance(trainer.args, trl.RewardConfig)
    reason = f"is longer than {length}" if is_whole else f"has no token with a loss within {length}"
    if count == dropped:
        raise ConfigError(
            f"no example for {use} is left: each {reason}. Pass a larger --max_length, or shorter examples"
        )
    return f"{dropped:,} dropped of {count:,}: each {reason}"


def _examples_in_words(trainer: Any, kind: str, given: Any) -> str | None:
    """Describes how many examples TRL kept, cut and dropped; None if the examples are a stream."""
    dropped = _require_some(trainer, "training", given, trainer.train_dataset)
    if isinstance(given, datasets.IterableDataset):
        return None
    kept, longest = trainer.train_dataset, getattr(trainer.args, "max_length", None)
    if getattr(trainer.args, "packing", False):
        return f"{len(given):,}, packed into {len(kept):,} rows of --max_length {longest}"
    words = [f"{len(kept):,} kept", *([dropped] if dropped else [])]
    lengths = None if longest is None else token_counts(kept)
    if lengths is not None:
        # For SFT, TRL has already cut the examples, so each cut example has exactly --max_length tokens. For DPO and
        # KTO, the collator cuts examples later, so each example with more tokens is counted.
        is_cut = kind != "sft"
        count = int((lengths > longest).sum() if is_cut else (lengths == longest).sum())
        what = (
            f"cut to --max_length {longest}" if is_cut else f"fill --max_length {longest}, to which longer ones are cut"
        )
        words[1:1] = [f"{count:,} {what}"] if count else []
    return "; ".join(words)


def _require_exact(trainer: Any) -> None:
    """Raises ConfigError if the model is not a causal decoder, or if the model may mix packed examples."""
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()
    config, name, source = model.config, type(model).__name__, inspect.getsource(sys.modules[type(model).__module__])
    # The code of some models reads `config.is_decoder`. For all other models, `config.is_decoder` has no meaning.
    sees_all = "config.is_decoder" in source and not getattr(config, "is_decoder", True)
    decodes = name.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))
    if sees_all or config.is_encoder_decoder or not (decodes or name.endswith("ForSequenceClassification")):
        raise ConfigError(
            f"{name} is not a causal decoder, so `memascend train` cannot train it: write a training loop with "
            "memascend.offload() instead"
        )
    layers = {*(getattr(config, "layer_types", None) or ())}
    if getattr(trainer.args, "packing", False) and not (
        # Position ids keep attention within an example, but recurrent and convolutional layers ignore position ids.
        ("position_ids=position_ids" in source and "causal_mask" in source)
        and layers <= {"full_attention", "sliding_attention", "chunked_attention"}
        and not any(isinstance(module, torch.nn.Conv1d) for module in model.modules())
    ):
        raise ConfigError(f"{name} may mix examples that share a sequence: pass --packing false")


def _write(trainer: Any, file: Path, record: dict[str, Any]) -> None:
    """Writes `record` to `file`, atomically, on rank 0 only."""
    if trainer.is_world_process_zero():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".new").write_text(json.dumps(record))
        file.with_suffix(".new").replace(file)


def _save(trainer: Any, file: Path, record: dict[str, Any]) -> None:
    """Saves the model of the last step and plots the run, unless the model is saved already. Closes the optimizer."""
    optimizer = offloaded_optimizer(trainer.optimizer)
    made = session_of(optimizer).run.metadata.identity()
    (is_there,) = broadcast_object_list([record.get("saved") == made])
    if not is_there:
        trainer.save_model(str(file.parent))
        trainer.save_state()
        # The model is flushed to the disk before the record is written. After a crash, the record must not name an
        # incomplete model.
        os.sync()
        _write(trainer, file, record | {"saved": made})
    done = "this run is finished" if is_there else "the training is done"
    trainer.accelerator.print(f"{done}: {file.parent} holds the model of step {optimizer.steps}")
    optimizer.close()
    if trainer.is_world_process_zero() and not is_there:
        # The model is saved already, so an error in the plot (for example, no matplotlib) must not fail the command.
        with contextlib.suppress(Exception):
            optimizer.report().plot(file.parent / _PICTURE)
            print(f"{file.parent / _PICTURE} shows loss, seconds a step and GB/s")
