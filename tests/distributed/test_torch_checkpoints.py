"""Tests what torch.distributed.checkpoint reads and writes: the files of save(), `weights=`, and what is refused."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from support.bits import same_bits
from support.rank_models import said
from support.ranks import on_ranks
from torch import distributed, nn
from torch.distributed import checkpoint as torch_checkpoints
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.fsdp import fully_shard

import memascend


class Uneven(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a tied head, a buffer, a scalar."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(33, 16)
        self.narrow = nn.Sequential(nn.Linear(16, 1), nn.GELU(), nn.Linear(1, 16))
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((2,), 0.5))
        self.register_buffer("seen", torch.tensor(7))

    def forward(self, tokens):
        return self.head(self.narrow(self.embed(tokens))) * self.scale[0]


def model(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    with torch.device(device):
        return Uneven().to(dtype)


def sharded(made):
    fully_shard(made.narrow)
    return fully_shard(made)


def sgd(trained):
    return torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)


def tensors(trained):
    """All that a state dict has, whole."""
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
        for name, one in trained.state_dict().items()
    }


def step_of(trained, optimizer, step):
    generator = torch.Generator().manual_seed(10 * step + distributed.get_rank())
    trained(torch.randint(0, 33, (4, 6), generator=generator)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def begun_from(folder, store, made):
    """All values of a run that begins with these weights."""
    trained, optimizer = memascend.offload(made, sgd(made), storage=store, weights=folder)
    found = tensors(trained)
    optimizer.close()
    return found


def write_and_read(folder):
    """What torch writes of a divided model: parts, and one whole file, which the ranks begin from."""
    made = sharded(model())
    state = {name: one for name, one in made.state_dict().items() if name != "head.weight"}
    parts = HuggingFaceStorageWriter(f"{folder}/parts", save_distributed=True)
    torch_checkpoints.save(state, storage_writer=parts)
    # What torch consolidates has neither integers nor, right, tensors without dimensions.
    del state["seen"]
    whole = HuggingFaceStorageWriter(f"{folder}/whole", save_distributed=True, enable_consolidation=True)
    torch_checkpoints.save(state, storage_writer=whole)
    if distributed.get_rank() == 0:
        torch_checkpoints.save(model().state_dict(), checkpoint_id=f"{folder}/own", no_dist=True)
    distributed.barrier()
    made = model("meta")
    del made.seen
    return begun_from(f"{folder}/whole", f"{folder}/store", sharded(made))


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


def refusals(trained, optimizer):
    """What torch says where it asks for state that is on storage."""
    calls = [
        lambda: torch_states.get_optimizer_state_dict(trained, optimizer),
        lambda: torch_states.get_state_dict(trained, optimizer),
        lambda: torch_states.set_optimizer_state_dict(trained, optimizer, {"state": {}, "param_groups": []}),
    ]
    return [said(call) for call in calls]


def read_by_torch(folder):
    """Whether torch's distributed checkpoints hold, and read, the values that ranks saved; and what they refuse."""
    trained = sharded(model())
    trained, optimizer = memascend.offload(trained, sgd(trained), storage=f"{folder}/run")
    # Before the first step torch would make one, to have state.
    words = refusals(trained, optimizer)
    step_of(trained, optimizer, 0)
    optimizer.save(f"{folder}/ours")
    torch_checkpoints.save({"model": torch_states.get_model_state_dict(trained)}, checkpoint_id=f"{folder}/torchs")
    saved = [parameter.full_tensor() for parameter in trained.parameters()]
    step_of(trained, optimizer, 1)
    words += refusals(trained, optimizer)
    # Into the rows, as loops load: the run has what was saved.
    with memascend.materialized(trained, modify=True):
        into = torch_states.get_model_state_dict(trained)
        torch_checkpoints.load({"model": into}, checkpoint_id=f"{folder}/torchs")
        del into
    values = [parameter.full_tensor() for parameter in trained.parameters()]
    found = [words, optimizer.steps, all(map(same_bits, values, saved))]
    optimizer.close()
    for source in (
        {"checkpoint_id": f"{folder}/torchs"},
        {"storage_reader": HuggingFaceStorageReader(f"{folder}/ours")},
    ):
        other = sharded(model())
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        state = dict(other.named_parameters())
        torch_checkpoints.load({"model": state} if "checkpoint_id" in source else state, **source)
        values = [parameter.full_tensor() for parameter in other.parameters()]
        found.append(all(map(same_bits, values, saved)))
    # And into a model that nobody divided.
    other = model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    torch_checkpoints.load(
        dict(other.named_parameters()), storage_reader=HuggingFaceStorageReader(f"{folder}/ours"), no_dist=True
    )
    found.append(all(map(same_bits, (one.detach() for one in other.parameters()), saved)))
    return found


@pytest.mark.slow
def test_torchs_distributed_checkpoints_hold_and_read_the_values(tmp_path):
    for refused, steps, *same in on_ranks(2, read_by_torch, tmp_path):
        assert len(refused) == 6
        assert all("move none of it: call optimizer.save(folder), on every rank" in words for words in refused)
        assert steps == 2
        assert same == [True, True, True, True]
