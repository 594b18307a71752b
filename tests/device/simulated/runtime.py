"""The simulated CUDA as a process on it sees it: what it counts, its streams' delays, and operations that check.

A `Check` follows the training of a model whose every operation is one of these: each read of a weight or of a saved
activation is a hash of what the stream finds when it comes there, and each gradient is a pattern. What has to be found
is known from the same training on the CPU.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections import Counter

import torch

from memascend import kernels

library = ctypes.CDLL("libcuda.so.1")
_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
library.simulated_read.argtypes = [_POINTER, _POINTER, _SIZE, ctypes.c_int]
library.simulated_fill.argtypes = [_POINTER, _POINTER, _SIZE, ctypes.c_uint16]
library.simulated_check.argtypes = [_POINTER, _POINTER, _SIZE, _POINTER]
library.simulated_hash.argtypes = [_POINTER, _SIZE]
library.simulated_delay.argtypes = [_POINTER, ctypes.c_long]
library.simulated_hold.argtypes = [_POINTER, ctypes.c_int]
library.simulated_hash.restype = library.simulated_result.restype = ctypes.c_uint64

RESULTS_MAX = 1 << 18
# Steps whose gradients are 16 times as large.
LOUD: set[int] = set()


def _text(function):
    size = function(None, 0)
    while True:
        out = ctypes.create_string_buffer(size)
        if (needed := function(out, size)) <= size:
            return out.value.decode()
        size = needed


def counts():
    """How often what was done, by (thread, what): Python's threads by Python's names, others by their own."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = Counter()
    for line in _text(library.simulated_counts).splitlines():
        key, _, number = line.rpartition("=")
        thread, name, what = key.split("|")
        found[names.get(int(thread), name), what] += int(number)
    return found


def total(what):
    """How often something was done, by all threads."""
    return sum(number for (_, done), number in counts().items() if done == what)


def faults():
    """What CUDA would not have forgiven."""
    return _text(library.simulated_faults).splitlines()


def reset():
    """Count from here."""
    library.simulated_reset()


def delay(stream, microseconds):
    """Let each work of a stream take so much longer."""
    library.simulated_delay(stream.cuda_stream, microseconds)


def hold(stream, held=True):
    """Let a stream begin nothing until it is let go."""
    library.simulated_hold(stream.cuda_stream, int(held))


def on(tensor, function, *arguments):
    """Queues what a function of the library does with a tensor, on the caller's stream of its device."""
    # The handle of a device's own stream means that of the current one.
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream().cuda_stream
        function(stream, tensor.data_ptr(), tensor.nbytes, *arguments)


def hashed(tensor):
    """The hash of a tensor in host memory."""
    return library.simulated_hash(tensor.data_ptr(), tensor.nbytes)


def pattern(name, step):
    """Two bytes that a tensor of this name has everywhere in this step; two of them are a fp32 from 1 to 1.9."""
    return 0x3F80 + zlib.crc32(f"{name} {step}".encode()) % 0x70 + (0x200 if step in LOUD else 0)


def filled(shape, element):
    """A tensor of fp32 in host memory that has a pattern everywhere."""
    return torch.full(shape, element << 16 | element, dtype=torch.int32, device="cpu").view(torch.float32)


def begin_check(tensors, sums):
    """The check of gradients, which begins as it does elsewhere; what the kernel would add comes in its stream."""
    _begin_check(tensors, sums)
    for tensor, row in zip(tensors, sums, strict=True):
        assert tensor.dtype == torch.float32
        on(tensor, library.simulated_check, row.data_ptr())


def stack(tensors):
    """As torch's own, by copies: its kernel does nothing here."""
    if tensors[0].device.type == "cpu":
        return _stack(tensors)
    out = torch.empty(len(tensors), *tensors[0].shape, dtype=tensors[0].dtype, device=tensors[0].device)
    for part, tensor in zip(out, tensors, strict=True):
        part.copy_(tensor)
    return out


_begin_check, kernels.begin_check = kernels.begin_check, begin_check
_stack, torch.stack = torch.stack, stack


class Check:
    """What streams found, and what they had to find."""

    def __init__(self):
        self.step = 0
        # (result, what it is, what it has to be)
        self._reads = []
        self._patterns = {}
        # Of the CPU's training, by name: hashes of the weights as the last step left them.
        self.weights = {}
        self.wrong = []
        self.checked = 0
        # The operation whose backward fails, and what fails.
        self.fails = None

    def use(self, x, weight, name, before):
        """An operation with a weight on `x`, which the operation `before` made; its name as such."""
        return Use.apply(x, weight, name, before, self), f"output of {name}"

    def read(self, tensor, what, expected):
        number = len(self._reads)
        assert number < RESULTS_MAX
        on(tensor, library.simulated_read, number)
        self._reads.append((number, f"{what} in step {self.step}", expected))

    def read_pattern(self, tensor, what, name):
        key = tensor.nbytes, pattern(name, self.step)
        if key not in self._patterns:
            self._patterns[key] = hashed(filled((tensor.nbytes // 4,), key[1]))
        self.read(tensor, what, self._patterns[key])

    def fill(self, tensor, name):
        on(tensor, library.simulated_fill, pattern(name, self.step))
        return tensor

    def equal(self, found, expected, what):
        """Values on the host."""
        self.checked += 1
        if not torch.equal(found, expected):
            self.wrong.append(f"{what} in step {self.step}")

    def number(self, found, expected, what):
        """A number that the device has computed."""
        self.checked += 1
        if found != expected:
            self.wrong.append(f"{what} in step {self.step}: {found}, not {expected}")

    def compare(self):
        """What was checked and what was wrong of all that was read, once the devices have come there."""
        for device in range(torch.cuda.device_count()):
            # Which would make a context.
            if library.simulated_active(device):
                torch.cuda.synchronize(device)
        for number, what, expected in self._reads:
            self.checked += 1
            if library.simulated_result(number) != expected:
                self.wrong.append(what)
        self._reads.clear()
        return {"checked": self.checked, "wrong": self.wrong, "faults": faults()}


class Use(torch.autograd.Function):
    """An operation with one weight: reads it, and writes patterns."""

    @staticmethod
    def forward(ctx, x, weight, name, before, check):
        check.read(weight, f"{name}, forward", check.weights[name])
        ctx.save_for_backward(x, weight)
        # `before` made what came in.
        ctx.name, ctx.before, ctx.check = name, before, check
        return check.fill(torch.empty_like(x), f"output of {name}")

    @staticmethod
    def backward(ctx, _grad):
        x, weight = ctx.saved_tensors
        check, name = ctx.check, ctx.name
        if check.fails is not None and name == check.fails[0]:
            check.fails[1]()
        check.read(weight, f"{name}, backward", check.weights[name])
        check.read_pattern(x, f"what {name} saved", ctx.before)
        return check.fill(torch.empty_like(x), "gradient"), check.fill(torch.empty_like(weight), name), None, None, None
