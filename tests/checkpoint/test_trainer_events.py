"""Tests the events of a Trainer that starts several times, and the settings that each start compares with the store."""

import functools
import json
import shutil
from collections import deque

import numpy as np
import pytest
import torch
import transformers
from support.trained_program import Drawn, Habits, made, model, started
from torch.optim import lr_scheduler
from transformers.trainer_callback import ExportableState

import memascend.trainer
from memascend.errors import ConfigError, UsageError
from memascend.trainer import digest
from memascend.trainer.description import description, of_ranks

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quiet")]


class Events(transformers.TrainerCallback):
    """Records each event with the step and the epoch at which the Trainer calls it."""

    def __init__(self):
        self.seen = []


for _name in (name for name in dir(transformers.TrainerCallback) if name.startswith("on_")):

    def _note(self, _args, state, _control, name=_name, **_):
        self.seen.append((name.removeprefix("on_"), state.global_step, state.epoch))

    setattr(Events, _name, _note)


def trained(folder, *callbacks, **options):
    """Starts or resumes the training; returns the Trainer, and its events except `init_end` and `prediction_step`."""
    events = Events()
    trainer = started(folder, events, *callbacks, **options)
    return trainer, [event for event in events.seen if event[0] not in ("init_end", "prediction_step")]


# Maps a step to the epoch that the Trainer reports after this step. An epoch has 25 batches.
AFTER = {2: 8 / 25, 7: 1.0, 9: 1 + 8 / 25}
BEFORE = ("step_begin", "substep_end", "pre_optimizer_step", "epoch_begin")


def test_restarts_repeat_no_event_before_a_step_and_miss_none_after_it(tmp_path):
    _, whole = trained(tmp_path / "whole")
    seen = []
    for end in (2, 7, 9, None):
        _, found = trained(tmp_path / "ended", end=end)
        seen.append(found)
    steps = [event for event in whole if event[0] not in ("train_begin", "train_end")]
    found = [event for start in seen for event in start if event[0] not in ("train_begin", "train_end")]
    # A start within an epoch calls on_epoch_begin() again, with the state at the epoch's beginning.
    begins = [event for event in found if event[0] == "epoch_begin"]
    assert begins == [("epoch_begin", 0, 0), ("epoch_begin", 0, 0), ("epoch_begin", 7, 1.0), ("epoch_begin", 7, 1.0)]
    for name in BEFORE[:3]:
        assert [event for event in found if event[0] == name] == [event for event in steps if event[0] == name]
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(steps))
    # on_train_begin() gets the state of the last commit, as if the Trainer resumed from a checkpoint.
    assert [start[0] for start in seen[1:]] == [("train_begin", step, epoch) for step, epoch in AFTER.items()]


def test_a_training_that_ended_repeats_no_event_of_its_last_step(tmp_path):
    trainer, _ = trained(tmp_path, max_steps=4, save_steps=4)
    again, seen = trained(tmp_path, max_steps=4, save_steps=4)
    assert [name for name, *_ in seen] == ["train_begin", "log", "train_end"]
    assert seen[0][1] == 4
    assert again.digest == trainer.digest
    lines = [line for line in again.state.log_history if "train_runtime" not in line]
    assert lines == [line for line in trainer.state.log_history if "train_runtime" not in line]


def test_training_stopped_by_a_callback_resumes_without_the_callback(tmp_path):
    stop = transformers.TrainerCallback()
    stop.on_step_end = lambda _, state, control, **__: setattr(control, "should_training_stop", state.global_step == 2)
    for callbacks in ([stop], []):
        last, _ = trained(tmp_path / "stopped", *callbacks, max_steps=4)
    assert last.digest == trained(tmp_path / "whole", max_steps=4)[0].digest


def test_longer_training_keeps_the_final_log_lines_of_the_shorter_run(tmp_path):
    constant = {"lr_scheduler_type": "constant_with_warmup", "eval_steps": 4}
    short, grown = (started(tmp_path / "grown", max_steps=steps, **constant) for steps in (6, 9))
    assert short.digest != grown.digest == started(tmp_path / "whole", max_steps=9, **constant).digest
    ends = [line for line in short.state.log_history if line["step"] == 6]
    assert len(ends) == 3
    assert all(line in grown.state.log_history for line in ends if "loss" not in line)
    assert len([line for line in grown.state.log_history if line["step"] == 6 and "loss" in line]) == 1
    with pytest.raises(ConfigError, match="after step 9: max_steps 9 -> 4"):
        started(tmp_path / "grown", max_steps=4, **constant)


def test_edit_after_a_finished_training_is_applied(tmp_path):
    """A resumed run skips edits that it made before. The second start of a finished training must make a new edit."""
    started(tmp_path, Habits(), max_steps=2)
    trainer = made(tmp_path / "out", Habits(), max_steps=2)
    with memascend.trainer.offload(trainer, storage=tmp_path / "store") as optimizer:
        trainer.train()
        weight = trainer.model.model.norm.weight
        with optimizer.edit(weight) as values:
            values.zero_()
        assert not weight.detach().any()


class Collects(transformers.Trainer):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.mine, self.pairs, self.untouched = [], {(1, 2): deque([0.0], 3)}, 5
        self.total, self.names = torch.zeros(()), np.array(["a", "b"])

    def compute_loss(self, *given, **named):
        loss = super().compute_loss(*given, **named)
        self.mine.append(float(loss[0] if isinstance(loss, tuple) else loss))
        self.pairs[(1, 2)].append(self.mine[-1])
        self.total += self.mine[-1]
        return loss


def test_keep_restores_trainer_attributes_and_others_cause_a_warning(tmp_path):
    keep = {"keep": ["mine", "pairs", "total"]}
    for end in (3, None):
        trainer = started(tmp_path, end=end, offloads=keep, kind=Collects, max_steps=4, eval_strategy="no")
    assert len(trainer.mine) == 16
    assert trainer.pairs == {(1, 2): deque(trainer.mine[-3:], 3)}
    assert torch.equal(trainer.total, functools.reduce(torch.add, map(torch.tensor, trainer.mine), torch.zeros(())))
    with pytest.warns(UserWarning, match=r"pairs, total of Collects changed.*keep=\['pairs', 'total'\]"):
        started(tmp_path / "other", offloads={"keep": ["mine"]}, kind=Collects, max_steps=2)
    for keep, says in [
        (["no"], "no attribute"),
        ("mine", "a list of"),
        (["model"], "'model' of keep= .* of type Qwen2"),
    ]:
        with pytest.raises(ConfigError, match=says):
            memascend.trainer.offload(made(tmp_path / "no", kind=Collects), storage=tmp_path / "no-store", keep=keep)
    assert not (tmp_path / "no-store").exists()


class Grows(transformers.TrainerCallback, ExportableState):
    def __init__(self):
        self.found = []

    def state(self):
        return {"args": {}, "attributes": {"found": self.found}}

    def on_step_begin(self, _args, state, *_, **__):
        self.found += torch.rand(2500, generator=torch.Generator().manual_seed(state.global_step)).tolist()


def test_callback_state_too_large_for_a_commit_keeps_the_newest_entries(tmp_path):
    grows = Grows()
    with pytest.warns(UserWarning, match="largest is 'Grows'"):
        started(tmp_path, grows, end=4)
    again = Grows()
    started(tmp_path, again, end=4)
    assert 500 < len(again.found) < 10_000
    assert again.found == grows.found[-len(again.found) :]


class Accumulates(transformers.TrainerCallback):
    """Sets 5 micro-batches a step in the first epoch, and 1 from the second epoch on."""

    def on_epoch_begin(self, args, state, *_, **__):
        args.gradient_accumulation_steps = 1 if round(state.epoch or 0) else 5


def test_resume_keeps_the_accumulation_that_a_callback_sets_by_epoch(tmp_path):
    options = {"gradient_accumulation_steps": 5, "max_steps": 14}
    whole = started(tmp_path / "whole", Accumulates(), **options)
    for end in (5, 12, None):
        last = started(tmp_path / "ended", Accumulates(), end=end, **options)
    assert last.digest == whole.digest


class Bad(transformers.Trainer):
    """A Trainer whose loss in the third step is NaN."""

    def compute_loss(self, *given, **named):
        loss = super().compute_loss(*given, **named)
        return loss * float("nan") if self.state.global_step == 2 and self.model.training else loss


@pytest.mark.parametrize("clipping", ["torch", "exact"])
def test_nan_gradient_norm_is_rejected_before_the_commit_or_skipped(tmp_path, clipping):
    options = {"kind": Bad, "max_steps": 5, "logging_nan_inf_filter": False}
    trainer = made(tmp_path / "out", **options)
    with memascend.trainer.offload(trainer, storage=tmp_path / "store", clipping=clipping) as optimizer:
        with pytest.raises(UsageError, match="step 3 was not committed: the norm of its gradients is nan"):
            trainer.train()
        assert optimizer.steps == 2
    again = made(tmp_path / "out", **options)
    skips = {"clipping": clipping, "nonfinite": "skip"}
    with memascend.trainer.offload(again, storage=tmp_path / "store", **skips) as optimizer:
        again.train()
        assert (optimizer.steps, again.state.global_step, again.lr_scheduler.last_epoch) == (4, 5, 4)
        assert all(parameter.isfinite().all() for parameter in again.model.parameters())


# --- settings that a start compares with the store ------------------------------------------


def given(schedule=None, **options):
    """Returns options for made(): a user's own model, optimizer and scheduler."""
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), fused=True, **{"lr": 1e-2, **options})
    return {"optimizers": (optimizer, schedule and schedule(optimizer)), "own": own}


def adapted(**options):
    import peft

    torch.manual_seed(1)
    return {"own": peft.get_peft_model(model(), peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **options}))}


def by(gamma):
    return lambda optimizer: lr_scheduler.StepLR(optimizer, 2, gamma)


# Maps an edit of a user's script to the options before the edit, the options after the edit, and the differences that
# the error names.
EDITED = {
    "options": (
        lambda: given(by(0.9)),
        lambda: given(by(0.5), lr=5e-3, weight_decay=1.0),
        r"optimizer.lr \[0.01\] -> \[0.005\]; optimizer.weight_decay .*scheduler gamma 0.9 -> 0.5",
    ),
    "a scheduler": (given, lambda: given(by(0.9)), "scheduler LambdaLR -> StepLR"),
    "adapters": (
        adapted,
        lambda: adapted(lora_alpha=64, alpha_pattern={"q_proj": 32}),
        r"alpha_pattern \{\} -> \{'q_proj': 32\}; adapter default.lora_alpha 8 -> 64",
    ),
}


@pytest.mark.parametrize("name", EDITED)
def test_resume_with_an_edited_script_is_rejected_with_the_differences(tmp_path, name):
    if name == "adapters":
        pytest.importorskip("peft")
    before, after, says = EDITED[name]
    started(tmp_path, end=2, max_steps=4, **before())
    with pytest.raises(ConfigError, match=f"another training, after step 2: .*{says}"):
        started(tmp_path, max_steps=4, **after())
    begun_again = made(tmp_path / "out", max_steps=4, **before())
    with memascend.trainer.offload(begun_again, storage=tmp_path / "store") as optimizer:
        assert optimizer.steps == 2


def test_resume_with_another_clipping_is_rejected(tmp_path, ended):
    trainer = made(tmp_path / "out")
    before = dict(vars(trainer))
    with pytest.raises(ConfigError, match=r"clipping torch -> exact 1\.0"):
        memascend.trainer.offload(trainer, storage=ended / "store", clipping="exact")
    assert vars(trainer) == before, "the failed call changed the Trainer"


@pytest.mark.parametrize("existing", ["resume", "replace"])
def test_resume_without_a_clipping_argument_keeps_exact_clipping(tmp_path, caplog, existing):
    """A script that does not pass `clipping=` resumes from the store or from a checkpoint, and keeps exact clipping."""
    options = {"max_steps": 6, "logging_steps": 1, "save_steps": 2}
    whole = started(tmp_path / "whole", offloads={"clipping": "exact"}, **options)
    folder = tmp_path / "ended"
    started(folder, end=3, offloads={"clipping": "exact"}, **options)
    how = {"existing": existing} | ({} if existing == "resume" else {"checkpoint": folder / "out/checkpoint-2"})
    with caplog.at_level("INFO", "memascend"):
        trainer = started(folder, offloads=how, **options)
    assert "clipping='exact', because the stored training began with it" in caplog.text
    assert (trainer.state.global_step, trainer.digest) == (6, whole.digest)
    norms = [[line.get("grad_norm") for line in one.state.log_history] for one in (trainer, whole)]
    assert norms[0] == norms[1]
    # torch rounds norms to float32. At least one logged norm is not a float32 number, so exact clipping computed it.
    assert any(norm != torch.tensor(norm).item() for norm in norms[0] if norm is not None)
    with pytest.raises(ConfigError, match=r"clipping exact 1\.0 -> torch"):
        started(folder, offloads={"clipping": "torch"}, **options)


def checkpointed(function):
    kept = {"use_reentrant": False, "context_fn": functools.partial(function, [torch.ops.aten.mm.default])}
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kept}


def test_resume_accepts_argument_changes_that_change_no_bit(tmp_path, ended, monkeypatch):
    """Changes activation checkpointing, and adds two arguments as a newer transformers may do.

    One of these arguments is a plain `object()`.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    own = transformers.TrainingArguments.to_dict
    newer = lambda self: {**own(self), "invented": 1, "handler": object()}  # noqa: E731
    monkeypatch.setattr(transformers.TrainingArguments, "to_dict", newer)
    trainer = made(tmp_path / "out", **checkpointed(create_selective_checkpoint_contexts))
    with memascend.trainer.offload(trainer, storage=ended / "store") as optimizer:
        assert optimizer.steps == 5


class Lines(torch.utils.data.Dataset):
    """Reads lines of a file. Seeks only if the requested line does not follow the line that was read last."""

    def __init__(self, file):
        file.write_text("".join(f"{number:03}\n" for number in range(100)))
        self.file, self.next = file.open(), 0

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index != self.next:
            self.file.seek(4 * index)
        self.next = index + 1
        return int(self.file.readline())


def test_data_digest_disturbs_no_dataset_and_omits_randomly_drawn_rows(tmp_path):
    trainer = made(tmp_path / "out", data=Lines(tmp_path / "lines"))
    assert description(trainer, "torch")["data"].startswith("100 rows ")
    assert [trainer.train_dataset[index] for index in range(5)] == list(range(5))
    trainer.train_dataset = Drawn(np.random.default_rng().random)
    assert description(trainer, "torch")["data"] == "50 rows"
    long = torch.zeros(1 << 15)
    assert digest.digest_of(long) != digest.digest_of(torch.cat([long[1:], torch.ones(1)]))


def test_of_ranks_repeats_micro_batches_of_a_step_that_does_not_divide():
    moved = of_ranks({"run": {"ranks": 1}, "passed": 24, "group": 3, "feed": {"fetched": 27}}, 2)
    assert (moved["passed"], moved["group"], moved["feed"]["fetched"]) == (12, 2, 14)


class MakesOne(transformers.Trainer):
    """A Trainer as tutorials write it: each call of create_optimizer() makes a new optimizer."""

    def create_optimizer(self, *_, **__):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        return self.optimizer


def test_repeated_create_optimizer_calls_make_one_optimizer(tmp_path):
    assert started(tmp_path, kind=MakesOne, max_steps=2).state.global_step == 2


def test_arguments_that_change_after_offload_are_refused(tmp_path):
    trainer = made(tmp_path / "out")
    with memascend.trainer.offload(trainer, storage=tmp_path / "store") as optimizer:
        trainer.args.learning_rate = 5e-3
        with pytest.raises(UsageError, match=r"learning_rate 0\.01 -> 0\.005. Change arguments before"):
            trainer.train()
        assert optimizer.steps == 0


def test_resume_by_a_plain_trainer_names_memascend_trainer_offload(tmp_path):
    started(tmp_path, max_steps=2, save_steps=2)
    plain = made(tmp_path / "out", max_steps=4)
    with pytest.raises(TypeError, match=r"state of this checkpoint is memascend's.*memascend\.trainer\.offload\("):
        plain.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-2"))
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    assert state["global_step"] == 2


def test_missing_best_checkpoint_is_logged_when_training_ends(tmp_path, caplog):
    class Loses(transformers.TrainerCallback):
        def on_step_end(self, _args, state, *_, **__):
            if state.global_step == 5:
                shutil.rmtree(tmp_path / "out/checkpoint-4")

    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "save_total_limit": 2}
    started(tmp_path, Loses(), save_steps=4, max_steps=5, **best)
    assert "does not exist any more" in caplog.text
