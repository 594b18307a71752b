"""Registers a torch device ("posing") that acts as a GPU with the CPU's bits: parameters, gradients, copy streams.

What `support.fake_device` shows of copies, this shows of everything that has to be told apart by where it lies: host
memory and the device's never mix, a pointer to the device's memory faults on the host, and a backward runs on a thread
of its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
import types
from pathlib import Path

import torch
from device.simulated.build import ROOT, compiled
from support.fake_device import Fake
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("backend.cpp")


def built() -> Path:
    """The compiled backend, made once for each torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    linked = [*libraries, "-ltorch", "-ltorch_cpu", "-lc10"]
    return compiled(ROOT / "target" / f"posing-{key}.so", "-O1", "-w", *includes, str(SOURCE), *linked)


def registered() -> torch.device:
    """Let torch know of the device; once in a process."""
    if not hasattr(torch, "posing"):
        torch.ops.load_library(str(built()))
        torch.utils.rename_privateuse1_backend("posing")
        module = types.ModuleType("torch.posing")
        module.is_available = lambda: True
        module.is_initialized = lambda: True
        module.device_count = lambda: 1
        module.current_device = lambda: 0
        module._is_in_bad_fork = lambda: False
        module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        # Nothing random runs there by itself.
        module.get_rng_state = lambda _device=None: torch.get_rng_state()
        module.set_rng_state = lambda _state, _device=None: None
        module.manual_seed_all = lambda _seed: None
        sys.modules["torch.posing"] = module
        torch._register_device_module("posing", module)
        torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("posing", 0)


class Posing(Fake):
    """A `Device` whose memory is that device's."""

    def __init__(self, delay=0.0005, fills=0.0):
        super().__init__(delay, fills)
        self.torch_device = registered()

    def memory(self, nbytes):
        return self.fill(torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device))

    def lent(self, memory, start, nbytes, owner):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))
        return torch.ops.posing.lent(memory.data_ptr() + start, nbytes, id(owner))

    def free(self):
        return 0

    def allocated(self):
        return torch.ops.posing.used(False), torch.ops.posing.used(True)
