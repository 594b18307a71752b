"""Tests LSTM and GRU on a device: weights stay in place while offloaded, and flattening comes back."""

import warnings

import pytest
import torch

import memascend
from memascend.device.device import Flattening

KINDS = [torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN]


@pytest.fixture
def flattened(monkeypatch):
    """As torch does it on CUDA: it asks each weight for its memory, and moves it."""
    seen = []

    def flatten_parameters(self):
        for weight in self._flat_weights:
            weight.data_ptr()
            with torch.no_grad():
                weight.set_(weight.clone())
        seen.append(self)

    monkeypatch.setattr(torch.nn.RNNBase, "flatten_parameters", flatten_parameters)
    return seen


class Model(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.cells = kind(16, 16, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(16, 4)

    def forward(self, x):
        # What many do, so that a wrapper's copies do not warn.
        self.cells.flatten_parameters()
        return self.head(self.cells(x)[0])


def trained(model, optimizer, device=None):
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        if device is not None:
            model.to(device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_may_be_moved_to_where_it_is(tmp_path, fake, kind, flattened):
    """`model.to()` and a forward that flattens leave weights in their units, in the bits of a run that never does."""
    found = []
    for moves in (False, True):
        model = Model(kind)
        flattened.clear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer = memascend.offload(model, optimizer, storage=tmp_path, existing="replace", gradients="fused")
        cells = model.cells
        with optimizer:
            found.append(trained(model, optimizer, fake.torch_device if moves else None))
            assert flattened == []
            with memascend.materialized(model):
                # They are real ones for a while.
                cells.flatten_parameters()
                assert flattened == [cells]
            cells.flatten_parameters()
            assert flattened == [cells]
            assert optimizer.plan.recurrent_bytes == sum(p.nbytes for p in cells.parameters())
            assert "cuDNN" in str(optimizer.plan)
        assert "flatten_parameters" not in cells.__dict__
    assert found[0] == found[1]
    assert not any(message and "RNN" in message.pattern for _, message, *_ in warnings.filters)


def test_what_torch_asks_for_in_vain_is_not_said(recwarn):
    said = "RNN module weights are not part of single contiguous chunk of memory. This means they need to be compacted"
    model = Model(torch.nn.LSTM)
    own = model.cells.__dict__["flatten_parameters"] = lambda: "its own"
    flattening = Flattening(model)
    flattening.stop()
    warnings.warn(said, stacklevel=1)
    assert len(recwarn) == 0
    flattening.resume()
    flattening.resume()
    assert model.cells.flatten_parameters is own
    with pytest.warns(UserWarning, match="RNN module"):
        warnings.warn(said, stacklevel=1)


def test_other_models_copy_nothing(tmp_path, fake):  # noqa: ARG001 - it computes there
    model = torch.nn.Linear(4, 4)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path)
    with optimizer:
        assert optimizer.plan.recurrent_bytes == 0
        assert "cuDNN" not in str(optimizer.plan)
