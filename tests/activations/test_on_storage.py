"""Tests checkpointed activations on storage: freed memory, restored bits, reused disk space, storage failures."""

import errno
import gc
import re
from functools import partial

import pytest
import torch
from support import chains, checkpointed
from support.bits import same_states
from support.checkpointed import WIDTH, Block, keeper, require_two_backwards
from torch import nn
from torch.utils.checkpoint import checkpoint

import memascend
from memascend.activations import chunks as scratch
from memascend.plan import decision

ROWS, BLOCKS = 128, 10


@pytest.fixture(params=[{4096: 3}, {1 << 20: 8}], ids=["small", "usual"])
def chunks(request, monkeypatch):
    monkeypatch.setattr(decision, "ACTIVATION_CHUNKS", request.param)


offloaded = partial(checkpointed.offloaded, blocks=BLOCKS, activations="ssd", gradients="ram")
rows = partial(checkpointed.rows, ROWS)


def require_same_as_on_the_device(tmp_path, **options):
    found, wanted = (
        checkpointed.trained(*offloaded(tmp_path, existing="replace", **each), map(rows, range(3)))
        for each in (options, {**options, "activations": "device"})
    )
    assert found[0] == wanted[0]
    assert same_states(found[1], wanted[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.usefixtures("chunks")
def test_activations_on_storage_give_the_same_bits_as_on_the_device(tmp_path, reentrant):
    require_same_as_on_the_device(tmp_path, reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_block_inputs_on_storage_are_freed_in_memory(tmp_path, reentrant):
    model, optimizer = offloaded(tmp_path, reentrant=reentrant)
    with optimizer:
        x = rows()
        loss = model(x).square().mean()
        gc.collect()
        # Only the first input is still in memory, because this test holds it.
        assert [ref() is not None for ref in model.inputs] == [True] + [False] * (BLOCKS - 1)
        loss.backward()
        report = optimizer.report().to_dict()
        assert report["written"]["activations"] == BLOCKS * x.nbytes
        assert report["host"]["owners"]["activations"]["bytes"] <= optimizer.plan.host["activations"]


@pytest.mark.usefixtures("chunks")
def test_later_steps_reuse_the_space_of_the_scratch_file(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        room = keeper(model)._chunks._room
        chains.train(model, optimizer, map(rows, range(4)), checkpointed.mean_square)
        kept = keeper(model)
        kept._reap()
        assert len(room._free) + kept._chunks.occupied == room.file_bytes // room._place_bytes
        assert len(room._volumes) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run.store"]


def test_tensor_shared_by_all_blocks_is_written_once_until_it_changes(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        shared = torch.randn(ROWS, WIDTH)
        model.others = (shared, shared)
        model(rows()).square().mean().backward()
        assert keeper(model).counters["written"] == (BLOCKS + 1) * shared.nbytes
        optimizer.step()
        optimizer.zero_grad()
        # If a tensor was changed in place, the tensor must be saved again.
        loss = model(rows()).square().mean()
        shared.add_(1)
        loss = loss + model(rows()).square().mean()
        loss.backward()
        assert keeper(model).counters["written"] == (3 * BLOCKS + 3) * shared.nbytes


def test_in_place_change_and_second_backward_use_the_saved_values(tmp_path):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        x = rows().detach()
        loss = model(x).square().mean()
        x.zero_()
        loss.backward()
        changed = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.zero_grad()
        model(rows().detach()).square().mean().backward()
        assert all(map(torch.equal, changed, [parameter.grad for parameter in model.parameters()]))
        require_two_backwards(model, rows())


class Tail(nn.Module):
    """A model that checkpoints the block `first` but not the block `last`."""

    def __init__(self):
        super().__init__()
        self.first, self.last = Block(WIDTH), Block(WIDTH)

    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant=False)).exp()


def test_only_inputs_of_checkpointed_blocks_are_written(tmp_path):
    model, optimizer = chains.offloaded(tmp_path / "s", Tail(), activations="ssd", units=["first", "last"])
    with optimizer:
        x = rows()
        model(x).sum().backward()
        assert keeper(model).counters["written"] == x.nbytes


def test_backward_names_the_damaged_bytes_and_the_next_step_commits(tmp_path, monkeypatch):
    monkeypatch.setattr(decision, "ACTIVATION_CHUNKS", {4096: 3})
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        loss = model(rows()).square().mean()
        kept = keeper(model)
        piece = next(iter(kept._living.values()))().pieces[0]
        assert piece.chunk is None
        piece.place.volume.write(torch.zeros(4096, dtype=torch.uint8), piece.place.offset).wait()
        with pytest.raises(memascend.CorruptionError, match=f"4096 bytes at {piece.place.offset} of") as raised:
            loss.backward()
        assert raised.value.offset == piece.place.offset
        optimizer.zero_grad()
        del loss
        model(rows()).square().mean().backward()
        optimizer.step()
        assert optimizer.steps == 1


def test_full_disk_error_proposes_scratch_and_the_next_step_commits(tmp_path, monkeypatch):
    model, optimizer = offloaded(tmp_path)
    with optimizer:
        with monkeypatch.context() as patch:
            patch.setattr(scratch, "_FIRST_BYTES", 1 << 60)
            with pytest.raises(memascend.StorageError, match=re.escape("give offload(scratch=)")) as raised:
                model(rows())
        assert raised.value.errno in (errno.ENOSPC, errno.EFBIG)
        optimizer.zero_grad()
        model(rows()).square().mean().backward()
        optimizer.step()
        assert optimizer.steps == 1


def test_backward_after_close_is_rejected(tmp_path):
    model, optimizer = offloaded(tmp_path)
    loss = model(rows()).square().mean()
    optimizer.close()
    with pytest.raises(memascend.UsageError):
        loss.backward()


def test_activations_are_written_to_the_scratch_folder(tmp_path, monkeypatch):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    opened = []
    real = scratch.nvme.open
    monkeypatch.setattr(scratch.nvme, "open", lambda paths, **options: opened.append(paths) or real(paths, **options))
    model, optimizer = offloaded(tmp_path, scratch=folder)
    with optimizer:
        model(rows())
        assert [[path.parent for path in paths] for paths in opened] == [[folder]]


def test_host_activations_on_the_cpu_are_not_copied(tmp_path):
    """On the CPU, activations="host" copies no activation and allocates no chunks."""
    require_same_as_on_the_device(tmp_path, activations="host")
    model, optimizer = offloaded(tmp_path, existing="replace", activations="host")
    with optimizer:
        assert keeper(model) is None
        assert optimizer.plan.host["activations"] == 0
