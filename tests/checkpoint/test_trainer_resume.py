"""Tests that a Trainer resumes where its process ended, with the same bits and log, or rejects the resume."""

import json
import random
import re
import shutil
import signal
from functools import partial

import pytest
import torch
import transformers
from support import trained_program
from support.grids import usual
from support.lives import environment
from support.loaded import Loaded
from support.trained_program import Drawn, Log, OwnDice, digest_of, logged, made, masked, model, rows, started

import memascend.trainer
from memascend.errors import ConfigError, StorageError, UsageError
from memascend.storage import look

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quiet")]


# --- processes ------------------------------------------------------------------------------

PROGRAM = "import sys; from support.trained_program import main; main(*sys.argv[1:])"


@pytest.fixture(scope="module")
def has_transformers():
    """Starts an interpreter that has imported transformers.

    The import takes longer than most of these trainings.
    """
    modules = ["transformers.trainer", "transformers.models.qwen2.modeling_qwen2"]
    loaded = Loaded(environment(), modules, warnings=("ignore",))
    yield loaded
    loaded.close()


@pytest.fixture
def start(has_transformers):
    """Returns `run`, which runs the program with options of the Trainer.

    `run` returns a list with the last line of the output, which is the digest of the weights. If a signal ends the
    program, the list has the last line of the error output, or is empty.
    """

    def run(*words, ends=0, **options):
        variables = {**environment(), "TRAINED_OPTIONS": json.dumps(options), "ENDS_BY": str(-ends)}
        # CUDA needs this variable for deterministic matrix products.
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        done = has_transformers.run(PROGRAM, *map(str, words), env=variables, timeout=250)
        assert done.status == ends, done
        last = (done.err if ends else done.out).splitlines()[-1:]
        if ends == -signal.SIGINT:
            assert re.fullmatch(
                r"stopped after step \d+, which is committed: start the same script again to continue, with "
                r'existing="resume" \(the default\)',
                *last,
            ), last
        return last

    return run


# Pairs of a point in the program and a step. The tests end the process at each pair: at every third pair by Ctrl-C, and
# at all other pairs by SIGKILL.
MOMENTS = [("creation", 0), ("after the commit", 2), ("evaluation", 4), ("checkpoint", 10)]
MORE = [
    ("micro-batch", 1), ("checkpoint", 5), ("before the step", 6), ("end of the step", 7), ("after the commit", 13),
    ("evaluation", 14),
]  # fmt: skip


def require_same(start, tmp_path, want, moments, **options):
    """Ends the program at each of `moments` and restarts it.

    Requires the digest `want`, and the log of an uninterrupted run.
    """
    for index, (moment, step) in enumerate(moments):
        ends = -signal.SIGINT if index % 3 == 2 else -signal.SIGKILL
        start(tmp_path / "killed", tmp_path / "killed.log", moment, step, ends=ends, **options)
    assert start(tmp_path / "killed", tmp_path / "killed.log", **options) == want
    assert logged(tmp_path / "killed.log") == logged(tmp_path / "whole.log")
    assert len(logged(tmp_path / "killed.log")) > 8


@pytest.mark.timeout(900)
@pytest.mark.parametrize("moments", [MOMENTS, pytest.param(MORE, marks=pytest.mark.slow)])
def test_repeatedly_killed_training_equals_training_in_memory(tmp_path, start, moments):
    """With `habits`, callbacks change options, freeze layers, read gradients, and write weights in many ways."""
    require_same(start, tmp_path, start("memory", tmp_path / "whole.log", habits=True), moments, habits=True)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True}], ids=str)
def test_gpu_resume_keeps_random_numbers_and_the_loss_scale(tmp_path, start, precision):
    """Compares killed and resumed runs with an uninterrupted offloaded run.

    A run in memory would have other bits, because torch's AdamW rounds differently on a GPU. Dropout draws its random
    numbers on the GPU.
    """
    options = {"use_cpu": False, **precision}
    want = start(tmp_path / "whole", tmp_path / "whole.log", **options)
    moments = [("after the commit", 2), ("micro-batch", 4), ("checkpoint", 5), ("before the step", 9)]
    require_same(start, tmp_path, want, moments, **options)


# --- several starts in this process ---------------------------------------------------------


def trained(folder, *ends, options=dict, **fixed):
    """Trains in several runs; returns the digest and the log.

    For each step in `ends`, one run stops at that step, and the next run resumes there. The last run completes the
    training.
    """
    log = folder / "log"
    for number, end in enumerate((*ends, None)):
        torch.manual_seed(100 + number)
        trainer = started(folder, Log(log), end=end, **{**options(), **fixed})
    return trainer.digest, logged(log)


@pytest.mark.parametrize(("batches", "limit"), [pytest.param(1, 2.3, marks=pytest.mark.slow), (4, 1.25)])
def test_clipped_and_unclipped_steps_equal_training_in_memory(tmp_path, batches, limit):
    """The script does not pass `clipping=`, so memascend clips gradients as torch does."""
    options = {"gradient_accumulation_steps": batches, "max_steps": 12, "logging_steps": 1, "max_grad_norm": limit}
    plain = made(tmp_path / "memory", Log(tmp_path / "log"), **options)
    plain.train()
    lines = logged(tmp_path / "log")
    assert trained(tmp_path / "offloaded", **options) == (digest_of(plain.model), lines)
    norms = [line["grad_norm"] for line in lines.values() if "grad_norm" in line]
    assert min(norms) < limit < max(norms)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(rows())


class Chained(transformers.Trainer):
    """A Trainer with its own scheduler. The scheduler computes each learning rate from the previous learning rate."""

    def create_scheduler(self, _steps=0, optimizer=None, **_):
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer or self.optimizer, gamma=0.9)
            self._created_lr_scheduler = True
        return self.lr_scheduler


def stopping(output, *callbacks, **options):
    """Makes a Trainer that stops after two evaluations in a row without improvement."""
    stop = transformers.EarlyStoppingCallback(2, 10.0)
    best = {"metric_for_best_model": "eval_loss", "save_strategy": "no", "eval_steps": 2}
    return made(output, *callbacks, stop, **best, **options)


def scaled(output, *callbacks, **options):
    """Makes a Trainer that scales losses as for fp16 on a GPU.

    The scale grows by a factor of 1.1. It is then no power of two, so scaling rounds.
    """
    trainer = made(output, *callbacks, **options)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", growth_factor=1.1, growth_interval=2)
    return trainer


PLATEAU = {
    "lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "threshold": 0.5},
    "eval_steps": 2, "metric_for_best_model": "eval_loss",
}  # fmt: skip
# Maps a case to the options of the Trainer, and to the steps after which the training stops and starts again.
RUNS = {
    # random.gauss() draws numbers in pairs, and keeps the second number for the next call.
    "epochs": (lambda: {"data": Drawn(partial(random.gauss, 0.5, 0.4))}, (3, 7, 10)),
    "a random collator": ({"collate": masked}, (1, 6, 7, 12)),
    "by length": ({"train_sampling_strategy": "group_by_length"}, (3, 9)),
    "workers": ({"dataloader_num_workers": 1, "collate": masked}, (3, 9)),
    "a stream": ({"data": Stream(), "max_steps": 10}, (3, 8)),
    # The scheduler lowers the learning rate when the loss of an evaluation does not improve.
    "a plateau": (PLATEAU, (4, 5, 9)),
    "a chained scheduler": ({"kind": Chained}, (2, 11)),
    "early stopping": ({"make": stopping}, (3, 4)),
    "no evaluation ahead": ({"eval_strategy": "no", "logging_strategy": "epoch", "save_strategy": "epoch"}, (5, 8)),
    "generators of its own": (lambda: {"collate": OwnDice(), "data": Drawn(random.Random(5).random)}, (1, 7, 9)),
    "a loss scale": ({"make": scaled, "max_grad_norm": 0, "max_steps": 8}, (2, 5)),
    "one batch a step": ({"gradient_accumulation_steps": 1, "max_steps": 9, "max_grad_norm": 0}, (1, 4)),
}
# Cases that run only with the slow tests.
LATER = {"by length", "a random collator", "no evaluation ahead", "generators of its own"}


@pytest.mark.parametrize("name", usual(RUNS, *RUNS.keys() - LATER))
def test_stopped_training_resumes_with_the_same_bits_and_log(tmp_path, name):
    options, ends = RUNS[name]
    # If `options` is callable, each start makes new objects with `options`, as a new process would.
    fresh = options if callable(options) else lambda: options
    whole = trained(tmp_path / "whole", **fresh())
    assert trained(tmp_path / "ended", *ends, options=fresh) == whole
    # A finished training takes no further step.
    assert trained(tmp_path / "ended", options=fresh) == whole


def streamed(*given, **options):
    with memascend.trainer.loading():
        return made(*given, **options)


def test_resume_identifies_a_loaded_model_by_its_weights(tmp_path, monkeypatch):
    """Each start loads a float32 model from bfloat16 files. A later start may load the model inside loading()."""
    folder = tmp_path / "model"
    model().bfloat16().save_pretrained(folder)
    load = partial(transformers.Qwen2ForCausalLM.from_pretrained, folder, dtype=torch.float32)
    monkeypatch.setattr(trained_program, "model", load)
    want, _ = trained(tmp_path / "whole", max_steps=3)
    started(tmp_path / "ended", end=2, max_steps=3)
    assert started(tmp_path / "ended", make=streamed, max_steps=3).digest == want
    other = load()
    other.get_input_embeddings().weight.data.add_(1)
    other.save_pretrained(folder)
    with pytest.raises(ConfigError, match="model"):
        trained(tmp_path / "ended", max_steps=3)


ARGUMENTS = {
    "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "optim": "sgd",
    "per_device_train_batch_size": 1, "seed": 1, "warmup_steps": 2, "weight_decay": 0.1,
}  # fmt: skip
CHANGES = {
    "arguments": (ARGUMENTS, "; ".join(rf"{name} \S+ -> {value}" for name, value in ARGUMENTS.items())),
    "epochs": (
        {"num_train_epochs": 3},
        "num_train_epochs 2 -> 3. No step was trained: only a training with a constant schedule",
    ),
    "fewer rows": ({"data": rows(49)}, "data 50 rows .* -> 49 rows"),
    "the last row": ({"data": [*rows()[:-1], rows()[0]]}, "data 50 rows .* -> 50 rows"),
    "the last batch, a loss, and dropout": (
        {
            "dataloader_drop_last": True,
            "compute_loss_func": lambda found, *_, **__: found.loss,
            "own": model(attention_dropout=0.5),
        },
        "dataloader_drop_last False -> True; compute_loss_func None -> .*; config.attention_dropout 0.1 -> 0.5",
    ),
    "other rows": ({"data": [{**row, "labels": row["labels"][::-1]} for row in rows()]}, "data 50 rows .* -> 50 rows"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_resume_of_another_training_is_rejected_with_the_differences(tmp_path, ended, name):
    options, says = CHANGES[name]
    before = (ended / "store").read_bytes()
    with pytest.raises(ConfigError, match=f'holds another training, after step 5: {says}.*existing="replace"'):
        memascend.trainer.offload(made(tmp_path / "out", **options), storage=ended / "store")
    assert (ended / "store").read_bytes() == before


def test_uncommitted_source_of_randomness_is_rejected_before_step_1(tmp_path):
    def drawn(batch):
        found = trained_program.padded(batch)
        return {**found, "input_ids": found["input_ids"] + random.SystemRandom().randrange(1, 1 << 20)}

    with pytest.raises(ConfigError, match=r"first batch was made twice.*differ.*source of randomness"):
        trained(tmp_path, collate=drawn)
    with look(tmp_path / "store") as store:
        assert store.step == 0


def test_persistent_workers_with_random_data_are_rejected_at_the_start(tmp_path):
    persistent = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 2}
    with pytest.raises(ConfigError, match="dataloader_persistent_workers=True, workers keep random states"):
        trained(tmp_path / "drawn", data=Drawn(lambda: torch.rand(()).item()), **persistent)
    assert trained(tmp_path / "plain", **persistent)


def test_resume_with_a_shorter_stream_is_rejected_with_batch_counts(tmp_path):
    class Short(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows(12))

    started(tmp_path, end=3, data=Stream(), max_steps=10)
    with pytest.raises(
        ConfigError,
        match=r"data ends after at most 6 batches of this epoch, but the stored training had already fetched 13",
    ):
        trained(tmp_path, data=Short(), max_steps=10)


REFUSED = {
    "model_init": lambda out: transformers.Trainer(
        args=transformers.TrainingArguments(str(out), use_cpu=True), model_init=lambda: model(0), train_dataset=rows()
    ),
    "auto_find_batch_size": partial(made, auto_find_batch_size=True),
    "ignore_data_skip": partial(made, ignore_data_skip=True),
    "takes a Trainer": lambda _: model(),
}


@pytest.mark.parametrize("says", REFUSED)
def test_unsupported_trainers_and_options_are_rejected_by_name(tmp_path, says):
    with pytest.raises(ConfigError, match=says):
        memascend.trainer.offload(REFUSED[says](tmp_path / "out"), storage=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_second_train_call_old_checkpoint_or_other_model_is_rejected(tmp_path):
    options = {"max_steps": 2, "save_steps": 1, "save_total_limit": None}
    trainer = made(tmp_path / "out", **options)
    with memascend.trainer.offload(trainer, storage=tmp_path / "store"):
        trainer.train()
        with pytest.raises(UsageError, match=r"train\(\) was called twice"):
            trainer.train()
        with pytest.raises(UsageError, match="one process per trial, each with a different storage="):
            trainer.hyperparameter_search()
    again = made(tmp_path / "out", **options)
    with memascend.trainer.offload(again, storage=tmp_path / "store"):
        with pytest.raises(
            UsageError, match=r"after step 2.*checkpoint-1.*no checkpoint of this training at this step"
        ):
            again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))
        # Without checkpoint-2, the store is one step ahead of the newest checkpoint.
        shutil.rmtree(tmp_path / "out/checkpoint-2")
        again.train(resume_from_checkpoint=True)
        assert again.state.global_step == 2
    swapped = made(tmp_path / "other", max_steps=2)
    with memascend.trainer.offload(swapped, storage=tmp_path / "other-store"):
        swapped.model = swapped.model_wrapped = model()
        with pytest.raises((UsageError, ConfigError)):
            swapped.train()


def test_training_resumes_from_an_earlier_checkpoint_with_the_same_bits(tmp_path):
    options = {"save_total_limit": None, "num_train_epochs": 1}
    want, log = trained(tmp_path, **options)
    back = made(tmp_path / "other", Log(tmp_path / "back"), **options)
    folder = tmp_path / "out/checkpoint-5"
    shutil.copytree(folder, tmp_path / "other/checkpoint-5")
    with memascend.trainer.offload(
        back, storage=tmp_path / "store", existing="replace", checkpoint=folder
    ) as optimizer:
        assert optimizer.steps == 5
        back.train(resume_from_checkpoint=True)
        assert digest_of(back.model) == want
    assert logged(tmp_path / "back").items() <= log.items()


def test_a_checkpoint_of_another_training_is_refused_before_a_store_is_made(tmp_path):
    trained(tmp_path, max_steps=2)
    other = made(tmp_path / "other", max_steps=3)
    with pytest.raises(ConfigError, match="max_steps 2 -> 3"):
        memascend.trainer.offload(other, storage=tmp_path / "new", checkpoint=tmp_path / "out/checkpoint-2")
    assert not (tmp_path / "new").exists()


def test_train_rejects_an_optimizer_replaced_after_offload(tmp_path):
    trainer = made(tmp_path / "out")
    with memascend.trainer.offload(trainer, storage=tmp_path / "store"):
        trainer.optimizer = torch.optim.AdamW(trainer.model.parameters())
        with pytest.raises(UsageError, match="right before train"):
            trainer.train()


def test_trainer_offload_rejects_the_store_of_a_training_loop(tmp_path):
    own = model()
    own, optimizer = memascend.offload(own, torch.optim.AdamW(own.parameters()), storage=tmp_path / "store")
    with optimizer:
        own(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
        optimizer.step()
    with pytest.raises(ConfigError, match="1 steps that were trained without"):
        memascend.trainer.offload(made(tmp_path / "out"), storage=tmp_path / "store")


def test_zeroed_store_is_rejected_and_not_overwritten(tmp_path):
    trained(tmp_path, max_steps=2)
    store = tmp_path / "store"
    store.write_bytes(bytes(store.stat().st_size))
    with pytest.raises(StorageError) as caught:
        memascend.trainer.offload(made(tmp_path / "out", max_steps=2), storage=store)
    assert "existing=" in str(caught.value), str(caught.value)
    assert not any(store.read_bytes())
