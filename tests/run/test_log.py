"""Tests the log of gradients of a run: what it writes, what a kill leaves, and who reads that with which bits."""

import hashlib
import logging
import os
import shutil
import signal

import pytest
import torch

import memascend
from memascend import cli, engine
from memascend.run import beginning, decision, resources

WIDTH, LAYERS, ALL = 128, 6, "64MiB"


def begun(store, *, host_memory=ALL, optimizer=torch.optim.AdamW, dtype=torch.bfloat16, bias=True, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(LAYERS))).to(dtype)
    original = optimizer(model.parameters(), lr=1e-2)
    options = {"existing": "resume", **options}
    return memascend.offload(model, original, storage=store, host_memory=host_memory, **options)


def stepped(model, optimizer, steps, *, first=0):
    for step in range(first, first + steps):
        values = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
        model(values.to(model[0].weight.dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer):
    """All that is to be the same: of each parameter its values and its state."""
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return values, [optimizer.state_of(parameter) for parameter in model.parameters()]


def same(one, other):
    (values, states), (others, their_states) = one, other
    return (
        values.keys() == others.keys()
        and all(torch.equal(value, others[name]) for name, value in values.items())
        and all(
            mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
            for mine, theirs in zip(states, their_states, strict=True)
        )
    )


@pytest.fixture
def killed(tmp_path):
    """What a run of seven steps leaves when it is killed, and what it had in memory."""

    def left(name, **options):
        model, optimizer = begun(tmp_path / name, log_steps=4, **options)
        with optimizer:
            assert optimizer.plan.log_steps == 4
            stepped(model, optimizer, 7)
            expected = state_of(model, optimizer)
            shutil.copy(tmp_path / name, tmp_path / f"{name}.left")
        return tmp_path / f"{name}.left", expected

    return left


def test_a_step_writes_gradients_and_a_part_of_the_rest(tmp_path):
    model, optimizer = begun(tmp_path / "store", bias=False)
    with optimizer:
        assert optimizer.plan.log_steps == 16
        assert len(optimizer.plan.logged) == LAYERS
        stepped(model, optimizer, 16)
        before = optimizer.report()
        stepped(model, optimizer, 32, first=16)
        report = optimizer.report()
        size = sum(parameter.numel() for parameter in model.parameters())
        kinds = ("values", "state", "log")
        written = sum(report.written[kind] - before.written[kind] for kind in kinds) / (32 * size)
        assert 2.74 < written < 2.76
        planned = sum(optimizer.plan.written_bytes.values()) / size
        assert 2.7 < planned < 2.8
        assert report.read["values"] == report.read["state"] == report.read["values, update"] == 0
        assert report.to_dict()["log"] == {"steps": 16, "bytes": optimizer.plan.log_bytes}
        assert "a log of 16 steps" in str(optimizer.plan)
        assert "a log of 16 steps" in str(report)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradients": "ssd", "max_grad_norm": 0.05},
        {"durability": "close", "state": "8bit"},
        {"dtype": torch.float32, "optimizer": torch.optim.SGD, "state": "bf16"},
    ],
    ids=["fused", "clipped", "8bit", "momentum"],
)
def test_what_a_kill_leaves_is_read_and_resumed_with_any_budget(killed, options, tmp_path, capsys):
    options = dict(options)
    if options.get("optimizer") is torch.optim.SGD:
        options["optimizer"] = lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9)
    left, expected = killed("store", **options)
    before = hashlib.sha256(left.read_bytes()).hexdigest()
    with engine.Store.open(left) as store:
        assert store.info()["log_steps"] > 0
        for name in expected[0]:
            assert torch.equal(store.read(name)[0], expected[0][name])
    assert cli.main(["store", "info", str(left)]) == 0
    assert "log" in capsys.readouterr().out
    assert cli.main(["store", "verify", str(left)]) == 0
    if options.get("durability") != "close":
        # There closing it makes the last commit durable.
        assert hashlib.sha256(left.read_bytes()).hexdigest() == before, "whoever looks writes nothing"
    shutil.copy(left, tmp_path / "other")
    ends = []
    for place, budget in ((left, None), (tmp_path / "other", ALL)):
        model, optimizer = begun(place, host_memory=budget, **options)
        with optimizer:
            assert optimizer.steps == 7
            assert same(state_of(model, optimizer), expected)
            stepped(model, optimizer, 2, first=7)
            ends.append(state_of(model, optimizer))
        with engine.Store.open(place) as store:
            assert store.info()["log_steps"] == 0, "a store that was closed has no log"
    assert same(*ends)


def test_ctrl_c_in_close_leaves_a_whole_store_with_its_log(tmp_path, monkeypatch):
    class Interrupted(resources.Progress):
        def reached(self, *_):
            signal.raise_signal(signal.SIGINT)

    model, optimizer = begun(tmp_path / "store", log_steps=3)
    stepped(model, optimizer, 5)
    expected = state_of(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(resources, "Progress", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.close()
    optimizer.close()
    heard = []

    class Heard(beginning.Progress):
        def reached(self, done, nbytes):
            super().reached(done, nbytes)
            heard.append((done, nbytes))

    monkeypatch.setattr(beginning, "Progress", Heard)
    model, optimizer = begun(tmp_path / "store", host_memory=None)
    with optimizer:
        assert heard
        assert heard[-1][0] == heard[-1][1] > 0
        assert same(state_of(model, optimizer), expected)


def test_without_a_log_what_is_held_is_written_each_step(tmp_path, caplog, monkeypatch):
    model, optimizer = begun(tmp_path / "store", log_steps=0)
    with optimizer:
        assert optimizer.plan.log_steps == optimizer.plan.log_bytes == 0
        stepped(model, optimizer, 3)
        assert optimizer.report().written["log"] == 0
        expected = state_of(model, optimizer)
    # The device has no room for it, which is found as it is begun.
    monkeypatch.setattr(engine.Store, "keep_log", lambda *_: 0)
    with caplog.at_level(logging.WARNING, "memascend"):
        model, optimizer = begun(tmp_path / "store")
    with optimizer:
        assert "no room on storage for a log of 16 steps" in caplog.text
        assert optimizer.plan.log_steps == 0
        assert same(state_of(model, optimizer), expected)
        before = optimizer.report()
        stepped(model, optimizer, 1, first=3)
        report = optimizer.report()
        written = sum(report.written[kind] - before.written[kind] for kind in ("values", "state"))
        assert written >= optimizer.plan.written_bytes["values"] + optimizer.plan.written_bytes["state"]


def test_half_of_the_free_room_is_left_to_others(tmp_path, monkeypatch):
    model, optimizer = begun(tmp_path / "store")
    full, size = optimizer.plan.log_bytes, optimizer.plan.disk_bytes
    optimizer.close()
    del model
    (tmp_path / "store").unlink()
    usage = shutil.disk_usage(tmp_path)._replace(free=size + full)
    monkeypatch.setattr(shutil, "disk_usage", lambda *_: usage)
    _, optimizer = begun(tmp_path / "store")
    with optimizer:
        assert 6 <= optimizer.plan.log_steps <= 8
        assert optimizer.plan.log_bytes <= full // 2
    (tmp_path / "store").unlink()
    _, optimizer = begun(tmp_path / "store", log_steps=12)
    with optimizer:
        assert optimizer.plan.log_steps == 12, "as it was asked for"


@pytest.mark.parametrize("steps", [-1, 2.0, True, "3", 5000])
def test_a_number_of_steps_is_one(tmp_path, steps):
    with pytest.raises(memascend.ConfigError, match="log_steps is an integer"):
        begun(tmp_path / "store", log_steps=steps)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_a_disk_that_fills_up_while_the_log_grows_has_a_shorter_one(small_disk, monkeypatch, caplog):
    # Nobody knows of the room before it is taken.
    monkeypatch.setattr(decision, "room_beside", lambda *_: None)
    with caplog.at_level(logging.WARNING, "memascend"):
        model, optimizer = begun(small_disk / "store", log_steps=1000)
    assert "no room on storage for a log of 1000 steps" in caplog.text
    assert 1 <= optimizer.plan.log_steps < 100
    stepped(model, optimizer, 3)
    expected = state_of(model, optimizer)
    optimizer.close()
    (small_disk / "rest").write_bytes(bytes(min(shutil.disk_usage(small_disk).free, 1 << 20)))
    model, optimizer = begun(small_disk / "store")
    with optimizer:
        assert same(state_of(model, optimizer), expected)
