"""Offloads a Trainer with one line of code, as a user's script does, and trains.

Tests start this program, kill it and start it again. If STORE is "memory", the program trains without offloading.

usage: [TRAINED_OPTIONS=JSON] [ENDS_BY=NUMBER] trained_program.py STORE LOG [MOMENT STEP]
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import signal
import sys
from collections import Counter
from functools import partialmethod
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers.trainer_callback import ExportableState

import memascend.trainer
from memascend.storage import Engine

# Words in the names of log entries about time and storage. These entries differ between runs, so tests do not compare
# them.
NOT_COMPARED = ("runtime", "per_second", "host_memory_bytes", "read_bytes", "written_bytes", "waiting_seconds")


def compared(line):
    """Returns a log line without the entries that tests do not compare (see `NOT_COMPARED`)."""
    return {name: value for name, value in line.items() if not any(part in name for part in NOT_COMPARED)}


def model(seed=0, attention_dropout=0.1):
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    # On a GPU, every attention kernel except "eager" has its own order of random numbers and of additions.
    shape["attn_implementation"] = "eager"
    config = transformers.Qwen2Config(vocab_size=64, num_hidden_layers=2, attention_dropout=attention_dropout, **shape)
    return transformers.Qwen2ForCausalLM(config)


def rows(count=50):
    tokens = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(3)).tolist()
    return [{"input_ids": row[: 6 + index % 7], "labels": row[: 6 + index % 7]} for index, row in enumerate(tokens)]


def padded(batch):
    return collated(batch, lambda ids: ids)


def masked(batch):
    """Collates a batch, and replaces some of the batch's tokens.

    Random numbers from torch's global generator choose the tokens.
    """
    return collated(batch, lambda ids: torch.where(torch.rand(ids.shape) < 0.2, 1, ids))


def collated(batch, change):
    width = max(len(row["input_ids"]) for row in batch)

    def column(name, padding):
        return torch.tensor([row[name] + [padding] * (width - len(row[name])) for row in batch])

    return {"input_ids": change(column("input_ids", 0)), "labels": column("labels", -100)}


class Drawn(torch.utils.data.Dataset):
    """A dataset that replaces tokens at random. It calls `draw` for each random number."""

    def __init__(self, draw):
        self.draw, self.rows = draw, rows()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {**row, "input_ids": [9 if self.draw() < 0.2 else token for token in row["input_ids"]]}


class OwnDice:
    """A collator with two random generators. `__init__` makes the first generator; the first batch makes the second."""

    def __init__(self):
        self.rare, self.lazy = random.Random(5), None

    def __call__(self, batch):
        self.lazy = self.lazy or np.random.default_rng(7)
        return collated(batch, self._changed)

    def _changed(self, ids):
        ids = torch.where(torch.from_numpy(self.lazy.random(ids.shape)) < 0.2, 1, ids)
        return torch.where(torch.tensor(self.rare.random() < 0.1), 2, ids)


class Habits(transformers.TrainerCallback, ExportableState):
    """A callback that changes weights and options, and freezes a layer, in the Trainer's events, like user programs."""

    def __init__(self, norms=(), seen=None):
        self.norms, self.seen = norms, seen or {}

    def state(self):
        return {"args": {"norms": self.norms}, "attributes": {"seen": self.seen}}

    def on_train_begin(self, *_, model, optimizer, **__):
        own, door = getattr(optimizer, "optimizer", optimizer), contextlib.nullcontext()
        if hasattr(own, "edit"):
            assert own.grad_norm is None
            door = memascend.materialized(model, modify=True)
        with torch.no_grad(), door:
            model.model.norm.weight.mul_(0.5)

    def on_epoch_begin(self, _args, state, _control, *, model, **_):
        model.model.layers[0].requires_grad_(round(state.epoch or 0) == 0)

    def on_step_begin(self, _args, _state, _control, *, optimizer, **_):
        for group in optimizer.param_groups:
            group["weight_decay"] *= 0.9

    def on_pre_optimizer_step(self, _args, state, _control, *, model, **_):
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        self.norms = (*self.norms[-3:], torch.stack([one.detach().norm() for one in gradients]).norm().item())
        self.seen[state.global_step % 5] = (state.global_step, len(state.log_history))

    def on_step_end(self, _args, state, _control, *, model, optimizer, **_):
        if state.global_step % 2:
            self._shrink(model, optimizer)

    def on_evaluate(self, *_, model, optimizer, **__):
        self._shrink(model, optimizer)

    def on_epoch_end(self, *_, model, **__):
        model.load_state_dict({"model.norm.weight": model.model.norm.weight.detach() * 0.9}, strict=False)

    @staticmethod
    def _shrink(model, optimizer):
        own = getattr(optimizer, "optimizer", optimizer)
        edit = own.edit if hasattr(own, "edit") else contextlib.nullcontext
        with torch.no_grad(), edit(model.model.norm.weight) as weight:
            weight.mul_(0.99)


class Averaging(transformers.Trainer):
    """A Trainer that also logs a mean loss, a sum of batch widths, and what each `Habits` callback saw (norms, steps).

    This class computes the mean loss and the sum itself.
    """

    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.losses, self.counted = [], Counter()

    def compute_loss(self, model, inputs, return_outputs=False, **named):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **named)
        if model.training:
            self.losses.append(loss.item())
            self.counted[inputs["input_ids"].shape[1]] += 1
        return (loss, outputs) if return_outputs else loss

    def log(self, logs, *given, **named):
        habits = [one for one in self.callback_handler.callbacks if isinstance(one, Habits)]
        if "loss" in logs:
            logs["mean"] = sum(self.losses) / len(self.losses)
            logs["widths"] = sum(width * count for width, count in self.counted.items())
            logs["seen"] = str([(one.norms, sorted(one.seen.items())) for one in habits])
            self.losses.clear()
        super().log(logs, *given, **named)


class Log(transformers.TrainerCallback):
    """A callback that appends each log line to `file`. It ends the process at the point `moment` of step `step`."""

    def __init__(self, file, moment=None, step=0):
        self.file, self.moment, self.step = Path(file), moment, int(step)

    def on_log(self, _args, state, _control, logs, **_):
        kind = next((name for name in ("loss", "eval_loss", "train_loss") if name in logs), "other")
        line = {"step": state.global_step, "kind": kind}
        line |= compared(logs)
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _at(self, _args, state, *_, moment, **__):
        if (moment, state.global_step) == (self.moment, self.step):
            end_of_process()

    on_substep_end = partialmethod(_at, moment="micro-batch")
    on_pre_optimizer_step = partialmethod(_at, moment="before the step")
    on_optimizer_step = partialmethod(_at, moment="after the commit")
    on_step_end = partialmethod(_at, moment="end of the step")
    on_prediction_step = partialmethod(_at, moment="evaluation")
    on_save = partialmethod(_at, moment="checkpoint")


class Ended(Exception):
    """Raised to end a training in the test's own process. A kill would also end the test."""


class Ends(transformers.TrainerCallback):
    """A callback that raises `Ended` after each step in `steps`."""

    def __init__(self, *steps):
        self.steps = steps

    def on_step_end(self, _args, state, *_, **__):
        if state.global_step in self.steps:
            raise Ended


def end_of_process():
    os.kill(os.getpid(), int(os.environ.get("ENDS_BY", signal.SIGKILL)))


def kill_while_created():
    """Patches `Engine.commit` so that the process ends before the commit of step 0.

    This commit would complete a new store.
    """
    own = Engine.commit

    def commit(self, step, **options):
        if step == 0:
            end_of_process()
        return own(self, step, **options)

    Engine.commit = commit


def made(
    output,
    *callbacks,
    data=None,
    collate=padded,
    optimizers=(None, None),
    kind=transformers.Trainer,
    own=None,
    compute_loss_func=None,
    **options,
):
    """Returns a Trainer with warm-up, evaluations and checkpoints.

    By default, a step has four micro-batches, and the last step of an epoch has fewer.
    """
    arguments = transformers.TrainingArguments(
        **{
            "output_dir": str(output), "num_train_epochs": 2, "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4, "learning_rate": 1e-2, "warmup_steps": 3, "logging_steps": 3,
            "eval_strategy": "steps", "eval_steps": 4, "save_steps": 5, "save_total_limit": 1, "report_to": [],
            "use_cpu": True, "disable_tqdm": True, "optim": "adamw_torch_fused", "remove_unused_columns": False,
            "include_num_input_tokens_seen": True, **options,
        }
    )  # fmt: skip
    return kind(
        model() if own is None else own, arguments, train_dataset=rows() if data is None else data,
        eval_dataset=rows(8), data_collator=collate, callbacks=list(callbacks), optimizers=optimizers,
        compute_loss_func=compute_loss_func,
    )  # fmt: skip


def started(folder, *callbacks, end=None, make=made, offloads=None, **options):
    """Offloads a new Trainer to the store in `folder` and trains it to step `end` (None: all steps).

    Returns the Trainer.
    """
    trainer = make(folder / "out", *callbacks, Ends(end), **options)
    with memascend.trainer.offload(trainer, storage=folder / "store", **(offloads or {})):
        with contextlib.suppress(Ended):
            trainer.train()
        assert end in (None, trainer.state.global_step)
        trainer.digest = digest_of(trainer.model)
    return trainer


def digest_of(trained):
    digest = hashlib.sha256()
    for name, parameter in trained.named_parameters():
        digest.update(name.encode() + parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def logged(file):
    """Returns the last line of a log for each pair of step and kind."""
    lines = [json.loads(line) for line in Path(file).read_text().splitlines()]
    return {(line["step"], line["kind"]): line for line in lines}


def main(store, log, moment=None, step=0, *, make=made, **offloads):
    torch.set_num_threads(1)
    if moment == "creation":
        kill_while_created()
    options = json.loads(os.environ.get("TRAINED_OPTIONS", "{}"))
    callbacks, keep = [], []
    if options.pop("habits", False):
        options |= {"kind": Averaging, "collate": OwnDice(), "weight_decay": 0.5}
        callbacks, keep = [Habits()], ["losses", "counted"]
    if not options.get("use_cpu", True):
        torch.use_deterministic_algorithms(True)
    trainer = make(f"{log}-out", *callbacks, Log(log, moment, step), **options)
    if store != "memory":
        memascend.trainer.offload(trainer, storage=store, keep=keep, **offloads)
    trainer.train()
    print(digest_of(trainer.model))


if __name__ == "__main__":
    main(*sys.argv[1:])
