"""Tests training, checkpoints and device memory without numpy."""

import gc
import threading
import weakref

import pytest
import torch

from memascend import tensors

# torch itself says once that there is none.
WITHOUT = """
import sys, warnings
sys.modules["numpy"] = None
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
import memascend
"""


def test_a_training_its_checkpoint_its_resume_and_memory_of_a_device(python, tmp_path):
    python(
        WITHOUT
        + """
folder = sys.argv[1]
def made():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4)).bfloat16()
    return model, torch.optim.AdamW(model.parameters(), foreach=False)
def trained(**options):
    model, optimizer = memascend.offload(*made(), gradients="ssd", max_grad_norm=1.0, **options)
    with optimizer:
        for _ in range(2):
            model(torch.ones(4, 16, dtype=torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.save(folder + f"/saved-{optimizer.steps}")
        assert model.state_dict()["0.weight"].isfinite().all()
        assert "peak" in str(optimizer.report())
        return optimizer.steps
assert trained(storage=folder) == 2
assert trained(storage=folder, existing="resume") == 4
assert trained(checkpoint=folder + "/saved-4") == 6
model = made()[0].to("meta")
weights = folder + "/saved-6"
memascend.offload(model, torch.optim.SGD(model.parameters(), lr=0.1), weights=weights)[1].close()
# Memory of a device, on one that is none, as there is none; the way is the same.
from types import SimpleNamespace
from memascend.device.device import Device
there = torch.arange(64, dtype=torch.uint8)
lent = Device.lent(SimpleNamespace(torch_device=torch.device("cpu")), there, 16, 8, object())
assert lent.tolist() == list(range(16, 24)) and lent.data_ptr() == there.data_ptr() + 16
assert sys.modules["numpy"] is None
""",
        tmp_path,
    )


class Owner:
    """Something that can be seen going."""


def test_the_owner_lives_as_long_as_the_last_view():
    there = torch.zeros(64, dtype=torch.uint8)
    owner = Owner()
    gone = weakref.ref(owner)
    tensor = tensors.lent(there.data_ptr() + 8, 32, torch.device("cpu"), owner)
    view = tensor.view(torch.float32)[2:]
    del owner, tensor
    gc.collect()
    view.fill_(1)
    assert gone() is not None
    assert there.view(torch.float32).sum() == 6
    last = [view]
    del view
    thread = threading.Thread(target=last.clear)
    thread.start()
    thread.join()
    assert gone() is None


def test_an_owner_that_nobody_takes_in_goes():
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = tensors._core.dlpack(0x1000, 32, 1, 0, owner)
    del owner
    assert gone() is not None
    del capsule
    assert gone() is None


def test_a_lent_tensor_at_the_end_of_the_interpreter(loaded):
    """Its owner is not touched any more."""
    loaded(
        """
import torch
from memascend import tensors as dlpack
there = torch.zeros(8, dtype=torch.uint8)
class Cycle:
    pass
one = Cycle()
one.self, one.tensor = one, dlpack.lent(there.data_ptr(), 8, torch.device("cpu"), [there])
torch.kept = one
"""
    )


@pytest.mark.gpu
def test_memory_of_a_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.arange(64, dtype=torch.uint8, device=device)
    lent = tensors.lent(there.data_ptr() + 16, 8, device, there)
    assert lent.device == device
    assert lent.tolist() == list(range(16, 24))
