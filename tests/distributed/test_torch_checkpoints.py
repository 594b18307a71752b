"""Tests what torch.distributed.checkpoint reads and writes: the files of save(), `weights=`, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from support import rank_models
from support.bits import same_bits
from support.rank_models import Odd, shard, step, whole
from support.ranks import on_ranks, ranks
from torch import distributed, nn
from torch.distributed import checkpoint as torch_checkpoints
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

import memascend


class Uneven(Odd):
    """Odd with fewer rows than ranks, nothing frozen, a buffer and a scalar."""

    def __init__(self):
        super().__init__(narrow=1)
        self.frozen = nn.Identity()
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale[0]

    def __iter__(self):
        return iter((self.narrow,))


def model(device="cpu"):
    with torch.device(device):
        return rank_models.model(torch.float32, Uneven)


def sgd(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)


def tensors(trained):
    """All that a state dict has, whole."""
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
        for name, one in trained.state_dict().items()
    }


def begun_from(folder, store, made):
    """All values of a run that begins with these weights."""
    trained, optimizer = memascend.offload(made, sgd(made), storage=store, weights=folder)
    found = tensors(trained)
    optimizer.close()
    return found


def write_and_read(folder):
    """What torch writes of a divided model: parts, and one whole file, which the ranks begin from."""
    made = shard(model())
    state = {name: one for name, one in made.state_dict().items() if name != "head.weight"}
    parts = HuggingFaceStorageWriter(f"{folder}/parts", save_distributed=True)
    torch_checkpoints.save(state, storage_writer=parts)
    # What torch consolidates has neither integers nor, right, tensors without dimensions.
    del state["seen"]
    joined = HuggingFaceStorageWriter(f"{folder}/whole", save_distributed=True, enable_consolidation=True)
    torch_checkpoints.save(state, storage_writer=joined)
    if distributed.get_rank() == 0:
        torch_checkpoints.save(model().state_dict(), checkpoint_id=f"{folder}/own", no_dist=True)
    distributed.barrier()
    made = model("meta")
    del made.seen
    return begun_from(f"{folder}/whole", f"{folder}/store", shard(made))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_that_torchs_distributed_checkpoints_wrote(tmp_path):
    wanted = tensors(model())
    for values in on_ranks(2, write_and_read, tmp_path):
        assert len(values) == len(wanted) - 1
        assert all(same_bits(values[name], wanted[name]) for name in values)

    def refused(folder, words):
        made = model("meta")
        with pytest.raises(memascend.ConfigError, match=words):
            memascend.offload(made, sgd(made), storage=tmp_path / "refused.store", weights=tmp_path / folder)
        assert not (tmp_path / "refused.store").exists()

    # As the errors say.
    refused("parts", "parts that ranks wrote.*HuggingFaceStorageReader")
    plain = model().apply(lambda module: [nn.init.zeros_(one) for one in module.parameters(recurse=False)])
    state = {name: one for name, one in plain.state_dict().items() if name != "head.weight"}
    reader = HuggingFaceStorageReader(f"{tmp_path}/parts")
    torch_checkpoints.load(state, storage_reader=reader, no_dist=True)
    save_model(plain, f"{tmp_path}/joined.safetensors")
    refused("own", "own are not read.*dcp_to_torch_save")
    dcp_to_torch_save(tmp_path / "own", tmp_path / "all.pt")
    save_file(torch.load(tmp_path / "all.pt"), tmp_path / "converted.safetensors")
    for file in ("joined.safetensors", "converted.safetensors"):
        values = begun_from(tmp_path / file, tmp_path / f"{file}.store", model("meta"))
        assert all(same_bits(values[name], wanted[name]) for name in wanted), file


# --- what torch reads, and what it is refused ------------------------------------------------


def require_refusals(trained, optimizer):
    """Torch may not ask for state that is on storage."""
    for call in (
        lambda: torch_states.get_optimizer_state_dict(trained, optimizer),
        lambda: torch_states.get_state_dict(trained, optimizer),
        lambda: torch_states.set_optimizer_state_dict(trained, optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(memascend.MemascendError, match=r"move none of it: call optimizer.save\(folder\), on every"):
            call()


def zeros():
    made = model()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made


@pytest.mark.slow
@ranks(2)
def test_torchs_distributed_checkpoints_hold_and_read_the_values(folder):
    """Torch's distributed checkpoints hold, and read, the values that ranks saved."""
    trained = shard(model())
    trained, optimizer = memascend.offload(trained, sgd(trained), storage=f"{folder}/run")
    # Before the first step torch would make one, to have state.
    require_refusals(trained, optimizer)
    step(trained, optimizer)
    optimizer.save(f"{folder}/ours")
    torch_checkpoints.save({"model": torch_states.get_model_state_dict(trained)}, checkpoint_id=f"{folder}/torchs")
    saved = whole(trained)
    step(trained, optimizer)
    require_refusals(trained, optimizer)
    # Into the rows, as loops load: the run has what was saved.
    with memascend.materialized(trained, modify=True):
        into = torch_states.get_model_state_dict(trained)
        torch_checkpoints.load({"model": into}, checkpoint_id=f"{folder}/torchs")
        del into
    assert optimizer.steps == 2
    assert all(map(same_bits, whole(trained), saved))
    optimizer.close()
    ours = HuggingFaceStorageReader(f"{folder}/ours")
    other = shard(zeros())
    torch_checkpoints.load({"model": dict(other.named_parameters())}, checkpoint_id=f"{folder}/torchs")
    assert all(map(same_bits, whole(other), saved))
    # And into a model that is not sharded.
    for other, alone in ((shard(zeros()), False), (zeros(), True)):
        torch_checkpoints.load(dict(other.named_parameters()), storage_reader=ours, no_dist=alone)
        assert all(map(same_bits, whole(other), saved))
