"""Tests that a Trainer prints a header, figures of its steps, and totals. Also tests the forecast of a step."""

import random
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from support.trained_program import Drawn, made, rows, started

from memascend.plan import hardware
from memascend.plan.cost import assumed_host
from memascend.trainer import display
from memascend.trainer.callback import FIGURES
from memascend.trainer.forecast import _parameters_of_token, forecast
from memascend.trainer.position import RandomNumbers, numbers

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("one_thread")]
# Two epochs of 7 steps: 50 examples, 2 in a batch, 4 batches a step.
STEPS = 14


@pytest.fixture(autouse=True)
def is_fast(monkeypatch):
    """Makes the measurement of the processor's speed as short as possible."""
    monkeypatch.setattr(hardware, "_SECONDS", 0.0)


def shown(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith(("memascend", "  "))]


def test_header_shows_the_run_its_machine_and_the_resumed_step(tmp_path, capsys):
    started(tmp_path, end=5)
    title, *header = shown(capsys)[:7]
    assert title == f"memascend: a new run of {STEPS} steps"
    messages = {line.split()[0]: line.split(maxsplit=1)[1] for line in header}
    assert list(messages) == ["model", "device", "RAM", "drive", "examples", "steps"]
    assert re.fullmatch(r"Qwen2ForCausalLM: [\d,]+ parameters, all trained; float32", messages["model"])
    assert messages["device"] == "this processor, 1 thread"
    assert re.fullmatch(
        r"[\d.]+ MiB of a budget of 1 GiB, with \d+ parameters kept in RAM; [\d.]+ GiB free of [\d.]+ GiB",
        messages["RAM"],
    )
    assert str(tmp_path / "store") in messages["drive"]
    assert messages["examples"] == "50"
    assert re.fullmatch(
        rf"{STEPS} of 8 examples; [\d.]+ (ms|s) and [\d.]+ [GM]B written, predicted for a drive of 5 and 4 GB/s, "
        r"50% of this processor's [\d,]+ GFLOPS",
        messages["steps"],
    )
    started(tmp_path, end=9)
    title, *header = shown(capsys)[:7]
    assert title == f"memascend: resuming at step 6 of {STEPS}"
    assert " left, as the steps before took, and " in header[-1]
    started(tmp_path)
    capsys.readouterr()
    # A finished run does not start again.
    started(tmp_path)
    assert shown(capsys)[0] == f"memascend: this run is finished: step {STEPS} of {STEPS}"


def test_each_log_line_without_a_progress_bar_gets_a_line_of_figures(tmp_path, capsys):
    started(tmp_path, end=7)
    lines = [line for line in shown(capsys) if line.startswith("memascend: step")]
    drive = r"drive [\d.]+ GB/s, waited for it \d+% of the time"
    figures = rf"[\d.]+ m?s a step, [\d,]+ tokens/s, {drive}, [\d.]+ (m?s|minutes?) left"
    assert len(lines) == 2
    for line, step in zip(lines, (3, 6), strict=True):
        assert re.fullmatch(rf"memascend: step {step} of {STEPS}: {figures}", line), line
    trainer = started(tmp_path)
    end = shown(capsys)[-1]
    assert re.fullmatch(
        r"memascend: 7 steps in [\d.]+ m?s: [\d.]+ MB written \([\d.]+ MB with the earlier starts\); less than 0.01% "
        r"of the [\d,]+ TB that a consumer drive of this size is warranted for",
        end,
    )
    # The history of the report has the losses of both starts of the training.
    losses = {line["step"]: line["loss"] for line in trainer.state.log_history if "loss" in line}
    report = trainer.optimizer.optimizer.report()
    assert report.history.losses == losses
    assert report.history.steps == list(range(9, STEPS + 1))
    assert len(report.history.seconds) == len(report.history.moved) == STEPS - 8


class Bar(transformers.TrainerCallback):
    """A callback with a progress bar, in the attribute where transformers' ProgressCallback has its bar."""

    def __init__(self):
        self.messages = []
        self.training_bar = SimpleNamespace(
            set_postfix_str=lambda words, refresh: self.messages.append((words, refresh))
        )


def test_progress_bar_shows_the_figures_as_its_postfix(tmp_path, capsys):
    bar = Bar()
    started(tmp_path, bar, end=3)
    assert len(bar.messages) == 3
    assert all(
        re.fullmatch(r"[\d,]+ tokens/s, drive [\d.]+ GB/s, waited for it .*", words) for words, _ in bar.messages
    )
    assert not any(line.startswith("memascend: step") for line in shown(capsys))


def test_trainer_with_log_level_error_prints_nothing(tmp_path, capsys):
    started(tmp_path, log_level="error", max_steps=3)
    assert shown(capsys) == []


def test_forecast_has_no_seconds_for_data_that_it_cannot_predict(tmp_path):
    """If forecast() cannot predict a step for the data, it raises no error, so training starts without a forecast."""
    trainer = made(tmp_path)
    trainer.create_optimizer()
    own = {"storage": str(tmp_path / "store")}
    for data in (None, {"one": rows()}, [1, 2], [{"label_ids": torch.tensor(1)}], torch.utils.data.ChainDataset([])):
        trainer.train_dataset = data
        assert forecast(trainer, own).seconds is None
    trainer.train_dataset = [{"input_ids": [1, 2], "token_type_ids": [0, 0]}]
    assert forecast(trainer, own).seconds > 0
    assert forecast(trainer, {**own, "device": "nowhere"}) is None


def test_a_commit_leaves_out_figures_of_several_elements():
    given = {"loss": torch.tensor(2.0), "each": torch.ones(3), "array": torch.ones(3).numpy(), "words": "two"}
    assert numbers(given) == {"loss": 2.0, "words": "two"}


def test_a_forecast_has_the_seconds_of_the_updates(tmp_path, monkeypatch):
    trainer = made(tmp_path, data=rows())
    trainer.create_optimizer()
    own = {"storage": str(tmp_path / "store")}
    quick = forecast(trainer, own).seconds
    found = assumed_host(None, shared=True)
    slow = replace(found, update=found.update + 1e-3)
    monkeypatch.setattr("memascend.trainer.forecast.assumed_host", lambda *_, **__: slow)
    count = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert forecast(trainer, own).seconds - quick >= 0.9e-3 * count


def test_a_forecast_advises_float32_for_a_processor_without_units_for_bfloat16(tmp_path, monkeypatch):
    trainer = made(tmp_path, data=rows())
    trainer.model.bfloat16()
    trainer.create_optimizer()
    own = {"storage": str(tmp_path / "store")}
    for fast, advice in (
        (25, "; it computes bfloat16 25 times slower than float32, so use --dtype float32"),
        (3, "50% of this processor's 2 GFLOPS"),
    ):
        for module in ("plan.hardware", "trainer.forecast"):
            speeds = {"bfloat16": 2e9, "float32": fast * 2e9}
            monkeypatch.setattr(f"memascend.{module}.product_flops", speeds.__getitem__)
        assert forecast(trainer, own).assumed.endswith(advice)


@pytest.mark.parametrize("kind", ["drawn", "list"])
def test_forecast_draws_no_random_numbers(tmp_path, kind):
    """forecast() must not change the training, so it draws no random numbers and reads no data that draws them."""
    dice = random.Random(1)
    trainer = made(tmp_path, data=Drawn(dice.random) if kind == "drawn" else rows())
    trainer.create_optimizer()
    before = RandomNumbers.now().to_json(), dice.getstate()
    found = forecast(trainer, {"storage": str(tmp_path / "store")})
    assert before == (RandomNumbers.now().to_json(), dice.getstate())
    assert (found.seconds is None) == (kind == "drawn")
    # A step of four micro-batches with clipping writes the spilled gradients, the updated optimizer state and the
    # values.
    trained = sum(parameter.nbytes for parameter in trainer.model.parameters())
    assert found.written > 3 * trained


def test_tokens_are_counted_without_padding():
    tokens = display._tokens_of
    ids = torch.ones(2, 3, dtype=torch.long)
    assert tokens({"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}) == 3
    assert tokens({"chosen_input_ids": ids, "rejected_input_ids": ids, "label": ids}) == 12
    assert tokens({"input_ids": ids, "attention_mask": {"full_attention": ids}, 3: ids}) == 6
    assert tokens(ids) == tokens({}) == 0


def test_parameters_of_a_token_count_only_the_chosen_experts():
    model = torch.nn.ModuleDict({"experts": torch.nn.ModuleDict({"w": torch.nn.Linear(10, 10, bias=False)})})
    model = torch.nn.ModuleDict({"mlp": model, "head": torch.nn.Linear(10, 1, bias=False)})
    assert _parameters_of_token(model) == 110
    model.config = SimpleNamespace(num_experts=4, num_experts_per_tok=1)
    assert _parameters_of_token(model) == 35


class Printed(transformers.PrinterCallback):
    """A PrinterCallback that records the logs instead of printing them."""

    def on_log(self, _args, _state, _control, logs=None, **_):
        self.logs = [*getattr(self, "logs", ()), dict(logs)]


def test_storage_figures_are_in_the_log_history_but_not_printed(tmp_path, capsys):
    printed, reported = Printed(), transformers.TrainerCallback()
    seen = []
    reported.on_log = lambda *_, logs, **__: seen.append(dict(logs))
    trainer = started(tmp_path, printed, reported, end=4)
    (line,) = (line for line in trainer.state.log_history if "loss" in line)
    assert line.keys() >= set(FIGURES)
    # Callbacks that the Trainer calls after the printing callback get the figures as well.
    assert [set(FIGURES) <= logs.keys() for logs in seen] == [True]
    assert len(printed.logs) == 1
    assert not printed.logs[0].keys() & set(FIGURES)
    assert "_bytes" not in capsys.readouterr().out
