"""Tests checkpoints that several ranks write and load, and torch's distributed checkpoints.

The checkpoint of several ranks must equal the checkpoint that one process writes.
"""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from support import rank_models
from support.bits import files, same_bits
from support.rank_models import Odd, adamw, backward, divide_gradients, loss_of, shard, step, trainable, whole
from support.rank_runs import make_hidden
from support.ranks import on_ranks, ranks
from support.stores import damage
from torch import distributed, nn
from torch.distributed import checkpoint as torch_checkpoints
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

import memascend
from memascend.checkpoint.reader import Checkpoint
from memascend.plan.options import Options
from memascend.session.decide import planned


class Scaled(Odd):
    """`Odd` with a persistent buffer."""

    def __init__(self, narrow=3, device="cpu"):
        super().__init__(narrow)
        self.register_buffer("scale", torch.full((2,), 0.5, device=device))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale[0]


class Wide(Scaled):
    """`Scaled` with two more layers. On 2 and 4 ranks, each shard of their weights has a multiple of 256 elements."""

    def __init__(self):
        super().__init__()
        self.narrow.append(nn.Sequential(nn.Linear(16, 320), nn.GELU(), nn.Linear(320, 16)))


def model(dtype, device="cpu", kind=Wide):
    with torch.device(device):
        return rank_models.model(dtype, kind)


def optimizer_of(trained, kind):
    kinds = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
        "adamw": adamw,
    }
    return kinds[kind](trainable(trained))


def options_of(start, source):
    """Returns the options of `offload()` that read the first values from `source`; empty if `start` reads no source."""
    if start == "checkpoint":
        return {"checkpoint": source}
    if start == "weights":
        return {"weights": source}
    if start == "function":
        values = load_file(f"{source}/model.safetensors")
        return {"weights": lambda name, like: values[name].reshape(like.shape)}
    return {}


def train_and_save(folder, name, case, source, count):
    """Offloads a model as `case` describes, trains the model, and saves it.

    This function runs in one process, or on each of several ranks.
    """
    dtype, kind, start, steps, state = case
    several = distributed.is_initialized()
    trained = model(getattr(torch, dtype), "cpu" if start == "values" else "meta")
    # If `start` is "weights", offload() itself shards the model.
    if several and start != "weights":
        trained = shard(trained)
    torch.manual_seed(1)
    options = {"state": state} if state != "stochastic" else {"rounding": state, "master_dtype": None, "seed": 3}
    options |= {"gradients": "ssd", **options_of(start, source)}
    trained, optimizer = memascend.offload(
        trained, optimizer_of(trained, kind), storage=f"{folder}/store-{name}", **options
    )
    divide_gradients(trained)
    for number in range(optimizer.steps, optimizer.steps + steps):
        backward(trained, number, count)
        optimizer.user_state = {"position": number}
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(f"{folder}/{name}")
    # The second save replaces the checkpoint of the first save.
    optimizer.save(f"{folder}/{name}")
    if several:
        # Only rank 0 sees the files in this folder, as if the other ranks were on another host. So the other ranks send
        # their rows to rank 0.
        optimizer.save(f"{folder}/hidden/{name}")
    optimizer.close()


def train_all(folder, cases, source):
    make_hidden(folder)
    for number, case in enumerate(cases):
        train_and_save(folder, f"{number}", case, source, distributed.get_world_size())


def same_checkpoints(one, other):
    """Requires that two checkpoints differ only in the store's id, and in how checksums are divided between ranks.

    Returns True if `one` has tensors that several ranks wrote.
    """
    assert files(one) == files(other), one
    manifests = [json.loads((folder / "memascend/manifest.json").read_bytes()) for folder in (one, other)]
    for folder, manifest in zip((one, other), manifests, strict=True):
        Checkpoint(folder).verify()
        del manifest["store"], manifest["checksum"]
    # A tensor that several ranks wrote has a checksum for each rank's part.
    parts = {
        (name, key): sums
        for name, file in manifests[0]["files"].items()
        for key, sums in file["tensors"].items()
        if isinstance(sums, list)
    }
    for (name, key), sums in parts.items():
        manifests[1]["files"][name]["tensors"][key] = sums
    assert manifests[0] == manifests[1]
    return bool(parts)


def begun(folder, name, **options):
    trained = shard(model(torch.float32))
    return memascend.offload(trained, optimizer_of(trained, "sgd"), storage=f"{folder}/{name}", **options)


def require_own_states_and_sums(folder):
    """Saves each rank's own `user_state` and restores it in a new run.

    Returns the bytes that this rank had read and written after one step, without the writes of first values. Also
    returns the sums over all ranks, as this rank's report shows them after two steps.
    """
    rank = distributed.get_rank()
    trained, optimizer = begun(folder, "own")
    optimizer.user_state = {"position": rank}
    optimizer.save(f"{folder}/own-states")
    optimizer.close()
    trained, optimizer = begun(folder, "again", checkpoint=f"{folder}/own-states")
    assert optimizer.user_state == {"position": rank}
    assert "ranks" not in optimizer.report().to_dict()
    step(trained, optimizer)
    own = optimizer.report()
    step(trained, optimizer)
    after = optimizer.report()
    optimizer.close()
    assert rank or "This is one of 2 ranks" in str(after)
    moved = [sum(own.read.values()), sum(own.written.values()) - own.written["first values"]]
    return moved, after.to_dict()["ranks"]


def require_the_old_checkpoint(folder):
    """Requires that a `save()` that fails on a rank keeps the earlier checkpoint and leaves no temporary file."""
    rank = distributed.get_rank()
    trained, optimizer = begun(folder, "run", gradients="ssd")

    def refused(to, words, *kinds):
        with pytest.raises(kinds[rank], match=words):
            optimizer.save(f"{folder}/{to}")

    if rank == 0:
        (Path(folder) / "others").mkdir()
        (Path(folder) / "others" / "file").touch()
    refused("others", "contains files that are not a checkpoint", memascend.ConfigError, memascend.RankError)
    loss_of(trained, 0, rank).backward()
    refused("saved", "", memascend.UsageError, memascend.UsageError)
    optimizer.zero_grad()
    optimizer.save(f"{folder}/saved")
    before = (Path(folder) / "saved" / "model.safetensors").read_bytes()
    own = os.pwrite
    if rank == 1:
        os.pwrite = full
    refused("saved", "No space left on device", memascend.RankError, memascend.StorageError)
    os.pwrite = own
    if rank == 1:
        (path,) = (Path(folder) / "run" / "rank-1-of-2").iterdir()
        damage(path, trained.embed.weight.detach().to_local().clone().numpy().tobytes())
    distributed.barrier()
    refused("saved", "" if rank else "the call failed on rank 1", memascend.RankError, memascend.CorruptionError)
    assert (Path(folder) / "saved" / "model.safetensors").read_bytes() == before
    distributed.barrier()
    assert not list(Path(folder).glob(".saved*"))
    optimizer.close()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def require_planned(folder):
    """Requires that `planned` predicts the plan of rank 0, which has the most rows.

    `planned` gets the number of ranks as an argument, and needs no process group.
    """
    trained = model(torch.bfloat16)
    options = {"storage": f"{folder}/planned", "gradients": "ssd", "units": ["narrow", "frozen"]}
    bare = model(torch.bfloat16, "meta")
    alone = planned(bare, optimizer_of(bare, "adamw"), Options(**options), distributed.get_world_size())
    trained, optimizer = memascend.offload(trained, optimizer_of(trained, "adamw"), **options)
    assert distributed.get_rank() or optimizer.plan.to_dict() == alone.plan.to_dict()
    optimizer.close()
    # The network traffic of rank 0, with 2 bytes for each element. The forward gathers all parameters. The backward
    # gathers the blocks again, and reduces the gradients of trainable parameters.
    embed, narrow, frozen = 17 * 16, 2 * 16 + 2 + 8 * 3 + 8 + 160 * 17 + 8 * 321, 8 * 16 + 8
    assert alone.network.total == 2 * (embed + 2 * narrow + 2 * frozen + embed + narrow)


def every(folder):
    require_the_old_checkpoint(folder)
    require_planned(folder)
    return require_own_states_and_sums(folder)


# The cases for each number of ranks. A case has the parameters' dtype, the optimizer, the source of the first values
# (an argument of `options_of`), the number of steps, and the format of the optimizer state ("stochastic": stochastic
# rounding instead of a format).
MORE = [
    *((dtype, kind, start, 2, None) for dtype in ("bfloat16", "float32")
      for kind, start in (("adamw", "values"), ("sgd", "initialised"), ("radam", "values"))),
    ("bfloat16", "adamw", "checkpoint", 1, None),
    ("bfloat16", "radam", "weights", 1, None),
]  # fmt: skip
CASES = {
    2: [
        ("bfloat16", "adamw", "values", 2, "8bit"),
        ("bfloat16", "adamw", "values", 3, "bf16"),
        ("bfloat16", "adamw", "values", 3, "stochastic"),
        ("bfloat16", "adamw", "checkpoint", 1, None),
        ("bfloat16", "adamw", "weights", 0, None),
        ("bfloat16", "sgd", "function", 1, None),
        ("float32", "sgd", "initialised", 0, None),
    ],
    3: MORE,
    4: [*MORE, ("float32", "adamw", "values", 2, "8bit"), ("bfloat16", "sgd", "values", 2, "8bit")],
}


@pytest.mark.parametrize("count", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 4))])
def test_checkpoint_of_ranks_equals_the_checkpoint_of_one_process(tmp_path, count):
    source, cases = tmp_path / "source", CASES[count]
    # One process writes the checkpoint from which some cases start.
    train_and_save(tmp_path, "source", (cases[0][0], cases[0][1], "values", 1, None), None, count)
    on_ranks(count, train_all, tmp_path, cases, source)
    for number, case in enumerate(cases):
        train_and_save(tmp_path, f"alone-{number}", case, source, count)
        alone = tmp_path / f"alone-{number}"
        assert same_checkpoints(tmp_path / f"{number}", alone)
        assert not same_checkpoints(tmp_path / f"hidden/{number}", alone)


def test_ranks_keep_checkpoints_and_user_states_and_match_their_plan(tmp_path):
    (one, all_of_them), (other, answer) = on_ranks(2, every, tmp_path)
    assert answer == all_of_them
    # The second report has the bytes that both ranks had moved when the second `step()` began.
    assert one[0] + other[0] <= answer["read"] <= 2 * (one[0] + other[0])
    assert answer["written"] >= one[1] + other[1] > 0
    trained = model(torch.float32)
    alone = optimizer_of(trained, "sgd")
    with pytest.warns(UserWarning, match="2 ranks wrote this checkpoint"):
        trained, alone = memascend.offload(trained, alone, storage=tmp_path / "one", checkpoint=tmp_path / "own-states")
    assert alone.user_state == {"position": 0}
    alone.close()


# --- torch.distributed.checkpoint ----------------------------------------------------------------------


class Uneven(Scaled):
    """`Scaled` with a scalar buffer and with a layer that has fewer rows than ranks, but without the frozen block."""

    def __init__(self):
        super().__init__(narrow=1, device=None)
        self.frozen = nn.Identity()
        self.register_buffer("seen", torch.tensor(7))

    def __iter__(self):
        return iter((self.narrow,))


def uneven(device="cpu"):
    return model(torch.float32, device, Uneven)


def tensors(trained):
    """Returns copies of all tensors of the state dict, gathered from all ranks."""
    return {
        name: (one.full_tensor() if hasattr(one, "full_tensor") else one).clone()
        for name, one in trained.state_dict().items()
    }


def begun_from(folder, store, made):
    """Offloads the model `made` with the weights in `folder`; returns its tensors."""
    trained, optimizer = memascend.offload(made, optimizer_of(made, "sgd"), storage=store, weights=folder)
    found = tensors(trained)
    optimizer.close()
    return found


def write_and_read(folder):
    """Writes a model with torch: all ranks write parts and one joined file, and rank 0 writes torch's own format.

    Returns the tensors of a run that loads its weights from the joined file.
    """
    made = shard(uneven())
    state = {name: one for name, one in made.state_dict().items() if name != "head.weight"}
    parts = HuggingFaceStorageWriter(f"{folder}/parts", save_distributed=True)
    torch_checkpoints.save(state, storage_writer=parts)
    # The buffer `seen` is an integer without dimensions. torch's consolidation fails on integers, and writes tensors
    # without dimensions wrongly, so the test leaves out `seen`.
    del state["seen"]
    joined = HuggingFaceStorageWriter(f"{folder}/whole", save_distributed=True, enable_consolidation=True)
    torch_checkpoints.save(state, storage_writer=joined)
    if distributed.get_rank() == 0:
        torch_checkpoints.save(uneven().state_dict(), checkpoint_id=f"{folder}/own", no_dist=True)
    distributed.barrier()
    made = uneven("meta")
    del made.seen
    return begun_from(f"{folder}/whole", f"{folder}/store", shard(made))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_offload_reads_joined_torch_checkpoints_and_rejects_other_formats(tmp_path):
    wanted = tensors(uneven())
    for values in on_ranks(2, write_and_read, tmp_path):
        assert len(values) == len(wanted) - 1
        assert all(same_bits(values[name], wanted[name]) for name in values)

    def refused(folder, words):
        with pytest.raises(memascend.ConfigError, match=words):
            begun_from(tmp_path / folder, tmp_path / "refused.store", uneven("meta"))
        assert not (tmp_path / "refused.store").exists()

    # Each error names a way to convert the checkpoint. The lines after each call of `refused` convert the checkpoint in
    # this way.
    refused("parts", "written by several ranks.*HuggingFaceStorageReader")
    plain = uneven().apply(lambda module: [nn.init.zeros_(one) for one in module.parameters(recurse=False)])
    state = {name: one for name, one in plain.state_dict().items() if name != "head.weight"}
    reader = HuggingFaceStorageReader(f"{tmp_path}/parts")
    torch_checkpoints.load(state, storage_reader=reader, no_dist=True)
    save_model(plain, f"{tmp_path}/joined.safetensors")
    refused("own", "does not read.*dcp_to_torch_save")
    dcp_to_torch_save(tmp_path / "own", tmp_path / "all.pt")
    save_file(torch.load(tmp_path / "all.pt"), tmp_path / "converted.safetensors")
    for file in ("joined.safetensors", "converted.safetensors"):
        values = begun_from(tmp_path / file, tmp_path / f"{file}.store", uneven("meta"))
        assert all(same_bits(values[name], wanted[name]) for name in wanted), file


# --- values, which torch can read; optimizer state, which torch cannot read -------------------


def require_refusals(trained, optimizer):
    """Requires that torch's functions for optimizer state raise an error, because the state is on storage."""
    for call in (
        lambda: torch_states.get_optimizer_state_dict(trained, optimizer),
        lambda: torch_states.get_state_dict(trained, optimizer),
        lambda: torch_states.set_optimizer_state_dict(trained, optimizer, {"state": {}, "param_groups": []}),
    ):
        with pytest.raises(
            memascend.MemascendError, match=r"cannot read or set it. Call optimizer.save\(folder\) on every"
        ):
            call()


def zeros():
    made = uneven()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made


@pytest.mark.slow
@ranks(2)
def test_torch_checkpoints_load_model_values_but_not_optimizer_state(folder):
    """Torch saves and loads an offloaded model, and loads the checkpoint that `optimizer.save()` has written."""
    trained = shard(uneven())
    trained, optimizer = memascend.offload(trained, optimizer_of(trained, "sgd"), storage=f"{folder}/run")
    # Before the first step, torch's functions would take a step themselves to create optimizer state.
    require_refusals(trained, optimizer)
    step(trained, optimizer)
    optimizer.save(f"{folder}/ours")
    torch_checkpoints.save({"model": torch_states.get_model_state_dict(trained)}, checkpoint_id=f"{folder}/torchs")
    saved = whole(trained)
    step(trained, optimizer)
    require_refusals(trained, optimizer)
    # Loads the checkpoint into this rank's rows, as training loops do: the run has the saved values again.
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
    # torch loads the checkpoint of `optimizer.save()` into a sharded model, and into a model that is not sharded.
    for other, alone in ((shard(zeros()), False), (zeros(), True)):
        torch_checkpoints.load(dict(other.named_parameters()), storage_reader=ours, no_dist=alone)
        assert all(map(same_bits, whole(other), saved))
