"""Tests steps without gradients, interrupted steps and failed ones: what they leave is a whole step."""

from functools import partial
from unittest import mock

import pytest
import torch
from support.chains import chain, loss_of, offloaded, require_same, step, twins

import memascend
from memascend.optim import rules

FUSED = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("gradients", ["ssd", "fused", "ram"])
def test_a_step_that_was_interrupted_after_its_commit_is_committed(tmp_path, gradients):
    plain, theirs, model, optimizer = twins(tmp_path, gradients, kind=FUSED, rate=1e-2)
    commit = memascend.engine.Engine.commit

    def interrupted(*args, **options):
        commit(*args, **options)
        raise KeyboardInterrupt

    with optimizer:
        for index in range(3):
            step(plain, theirs, index)
            if index != 1:
                step(model, optimizer, index)
                continue
            patch = mock.patch.object(memascend.engine.Engine, "commit", interrupted)
            with patch, pytest.raises(KeyboardInterrupt):
                step(model, optimizer, index)
            optimizer.zero_grad()
        assert optimizer.steps == 3
        require_same(plain, model)


def test_an_update_that_could_not_begin_is_no_part_of_the_next_step(tmp_path, monkeypatch):
    plain, theirs, model, optimizer = twins(tmp_path, "ssd")
    begin, calls = rules._Rule.update, []

    def fails_second(*args, **options):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return begin(*args, **options)

    with optimizer:
        loss_of(model).backward()
        monkeypatch.setattr(rules._Rule, "update", fails_second)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        optimizer.step()
        loss_of(plain).backward()
        theirs.step()
        require_same(plain, model)


def edited(model, optimizer):
    with optimizer.edit(model[0].weight) as weight:
        weight.mul_(2)


def test_a_commit_that_failed_counts_for_no_loss_scale_and_ends_no_blocks(tmp_path):
    model, optimizer = offloaded(tmp_path / "store", chain(dtype=torch.float16))
    error = memascend.StorageError("no room")
    with optimizer:
        scale = optimizer._session.run.metadata.scale
        before = scale.state()
        edited(model, optimizer)
        with mock.patch.object(memascend.engine.Engine, "commit", side_effect=error), pytest.raises(type(error)):
            step(model, optimizer)
        assert scale.state() == before
        optimizer.zero_grad()
        edited(model, optimizer)
        # A Trainer's resume runs both blocks again.
        assert optimizer._session.run.resources.store.hyperparameters["blocks"] == 2
        step(model, optimizer)
        assert scale.state() != before
