"""Tests updates that begin before step() knows the norm: kept, made anew or never begun, they are those of "ssd"."""

import logging

import pytest
import torch
from grads.clipped_runs import nothing, require_same, run, stack
from grads.clipped_runs import offloaded as clipped
from parity.zoo_loops import other
from support.bits import same_bits
from support.chains import loss_of

from memascend.errors import UsageError

LIMIT = 1.0
# What a loss is multiplied by: the norm of its gradient is far below the limit, or far above it.
SMALL, LARGE = 1e-3, 1e3
NEVER, ALWAYS = [SMALL] * 6, [LARGE] * 6
ALTERNATING = [SMALL, LARGE] * 3
MIXED = [SMALL, SMALL, LARGE, SMALL, SMALL, SMALL, LARGE, LARGE]


def offloaded(folder, **options):
    return clipped(folder, **{"gradients": "auto", "max_grad_norm": LIMIT, **options})


def backward(model, optimizer, index, scale):
    optimizer.backward(loss_of(model, index) * scale)


def scaled(folder, gradients, scales, between=nothing, **options):
    """A run of as many steps as there are scales."""

    def loop(model, optimizer, index):
        backward(model, optimizer, index, scales[index])

    options = {"max_grad_norm": LIMIT, **options}
    return run(folder, gradients, steps=len(scales), loop=loop, between=between, **options)


def both(tmp_path, scales, between=nothing, **options):
    """The report of a run that may begin updates early, whose bits are those of one that does not."""
    waits = scaled(tmp_path / "ssd", "ssd", scales, between, **options)
    early = scaled(tmp_path / "auto", "auto", scales, between, **options)
    require_same(waits, early)
    assert waits[2].early == 0
    return early[2]


def test_a_step_that_clips_nothing_reads_no_gradient(tmp_path):
    report = both(tmp_path, NEVER)
    written = sum(p.numel() * 2 for p in stack().parameters())
    waited = scaled(tmp_path / "again", "ssd", NEVER)[2]
    # In whole pages.
    assert report.written["gradients"] == waited.written["gradients"] >= 6 * written
    assert report.read["gradients"] == report.written["gradients"] // 6, "but in the first step, which waits"


def test_gradients_of_a_step_that_overflowed_are_still_there(tmp_path):
    model, optimizer = offloaded(tmp_path / "s", loss_scale=64.0)
    with optimizer:
        for index in range(3):
            optimizer.zero_grad()
            backward(model, optimizer, index, SMALL)
            if index < 2:
                optimizer.step()
        before = [parameter.grad.clone() for parameter in model.parameters()]
        model[0].weight.grad.mul_(torch.inf)
        optimizer.step()
        assert optimizer.overflowed
        assert optimizer.steps == 2
        assert optimizer.report().anew == 1
        after = [parameter.grad.clone() for parameter in model.parameters()]
        assert all(map(same_bits, before[1:], after[1:]))


def hooks(model, optimizer, index):
    def doubles(*_):
        model[0].weight.grad.mul_(2)
        handle.remove()

    if index == 2:
        handle = optimizer.register_step_pre_hook(doubles)


def clips(limit):
    return lambda model, *_: torch.nn.utils.clip_grad_norm_(model.parameters(), limit)


def more(model, optimizer, index):
    for micro in range(2):
        backward(model, optimizer, 100 * micro + index, SMALL)


OVERFLOWS = [SMALL, SMALL, 1e6, SMALL, SMALL, SMALL, LARGE, SMALL]
FALLS = [1.0, 1.0, 1e-3, 1.0, 1.0, 1.0]
# The scales, what happens between backward() and step(), the options; how many steps begin early, and are made anew.
RUNS = {
    # The first step waits, since nothing is known.
    "never": (NEVER, nothing, {}, 5, 0),
    "always": (ALWAYS, nothing, {}, 0, 0),
    # The one that had to be made anew makes two steps that change nothing necessary.
    "alternating": (ALTERNATING, nothing, {}, 1, 1),
    "mixed": (MIXED, nothing, {"optimizer": other(torch.optim.SGD, lr=1e-2, momentum=0.9)}, 4, 2),
    # Its own code computes the norm first.
    "own code": (NEVER, nothing, {"optimizer": other(torch.optim.RMSprop, lr=1e-3)}, 0, 0),
    "overflow": (OVERFLOWS, nothing, {"make": lambda: stack(torch.float16)}, 4, 2),
    "nan": ([SMALL, SMALL, float("nan")], nothing, {"nonfinite": "commit"}, 2, 1),
    "hook": (NEVER, hooks, {}, 3, 1),
    # Each step but the third is clipped, and the fourth begins as if it was not.
    "clipped": (FALLS, clips(1e-3), {"max_grad_norm": None}, 1, 1),
    "hardly clipped": (FALLS, clips(1.0), {"max_grad_norm": None}, 5, 0),
    "not clipped": (FALLS, clips(1e3), {"max_grad_norm": None}, 5, 0),
    "several, declared": (NEVER, more, {"accumulation_steps": 3}, 5, 0),
    "several": (NEVER, more, {"accumulation_steps": 1}, 0, 0),
}


@pytest.mark.parametrize(("scales", "between", "options", "early", "anew"), RUNS.values(), ids=RUNS)
def test_bits_are_those_of_steps_that_wait(tmp_path, scales, between, options, early, anew):
    report = both(tmp_path, scales, between, **options)
    assert (report.early, report.anew) == (early, anew)
    assert report.to_dict().get("early") == ({"steps": early, "anew": anew} if early else None)


def test_options_that_no_update_takes_are_refused_by_the_step(tmp_path):
    """As they are where nothing begins before it; and not where they are right again by then."""
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        for index in range(3):
            optimizer.zero_grad()
            right, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], -1.0
            backward(model, optimizer, index, SMALL)
            optimizer.param_groups[0]["lr"] = right
            optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True
        backward(model, optimizer, 3, SMALL)
        with pytest.raises(UsageError, match="amsgrad"):
            optimizer.step()


def test_the_log_says_what_was_made_anew(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "memascend"):
        report = scaled(tmp_path / "s", "auto", MIXED)[2]
    said = [record.getMessage() for record in caplog.records if "discarded" in record.getMessage()]
    assert len(said) == report.anew == 2
    assert "(2 of 4 steps so far)" in said[1]
    assert "Updates of 4 steps began before step(); 2 of them were made anew." in str(report)
