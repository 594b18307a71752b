"""Tests the report of memory that a device's driver did not register."""

import pytest
import torch

import memascend
from memascend.device.unit_memory import DeviceUnits


@pytest.mark.parametrize("why", [None, "not pinned for CUDA: cuMemHostRegister failed; copies are slower"])
def test_a_registration_that_was_refused(tmp_path, fake, monkeypatch, why):  # noqa: ARG001 - it computes there
    monkeypatch.setattr(DeviceUnits, "unregistered", why)
    model = torch.nn.Linear(4, 4)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path)
    with optimizer:
        report = optimizer.report()
        assert report.device_copies == why
        assert ("cuMemHostRegister failed" in str(report)) == (why is not None)
