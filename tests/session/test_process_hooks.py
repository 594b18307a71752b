"""Tests process-wide hooks, which the first run installs and the last run removes.

Some of these hooks reject steps of other optimizers, or find new trainable parameters.
"""

import gc

import pytest
import torch
from support.bits import same_states
from support.chains import WIDTH, chain, loss_of, offloaded, step, values
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks
from torch.utils._foreach_utils import _foreach_supported_types

import memascend
from memascend import UsageError


def hooks():
    return (
        len(torch.nn.modules.module._global_module_registration_hooks),
        len(_global_optimizer_pre_hooks),
        # torch also adds types to this list, so this counts only the types of memascend.
        sum(kind.__module__.startswith("memascend") for kind in _foreach_supported_types),
        hasattr(nn.Module, "__deepcopy__"),
        sorted(vars(nn.Parameter)),
    )


@pytest.mark.filterwarnings("ignore:the trained weights are lost")
def test_process_hooks_are_removed_with_the_last_run():
    before = hooks()
    one, first = offloaded(None)
    during = hooks()
    assert during != before
    other, second = offloaded(None)
    assert hooks() == during
    first.close()
    first.close()
    assert hooks() == during
    del other, second
    gc.collect()
    assert hooks() == before
    del one


def test_failed_offload_leaves_no_process_hooks(tmp_path):
    before = hooks()
    with pytest.raises(memascend.ConfigError):
        offloaded(None, device="meta")
    offloaded(tmp_path / "s")[1].close()
    with pytest.raises(memascend.MemascendError):
        offloaded(tmp_path / "s", chain(3), existing="resume")
    assert hooks() == before


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_step_of_another_optimizer_of_offloaded_parameters_raises(tmp_path, gradients):
    model, kind = chain(bias=True), torch.optim.AdamW
    original = kind(model.parameters(), lr=1e-2)
    model, optimizer = memascend.offload(model, original, storage=tmp_path / "s", gradients=gradients)
    other = kind(model.parameters(), lr=1e-2)
    with optimizer:
        before = values(model)
        loss_of(model).backward()
        for wrong in (original, other):
            with pytest.raises(UsageError, match=r"not the optimizer that offload\(\) returned.*optimizers="):
                wrong.step()
        assert same_states(values(model), before)
        assert not other.state
        optimizer.step()
        optimizer.zero_grad()
        with memascend.materialized(model, modify=True):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            other.step()
            other.zero_grad()


NEW = r"new trainable .* offload\(\) again"


# Functions that add a module: to the model itself, or to a module that was added after offload().
@pytest.mark.parametrize(
    "adds", [lambda model, new: setattr(model, "new", new), lambda model, new: model.later.append(new)]
)
def test_step_and_forward_reject_a_new_trainable_parameter(tmp_path, adds):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        model.later = nn.Sequential()
        before = values(model)
        loss_of(model).backward()
        adds(model, nn.Linear(WIDTH, WIDTH))
        with pytest.raises(memascend.ConfigError, match=NEW):
            optimizer.step()
        with pytest.raises(memascend.ConfigError, match=NEW):
            loss_of(model)
        assert optimizer.steps == 0
        now = model.state_dict()
        assert same_states({name: now[name] for name in before}, before)
        # If all new parameters are frozen, the model must train. peft freezes a second adapter in this way.
        for parameter in model.parameters():
            parameter.requires_grad_("_memascend" in parameter.__dict__)
        optimizer.zero_grad()
        step(model, optimizer)
        assert optimizer.steps == 1


def test_forward_under_no_grad_accepts_a_new_trainable_parameter(tmp_path):
    """Preference training makes a second adapter trainable for a forward under no_grad().

    This forward must not raise.
    """
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        model.other = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            loss_of(model)
        with pytest.raises(memascend.ConfigError, match=NEW):
            step(model, optimizer)
        model.other.requires_grad_(False)
        step(model, optimizer)


def test_frozen_tied_or_outside_parameters_may_be_added_after_offload(tmp_path):
    model, optimizer = offloaded(tmp_path / "s")
    with optimizer:
        optimizer.save(tmp_path / "whole")
        model.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        model.later = nn.BatchNorm1d(WIDTH, affine=False)
        words = r"frozen\.weight, frozen\.bias, later\.running_mean.*were added to the model after"
        with pytest.warns(UserWarning, match=words):
            optimizer.save(tmp_path / "parts")
        model.again = model[0]
        model[1].register_parameter("tied", model[0].weight)
        model[1].register_parameter("none", None)
        step(model, optimizer)
        assert sum(parameter.requires_grad for parameter in model.parameters()) == 4
        wrapper = nn.Sequential(model)
        wrapper.append(nn.Linear(WIDTH, WIDTH))
        assert wrapper(torch.ones(2, WIDTH)).shape == (2, WIDTH)
        with memascend.materialized(model):
            model.while_plain = nn.Linear(WIDTH, WIDTH)
        del model.while_plain
