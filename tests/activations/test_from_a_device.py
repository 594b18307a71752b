"""Tests activations that are offloaded from a GPU: how many bytes stay in pinned host memory, or go to storage."""

import gc
from functools import partial

import pytest
from support import checkpointed
from support.chains import smallest
from support.checkpointed import WIDTH, keeper

import memascend
from memascend.activations import activations
from memascend.activations import chunks as activation_memory
from memascend.device.device import Device
from memascend.plan import decision

pytestmark = pytest.mark.gpu

ROWS, BLOCKS = 64, 6
NBYTES = ROWS * WIDTH * 4
# The number of groups of chunks: one for the input of each block, one for the tensor that all blocks share, and a spare
# group.
GROUPS = BLOCKS + 2
STEPS = 2
# The bytes of a chunk: one page. Each tensor is divided into four pieces of this size.
CHUNK = 4096


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(decision, "ACTIVATION_CHUNKS", {CHUNK: 3})
    # One group has the chunks of one tensor.
    monkeypatch.setattr(decision, "ACTIVATION_GROUP", NBYTES // CHUNK)
    monkeypatch.setattr(decision, "ACTIVATION_GROUPS", GROUPS)


# A simulated device computes nothing. Results are the arbitrary contents of memory, and may be NaN.
ANYTHING = {"gradients": "ssd", "nonfinite": "commit"}
offloaded = partial(checkpointed.offloaded, blocks=BLOCKS, activations="host", **ANYTHING)


def rows(seed=1):
    return checkpointed.rows(ROWS, seed).detach().cuda().requires_grad_()


def comfortable(tmp_path):
    """Returns the budget that has room for all groups of chunks, and the bytes of one group."""
    _, optimizer = offloaded(tmp_path, existing="replace")
    with optimizer:
        plan = optimizer.plan
    _, optimizer = offloaded(tmp_path, existing="replace", activations="ssd")
    with optimizer:
        return plan.comfortable, (plan.host["activations"] - optimizer.plan.host["activations"]) // GROUPS


def written(tmp_path, **options):
    """Returns the bytes of activations that two steps write to storage."""
    model, optimizer = offloaded(tmp_path, existing="replace", **options)
    model.others = (rows(9).detach(),)
    checkpointed.trained(model, optimizer, map(rows, range(STEPS)))
    report = optimizer.report().to_dict()
    # Training has closed the optimizer, which freed the chunks. The report may therefore have no entry for activations.
    owners = report["host"]["owners"]
    assert owners.get("activations", {"bytes": 0})["bytes"] <= optimizer.plan.host["activations"]
    assert report["host"]["peak"] <= report["host"]["budget"]
    return report["written"].get("activations", 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_beyond_the_host_budget_go_to_storage(tmp_path, reentrant):
    most, group = comfortable(tmp_path)
    kept = (BLOCKS + 1) * NBYTES * STEPS
    # In each step, the backward may use the pieces in the last three chunks before the run has written these pieces.
    last = 3 * CHUNK * STEPS
    budgets = {
        None: (0, 0),
        smallest(offloaded, tmp_path, existing="replace"): (kept - last, kept),
        most - (GROUPS - 4) * group: (1, kept - last - 1),
        most + 99: (0, 0),
    }
    for budget, (at_least, at_most) in budgets.items():
        went = written(tmp_path, reentrant=reentrant, host_memory=budget)
        assert at_least <= went <= at_most, budget
    assert kept - last <= written(tmp_path, reentrant=reentrant, activations="ssd") <= kept


def test_plan_sizes_the_activation_groups_from_the_remaining_budget(tmp_path):
    most, group = comfortable(tmp_path)
    _, optimizer = offloaded(tmp_path, existing="replace")
    with optimizer:
        plan = optimizer.plan
        assert plan.activation_groups == GROUPS
        assert most == plan.budget == plan.comfortable == plan.host_peak
        assert "pinned chunks, allocated when needed; further activations go to storage" in str(plan)
    _, optimizer = offloaded(tmp_path, existing="replace", host_memory=plan.comfortable + 3 * group + 1)
    with optimizer:
        assert optimizer.plan.activation_groups == GROUPS + 3
        assert optimizer.plan.host_peak == plan.comfortable + 3 * group
        # The run allocates a group of chunks only when it needs the group, so the report counts no groups yet.
        held = optimizer.report().to_dict()["host"]["owners"]["activations"]["bytes"]
        assert held == optimizer.plan.host["activations"] - (GROUPS + 3) * group


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["host", "ssd"])
def test_offloaded_block_inputs_are_freed_on_the_device(tmp_path, where, reentrant):
    model, optimizer = offloaded(tmp_path, reentrant=reentrant, activations=where)
    with optimizer:
        x = rows()
        loss = model(x).square().mean()
        gc.collect()
        # The first input is alive because this test holds it. The last `_COMING` inputs may be alive because their
        # copies from the device may still be running. All other inputs must be freed.
        lives = [ref() is not None for ref in model.inputs]
        assert lives[1 : BLOCKS - activations._COMING] == [False] * (BLOCKS - activations._COMING - 1)
        loss.backward()


def test_dropped_graph_releases_its_activations_and_chunks(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        x = rows()
        model.others = (x,)
        loss = model(x).square().mean()
        # Restores the tensor that a backward would need first. The copy of this tensor may still be running when the
        # test drops the graph.
        keeper(model)._living[BLOCKS - 1]().tensor()
        del loss
        gc.collect()
        keeper(model)._reap()
        model(rows(2)).square().mean().backward()
        optimizer.step()
        keeper(model)._reap()
        assert not keeper(model)._living
        assert not keeper(model)._chunks._held


def test_input_changed_in_place_before_its_device_copy_ends_is_rejected(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        x = rows().detach()
        loss = model(x).square().mean()
        # The forward of later blocks waited until `x` was copied to host memory, so the backward uses the old values of
        # `x`.
        x.zero_()
        loss.backward()
        optimizer.zero_grad()
        model.blocks[1].up.register_forward_pre_hook(lambda *_: x.zero_())
        with pytest.raises(memascend.UsageError, match="changed in place after its copy from the device began"):
            model(x)


def test_backward_reports_a_device_failure_and_the_next_step_commits(tmp_path, monkeypatch):
    model, optimizer = offloaded(tmp_path)

    def fails(*_):
        raise RuntimeError("the device is lost")

    with optimizer:
        loss = model(rows()).square().mean()
        with monkeypatch.context() as patch:
            patch.setattr(Device, "bring", fails)
            with pytest.raises(RuntimeError, match="the device is lost"):
                loss.backward()
        del loss
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()
        assert optimizer.steps == 1


def test_activations_go_to_storage_when_chunk_allocation_fails(tmp_path, monkeypatch, caplog):
    """If an allocation of chunks fails, activations go to storage. The plan does not guarantee the chunks."""
    real = activation_memory.memory.ChunkRing

    def scarce(chunk_bytes, count, **options):
        if (chunk_bytes, count) == (CHUNK, decision.ACTIVATION_GROUP):
            raise memascend.MemoryLimitError("there is no more", needed=1, available=0)
        return real(chunk_bytes, count, **options)

    monkeypatch.setattr(activation_memory.memory, "ChunkRing", scarce)
    assert written(tmp_path) > BLOCKS * NBYTES * STEPS // 2
    assert "checkpointed activations that do not fit in host memory go to storage: there is no more" in caplog.text
