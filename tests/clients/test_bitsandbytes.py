"""Tests that bitsandbytes' own optimizers are refused, and that the error names what works instead."""

import bitsandbytes
import pytest
import torch

import memascend


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("kind", ["AdamW8bit", "PagedAdamW8bit", "AdamW", "Lion8bit"])
def test_its_classes_are_refused(tmp_path, kind):
    model = torch.nn.Linear(64, 64)
    before = model.weight.detach().clone()
    optimizer = getattr(bitsandbytes.optim, kind)(model.parameters())
    with pytest.raises(memascend.ConfigError, match=f"{kind} of bitsandbytes is rejected.*state=.8bit"):
        memascend.offload(model, optimizer, storage=tmp_path / "store")
    assert torch.equal(model.weight, before)
    assert not list(tmp_path.iterdir())
