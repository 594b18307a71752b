"""Tests checkpointed activations of a model on a device, in host memory and on storage: the same losses."""

import pytest
from support import checkpointed


@pytest.mark.parametrize("reentrant", [False, True])
def test_wherever_they_wait(tmp_path, device, reentrant):
    found = []
    for where in ("device", "host", "ssd"):
        options = {"device": device, "activations": where, "gradients": "ssd", "existing": "replace"}
        model, optimizer = checkpointed.offloaded(tmp_path, blocks=4, reentrant=reentrant, **options)
        batches = [checkpointed.rows(64, seed).detach().to(device).requires_grad_() for seed in range(3)]
        losses, _ = checkpointed.trained(model, optimizer, batches)
        held = optimizer.report().to_dict()
        assert held["host"]["peak"] <= held["host"]["budget"]
        found.append(losses)
    assert found[0] == found[1] == found[2]
