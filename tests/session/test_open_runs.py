"""Tests that a store which a run of this process has open is opened again, as by a notebook's cell."""

import errno
import gc

import pytest
import torch
from support.bits import same_states
from support.chains import chain, offloaded, step, train, values
from torch import nn

import memascend


@pytest.mark.parametrize(
    ("existing", "steps", "begins", "at"), [("resume", 2, 2, ""), ("resume", 0, 0, "run.store"), ("replace", 2, 0, "")]
)
def test_the_earlier_run_is_closed_with_a_warning(tmp_path, existing, steps, begins, at):
    model, optimizer = offloaded(tmp_path / at)
    train(model, optimizer, range(steps))
    with pytest.warns(UserWarning, match=rf"had this store open and was closed at step {steps}.*optimizer\.close\(\)"):
        again, other = offloaded(tmp_path / at, existing=existing)
    with other:
        assert other.steps == begins
        step(again, other)
        assert other.steps == begins + 1
    with pytest.raises(memascend.UsageError, match="has been closed"):
        step(model, optimizer)
    optimizer.close()


def test_a_copy_that_was_written_to_fails_no_other_call(tmp_path):
    model, optimizer = offloaded(tmp_path)
    step(model, optimizer)
    copy = model[0].weight.data
    copy.add_(1)
    with pytest.warns(UserWarning, match=r"was closed at step 1.*0\.weight .* was written to"):
        again, other = offloaded(tmp_path, existing="resume")
    with other:
        assert other.steps == 1
        step(again, other)
    optimizer.close()


def of_another_shape():
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 5))


OTHERS = {
    "shape": (of_another_shape, torch.optim.AdamW, r"does not fit: .*1\.weight.*the run .* continues"),
    "optimizer": (lambda: chain(bias=True), torch.optim.SGD, r"does not fit: .*SGD.*the run .* continues"),
}


@pytest.mark.parametrize(("other", "steps"), [("shape", 0), ("shape", 2), ("optimizer", 1)])
def test_a_resume_or_replacement_by_another_model_or_optimizer_leaves_the_run(tmp_path, other, steps):
    make, kind, words = OTHERS[other]
    model, optimizer = offloaded(tmp_path / "run.store")
    train(model, optimizer, range(steps))
    before = values(model)
    with pytest.raises(memascend.ConfigError, match=words):
        offloaded(tmp_path / "run.store", make(), kind, existing="resume")
    with pytest.raises(memascend.ConfigError, match=rf"run\.store.*open at step {steps} .*optimizer\.close\(\)"):
        offloaded(tmp_path / "run.store", make(), kind, existing="replace")
    # Without resume or replace the error names close().
    with pytest.raises(memascend.StorageError, match=r"optimizer\.close\(\)") as refused:
        offloaded(tmp_path / "run.store", existing="previous")
    assert refused.value.errno == errno.EBUSY
    assert same_states(values(model), before)
    step(model, optimizer)
    optimizer.close()
    with offloaded(tmp_path / "run.store", existing="resume")[1] as optimizer:
        assert optimizer.steps == steps + 1
    with offloaded(tmp_path / "run.store", make(), kind, existing="replace")[1] as replaced:
        assert replaced.steps == 0


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
