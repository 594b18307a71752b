"""Tests that a store which a run of this process has open is opened again, as by a notebook's cell."""

import errno
import gc

import pytest
import torch
from torch import nn

import memascend


def offloaded(folder, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    return memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=folder, **options)


def step(model, optimizer):
    model(torch.ones(3, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("at", ["folder", "file"])
@pytest.mark.parametrize(("existing", "steps"), [("resume", 2), ("replace", 0)])
def test_the_earlier_run_is_closed_with_a_warning(tmp_path, existing, steps, at):
    where = tmp_path if at == "folder" else tmp_path / "run.store"
    model, optimizer = offloaded(where)
    step(model, optimizer)
    step(model, optimizer)
    with pytest.warns(UserWarning, match=r"had this store open and was closed at step 2.*optimizer\.close\(\)"):
        again, other = offloaded(where, existing=existing)
    with other:
        assert other.steps == steps
        step(again, other)
        assert other.steps == steps + 1
    with pytest.raises(memascend.UsageError, match="has been closed"):
        model(torch.ones(3, 8))
    optimizer.close()


def test_without_resume_or_replace_the_error_names_close(tmp_path):
    model, optimizer = offloaded(tmp_path)
    step(model, optimizer)
    with pytest.raises(memascend.StorageError, match=r"optimizer\.close\(\)") as refused:
        offloaded(tmp_path, existing="previous")
    assert refused.value.errno == errno.EBUSY
    # The run goes on.
    step(model, optimizer)
    assert optimizer.steps == 2
    optimizer.close()


def test_a_run_that_nothing_refers_to_is_collected_without_a_word(tmp_path):
    gc.collect()
    gc.disable()
    try:
        model, optimizer = offloaded(tmp_path)
        step(model, optimizer)
        del model, optimizer
        # No warning: each is an error here.
        _, optimizer = offloaded(tmp_path, existing="resume")
    finally:
        gc.enable()
    with optimizer:
        assert optimizer.steps == 1


def test_another_store_stays_open(tmp_path):
    model, optimizer = offloaded(tmp_path / "one")
    _, other = offloaded(tmp_path / "two", existing="replace")
    with optimizer, other:
        step(model, optimizer)
        assert optimizer.steps == 1
