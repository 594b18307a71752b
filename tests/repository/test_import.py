"""Tests that `import memascend` loads next to nothing: no torch, no kernel, no CUDA library."""


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


def test_memory_needs_no_torch_until_there_is_a_tensor(python):
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


def test_every_public_name_is_there(loaded):
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


def test_the_function_stays_where_its_module_was_imported_first(loaded):
    loaded(
        "from memascend.session.offload import offload; import memascend;"
        "assert memascend.offload is offload and callable(memascend.offload);"
        "assert memascend.Report.__name__ == 'Report'"
    )
