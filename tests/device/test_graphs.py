"""Tests that CUDA graphs are refused by name, whoever captures, and that nothing has changed."""

import contextlib

import pytest
import torch
from device.test_device import begun, losses, step
from parity.zoo_plain import next_token
from support.grids import covered

import memascend
from memascend.device.device import Device, refuse_graphs


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_a_stream_that_is_being_captured(tmp_path, device, data, gradients, monkeypatch):
    """Forward, backward, step and a touch from outside each say so, and the same step goes on without a capture."""
    model, optimizer = begun(tmp_path, device, gradients=gradients)

    def captured(call):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(memascend.UsageError, match="CUDA graph"):
                call()

    with optimizer:
        captured(lambda: model.head.weight + 1)
        for index in range(3):
            captured(lambda batch=data[index]: next_token(model, batch))
            loss = next_token(model, data[index])
            if index == 1:
                captured(loss.backward)
                optimizer.zero_grad()
                loss = next_token(model, data[index])
            loss.backward()
            captured(optimizer.step)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.steps == 3


def test_a_device_looks_whether_the_callers_stream_is_captured(monkeypatch):
    device = object.__new__(Device)
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        with pytest.raises(memascend.UsageError, match="CUDA graph") if captures else contextlib.nullcontext():
            device.require_no_capture()


def of_a_block(model, **how):
    model.blocks[1].compile(**how)
    return model


def of_a_function(model, **how):
    def function(batch):
        return model(batch)

    return torch.compile(function, **how)


@pytest.mark.parametrize(
    ("of", "how"),
    covered(
        [torch.compile, of_a_block, of_a_function],
        [
            {"mode": "reduce-overhead"},
            {"mode": "max-autotune"},
            {"options": {"triton.cudagraphs": True}},
            {"backend": "cudagraphs"},
        ],
    ),
)
def test_code_that_is_compiled_to_be_captured(tmp_path, device, data, of, how):
    torch._dynamo.reset()
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        losses(model, optimizer, data, 1)
        compiled = of(model, **how)
        for _ in range(2):
            with pytest.raises(memascend.UsageError, match="max-autotune-no-cudagraphs"):
                next_token(compiled, data[0])
        for module in model.modules():
            module._compiled_call_impl = None
        step(model, optimizer, data[1])
        assert optimizer.steps == 2


@pytest.mark.parametrize("how", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"backend": "eager"}])
def test_what_is_compiled_otherwise_is_not_refused(how):
    @torch._dynamo.disable
    def gate(*_):
        refuse_graphs()
        seen.append("a gate")

    seen = []
    module = torch.nn.Identity()
    module.register_forward_pre_hook(gate)
    torch.compile(module, **how)(torch.zeros(2))
    assert seen == ["a gate"]
