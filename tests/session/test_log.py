"""Tests the write-ahead log of gradients: bytes written, and resuming after a kill.

Also tests close() without a log.
"""

import logging
import shutil
import signal
from functools import partial

import pytest
import torch
from support.bits import same_states
from support.chains import chain, everything, offloaded, train, values

from memascend import cli, engine
from memascend.errors import StorageError
from memascend.session import open_store, run

WIDTH, LAYERS, ALL = 128, 6, "64MiB"


def begun(store, *, kind=torch.optim.AdamW, dtype=torch.bfloat16, bias=True, **options):
    options = {"existing": "resume", "host_memory": ALL, **options}
    return offloaded(store, chain(LAYERS, bias, width=WIDTH, dtype=dtype), kind, **options)


class Interrupting(run.Progress):
    """A `Progress` that sends Ctrl-C to the process in each of the first `times` calls of `reached`."""

    times, received = 0, []

    def reached(self, done, nbytes):
        super().reached(done, nbytes)
        self.received.append((done, nbytes, self._total))
        if len(self.received) <= self.times:
            signal.raise_signal(signal.SIGINT)


def test_step_with_a_gradient_log_writes_the_planned_bytes(tmp_path):
    model, optimizer = begun(tmp_path / "store", bias=False)
    with optimizer:
        assert optimizer.plan.log_steps == 16
        assert len(optimizer.plan.logged) == LAYERS
        train(model, optimizer, range(16))
        before = optimizer.report()
        train(model, optimizer, range(16, 48))
        report = optimizer.report()
        size = sum(parameter.numel() for parameter in model.parameters())
        kinds = ("values", "state", "log")
        written = sum(report.written[kind] - before.written[kind] for kind in kinds) / (32 * size)
        assert 2.74 < written < 2.76
        planned = sum(optimizer.plan.written_bytes.values()) / size
        assert 2.7 < planned < 2.8
        assert report.read["values"] == report.read["state"] == report.read["values, update"] == 0
        assert report.to_dict()["log"] == {"steps": 16, "bytes": optimizer.plan.log_bytes}
        assert "a gradient log of 16 steps" in str(optimizer.plan)
        assert "a gradient log of 16 steps" in str(report)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradients": "ssd", "max_grad_norm": 0.05},
        {"kind": partial(torch.optim.SGD, momentum=0.9, dampening=0.3, maximize=True), "state": "8bit"},
        {"kind": torch.optim.SGD, "dtype": torch.float16, "loss_scale": 16.0, "gradients": "ram"},
    ],
    ids=["fused", "clipped", "momentum of 8 bits", "sgd of 16 bits"],
)
def test_killed_run_with_a_log_is_read_and_resumed_with_any_budget(tmp_path, options, capsys):
    model, optimizer = begun(tmp_path / "store", log_steps=4, **options)
    with optimizer:
        assert optimizer.plan.log_steps == 4
        train(model, optimizer, range(7))
        expected = everything(model, optimizer)
        left = shutil.copy(tmp_path / "store", tmp_path / "left")
    before = left.read_bytes()
    with engine.Store.open(left) as store:
        assert store.info()["log_steps"] > 0
        values = {name: value for name, value in expected.items() if ": " not in name}
        assert all(torch.equal(store.read(name)[0], value) for name, value in values.items())
    assert cli.main(["store", "info", str(left)]) == 0
    assert "log" in capsys.readouterr().out
    assert cli.main(["store", "verify", str(left)]) == 0
    assert left.read_bytes() == before, "reading the store changed its bytes"
    shutil.copy(left, tmp_path / "other")
    shutil.copy(left, tmp_path / "last")
    ends = []
    lives = ((left, None, "step"), (tmp_path / "other", ALL, "step"), (tmp_path / "last", ALL, "none"))
    for place, budget, durability in lives:
        model, optimizer = begun(place, host_memory=budget, durability=durability, **options)
        with optimizer:
            assert optimizer.steps == 7
            assert same_states(everything(model, optimizer), expected)
            train(model, optimizer, range(7, 9))
            ends.append(everything(model, optimizer))
        with engine.Store.open(place) as store:
            assert store.info()["log_steps"] == 0, "close() left steps in the log"
    assert all(same_states(ends[0], other) for other in ends[1:])


def test_interrupted_log_replay_and_interrupted_close_lose_no_step(tmp_path, monkeypatch):
    model, optimizer = begun(tmp_path / "store", log_steps=3)
    with optimizer:
        train(model, optimizer, range(4))
        expected = everything(model, optimizer)
        train(model, optimizer, [4])
        left = shutil.copy(tmp_path / "store", tmp_path / "left")
    with monkeypatch.context() as patched:
        patched.setattr(open_store, "Progress", type("Once", (Interrupting,), {"times": 1, "received": []}))
        with pytest.raises(KeyboardInterrupt):
            begun(left, existing="previous")
    model, optimizer = begun(left)
    assert optimizer.steps == 4
    assert same_states(everything(model, optimizer), expected)
    train(model, optimizer, [4])
    expected = everything(model, optimizer)
    # If close() is interrupted, steps of the run stay in the log.
    with monkeypatch.context() as patched:
        patched.setattr(run, "Progress", type("Always", (Interrupting,), {"times": 99, "received": []}))
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
    optimizer.close()
    model, optimizer = begun(left)
    with optimizer:
        assert same_states(everything(model, optimizer), expected)


def test_step_without_a_log_writes_all_values_and_state(tmp_path, caplog, monkeypatch):
    model, optimizer = begun(tmp_path / "store", log_steps=0)
    with optimizer:
        assert optimizer.plan.log_steps == optimizer.plan.log_bytes == 0
        train(model, optimizer, range(3))
        assert optimizer.report().written["log"] == 0
        expected = everything(model, optimizer)
    # Simulates a device without room for a log. The next offload() must log a warning.
    monkeypatch.setattr(engine.Store, "keep_log", lambda *_: 0)
    with caplog.at_level(logging.WARNING, "memascend"):
        model, optimizer = begun(tmp_path / "store")
    with optimizer:
        assert "no disk space for a gradient log of 16 steps" in caplog.text
        assert optimizer.plan.log_steps == 0
        assert same_states(everything(model, optimizer), expected)
        before = optimizer.report()
        train(model, optimizer, [3])
        report = optimizer.report()
        written = sum(report.written[kind] - before.written[kind] for kind in ("values", "state"))
        assert written >= optimizer.plan.written_bytes["values"] + optimizer.plan.written_bytes["state"]


# --- close() of a run whose state is only in memory -----------------------------------------------


def undurable(store, **options):
    # The model has so many records that close() reports its progress more than once.
    return offloaded(store, chain(16, bias=True, width=24), durability="none", host_memory=ALL, **options)


def stepped(store):
    model, optimizer = undurable(store)
    assert len(optimizer.plan.ram_tier) == 32
    train(model, optimizer, range(2))
    return values(model), optimizer


@pytest.fixture
def progress(monkeypatch):
    kind = type("Own", (Interrupting,), {"received": []})
    monkeypatch.setattr(run, "Progress", kind)
    return kind


def test_close_reports_its_progress(tmp_path, progress):
    _, optimizer = stepped(tmp_path / "store")
    optimizer.close()
    done, totals, known = zip(*progress.received, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == set(known)
    assert 0 < done[0] < done[-1] <= totals[0]


def test_close_continues_after_one_interrupt_and_loses_no_step(tmp_path, progress, caplog):
    progress.times = 1
    saved, optimizer = stepped(tmp_path / "store")
    with caplog.at_level(logging.WARNING, "memascend"), pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert "another Ctrl-C drops them" in caplog.text
    # After the interrupt, close() continued. It did not start again.
    done = [one[0] for one in progress.received]
    assert done[1] >= done[0]
    optimizer.close()
    model, optimizer = undurable(tmp_path / "store", existing="resume")
    with optimizer:
        assert optimizer.steps == 2
        assert same_states(values(model), saved)


def test_resume_rejects_a_store_after_two_interrupts_of_close(tmp_path, progress):
    progress.times = 2
    _, optimizer = stepped(tmp_path / "store")
    with pytest.raises(KeyboardInterrupt):
        optimizer.close()
    assert len(progress.received) == 2
    optimizer.close()
    with pytest.raises(StorageError, match="not closed"):
        undurable(tmp_path / "store", existing="resume")
    _, optimizer = undurable(tmp_path / "store", existing="replace")
    optimizer.close()
