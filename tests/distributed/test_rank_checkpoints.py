"""Tests checkpoints of several ranks: what they write is what one process writes, and everybody starts from it."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support import rank_models
from support.bits import files
from support.rank_models import Odd, adamw, backward, loss_of, shard, step, trainable, without_mean
from support.rank_runs import make_hidden
from support.ranks import on_ranks
from support.stores import damage
from torch import distributed, nn

import memascend
from memascend.checkpoint.reader import Checkpoint
from memascend.plan.options import Options
from memascend.session.decide import planned


class Wide(Odd):
    """Odd, with rows that are whole blocks of 256 elements on 2 and on 4 ranks, and not on 3, and a buffer."""

    def __init__(self):
        super().__init__()
        self.narrow.append(nn.Sequential(nn.Linear(16, 320), nn.GELU(), nn.Linear(320, 16)))
        self.register_buffer("scale", torch.full((2,), 0.5, device="cpu"))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale[0]


def model(dtype, device="cpu"):
    with torch.device(device):
        return rank_models.model(dtype, Wide)


def optimizer_of(trained, kind):
    kinds = {
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
        "adamw": adamw,
    }
    return kinds[kind](trainable(trained))


def options_of(start, source):
    """How a run begins on meta."""
    if start == "checkpoint":
        return {"checkpoint": source}
    if start == "weights":
        return {"weights": source}
    if start == "function":
        values = load_file(f"{source}/model.safetensors")
        return {"weights": lambda name, like: values[name].reshape(like.shape)}
    return {}


def train_and_save(folder, name, case, source, count):
    """Begin as the case says, train, and save; alone, or what is this rank's part of it."""
    dtype, kind, start, steps, state = case
    several = distributed.is_initialized()
    trained = model(getattr(torch, dtype), "cpu" if start == "values" else "meta")
    # Where nobody divided a model, offload() does.
    if several and start != "weights":
        trained = shard(trained)
    torch.manual_seed(1)
    options = {"state": state} if state != "stochastic" else {"rounding": state, "master_dtype": None, "seed": 3}
    options |= {"gradients": "ssd", **options_of(start, source)}
    trained, optimizer = memascend.offload(
        trained, optimizer_of(trained, kind), storage=f"{folder}/store-{name}", **options
    )
    without_mean(trained)
    for number in range(optimizer.steps, optimizer.steps + steps):
        backward(trained, number, count)
        optimizer.user_state = {"position": number}
        optimizer.step()
        optimizer.zero_grad()
    optimizer.save(f"{folder}/{name}")
    # Twice is fine: the earlier one is replaced.
    optimizer.save(f"{folder}/{name}")
    if several:
        # As if the other ranks were on another host: their rows are sent.
        optimizer.save(f"{folder}/hidden/{name}")
    optimizer.close()


def train_all(folder, cases, source):
    make_hidden(folder)
    for number, case in enumerate(cases):
        train_and_save(folder, f"{number}", case, source, distributed.get_world_size())


def same_checkpoints(one, other):
    """Whether two checkpoints are the same bytes, but for which store they are of."""
    assert files(one) == files(other), one
    manifests = [json.loads((folder / "memascend/manifest.json").read_bytes()) for folder in (one, other)]
    for folder, manifest in zip((one, other), manifests, strict=True):
        Checkpoint(folder).verify()
        del manifest["store"], manifest["checksum"]
    # What several ranks have written has a checksum for the part of each.
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
    """A checkpoint of ranks that each have their own `user_state`, which a new run of them has, and its reports."""
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
    """Where save() fails on a rank, what was there stays, and nothing is left."""
    rank = distributed.get_rank()
    trained, optimizer = begun(folder, "run", gradients="ssd")

    def refused(to, words, *kinds):
        with pytest.raises(kinds[rank], match=words):
            optimizer.save(f"{folder}/{to}")

    if rank == 0:
        (Path(folder) / "others").mkdir()
        (Path(folder) / "others" / "file").touch()
    refused("others", "holds something else", memascend.ConfigError, memascend.RankError)
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
    refused("saved", "" if rank else "rank 1 refused", memascend.RankError, memascend.CorruptionError)
    assert (Path(folder) / "saved" / "model.safetensors").read_bytes() == before
    distributed.barrier()
    assert not list(Path(folder).glob(".saved*"))
    optimizer.close()


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def require_planned(folder):
    """The plan of the first rank, which has the most rows, is the one that is made without ranks."""
    trained = model(torch.bfloat16)
    options = {"storage": f"{folder}/planned", "gradients": "ssd", "units": ["narrow", "frozen"]}
    bare = model(torch.bfloat16, "meta")
    alone = planned(bare, optimizer_of(bare, "adamw"), Options(**options), distributed.get_world_size())
    trained, optimizer = memascend.offload(trained, optimizer_of(trained, "adamw"), **options)
    assert distributed.get_rank() or optimizer.plan.to_dict() == alone.plan.to_dict()
    optimizer.close()
    # As many rows as the first rank has, in 2 bytes: values for a forward, those of blocks once more, gradients.
    embed, narrow, frozen = 17 * 16, 2 * 16 + 2 + 8 * 3 + 8 + 160 * 17 + 8 * 321, 8 * 16 + 8
    assert alone.network.total == 2 * (embed + 2 * narrow + 2 * frozen + embed + narrow)


def every(folder):
    require_the_old_checkpoint(folder)
    require_planned(folder)
    return require_own_states_and_sums(folder)


# The parameters' dtype, the optimizer, how the run begins, steps, and the format of the state; by number of ranks.
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
def test_ranks_write_what_one_process_writes_wherever_they_begin(tmp_path, count):
    source, cases = tmp_path / "source", CASES[count]
    # One process has written where some of them begin.
    train_and_save(tmp_path, "source", (cases[0][0], cases[0][1], "values", 1, None), None, count)
    on_ranks(count, train_all, tmp_path, cases, source)
    for number, case in enumerate(cases):
        train_and_save(tmp_path, f"alone-{number}", case, source, count)
        alone = tmp_path / f"alone-{number}"
        assert same_checkpoints(tmp_path / f"{number}", alone)
        assert not same_checkpoints(tmp_path / f"hidden/{number}", alone)


def test_what_ranks_save_keep_and_plan_where_something_fails_too(tmp_path):
    (one, all_of_them), (other, told) = on_ranks(2, every, tmp_path)
    assert told == all_of_them
    # What they had moved by the beginning of the second step().
    assert one[0] + other[0] <= told["read"] <= 2 * (one[0] + other[0])
    assert told["written"] >= one[1] + other[1] > 0
    trained = model(torch.float32)
    alone = optimizer_of(trained, "sgd")
    with pytest.warns(UserWarning, match="2 ranks wrote this checkpoint"):
        trained, alone = memascend.offload(trained, alone, storage=tmp_path / "one", checkpoint=tmp_path / "own-states")
    assert alone.user_state == {"position": 0}
    alone.close()
