"""Tests what `memascend train --report` passes on, to stand-ins for TensorBoard and Weights & Biases."""

import sys
import types

import pytest

from memascend.cli.train.loop import open_reporters, require_reporters
from memascend.errors import ConfigError

NAMES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}


class Told:
    """What is told of a run, in the words of either package."""

    def __init__(self):
        self.begun, self.figures, self.ended = [], [], 0

    def begin(self, *args, **options):
        self.begun.append((args, options))
        return self

    def add_scalar(self, name, value, step):
        self.figures.append((name, value, step))

    def log(self, figures, *, step):
        self.figures += [(name, value, step) for name, value in figures.items()]

    def close(self):
        self.ended += 1

    finish = close


@pytest.fixture
def told(monkeypatch):
    """Stands in for both packages."""
    made = {name: Told() for name in NAMES}
    tensorboard, wandb = types.ModuleType(NAMES["tensorboard"]), types.ModuleType(NAMES["wandb"])
    tensorboard.SummaryWriter, wandb.init = made["tensorboard"].begin, made["wandb"].begin
    monkeypatch.setitem(sys.modules, NAMES["tensorboard"], tensorboard)
    monkeypatch.setitem(sys.modules, NAMES["wandb"], wandb)
    return made


def test_each_is_told_of_every_step(told, tmp_path):
    require_reporters(list(NAMES))
    reporters = open_reporters(list(NAMES), tmp_path / "logs", "run-1", {"lr": 0.1})
    for reporter in reporters:
        for step in (3, 4):
            reporter.event("step", {"step": step, "loss": step / 2, "grad_norm": 1.5, "tokens": 8}, "")
        reporter.event("step", {"step": 5, "loss": 3.0, "grad_norm": None}, "")
        reporter.event("eval", {"step": 5, "eval_loss": 2.0}, "")
        reporter.event("save", {"step": 5, "folder": "out"}, "")
        reporter.close()
    assert told["tensorboard"].begun == [((str(tmp_path / "logs"),), {})]
    figures = [("loss", 1.5, 3), ("grad_norm", 1.5, 3), ("loss", 2.0, 4), ("grad_norm", 1.5, 4)]
    figures += [("loss", 3.0, 5), ("eval_loss", 2.0, 5)]
    assert told["tensorboard"].figures == [(f"train/{name}", value, step) for name, value, step in figures]
    # The same name goes on with the same run; its folder must be there before.
    ((_, options),) = told["wandb"].begun
    assert options == {"dir": str(tmp_path / "logs"), "id": "run-1", "resume": "allow", "config": {"lr": 0.1}}
    assert (tmp_path / "logs").is_dir()
    assert told["wandb"].figures == figures
    assert [one.ended for one in told.values()] == [1, 1]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_not_installed_is_refused_by_name(name, monkeypatch, told):
    assert told
    monkeypatch.setitem(sys.modules, NAMES[name], None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        require_reporters([name])


def test_nobody_is_told_where_nobody_asked(told, tmp_path):
    assert open_reporters([], tmp_path / "logs", "run-1", {}) == []
    assert all(not one.begun for one in told.values())
    assert not (tmp_path / "logs").exists()
