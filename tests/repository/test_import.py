"""Tests `import memascend`: loaded modules, public names, errors; training without numpy; memory lent to tensors."""

import gc
import pickle
import threading
import weakref

import pytest
import torch

import memascend
from memascend import tensors


def test_import_loads_only_the_package(python):
    python(
        """
import sys
from pathlib import Path
import memascend
loaded = {name for name in sys.modules if name.split(".")[0] in
          {"torch", "triton", "numpy", "transformers", "safetensors", "matplotlib", "cuda"}}
assert not loaded, loaded
assert [name for name in sys.modules if name.startswith("memascend")] == ["memascend"]
assert "libcuda" not in Path("/proc/self/maps").read_text()
"""
    )


def test_lease_needs_no_torch_and_its_tensor_no_triton_or_cuda(python):
    python(
        """
import sys
import memascend, memascend.nvme
lease = memascend.memory.ChunkRing(4096, 1).lease()
assert "torch" not in sys.modules
import torch
lease.tensor(1, torch.uint8)
assert "triton" not in sys.modules and not torch.cuda.is_initialized()
"""
    )


def test_every_public_name_and_error_is_importable_from_memascend(loaded):
    loaded(
        """
import memascend
assert set(memascend.__all__) == set(dir(memascend))
for name in memascend.__all__:
    getattr(memascend, name)
errors = [each for each in vars(memascend.errors).values() if getattr(each, "__module__", "") == "memascend.errors"]
assert len(errors) > 9
for error in errors:
    assert issubclass(error, memascend.MemascendError)
    assert getattr(memascend, error.__name__) is error
assert memascend.__version__
try:
    memascend.nonsense
except AttributeError as error:
    assert "nonsense" in str(error)
else:
    raise SystemExit("found")
"""
    )


def test_memascend_offload_is_the_function_after_its_module_is_imported(loaded):
    loaded(
        "from memascend.session.offload import offload; import memascend;"
        "assert memascend.offload is offload and callable(memascend.offload);"
        "assert memascend.Report.__name__ == 'Report'"
    )


ERRORS = [
    (memascend.ConfigError("wrong"), ValueError),
    (memascend.BudgetError("small", smallest=7), MemoryError),
    (memascend.MemoryLimitError("none", needed=9, available=None), MemoryError),
    (memascend.StorageError("full", errno=28, path="/x", offset=4096, nbytes=512), OSError),
    (memascend.CorruptionError("flipped", path="/x", offset=0, nbytes=1), memascend.StorageError),
    (memascend.DeviceError("lost"), RuntimeError),
    (memascend.RankError("gone", ranks=(1, 3)), RuntimeError),
    (memascend.UsageError("not now"), RuntimeError),
    (memascend.TimeoutExpired("late"), TimeoutError),
]


@pytest.mark.parametrize(("error", "also"), ERRORS)
def test_error_has_a_builtin_base_class_and_survives_pickling(error, also):
    assert isinstance(error, also)
    assert isinstance(error, memascend.MemascendError)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    attributes = ("smallest", "needed", "available", "errno", "path", "offset", "nbytes", "ranks")
    assert [getattr(copy, name, None) for name in attributes] == [getattr(error, name, None) for name in attributes]


# torch itself warns once that numpy is missing.
WITHOUT = """
import sys, warnings
sys.modules["numpy"] = None
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
import memascend
"""


def test_training_resume_and_checkpoints_work_without_numpy(python, tmp_path):
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
# Lends CPU memory. The same code lends the memory of a device.
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
    """An owner of memory. A weak reference to the owner shows when Python frees the owner."""


def test_lent_tensor_frees_its_owner_with_the_last_view():
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


def test_unused_dlpack_capsule_frees_its_owner():
    owner = Owner()
    gone = weakref.ref(owner)
    capsule = tensors._core.dlpack(0x1000, 32, 1, 0, owner)
    del owner
    assert gone() is not None
    del capsule
    assert gone() is None


def test_freeing_a_lent_tensor_at_interpreter_exit_does_not_crash(loaded):
    """When the interpreter exits, freeing the tensor does not touch its owner."""
    program = """
import torch
from memascend import tensors as dlpack
there = torch.zeros(8, dtype=torch.uint8)
class Cycle:
    pass
one = Cycle()
one.self, one.tensor = one, dlpack.lent(there.data_ptr(), 8, torch.device("cpu"), [there])
torch.kept = one
"""
    loaded(program, whole=True)


@pytest.mark.gpu
def test_lent_tensor_reads_gpu_memory_at_its_address():
    device = torch.device("cuda", torch.cuda.current_device())
    there = torch.arange(64, dtype=torch.uint8, device=device)
    lent = tensors.lent(there.data_ptr() + 16, 8, device, there)
    assert lent.device == device
    assert lent.tolist() == list(range(16, 24))
