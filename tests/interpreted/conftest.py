"""These tests run where TRITON_INTERPRET was set before triton was imported; test_triton_interpreted.py starts them."""

import os

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]


@pytest.fixture(autouse=True)
def _round_like_a_gpu(monkeypatch):
    """The interpreter truncates fp32 to bf16; a GPU rounds to nearest even (test_triton_compiled.py looks for that)."""
    truncating = interpreter.InterpreterBuilder.cast_impl

    def rounding(builder, source, target):
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return truncating(builder, source, target)
        values = torch.from_numpy(source.data.copy()).bfloat16()
        return interpreter.TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounding)
