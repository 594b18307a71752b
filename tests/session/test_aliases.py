"""Tests tensors that share memory with weights or optimizer state: offload() raises, or training stays exact."""

import copy
import gc
import io
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.bits import same_states
from support.chains import WIDTH, batch, chain, loss_of, require_same_training, step
from torch import nn

import memascend


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def flat(model):
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return vector


def of_a_buffer(model):
    memory = bytearray(4 * WIDTH * WIDTH)
    model[0].weight.data = torch.frombuffer(memory, dtype=torch.float32).view(WIDTH, WIDTH)
    return memory


def loaded(model):
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file), assign=True)


ALIASES = {
    "data": lambda model: model[0].weight.data,
    "view with a gradient": lambda model: model[0].weight.view(-1),
    "view of inference": lambda model: torch.inference_mode()(model[0].weight.view)(-1),
    "dlpack": lambda model: torch.utils.dlpack.to_dlpack(model[0].weight.detach()),
    "storage": lambda model: model[0].weight.untyped_storage(),
    "flat buffer": flat,
    "buffer below": of_a_buffer,
    "other processes": lambda model: model.share_memory(),
    "graph": lambda model: model(batch()),
    "looked at by numpy": lambda model: model[0].weight.detach().numpy().sum(),
    "loaded by torch": loaded,
}
# torch does not count aliases that code makes in these ways. Even after the alias is deleted, offload() rejects the
# weights and accepts only copies of the weights.
UNCOUNTED = ("buffer below", "other processes", "looked at by numpy", "loaded by torch")


def refused(model, optimizer, folder, words):
    """Requires that `offload()` raises an error and changes nothing. The error must match `words`.

    `offload()` must also leave no file.
    """
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(memascend.ConfigError, match=words):
        memascend.offload(model, optimizer, storage=folder / "run.store")
    assert not list(folder.iterdir())
    assert same_states(before, model.state_dict())
    assert str(state) == str(optimizer.state_dict()["state"])
    step(model, optimizer)


def accepted(model, optimizer, folder):
    """Requires that `offload()` succeeds, and that training then gives the same bits as training in memory."""
    plain = copy.deepcopy(model)
    theirs = type(optimizer)(plain.parameters(), **optimizer.defaults)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    given = memascend.offload(model, optimizer, storage=folder / "run.store", gradients="ssd")
    require_same_training(plain, theirs, *given, range(2))


@pytest.mark.parametrize("way", ALIASES)
def test_offload_rejects_an_alias_of_a_weight_until_it_is_deleted(tmp_path, way):
    model = chain(3)
    kept = ALIASES[way](model)
    optimizer = sgd(model)
    # The input of layer 0 needs no gradient, so the graph does not save the weight of layer 0. The error names layer 1.
    name = "1" if way == "graph" else "0"
    refused(model, optimizer, tmp_path, rf"{name}\.weight.*(shares memory|code outside of torch may use)")
    del kept
    if way in UNCOUNTED:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    accepted(model, optimizer, tmp_path)


@pytest.mark.parametrize("way", ["parameter", "buffer"])
def test_offload_rejects_parameters_and_buffers_that_share_memory(tmp_path, way):
    model = chain()
    if way == "parameter":
        model[1].weight.data = model[0].weight.data
    else:
        model.register_buffer("first", model[0].weight.detach()[:2])
    with pytest.raises(memascend.ConfigError, match="share memory"):
        memascend.offload(model, sgd(model), storage=tmp_path / "s.store")


class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.turned = self.layer.weight.data.t()

    def forward(self, x):
        return self.layer(x) @ self.turned[:]


def test_offload_error_names_the_attribute_that_holds_a_view_of_a_weight(tmp_path):
    model = nn.Sequential(Transposed(), nn.Linear(WIDTH, WIDTH))
    refused(
        model, sgd(model), tmp_path, r"0\.layer\.weight shares memory with the attribute 'turned' of 0 \(Transposed"
    )
    model[0].others = {"turned": model[0].turned}
    model[0].turned = model[0].turned.clone()
    refused(model, sgd(model), tmp_path, "attribute 'others' of 0")


@pytest.mark.parametrize("export", [torch.from_dlpack, torch.utils.dlpack.to_dlpack, np.from_dlpack])
def test_offload_rejects_a_frozen_weight_exported_by_dlpack(tmp_path, export):
    """An export by DLPack keeps the parameter itself alive."""
    model = chain(3)
    model[0].requires_grad_(False)
    kept, optimizer = export(model[0].weight), sgd(model[1:])
    refused(model, optimizer, tmp_path, r"0\.weight shares memory")
    del kept
    memascend.offload(model, optimizer, storage=tmp_path / "run.store")[1].close()


def test_offload_accepts_a_weight_whose_view_is_in_a_garbage_cycle(tmp_path):
    model = chain()
    cycle = [view := model[0].weight.data]
    cycle.append(cycle)
    del cycle, view
    gc.disable()
    try:
        accepted(model, sgd(model), tmp_path)
    finally:
        gc.enable()


def of_files(folder, model, read):
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    (folder / "weights").mkdir()
    if read is load_file:
        save_file(model.state_dict(), folder / "weights/of")
        model.load_state_dict(load_file(folder / "weights/of"), assign=True)
    else:
        torch.save(model.state_dict(), folder / "weights/of")
        model.load_state_dict(torch.load(folder / "weights/of", mmap=True), assign=True)


def reverted(model):
    loss = loss_of(model)
    loss.backward()
    model.zero_grad()
    return loss


HARMLESS = {
    "average": torch.optim.swa_utils.AveragedModel,
    "a loss that went back": reverted,
    "pickled": lambda model: (
        model.load_state_dict(pickle.loads(pickle.dumps(model.state_dict())), assign=True) and None
    ),
    "one file mapped by safetensors": load_file,
    "one file mapped by torch": torch.load,
    "compiled": lambda model: (model[1].compile(backend="aot_eager"), model(batch()).detach())[1],
    "spectral norm": lambda model: nn.utils.spectral_norm(model[0]) and None,
    "weight norm": lambda model: nn.utils.parametrizations.weight_norm(model[0]) and None,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", HARMLESS)
def test_offload_accepts_weights_after_uses_that_keep_no_alias(tmp_path, way):
    model = chain(3)
    make = HARMLESS[way]
    kept = of_files(tmp_path, model, make) if make in (load_file, torch.load) else make(model)
    model, optimizer = memascend.offload(model, sgd(model), storage=tmp_path / "run.store")
    with optimizer:
        step(model, optimizer)
    del kept


@pytest.mark.parametrize("way", ["deep copy", "state dict"])
def test_offload_accepts_a_copy_of_an_offloaded_model_unless_aliased(tmp_path, way):
    made = chain()
    first, ours = memascend.offload(made, sgd(made), storage=tmp_path / "first.store")
    (tmp_path / "second").mkdir()
    with ours:
        step(first, ours)
        if way == "deep copy":
            model = copy.deepcopy(first)
        else:
            model = chain()
            model.load_state_dict(first.state_dict(), assign=True)
            model.requires_grad_(True)
    kept = model[1].weight.data
    refused(model, sgd(model), tmp_path / "second", r"1\.weight shares memory")
    del kept
    accepted(model, sgd(model), tmp_path / "second")


def trained():
    model = chain()
    optimizer = sgd(model)
    step(model, optimizer)
    return model, optimizer


HELD_STATE = {
    "its dict": lambda optimizer, p: optimizer.state[p],
    "state dict": lambda optimizer, _: optimizer.state_dict(),
    "storage": lambda optimizer, p: optimizer.state[p]["momentum_buffer"].untyped_storage(),
    "capsule": lambda optimizer, p: torch.utils.dlpack.to_dlpack(optimizer.state[p]["momentum_buffer"]),
}


@pytest.mark.parametrize("way", HELD_STATE)
def test_offload_rejects_an_alias_of_optimizer_state_until_it_is_deleted(tmp_path, way):
    model, optimizer = trained()
    kept = HELD_STATE[way](optimizer, model[0].weight)
    refused(model, optimizer, tmp_path, "optimizer's state.*0.weight")
    del kept
    accepted(model, optimizer, tmp_path)


def test_use_of_optimizer_state_kept_from_before_offload_raises(tmp_path):
    model, optimizer = trained()
    given = trained()[1].state_dict()
    optimizer.load_state_dict(given)
    mapping, kept = optimizer.state, optimizer.state[model[0].weight]["momentum_buffer"]
    model, ours = memascend.offload(model, optimizer, storage=tmp_path / "run.store")
    uses = [kept.clone, kept.tolist, kept.zero_, kept.numpy, lambda: kept + 1, lambda: kept[:1].copy_(kept[1:2])]
    with ours:
        for use in (*uses, given["state"][0]["momentum_buffer"].sum):
            with pytest.raises(RuntimeError, match=r"momentum_buffer of an optimizer.*on storage"):
                use()
        with pytest.raises(memascend.UsageError, match="on storage"):
            mapping[model[0].weight]
