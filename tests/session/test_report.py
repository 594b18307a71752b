"""Tests `optimizer.report()`: bytes, seconds, memory and advice of a run.

Also tests progress lines of long operations.
"""

import dataclasses
import io
import json
import sys
import time

import pytest
import torch
from support.chains import offloaded, train
from torch import nn

from memascend.errors import ConfigError
from memascend.session.offload import offload
from memascend.text import Progress

WIDTH = 256


def model_of(blocks=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDTH), *[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(blocks)])


def trained(tmp_path, steps=3, kind=torch.optim.AdamW, **options):
    model, optimizer = offloaded(tmp_path, model_of(), kind, **options)
    train(model, optimizer, range(steps))
    return model, optimizer


def test_report_counts_the_bytes_that_updates_read_and_write(tmp_path):
    model, optimizer = trained(tmp_path, gradients="fused")
    with optimizer:
        of_model = sum(parameter.nbytes for parameter in model.parameters())
        report = optimizer.report().to_dict()
        assert set(report) == {"host", "beside", "read", "written", "seconds", "steps"}
        assert report["beside"] == {"Python objects": optimizer.plan.object_bytes}
        assert report["steps"] == 3
        # "state" counts the bytes of the two moments, and "values" counts the bytes of the values. The store rounds the
        # bytes of each extent up to whole pages of 4096 bytes.
        assert 3 * 2 * of_model <= report["read"]["state"] <= 3 * 2.1 * of_model
        assert 3 * 2 * of_model <= report["written"]["state"] <= 3 * 2.1 * of_model
        assert 3 * of_model <= report["written"]["values"] <= 3 * 1.1 * of_model
        assert 3 * of_model <= report["written"]["first values"] <= 3.5 * of_model
        assert report["read"]["values"] >= 3 * of_model
        assert 0 < report["seconds"]["step()"] < report["seconds"]["wall"]
        json.dumps(report)


def test_report_in_memory_counts_added_masters_which_are_logged_once(tmp_path, caplog):
    caplog.set_level("INFO", "memascend")
    for model in (model_of(), model_of().bfloat16()):
        offload(model, torch.optim.AdamW(model.parameters()), master_dtype=None)[1].close()
    model = model_of().bfloat16()
    count = sum(parameter.numel() for parameter in model.parameters())
    model, optimizer = offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path)
    with optimizer:
        held = optimizer.report().in_memory
        # Each element needs 2 bytes for the value, 2 bytes for the gradient, and 4 bytes each for the master weight and
        # the two moments.
        assert (held.values, held.gradients, held.state) == (2 * count, 2 * count, 12 * count)
    assert caplog.text.count("pass master_dtype=None") == 1


def test_a_resumed_run_counts_its_own_steps(tmp_path):
    _, optimizer = trained(tmp_path, steps=3)
    optimizer.close()
    _, optimizer = trained(tmp_path, steps=2, existing="resume")
    with optimizer:
        assert (optimizer.steps, optimizer.report().steps) == (5, 2)
        assert optimizer.report().to_dict()["written"]["first values"] == 0


def test_report_text_names_memory_and_steps_and_plot_needs_matplotlib(tmp_path, monkeypatch):
    _, optimizer = trained(tmp_path, gradients="fused", host_memory="64MiB")
    with optimizer:
        report = optimizer.report()
        assert report.owners["gradients in RAM"].peak == report.in_memory.gradients
        report.plot(tmp_path / "new" / "picture.png")
        assert (tmp_path / "new" / "picture.png").read_bytes()[:4] == b"\x89PNG"
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        with pytest.raises(ConfigError, match="pip install"):
            report.plot(tmp_path / "picture.png")
        shown = str(report)
    for word in ("units", "update staging", "gradients", "budget", "In memory", "first values", "step()", "3 steps"):
        assert word in shown
    # `report()` also works after `close()`.
    assert "3 steps" in str(optimizer.report())


@pytest.mark.parametrize("gradients", ["ssd", "ram"])
def test_report_counts_an_accumulated_gradient_once(tmp_path, gradients):
    model, optimizer = trained(tmp_path, steps=1, gradients=gradients)
    with optimizer:
        of_model = sum(parameter.nbytes for parameter in model.parameters())
        for _ in range(3):
            model(torch.ones(2, 16)).sum().backward()
        held = optimizer.report().owners["gradients"]
        if gradients == "ram":
            assert (held.bytes, held.peak) == (of_model, of_model)
            optimizer.zero_grad()
            assert optimizer.report().owners["gradients"].bytes == 0
        else:
            assert held.peak < of_model


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_logs_a_line_every_15_seconds(monkeypatch):
    clock, log = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Progress("writing", 100 << 20, log) as lines:
        for clock[0] in (5.0, 10.0, 20.0, 25.0, 30.0, 40.0):
            lines.add(10 << 20)
    assert log.getvalue().splitlines() == [
        "memascend: writing: 30 MiB of 100 MiB, 1.5 MiB/s, 47 s left",
        "memascend: writing: 60 MiB of 100 MiB, 1.5 MiB/s, 27 s left",
    ]
    with Progress("measuring", 4, log, unit="operations") as lines:
        clock[0] += 16
        lines.add(1)
    assert log.getvalue().endswith("memascend: measuring: 1 of 4 operations, 48 s left\n")
    # If the total is 0 at first, as when records are replayed or verified, the first call of `reached` sets the total.
    with Progress("reading", 0, log) as lines:
        clock[0] += 20.0
        lines.reached(10 << 20, 40 << 20)
    assert log.getvalue().endswith("memascend: reading: 10 MiB of 40 MiB, 512 KiB/s, 60 s left\n")
    monkeypatch.setitem(sys.modules, "tqdm", None)
    terminal = Terminal()
    with Progress("writing", 100 << 20, terminal) as progress:
        clock[0] += 20.0
        progress.add(50 << 20)
    assert terminal.getvalue() == "memascend: writing: 50 MiB of 100 MiB, 2.5 MiB/s, 20 s left\n"


def test_progress_shows_a_tqdm_bar_in_a_terminal_for_long_work(monkeypatch):
    pytest.importorskip("tqdm")
    terminal = Terminal()
    with Progress("writing", 100 << 20, terminal) as bar:
        bar.add(10 << 20)
    assert terminal.getvalue() == ""
    monkeypatch.setattr("memascend.text._PATIENCE_SECONDS", 0.0)
    with Progress("writing", 100 << 20, terminal) as bar:
        bar.add(25 << 20)
        time.sleep(0.11)
        bar.add(25 << 20)
    # The bar shows the name of the work and the bytes. The bar is erased at the end.
    assert "writing" in terminal.getvalue()
    assert "50.0M/100M" in terminal.getvalue()
    assert terminal.getvalue().rstrip(" ").endswith("\r")


def test_report_of_a_drive_bound_run_advises_options(tmp_path):
    _, optimizer = trained(tmp_path)
    with optimizer:
        report = optimizer.report()
    stages = {
        "wall": 10.0, "waiting for units": 3.0, "handing on gradients": 1.0, "step()": 2.0, "update, idle": 1.0,
        "update, applying": 0.1, "update, reading": 4.0, "update, computing": 2.0, "update, sealing": 0.5,
        "update, writing": 3.0,
    }  # fmt: skip
    bound = dataclasses.replace(report, seconds=stages)
    assert bound.waited == pytest.approx(0.6)
    assert "training waited for it 60% of the time" in str(bound)
    for words in ("by_layer=True", "gradient_accumulation_steps", "host_memory="):
        assert words in bound.advice
    # The report gives no advice in three cases: the waits are short, updates compute for longer than the drive is busy,
    # or the run has made no step yet.
    for other in ({"wall": 100.0}, {"update, computing": 8.0}):
        assert dataclasses.replace(report, seconds={**stages, **other}).advice == ""
    assert dataclasses.replace(bound, steps=0).advice == ""
