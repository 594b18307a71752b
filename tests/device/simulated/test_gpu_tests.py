"""Runs users' habits, benchmarks, and GPU tests that compare no computed values, on the simulated CUDA."""

import json
import os
import subprocess
import sys

import pytest
from device.simulated import build
from device.simulated.test_order import LONG, fine
from support.grids import usual

pytestmark = [pytest.mark.simulated, pytest.mark.timeout(300)]
# For each file: how many tests must pass, and the names of the tests to run (an empty list runs the whole file). These
# tests look only at memory, registration, waits, launches and copies. Other GPU tests compare values that kernels
# compute, and the simulated device computes nothing.
WITHOUT_NUMBERS = {
    "device/test_staging.py": (13, []),
    "device/test_device.py": (
        15,
        [
            "test_parameters_report_the_device_and_cannot_be_moved",
            "test_offload_without_device_memory_fails_and_changes_nothing",
            "test_host_memory_does_not_grow_with_the_number_of_blocks",
            "test_a_registration_that_was_refused_is_reported",
            "test_failed_device_call_raises_and_the_run_resumes",
            "test_run_rejects_calls_during_a_graph_capture_and_then_continues",
            "test_code_compiled_with_cuda_graphs_is_rejected",
        ],
    ),
    "activations/test_from_a_device.py": (11, []),
    "session/test_added_room.py": (3, []),
}
LATER = {
    "device/test_cuda.py": (
        3,
        [
            "test_the_chunks_are_registered",
            "test_forward_and_fused_backward_do_not_synchronise",
            "test_offload_rejects_an_absent_cuda_device",
        ],
    ),
    "kernels/test_kernels_gpu.py": (
        2,
        ["test_cuda_route_is_triton", "test_check_and_unscale_does_not_synchronize_the_device"],
    ),
    "memory/test_memory_cuda.py": (1, ["test_a_real_device_copies_from_a_region"]),
}


@pytest.mark.parametrize("path", [*WITHOUT_NUMBERS, *(pytest.param(path, marks=LONG) for path in LATER)])
def test_gpu_tests_that_compare_no_values_pass(simulated, path):
    count, names = {**WITHOUT_NUMBERS, **LATER}[path]
    whole = str(build.ROOT / "tests" / path)
    chosen = [f"{whole}::{name}" for name in names] or [whole]
    assert simulated("gpu_tests.run", chosen=chosen, env={"MEMASCEND_GPU": "1"}, timeout=280) == count


@LONG
def test_kernel_benchmark_completes_all_checks(simulated):  # noqa: ARG001 - the fixture builds the library
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels_gpu", "--mebibytes", "1"],
        env=build.environment(), cwd=build.ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    # The benchmark compares three dtypes with three peers each, but torch does not have one of these peers for bf16.
    assert done.stdout.count("check ") == 8


# The simulated device computes nothing, so this start-up code makes `math.isfinite` accept every number. It also
# disables cuDNN's attention kernels, and disables TRL, because TRL's loss takes the size of a tensor from values on the
# device.
WITHOUT_THEM = """
import math, sys, torch
math.isfinite = lambda _: True
torch.backends.cuda.enable_cudnn_sdp(False)
sys.modules["trl"] = None
"""


@LONG
@pytest.mark.timeout(600)
def test_headline_benchmark_completes_steps_of_memascend_and_torch(simulated, tmp_path):  # noqa: ARG001 - the fixture builds the library
    """On the simulated device, the benchmark must complete steps with memascend and with torch."""
    shape = {
        "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 2048, "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THEM)
    environment = build.environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    words = ["--model", str(tmp_path), "--length", "32", "--gpu", "1,24,25", "--card", "2GiB", "--seconds", "550"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cuda", "--headline", "--storage", str(tmp_path), "--write", str(tmp_path),
         "--cells", "torch", "by layer, clipped", "other, not clipped", *words],
        env=environment, cwd=build.ROOT, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "headline.json").read_text())["cells"]
    ours = {name: cell for name, cell in cells.items() if cell["system"] == "memascend"}
    assert len(ours) == 2
    for name, cell in [*ours.items(), ("torch", next(iter(cells.values())))]:
        assert "error" not in cell, (name, cell)
        assert cell["steps"] >= 1
        assert 0 < cell["device_bytes"] < 1 << 30
    assert not ours["by layer, clipped"]["in_turn_since"]


@LONG
@pytest.mark.parametrize(("room", "fits"), [(1.15, True), (1.0, False)])
def test_trainer_steps_by_layer_only_if_activations_fit_on_the_device(simulated, room, fits):
    """A step by layer must take as much memory as predicted.

    If `fits` is false, the device memory is too small for a step by layer. Then micro-batches must run one after the
    other.
    """
    found = simulated("habits.trainer", room=room, env={"CUDA_VISIBLE_DEVICES": "0"}, timeout=200)
    assert found["steps"] == 4
    assert not found["faults"]
    assert found["kept"] > 5e6
    assert len(found["in turn"]) == (0 if fits else 1)
    if fits:
        assert 0.85 * found["needed"] < found["peak"] < 1.02 * found["needed"]
    else:
        assert found["peak"] < found["needed"] - 2 * found["kept"]


# --- users' habits work, or raise an error with advice -------------------------------------------


@pytest.mark.parametrize(
    "habit", usual(["on_the_device_already", "cache_emptied", "under_a_default_device"], "on_the_device_already")
)
def test_training_on_the_first_device_makes_no_context_on_the_second(simulated, habit):
    found = simulated(f"habits.{habit}")
    fine(found)
    assert found["on"] == "cuda:0"
    assert found["contexts"] == [1, 0]


def test_training_on_the_second_device_makes_no_context_on_the_first(simulated):
    """The first device must get no context, because a context takes memory."""
    found = simulated("habits.second_device")
    fine(found)
    assert found["on"] == "cuda:1"
    assert found["contexts"] == [0, 1]


@pytest.mark.parametrize("ours", [False, True])
def test_copy_to_the_second_device_makes_no_context_on_the_first(simulated, ours):
    assert simulated("habits.copies_to_the_second_device", ours=ours) == {"same": True, "contexts": [0, 1]}


def test_offload_uses_the_device_that_cuda_visible_devices_selects(simulated):
    found = simulated("habits.checked", env={"CUDA_VISIBLE_DEVICES": "1"})
    fine(found)
    assert (found["on"], found["name"]) == ("cuda:0", "Simulated GPU 1")


def test_offload_without_a_visible_device_suggests_the_cpu(simulated):
    output = simulated("habits.refused_device", env={"CUDA_VISIBLE_DEVICES": ""})
    assert "there is no CUDA device" in output
    assert "device='cpu'" in output


def test_training_under_autocast_has_no_faults(simulated):
    assert simulated("habits.autocast") == {"steps": 2, "faults": []}


@pytest.mark.parametrize(
    ("habit", "how"),
    [
        ("dispatched", {"where": "cuda"}),
        pytest.param("dispatched", {"where": "auto"}, marks=LONG),
        ("prepared", {"before": False}),
        pytest.param("prepared", {"before": True}, marks=LONG),
    ],
)
def test_model_placed_by_accelerate_trains_without_faults(simulated, habit, how):
    pytest.importorskip("accelerate")
    assert simulated(f"habits.{habit}", **how) == {"steps": 2, "faults": []}


@pytest.mark.parametrize("where", ["several", "offloaded"])
def test_offload_rejects_a_device_map_that_splits_the_model(simulated, where):
    """offload() must raise an error before it changes anything.

    Otherwise the weights that accelerate keeps outside this device would be lost.
    """
    pytest.importorskip("accelerate")
    found = simulated("habits.dispatched", where=where)
    assert found["refused"] == "ConfigError"
    assert "without device_map=" in found["why"]
