"""A CUDA device where there is one; and in the slow tests one that poses as such (posing/)."""

import pytest
import torch

from memascend import config
from memascend import device as devices

DEVICES = [
    pytest.param(
        "posing",
        marks=[
            pytest.mark.slow,
            pytest.mark.timeout(300),
            # What operations by way of the CPU do, where a GPU's do it in place.
            pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
        ],
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=DEVICES)
def device(request, monkeypatch):
    if request.param == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield torch.device("cuda", torch.cuda.current_device())
        torch.use_deterministic_algorithms(False)
        return
    from posing.device import Posing

    made = Posing()
    monkeypatch.setattr(devices, "open_device", lambda _: made)
    # Which knows of CUDA alone.
    monkeypatch.setattr(config.Options, "where", torch.device("cuda"))
    yield made.torch_device
    made.end()
