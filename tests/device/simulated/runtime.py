"""Reads the simulated CUDA's counts, delays its streams, and defines operations that check the order of reads.

A `Check` observes the training of a model that consists of `Use` operations. Each read of a weight or of a saved
activation computes a hash of the bytes that the stream finds when it runs the read. Each gradient is filled with a
known pattern. The same training on the CPU gives the expected hashes.
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
# The numbers of the steps whose gradients are multiplied by 16.
LOUD: set[int] = set()


def _text(function):
    size = function(None, 0)
    while True:
        out = ctypes.create_string_buffer(size)
        if (needed := function(out, size)) <= size:
            return out.value.decode()
        size = needed


def counts():
    """Returns the counts of actions and of copied bytes, by (thread, name). Python's threads have their Python name."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found = Counter()
    for line in _text(library.simulated_counts).splitlines():
        key, _, number = line.rpartition("=")
        thread, name, what = key.split("|")
        found[names.get(int(thread), name), what] += int(number)
    return found


def total(what):
    """Returns the sum of the count `what` over all threads."""
    return sum(number for (_, done), number in counts().items() if done == what)


def faults():
    """Returns a line for each forbidden use of CUDA that `reset` has not cleared."""
    return _text(library.simulated_faults).splitlines()


def reset():
    """Clears all counts and faults."""
    library.simulated_reset()


def delay(stream, microseconds):
    """Delays each work item of a stream by `microseconds`."""
    library.simulated_delay(stream.cuda_stream, microseconds)


def hold(stream, held=True):
    """Keeps a stream from running work until `hold(stream, held=False)`."""
    library.simulated_hold(stream.cuda_stream, int(held))


def on(tensor, function, *arguments):
    """Calls `function` of the library for a tensor, to queue work on the current stream of the tensor's device."""
    # The default streams of all devices have the same handle, which stands for the default stream of the current
    # device. So the device of `tensor` must be current.
    with torch.cuda.device(tensor.device):
        stream = torch.cuda.current_stream().cuda_stream
        function(stream, tensor.data_ptr(), tensor.nbytes, *arguments)


def hashed(tensor):
    """Returns the hash of a tensor in host memory."""
    return library.simulated_hash(tensor.data_ptr(), tensor.nbytes)


def pattern(name, step):
    """Returns the two bytes that fill a tensor of this name in this step.

    These two bytes, repeated, are fp32 numbers from 1 to 1.9. In a step of `LOUD`, the numbers are 16 times as large.
    """
    return 0x3F80 + zlib.crc32(f"{name} {step}".encode()) % 0x70 + (0x200 if step in LOUD else 0)


def filled(shape, element):
    """Returns an fp32 tensor in host memory that is filled with a pattern."""
    return torch.full(shape, element << 16 | element, dtype=torch.int32, device="cpu").view(torch.float32)


def begin_check(tensors, sums):
    """Replaces `kernels.begin_check`. Kernels compute nothing here, so `simulated_check` computes the sums."""
    _begin_check(tensors, sums)
    for tensor, row in zip(tensors, sums, strict=True):
        assert tensor.dtype == torch.float32
        on(tensor, library.simulated_check, row.data_ptr())


def stack(tensors):
    """Stands in for `torch.stack` and copies the tensors, because torch's kernel does nothing on a simulated device."""
    if tensors[0].device.type == "cpu":
        return _stack(tensors)
    out = torch.empty(len(tensors), *tensors[0].shape, dtype=tensors[0].dtype, device=tensors[0].device)
    for part, tensor in zip(out, tensors, strict=True):
        part.copy_(tensor)
    return out


_begin_check, kernels.begin_check = kernels.begin_check, begin_check
_stack, torch.stack = torch.stack, stack


class Check:
    """Records the bytes that streams find, and compares them with the expected bytes."""

    def __init__(self):
        self.step = 0
        # For each queued read: (number of the result, description, expected hash).
        self._reads = []
        self._patterns = {}
        # The hash of each weight, by name, after the last step of the training on the CPU.
        self.weights = {}
        self.wrong = []
        self.checked = 0
        # The name of the operation whose backward must fail, and a function that raises the error; or None.
        self.fails = None

    def use(self, x, weight, name, before):
        """Applies `Use` with `weight` to `x`; returns the output, and the name of the output's pattern.

        `before` is the name of the pattern of `x`.
        """
        return Use.apply(x, weight, name, before, self), f"output of {name}"

    def read(self, tensor, what, expected):
        """Queues a read of a tensor. The bytes that the stream then finds must have the hash `expected`."""
        number = len(self._reads)
        assert number < RESULTS_MAX
        on(tensor, library.simulated_read, number)
        self._reads.append((number, f"{what} in step {self.step}", expected))

    def read_pattern(self, tensor, what, name):
        """Queues a read of a tensor. The stream must then find the pattern `name` of the current step."""
        key = tensor.nbytes, pattern(name, self.step)
        if key not in self._patterns:
            self._patterns[key] = hashed(filled((tensor.nbytes // 4,), key[1]))
        self.read(tensor, what, self._patterns[key])

    def fill(self, tensor, name):
        """Queues a write that fills a tensor with the pattern `name` of the current step; returns the tensor."""
        on(tensor, library.simulated_fill, pattern(name, self.step))
        return tensor

    def equal(self, found, expected, what):
        """Compares two tensors in host memory."""
        self.checked += 1
        if not torch.equal(found, expected):
            self.wrong.append(f"{what} in step {self.step}")

    def number(self, found, expected, what):
        """Compares a number that the device computed with the expected number."""
        self.checked += 1
        if found != expected:
            self.wrong.append(f"{what} in step {self.step}: {found}, not {expected}")

    def compare(self):
        """Waits for the devices, and compares all queued reads with the expected hashes.

        Returns the number of checks, the checks that failed, and the faults.
        """
        for device in range(torch.cuda.device_count()):
            # On a device without a context, synchronize() would make one.
            if library.simulated_active(device):
                torch.cuda.synchronize(device)
        for number, what, expected in self._reads:
            self.checked += 1
            if library.simulated_result(number) != expected:
                self.wrong.append(what)
        self._reads.clear()
        return {"checked": self.checked, "wrong": self.wrong, "faults": faults()}


class Use(torch.autograd.Function):
    """An operation with one weight: reads the weight, and writes patterns as output and gradients."""

    @staticmethod
    def forward(ctx, x, weight, name, before, check):
        check.read(weight, f"{name}, forward", check.weights[name])
        ctx.save_for_backward(x, weight)
        # `before` names the pattern of `x`.
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
