"""Tests that Triton kernels compile to exact instructions for each architecture and dtype.

Also runs the tests in interpreted/.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from support.grids import covered
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from memascend.kernels import adamw_jit, check_jit

# Compute capabilities of Ampere, of Hopper, and of the two kinds of Blackwell.
TARGETS = [80, 90, 100, 120]
# Instructions that round differently from the CPU, or flush denormals.
INEXACT = re.compile(r"\bdiv\.(?:full|approx)\S*|\bsqrt\.approx\S*|\brsqrt\S*|\brcp\.approx\S*|\S+\.ftz\S*")
FUSED = re.compile(r"\bfma\.rn\S*\s")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SCALARS = ["grad_factor", "decay", "l2", "first_weight", "beta2", "one_minus_beta2", "bias2_root", "eps", "step_size"]


def compiled(kernel, signature, constants, capability, *, aligned=(), warps=4):
    """Compiles one kernel, and requires that it has no inexact instruction; returns the binary.

    `aligned` names the arguments that are multiples of 16.
    """
    names = kernel.arg_names
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    full = {name: "constexpr" if name in constants else signature[name] for name in names}
    source = ASTSource(fn=kernel, signature=full, constexprs=constants, attrs=attributes)
    # memascend launches its kernels with these options. test_every_launch_disables_fp_fusion checks that each launch
    # sets the second option.
    options = {"num_warps": warps, "enable_fp_fusion": False}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = binary.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert not (found := INEXACT.findall(ptx)), found
    return binary


def offsets_are_64_bit(binary):
    """True if every addition to a block of pointers adds 64-bit offsets."""
    tensors = re.findall(r"tt\.addptr .*: tensor<([\dx]+)x!tt\.ptr<\w+>>, tensor<[\dx]+x(i\d+)>", binary.asm["ttir"])
    assert tensors
    return all(kind == "i64" for _, kind in tensors)


@pytest.mark.parametrize(
    ("dtype", "many", "unscale", "capability"), covered(DTYPES, [False, True], [False, True], TARGETS)
)
def test_check_kernel_compiles_to_exact_integer_sums(dtype, many, unscale, capability):
    binary = compiled(
        check_jit.check_kernel,
        {"data": f"*{dtype}", "numel": "i64", "table": "*i64", "count": "i32", "sums": "*i64", "factor": "fp32"},
        {"MANY": many, "ALIGNED": True, "UNSCALE": unscale, **check_jit.constants(DTYPES[dtype])},
        capability, aligned=["data", "table", "sums", "numel"], warps=check_jit.WARPS,
    )  # fmt: skip
    assert binary.asm["cubin"]
    assert offsets_are_64_bit(binary)
    assert not (unscale and dtype == "bf16") or "cvt.rn.bf16" in binary.asm["ptx"]
    assert not FUSED.search(binary.asm["ptx"])
    # Each lane loads at least 16 bytes at once, even if the address of the data comes from `table`.
    assert re.search(r"ld\.global[.\w:]*\.v[48]\.b32", binary.asm["ptx"])
    # The programs of the kernel add 64-bit integers to the GPU's memory with atomic operations. They add integers
    # because only integer sums are exact in any order.
    added = re.findall(r"\b(?:atom|red)\.[.\w]+", binary.asm["ptx"])
    assert added
    assert all(".add.u64" in one and ".gpu." in one for one in added), added
    assert ".f64" not in binary.asm["ptx"]
    # The code has one load for whole tiles and one load for partial tiles, so each tile is read once. Only a tile with
    # non-finite values, or with values that are too small for its grid, is read again, row by row.
    columns = 512 // DTYPES[dtype].itemsize
    assert len(re.findall(rf"tt\.load .*tensor<8x{columns}x", binary.asm["ttir"])) == 2
    assert len(re.findall(rf"tt\.load .*tensor<1x{columns}x", binary.asm["ttir"])) == 2
    # The kernel uses no shared memory, so no warp waits for another warp. It uses no local memory, so no register is
    # spilled.
    assert binary.metadata.shared == 0
    assert ".local" not in binary.asm["ptx"]


@pytest.mark.parametrize("capability", TARGETS)
def test_fold_kernel_compiles_without_fused_operations(capability):
    binary = compiled(
        check_jit.fold_kernel, {"sums": "*i64", "squares_out": "*fp64", "found_out": "*u8"}, {}, capability, warps=1
    )
    assert binary.asm["cubin"]
    assert "cvt.rn.f64.s64" in binary.asm["ptx"]
    assert not FUSED.search(binary.asm["ptx"])


@pytest.mark.parametrize(
    ("dtype", "out", "l2", "capability"), covered(DTYPES, [None, "bf16", "fp16"], [False, True], TARGETS)
)
def test_adamw_kernel_compiles_with_only_its_own_fused_multiply_adds(dtype, out, l2, capability):
    pointers = dict.fromkeys(("master", "exp_avg", "exp_avg_sq"), "*fp32")
    halves = {"grad": f"*{dtype}", "out16": f"*{out or 'fp32'}"}
    binary = compiled(
        adamw_jit.adamw_kernel,
        pointers | halves | {"numel": "i64"} | dict.fromkeys(SCALARS, "fp32"),
        {"L2": l2, "FROM_GRADIENT": l2, "HAS_OUT": out is not None, "BLOCK": adamw_jit.BLOCK},
        capability, aligned=[*pointers, "grad", "out16", "numel"],
    )  # fmt: skip
    assert binary.asm["cubin"]
    assert offsets_are_64_bit(binary)
    ptx = binary.asm["ptx"]
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx
    assert out is None or f"cvt.rn.{out.replace('fp', 'f')}" in ptx
    # The formula has two fused multiply-adds, and L2 weight decay adds a third. The compiler must not fuse any other
    # operations.
    lanes = adamw_jit.BLOCK // 128
    # An `x2` instruction of Blackwell computes two elements.
    fused = sum(2 if "x2" in found else 1 for found in FUSED.findall(ptx))
    assert fused == (3 if l2 else 2) * lanes


@pytest.mark.parametrize("module", [adamw_jit, check_jit], ids=lambda module: module.__name__)
def test_every_launch_disables_fp_fusion(module):
    """The default of `enable_fp_fusion` depends on Triton's version and the environment, so each launch must set it."""
    launches = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    assert launches
    for launch in launches:
        decided = {word.arg: getattr(word.value, "value", None) for word in launch.keywords}
        assert decided.get("enable_fp_fusion") is False, ast.unparse(launch)


# The interpreter computes one tile after the other with numpy, so the slow tests take a minute. On a slow and busy
# processor, they take three minutes.
@pytest.mark.timeout(820)
@pytest.mark.parametrize(("marks", "least"), [("not slow", 95), pytest.param("slow", 50, marks=pytest.mark.slow)])
def test_the_interpreted_kernels_agree_with_their_references(marks, least):
    folder = str(Path(__file__).parent / "interpreted")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, folder]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"(\d+) passed", done.stdout)
    assert counted, done.stdout
    # pytest also ends with status 0 if it collects only a few tests, or skips tests. So check these numbers.
    assert int(counted.group(1)) > least
    assert not re.search(r"\d+ skipped", done.stdout)
