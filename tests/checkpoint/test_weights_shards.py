"""Tests weights whose tensors are in parts, as the ranks of torch.distributed.checkpoint write them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from support.bits import same_bits

import memascend
from memascend.errors import ConfigError, CorruptionError


class Scaled(torch.nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a scalar, a buffer without elements."""

    def __init__(self):
        super().__init__()
        self.wide = torch.nn.Linear(6, 7)
        self.narrow = torch.nn.Linear(7, 1)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("nothing", torch.zeros(0, 3))


def model(device="cpu"):
    torch.manual_seed(0)
    with torch.device(device):
        return Scaled().to(torch.bfloat16)


def write(folder, parts, metadata=None):
    """A file of these parts, by name: where each begins, and its values."""
    folder.mkdir(exist_ok=True)
    places = {name: {"saved_offsets": list(at)} for name, (at, _) in parts.items()}
    said = json.dumps(places) if metadata is None else metadata
    file = folder / f"shard-{len(list(folder.iterdir())) + 1:05}-model-00001-of-00001.safetensors"
    save_file({name: part.contiguous() for name, (_, part) in parts.items()}, file, {"DCP_SHARDING_INFO": said})
    return file


def divided(folder, count):
    """Rows by rank: the first ones have one more, the last may have none."""
    files = []
    for rank in range(count):
        parts = {}
        for name, tensor in model().state_dict().items():
            rows = -(-tensor.shape[0] // count) if tensor.dim() else 0
            if tensor.dim():
                parts[name] = (
                    (min(rank * rows, tensor.shape[0]), *[0] * (tensor.dim() - 1)),
                    tensor[rank * rows :][:rows],
                )
            elif rank == 0:
                parts[name] = (), tensor
        files.append(write(folder, parts))
    return files


def in_quarters(folder):
    """Two dimensions of the wide one divided, in several files."""
    wide = model().wide.weight.detach()
    rest = {name: ([0] * one.dim(), one) for name, one in model().state_dict().items() if name != "wide.weight"}
    cuts = {0: slice(0, 4), 4: slice(4, 7)}, {0: slice(0, 2), 2: slice(2, 6)}
    for row, column in ((4, 2), (0, 0), (4, 0), (0, 2)):
        write(folder, {"wide.weight": ((row, column), wide[cuts[0][row], cuts[1][column]]), **rest})
        rest = {}


def refused(error, words, weights, tmp_path):
    made = model("meta")
    with pytest.raises(error, match=words):
        memascend.offload(made, torch.optim.SGD(made.parameters()), storage=tmp_path / "run.store", weights=weights)
    assert not (tmp_path / "run.store").exists()
    assert all(one.is_meta for one in made.parameters())


@pytest.mark.parametrize("count", [1, 2, 4, "quarters"])
def test_parts_are_put_together(tmp_path, count):
    folder = tmp_path / "parts"
    if count == "quarters":
        in_quarters(folder)
    else:
        divided(folder, count)
    made = model("meta")
    made, optimizer = memascend.offload(
        made, torch.optim.SGD(made.parameters()), storage=tmp_path / "run.store", weights=folder
    )
    wanted = model().state_dict()
    with optimizer:
        found = made.state_dict()
        assert found.keys() == wanted.keys()
        assert all(same_bits(found[name].clone(), wanted[name]) for name in wanted)


def test_parts_that_do_not_make_a_whole_are_refused(tmp_path):
    first, second = divided(tmp_path / "parts", 2)
    words = r"parts of \S+ in .* do not make it whole.* into an empty folder"
    refused(ConfigError, words, second, tmp_path)
    refused(ConfigError, r"wide.weight is bfloat16 of shape \[4, 6\], not bfloat16 of shape \[7, 6\]", first, tmp_path)
    # Of another save: the same rows, rows beyond, and rows that lap over with as many missing.
    for name, at, rows in (("same", 4, (4, 7)), ("beyond", 8, (0, 2)), ("over", 1, (1, 4))):
        folder = shutil.copytree(tmp_path / "parts", tmp_path / name)
        if name == "over":
            (folder / second.name).unlink()
        write(folder, {"wide.weight": ((at, 0), model().wide.weight.detach()[slice(*rows)])})
        refused(ConfigError, words, folder, tmp_path)
    other = tmp_path / "other dtype"
    for at, dtype in ((0, torch.bfloat16), (4, torch.float32)):
        write(other, {"wide.weight": ((at, 0), model().wide.weight.detach()[at : at + 4].to(dtype))})
    refused(ConfigError, words, other, tmp_path)


@pytest.mark.parametrize(
    "said", ["{", "{}", "[]", '{"wide.weight": {"saved_offsets": [-1, 0]}}', '{"wide.weight": {"saved_offsets": [0]}}']
)
def test_where_parts_begin_must_make_sense(tmp_path, said):
    file = write(tmp_path / "parts", {"wide.weight": ((0, 0), model().wide.weight.detach())}, said)
    refused(CorruptionError, "does not say where its parts of tensors begin", file, tmp_path)


def test_other_files_without_an_index_are_refused(tmp_path):
    divided(tmp_path / "parts", 2)
    save_file({"more": torch.zeros(2)}, tmp_path / "parts" / "more.safetensors")
    refused(ConfigError, "3 safetensors files and no model.safetensors.index.json", tmp_path / "parts", tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__0_0.distcp").touch()
    refused(ConfigError, r"own are not read.*dcp_to_torch_save", tmp_path / "own", tmp_path)
