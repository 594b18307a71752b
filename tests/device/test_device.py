"""Tests a model on a device: the device of its tensors, failures of the device, and rejected CUDA graphs."""

import contextlib

import pytest
import torch
from parity.zoo_plain import Stack, next_token
from support import chains, checkpointed
from support.bits import same_states
from support.chains import chain, offloaded, values
from support.grids import covered

import memascend
from memascend.device.device import Device, refuse_graphs
from memascend.device.unit_memory import DeviceUnits


def begun(folder, device, **options):
    torch.manual_seed(1)
    folder.mkdir(exist_ok=True)
    # A simulated device computes nothing, so gradients may not be finite. With `nonfinite="commit"`, step() accepts
    # gradients that are not finite.
    options = {"gradients": "fused", "device": device, "nonfinite": "commit", **options}
    return offloaded(folder / "run.store", Stack(), **options)


def step(model, optimizer, batch):
    return chains.step(model, optimizer, batch, next_token).item()


def losses(model, optimizer, data, count=3):
    return [step(model, optimizer, data[index]) for index in range(count)]


def test_parameters_report_the_device_and_cannot_be_moved(tmp_path, device, data):
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        parameter = model.head.weight
        assert parameter.device == device
        assert parameter.get_device() == device.index
        assert parameter.is_cpu is False
        # A Trainer calls `model.to(device)`. This call must change nothing.
        assert model.to(device) is model
        assert parameter.to(device) is parameter
        with pytest.raises(memascend.UsageError, match="cannot be moved"):
            model.cpu()
        with pytest.raises(memascend.UsageError, match="cannot be moved"):
            parameter.cpu()
        next_token(model, data[0]).backward()
        assert parameter.grad.device == device
        assert (parameter + 1).device == device
        assert "device memory" in str(optimizer.report())
        assert "Device memory" in str(optimizer.plan)
        held = optimizer.report().to_dict()["device"]
        assert set(held["owners"]) == {"units", "gradients"}
        assert held["peak"] <= held["budget"] == optimizer.plan.device_budget
        assert held["torch"]["peak"] >= held["owners"]["units"]["bytes"]


def test_host_memory_does_not_grow_with_the_number_of_blocks(tmp_path, device):
    """Of all parts of the host memory, only the index grows with the number of blocks.

    The size of the queue depends on the largest parameter, which has the same size in both models.
    """
    plans = []
    for blocks in (4, 16):
        model = chain(blocks, bias=True)
        _, optimizer = offloaded(tmp_path / str(blocks), model, device=device, gradients="fused")
        with optimizer:
            plans.append({name: nbytes for name, nbytes in optimizer.plan.host.items() if name != "index"})
    assert plans[0] == plans[1]


def test_state_dicts_are_on_the_host(tmp_path, device, data):
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        losses(model, optimizer, data)
        state = model.state_dict()
        assert {name: value.device.type for name, value in state.items()} == dict.fromkeys(state, "cpu")
        before = optimizer.state_of(model.head.weight)
        # Loading equal values leaves the fp32 master weights unchanged. Loading other values changes the weights, also
        # if these values are on the device.
        model.load_state_dict(state)
        assert all(torch.equal(value, before[name]) for name, value in optimizer.state_of(model.head.weight).items())
        model.load_state_dict({**state, "head.weight": torch.ones_like(state["head.weight"]).to(device)})
        assert bool((model.state_dict()["head.weight"] == 1).all())
        assert bool((model.head.weight == 1).all())


def test_run_from_a_saved_checkpoint_has_the_same_losses(tmp_path, device, data):
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        losses(model, optimizer, data)
        optimizer.save(tmp_path / "saved")
        expected = losses(model, optimizer, data)
    model, optimizer = begun(tmp_path, device, existing="replace", checkpoint=tmp_path / "saved")
    with optimizer:
        assert losses(model, optimizer, data) == expected


@pytest.mark.parametrize("reentrant", [False, True])
def test_results_are_equal_with_activations_on_device_host_or_ssd(tmp_path, device, reentrant):
    found = []
    for where in ("device", "host", "ssd"):
        options = {"device": device, "activations": where, "gradients": "ssd", "existing": "replace"}
        model, optimizer = checkpointed.offloaded(tmp_path, blocks=4, reentrant=reentrant, **options)
        batches = [checkpointed.rows(64, seed).detach().to(device).requires_grad_() for seed in range(3)]
        found.append(checkpointed.trained(model, optimizer, batches)[0])
        held = optimizer.report().to_dict()
        assert held["host"]["peak"] <= held["host"]["budget"]
    assert found[0] == found[1] == found[2]


def test_offload_without_device_memory_fails_and_changes_nothing(tmp_path, device):
    """offload() raises an error that names device_memory, and changes nothing."""
    torch.manual_seed(1)
    # torch's allocator allocates blocks of 2 MiB for requests below 1 MiB, and blocks of 20 MiB for requests below 10
    # MiB. A small model could fit into a block that torch had allocated before the limit was set, so each layer has 16
    # MiB.
    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048, bias=False) for _ in range(2)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-9, device)
    try:
        with pytest.raises(memascend.MemascendError, match="pass a smaller device_memory=") as refused:
            memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=tmp_path, device=device)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    assert isinstance(refused.value, MemoryError)
    assert list(tmp_path.iterdir()) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("why", [None, "not pinned for CUDA: cuMemHostRegister failed; copies are slower"])
def test_a_registration_that_was_refused_is_reported(tmp_path, device, monkeypatch, why):
    monkeypatch.setattr(DeviceUnits, "unregistered", why)
    _, optimizer = begun(tmp_path, device)
    with optimizer:
        report = optimizer.report()
        assert report.device_copies == why
        assert ("cuMemHostRegister failed" in str(report)) == (why is not None)


@pytest.mark.parametrize("way", ["bring", "take", "mark"])
def test_failed_device_call_raises_and_the_run_resumes(tmp_path, device, data, way, monkeypatch):
    """If a call to the device fails, the step must raise a DeviceError. The run then resumes from its last commit."""
    model, optimizer = begun(tmp_path, device)
    there = optimizer._session.run.resources.units.device
    losses(model, optimizer, data)
    expected = values(model)

    def fail(*_):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(there, way, fail)
    with pytest.raises(memascend.DeviceError, match=r"illegal memory access.*existing=\"resume\""):
        step(model, optimizer, data[0])
    optimizer.close()
    monkeypatch.undo()
    again, optimizer = begun(tmp_path, device, existing="resume")
    with optimizer:
        assert optimizer.steps == 3
        assert same_states(values(again), expected)


# --- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_run_rejects_calls_during_a_graph_capture_and_then_continues(tmp_path, device, data, gradients, monkeypatch):
    """During a capture, a forward, a backward, step() and a read of a weight must raise an error.

    After the capture, the same step must work.
    """
    model, optimizer = begun(tmp_path, device, gradients=gradients)

    def captured(call):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(memascend.UsageError, match="CUDA graph"):
                call()

    with optimizer:
        captured(lambda: model.head.weight + 1)
        for index in range(3):
            captured(lambda batch=data[index]: next_token(model, batch))
            loss = next_token(model, data[index])
            if index == 1:
                captured(loss.backward)
                optimizer.zero_grad()
                loss = next_token(model, data[index])
            loss.backward()
            captured(optimizer.step)
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.steps == 3


def test_require_no_capture_raises_while_the_stream_is_captured(monkeypatch):
    device = object.__new__(Device)
    for captures in (False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda captures=captures: captures)
        with pytest.raises(memascend.UsageError, match="CUDA graph") if captures else contextlib.nullcontext():
            device.require_no_capture()


def of_a_block(model, **how):
    model.blocks[1].compile(**how)
    return model


def of_a_function(model, **how):
    def function(batch):
        return model(batch)

    return torch.compile(function, **how)


@pytest.mark.parametrize(
    ("of", "how"),
    covered(
        [torch.compile, of_a_block, of_a_function],
        [
            {"mode": "reduce-overhead"},
            {"mode": "max-autotune"},
            {"options": {"triton.cudagraphs": True}},
            {"backend": "cudagraphs"},
        ],
    ),
)
def test_code_compiled_with_cuda_graphs_is_rejected(tmp_path, device, data, of, how):
    torch._dynamo.reset()
    model, optimizer = begun(tmp_path, device)
    with optimizer:
        losses(model, optimizer, data, 1)
        compiled = of(model, **how)
        for _ in range(2):
            with pytest.raises(memascend.UsageError, match="max-autotune-no-cudagraphs"):
                next_token(compiled, data[0])
        for module in model.modules():
            module._compiled_call_impl = None
        step(model, optimizer, data[1])
        assert optimizer.steps == 2


@pytest.mark.parametrize("how", [{}, {"mode": "max-autotune-no-cudagraphs"}, {"backend": "eager"}])
def test_code_compiled_without_cuda_graphs_is_accepted(how):
    @torch._dynamo.disable
    def gate(*_):
        refuse_graphs()
        seen.append("a gate")

    seen = []
    module = torch.nn.Identity()
    module.register_forward_pre_hook(gate)
    torch.compile(module, **how)(torch.zeros(2))
    assert seen == ["a gate"]
