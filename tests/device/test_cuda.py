"""Tests on a CUDA device: streams, waits, registered memory, attention kernels, a lost context."""

import os
import sys

import pytest
import torch
from device.test_device import begun, losses, step
from device.test_parity import check
from parity.harness import Case
from parity.zoo_plain import next_token
from parity.zoo_transformers import LLAMA, loss

import memascend

pytestmark = pytest.mark.gpu


@pytest.fixture
def expected(tmp_path, device, data):
    model, optimizer = begun(tmp_path / "expected", device)
    with optimizer:
        return losses(model, optimizer, data)


def test_offload_without_device_uses_cuda(tmp_path, data, expected):
    model, optimizer = begun(tmp_path, None)
    with optimizer:
        assert model.head.weight.is_cuda
        assert losses(model, optimizer, data) == expected


def test_the_chunks_are_registered(tmp_path, device):
    _, optimizer = begun(tmp_path, device)
    with optimizer:
        units = optimizer._session.run.resources.units
        assert units._ring.region.pinned == units._windows.region.pinned == "cuda", units._ring.region.why_not
        assert units.unregistered is None


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_steps_on_new_streams_have_the_losses_of_one_stream(tmp_path, device, data, expected, gradients):
    """Each step runs on a new stream, and uses units that were loaded on the stream of the previous step.

    The run may rewrite a slot only after both streams have used the slot.
    """
    model, optimizer = begun(tmp_path, device, gradients=gradients, device_memory="1GiB")
    found = []
    with optimizer:
        last = torch.cuda.current_stream(device)
        for index in range(3):
            now = torch.cuda.Stream(device)
            now.wait_stream(last)
            with torch.cuda.stream(now):
                found.append(step(model, optimizer, data[index]))
            last = now
    assert found == expected


def test_forward_and_fused_backward_do_not_synchronise(tmp_path, device, data):
    """If the device has room for all units, a forward and a fused backward only queue work, and do not synchronise."""
    model, optimizer = begun(tmp_path, device, device_memory="1GiB")
    with optimizer:
        losses(model, optimizer, data)
        torch.cuda.set_sync_debug_mode("error")
        try:
            next_token(model, data[0]).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        optimizer.step()


def test_materialized_moves_parameters_to_the_host_and_back(tmp_path, device, data, expected):
    """materialized() moves the parameters to host memory, because the device may not have room for all of them.

    When the block ends, the parameters are on the device again.
    """
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        first = step(model, optimizer, data[0])
        with memascend.materialized(model):
            assert {p.device.type for p in model.parameters()} == {"cpu"}
        with memascend.materialized(model, modify=True), torch.no_grad():
            kept = model.head.weight.clone()
            model.head.weight.zero_()
        assert not bool(model.head.weight.any())
        with memascend.materialized(model, modify=True), torch.no_grad():
            model.head.weight.copy_(kept)
        assert model.head.weight.device == device
        assert first == expected[0]
        assert next_token(model, data[1]).item() == expected[1]


# Dynamo also reads `.grad` of activations, and torch warns about this.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_attention_has_the_same_bits_as_a_model_on_the_device(tmp_path, device, dtype, compiled):
    """An offloaded model must have the same bits as a model that stays on the device.

    Models in 16-bit dtypes use flash attention. If `compiled` is true, the blocks are compiled.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def made():
        model = Qwen2ForCausalLM(Qwen2Config(**{**LLAMA, "hidden_size": 256, "intermediate_size": 512}))
        if compiled:
            for layer in model.model.layers:
                layer.compile()
        return model

    def batches(generator):
        ids = torch.randint(0, 128, (2, 64), generator=generator)
        return [{"input_ids": ids, "labels": ids}]

    def loop(run):
        for index in range(3):
            run.optimizer.backward(run.loss(index))
            run.optimizer.step()
            run.optimizer.zero_grad()

    case = Case(name="attention", model=made, batches=batches, loss=loss, loop=loop, dtype=dtype)
    check(case, device, "fused", tmp_path)


def test_forward_in_a_graph_capture_is_rejected_and_the_run_continues(tmp_path, device, data, expected):
    """A forward during a capture must raise an error, and the run must then continue."""
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            # torch warns if a graph is empty, so the graph captures one operation.
            data[0].add(1)
            with pytest.raises(memascend.UsageError, match="CUDA graph"):
                next_token(model, data[0])
        assert losses(model, optimizer, data) == expected


def test_other_code_can_be_captured_while_units_are_prefetched(tmp_path, device, data, expected):
    """The staging thread queries its copies all the time.

    These queries must not end the capture of another thread.
    """
    model, optimizer = begun(tmp_path, device)
    x = torch.ones(1024, device=device)
    with optimizer:
        found = []
        for index in range(3):
            found.append(step(model, optimizer, data[index]))
            graph = torch.cuda.CUDAGraph()
            # During the capture, the library prefetches the first units of the next step.
            with torch.cuda.graph(graph):
                y = x
                for _ in range(200):
                    y = y * 1.0 + 1.0
            graph.replay()
            assert bool((y == 201).all())
    assert found == expected


LOST = """
import sys
import torch
sys.path.insert(0, sys.argv[2])
from device.test_device import begun, losses, step
from parity.zoo_plain import tokens
from pathlib import Path

data = [part.cuda() for part in tokens(torch.Generator().manual_seed(2))]
model, optimizer = begun(Path(sys.argv[1]), "cuda")
losses(model, optimizer, data)
# This index fails an assertion on the device. From here on, the CUDA context is lost.
torch.zeros(4, device="cuda")[torch.tensor([99], device="cuda")]
try:
    step(model, optimizer, data[0])
except RuntimeError as error:
    print("said:", type(error).__name__, error)
else:
    raise SystemExit("a lost context went unnoticed")
optimizer.close()
"""


def test_run_resumes_after_a_lost_cuda_context(tmp_path, device, python, data, expected):
    tests = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    output = python(LOST, tmp_path, tests, env={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert "said:" in output
    model, optimizer = begun(tmp_path, device, existing="resume")
    with optimizer:
        assert optimizer.steps == len(expected)
        assert step(model, optimizer, data[3]) > 0


def test_offload_rejects_an_absent_cuda_device(tmp_path):
    with pytest.raises(memascend.ConfigError, match="torch sees"):
        begun(tmp_path, f"cuda:{torch.cuda.device_count()}")


def test_model_larger_than_the_device_budget_stays_within_the_budget(tmp_path, device):
    """The weights have 200 MB, which is more than the device budget.

    torch must allocate only the budget, the activations, and the workspace of matrix products.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(24))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    before = torch.cuda.memory_allocated(device)
    model, optimizer = memascend.offload(model, optimizer, storage=tmp_path, device=device, gradients="fused")
    with optimizer:
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(3):
            model(torch.ones(4, 2048, dtype=torch.bfloat16, device=device)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        held = optimizer.report().to_dict()["device"]
        assert held["peak"] <= held["budget"] < 24 * (8 << 20) // 4
        assert torch.cuda.max_memory_allocated(device) - before <= held["budget"] + (80 << 20)
