"""Collects the tests of this folder only if TRITON_INTERPRET=1. test_triton.py starts pytest with this setting."""

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support import blockwise
from triton.runtime import interpreter

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


def pytest_configure(config):
    # The interpreter of the oldest supported triton causes this warning on every load and store.
    config.addinivalue_line("filterwarnings", "ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@pytest.fixture(autouse=True)
def _round_like_a_gpu(monkeypatch):
    """Makes the interpreter convert dtypes as a GPU does: it rounds to nearest even, and keeps the denormals of bf16.

    Without this fixture, the interpreter truncates fp32 to bf16 and loses denormals. test_triton.py checks the
    instruction that the compiler generates for a GPU. Before triton 3.9, this fixture also replaces the interpreter's
    fma.
    """
    inexact = interpreter.InterpreterBuilder.cast_impl

    def rounding(builder, source, target):
        pair = source.dtype.scalar, target.scalar
        if pair == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(source.data.copy()).bfloat16()
            return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)
        if pair == (tl.bfloat16, tl.float32):
            values = torch.from_numpy(source.data.copy()).view(torch.bfloat16).float()
            return interpreter.TensorHandle(values.numpy(), tl.float32)
        return inexact(builder, source, target)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", _fma_that_rounds_once)


def _fma_that_rounds_once(_builder, x, y, z):
    """Computes `x * y + z` and rounds the result once, as GPUs do.

    Interpreters of triton before 3.9 round the product and then the sum.
    """
    total = blockwise.fma(*(torch.from_numpy(np.array(one.data)) for one in (x, y, z)))
    return interpreter.TensorHandle(total.numpy(), z.dtype.scalar)
