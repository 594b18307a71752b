"""Tests runs with too little disk space for the gradient log or for deferred updates.

Also tests temporary stores, to which a run does not write parameters that are kept in RAM.
"""

import contextlib
import logging
import os
import shutil

import pytest
import torch
from grads.test_deferred import run as deferred_run
from session.test_log import begun
from support.bits import same_states
from support.chains import everything, loss_of, train
from support.disks import loop, small_ext4  # noqa: F401 - fixtures

import memascend
from memascend.plan import decision


def sizes(tmp_path):
    """Returns the bytes of a store, and a dictionary with the bytes of a gradient log for 16 steps and for 1 step."""
    found = {}
    for steps in (16, 1):
        with begun(tmp_path / f"sizes-{steps}", log_steps=steps)[1] as optimizer:
            found[steps] = optimizer.plan.log_bytes
            store = optimizer.plan.disk_bytes
    return store, found


@pytest.fixture
def room(monkeypatch):
    """Returns a function that sets the number of bytes that the library finds free on storage next to a store."""
    return lambda nbytes: monkeypatch.setattr(decision, "free_space_beside", lambda *_: nbytes)


@pytest.mark.parametrize("is_none", [True, False])
def test_shortened_gradient_log_is_named_by_warning_plan_and_report(tmp_path, room, monkeypatch, caplog, is_none):
    half = 0
    if is_none:
        room(0)
    else:
        store, logs = sizes(tmp_path)
        usage = shutil.disk_usage(tmp_path)._replace(free=store + logs[16])
        monkeypatch.setattr(shutil, "disk_usage", lambda *_: usage)
        half = logs[16] // 2
    with caplog.at_level(logging.WARNING, "memascend"):
        model, optimizer = begun(tmp_path / "store")
    with optimizer:
        train(model, optimizer, [0])
        steps, report = optimizer.plan.log_steps, optimizer.report()
        assert steps in ([0] if is_none else [6, 7, 8]), "the log takes at most half of the free space"
        assert optimizer.plan.log_bytes <= half
        is_notified = "no steps" if is_none else f"only {steps} steps"
        assert f"no disk space for a gradient log of 16 steps: the log holds {is_notified}" in caplog.text
        assert ("no disk space for a gradient log" if is_none else "no disk space for 16") in str(optimizer.plan)
        shown = "written whole each step" if is_none else f"gradient log of {steps} steps (no disk space for 16)"
        assert shown in str(report)
        assert report.to_dict()["log"] == {"steps": steps, "bytes": optimizer.plan.log_bytes, "wanted": 16}
        assert (report.written["log"] == 0) == is_none
        assert report.written["state"] > 0 or not is_none


def test_log_steps_beyond_disk_space_is_rejected_with_a_number_that_fits(tmp_path, room):
    _, logs = sizes(tmp_path)
    room(logs[16])
    with pytest.raises(memascend.ConfigError, match="log_steps=16 fits"):
        begun(tmp_path / "store", log_steps=64)
    room(logs[1] - 1)
    with pytest.raises(memascend.ConfigError, match="not one step fits"):
        begun(tmp_path / "store", log_steps=64)
    assert not (tmp_path / "store").exists()
    room(logs[16])
    with begun(tmp_path / "store", log_steps=16)[1] as optimizer:
        assert optimizer.plan.log_steps == 16


def test_full_log_counts_unlogged_updates_and_keeps_the_same_bits(tmp_path):
    """If a loop sets a gradient to None, the bytes of the gradient stay in the log until the commit.

    Such gradients can fill the log.
    """
    ends = []
    for drops in (0, 5):
        model, optimizer = begun(tmp_path / f"dropped-{drops}", log_steps=1, gradients="fused")
        with optimizer:
            for step in range(3):
                for _ in range(drops):
                    loss_of(model).backward()
                    for parameter in model.parameters():
                        parameter.grad = None
                train(model, optimizer, [step])
            ends.append(everything(model, optimizer))
            report = optimizer.report()
            assert (report.unlogged > 0) == (drops > 0)
    assert report.to_dict()["log"]["unlogged"] == report.unlogged
    assert "their parameters were written whole" in str(report)
    assert same_states(*ends)


def test_temporary_store_writes_no_parameter_that_is_in_ram(tmp_path):
    ends = []
    for store in (tmp_path / "store", None):
        model, optimizer = begun(store, existing="refuse")
        with optimizer:
            train(model, optimizer, [0])
            before = optimizer.report()
            train(model, optimizer, range(1, 5))
            report = optimizer.report()
            ends.append(everything(model, optimizer))
            written = {kind: report.written[kind] - before.written[kind] for kind in ("values", "state", "log")}
            assert (sum(written.values()) == 0) == (store is None)
            assert sum(optimizer.plan.written_bytes.get(kind, 0) for kind in written) == 0 or store is not None
            core = optimizer._session.run.resources.store
            counted = core.counters()["written_bytes"]
            optimizer._session.run.resources.values_read()
        assert (core.counters()["written_bytes"] - counted > 1 << 16) == (store is not None), "bytes that close() wrote"
    assert same_states(*ends)


def test_in_place_write_to_a_weight_ends_the_run_of_a_temporary_store():
    model, optimizer = begun(None, existing="refuse")
    with optimizer:
        train(model, optimizer, [0])

        def scribble(module, *_):
            with torch.no_grad():
                module.weight.mul_(2)

        hook = model[0].register_forward_pre_hook(scribble)
        loss_of(model).backward()
        hook.remove()
        with pytest.raises(memascend.UsageError, match="written to in place"):
            optimizer.step()
        assert optimizer.steps == 1
        optimizer.zero_grad()
        with pytest.raises(memascend.UsageError, match=r"no other copy .*storage="):
            train(model, optimizer, [1])
        optimizer._session.run.resources.values_read()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, because only root can create loop devices")
def test_log_on_a_raw_device_has_the_steps_that_fit_behind_the_store(tmp_path, loop, caplog):  # noqa: F811
    store, logs = sizes(tmp_path)
    each = (logs[16] - logs[1]) // 15
    for room, steps in ((logs[16], 16), (logs[1] + 2 * each, 3), (logs[1] // 2, 0)):
        device = loop((store + room + (1 << 16)) // 4096 * 4096)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "memascend"):
            model, optimizer = begun(device, existing="refuse", scratch=tmp_path)
        assert optimizer.plan.log_steps == steps
        assert ("no disk space for a gradient log" in caplog.text) == (steps < 16)
        train(model, optimizer, range(5))
        expected = everything(model, optimizer)
        # Copies the device. The copy has the state in which a kill would leave the device.
        with open(device, "rb") as left, open(tmp_path / "left", "wb") as copy:
            shutil.copyfileobj(left, copy)
        optimizer.close()
        model, optimizer = begun(tmp_path / "left", host_memory=None)
        with optimizer:
            assert same_states(everything(model, optimizer), expected)
        (tmp_path / "left").unlink()


@pytest.mark.root
def test_run_on_a_full_disk_defers_no_updates(tmp_path, small_ext4, caplog):  # noqa: F811
    """On a full file system, a run cannot reserve second places for gradients, so it defers no update.

    After the file `filler` is removed, the next run defers updates.
    """
    store, filler, scratch = small_ext4 / "s", small_ext4 / "filler", {"scratch": tmp_path}
    deferred_run(store, "ram", steps=2, durability="none", **scratch)
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as full:
        while full.write(bytes(1 << 12)):
            pass
    with caplog.at_level(logging.WARNING, "memascend"):
        at_once = deferred_run(store, steps=4, **scratch)[2]
    assert "too little disk space to defer the updates of" in caplog.text
    assert at_once.deferred == 0
    filler.unlink()
    caplog.clear()
    left = deferred_run(store, steps=6, **scratch)
    assert not caplog.text
    assert left[2].deferred == 2
    assert same_states(left[0], deferred_run(tmp_path / "ram", "ram", steps=6)[0])
