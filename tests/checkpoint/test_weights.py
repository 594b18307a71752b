"""Tests offload() of models on the meta device: weights from files or a function, initialisation, and errors."""

import errno
import json
import os
import weakref

import pytest
import torch
from safetensors.torch import save_file
from support.bits import same_states
from support.chains import chain, train
from support.chains import offloaded as begun
from support.chains import values as state
from support.checkpointed import Block

import memascend
from memascend.checkpoint.weights import WeightFiles
from memascend.errors import ConfigError, CorruptionError
from memascend.storage import Engine

DTYPE = torch.bfloat16


class Turned(torch.nn.Module):
    """A module with a buffer that is not persistent, so offload() has to rebuild it."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.register_buffer("angles", torch.empty(width), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.angles.copy_(torch.linspace(0, 1, self.width).cos())

    def forward(self, x):
        return x * self.angles.to(x.dtype)


class Base(torch.nn.Module):
    def __init__(self, width=16, depth=3):
        super().__init__()
        self.embed = torch.nn.Embedding(40, width)
        self.turned = Turned(width)
        self.blocks = torch.nn.ModuleList(Block(width) for _ in range(depth))
        self.batch = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        x = self.turned(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.batch(x.flatten(0, 1)).view(x.shape)


class Headed(torch.nn.Module):
    base_model_prefix = "base"

    def __init__(self, *, tied=True):
        super().__init__()
        self.base = Base()
        self.head = torch.nn.Linear(16, 40, bias=False)
        if tied:
            self.head.weight = self.base.embed.weight

    def forward(self, x):
        return self.head(self.base(x))


def real(kind=Headed, seed=0, **options):
    torch.manual_seed(seed)
    return kind(**options).to(DTYPE)


def bodiless(kind=Headed, **options):
    with torch.device("meta"):
        return kind(**options).to(DTYPE)


TOKENS = torch.arange(24).view(2, 12) * 7 % 40


def trained(model, optimizer, steps=3):
    return train(model, optimizer, range(steps), lambda model, _: model(TOKENS).float().square().mean())


def saved(model, path, *, drop=(), rename=lambda name: name, **more):
    tensors = {rename(name): tensor.clone() for name, tensor in model.state_dict().items() if name not in drop}
    save_file({**tensors, **more}, path)
    return path


def sharded(model, folder, parts=3):
    folder.mkdir()
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    places = {}
    for part in range(parts):
        file = f"model-{part + 1:05}-of-{parts:05}.safetensors"
        names = list(tensors)[part::parts]
        save_file({name: tensors[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


@pytest.mark.parametrize("how", ["file", "folder", "index", "function"])
def test_model_from_meta_trains_with_the_same_bits_as_in_memory(tmp_path, how):
    model, in_hand = begun(tmp_path / "in-hand", real())
    with in_hand:
        losses, after = trained(model, in_hand), state(model)
    model = real()
    values = state(model)
    weights = {
        "file": lambda: saved(model, tmp_path / "m.safetensors", drop={"head.weight"}),
        "folder": lambda: sharded(model, tmp_path / "shards"),
        "index": lambda: sharded(model, tmp_path / "shards") / "model.safetensors.index.json",
        "function": lambda: lambda name, like: values[name].to(like.dtype),
    }[how]()
    model = bodiless()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    held = list(model.parameters())
    # The case "function" keeps records in RAM. Placeholders of equal shape, strides and dtype share a tensor, so a
    # write to one placeholder during a step must not be detected as a write to the other placeholders.
    budget = "64MiB" if how == "function" else None
    model, offloaded = memascend.offload(
        model, optimizer, storage=tmp_path / "run", weights=weights, host_memory=budget
    )
    with offloaded:
        assert bool(offloaded.plan.ram_tier) == (how == "function")
        assert all(one is other for one, other in zip(model.parameters(), held, strict=True))
        assert all(one is other for one, other in zip(optimizer.param_groups[0]["params"], held, strict=True))
        assert model.head.weight is model.base.embed.weight
        assert trained(model, offloaded) == losses
        assert same_states(state(model), after)
    # A resume reads the weights from the store, so it needs no `weights=`.
    model, offloaded = begun(tmp_path / "run", bodiless(), existing="resume")
    with offloaded:
        assert offloaded.steps == 3
        assert same_states(state(model), after)


def test_base_model_prefix_may_be_missing_in_the_files_or_the_model(tmp_path):
    model = real()
    bare = saved(
        model, tmp_path / "bare.safetensors", drop={"head.weight"}, rename=lambda name: name.removeprefix("base.")
    )
    other, offloaded = begun(tmp_path / "headed", bodiless(), weights=bare)
    with offloaded:
        assert same_states(state(other.base), state(model.base))
    headed = saved(model, tmp_path / "headed.safetensors", drop={"head.weight"})
    other = bodiless(Base)
    other.base_model_prefix = "base"
    other, offloaded = begun(tmp_path / "base", other, weights=headed)
    with offloaded:
        assert same_states(state(other), state(model.base))


def test_tied_names_in_the_files_must_have_equal_values(tmp_path):
    model = real()
    for number, missing in enumerate([(), ("base.embed.weight",)]):
        weights = saved(model, tmp_path / f"{number}.safetensors", drop=missing)
        other, offloaded = begun(tmp_path / f"run{number}", bodiless(), weights=weights)
        with offloaded:
            assert same_states(state(other), state(model))
    differ = saved(real(tied=False), tmp_path / "differ.safetensors")
    with pytest.raises(ConfigError, match=r"different values in the files: base.embed.weight and head.weight"):
        begun(tmp_path / "run", bodiless(), weights=differ)


def test_one_error_lists_all_mismatched_weights_and_nothing_is_written(tmp_path):
    model = real()
    weights = saved(
        model,
        tmp_path / "w.safetensors",
        drop={"head.weight", "base.blocks.1.up.bias", "base.batch.running_mean", "base.blocks.0.up.weight"},
        **{
            "base.extra": torch.zeros(3),
            "base.blocks.0.up.weight": torch.zeros(3, 3, dtype=DTYPE),
            "base.blocks.2.down.bias": torch.zeros(16),
        },
    )
    before, offloaded = begun(tmp_path / "run", real(seed=3))
    kept = state(before)
    offloaded.close()
    for existing in ("refuse", "replace"):
        other = bodiless()
        storage = tmp_path / ("run" if existing == "replace" else "none")
        with pytest.raises(ConfigError) as error:
            begun(storage, other, weights=weights, existing=existing)
        for part in (
            "missing in the files: base.blocks.1.up.bias, base.batch.running_mean",
            "not in the model: base.extra",
            "base.blocks.0.up.weight is bfloat16 of shape [3, 3], not bfloat16 of shape [32, 16]",
            "base.blocks.2.down.bias is float32 of shape [16], not bfloat16 of shape [16]",
        ):
            assert part in str(error.value)
        assert all(tensor.is_meta for tensor in [*other.parameters(), *other.buffers()])
    assert not (tmp_path / "none").exists()
    before, offloaded = begun(tmp_path / "run", bodiless(), existing="resume")
    with offloaded:
        assert same_states(state(before), kept)


def test_weights_function_that_returns_the_wrong_dtype_is_rejected(tmp_path):
    values = state(real())
    other = bodiless()
    with pytest.raises(ConfigError, match=r"returned float32 of shape"):
        begun(tmp_path / "run", other, weights=lambda name, _: values[name].float())
    assert not (tmp_path / "run").exists()
    assert all(tensor.is_meta for tensor in [*other.parameters(), *other.buffers()])
    other, offloaded = begun(tmp_path / "run", other, weights=lambda name, _: values[name])
    offloaded.close()


def test_damaged_and_partial_files_are_refused(tmp_path):
    folder = sharded(real(), tmp_path / "shards")

    def refused(error, match, weights=folder):
        with pytest.raises(error, match=match):
            begun(tmp_path / "run", bodiless(), weights=weights)
        assert not (tmp_path / "run").exists()

    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    part = folder / "model-00002-of-00003.safetensors"
    whole = part.read_bytes()
    part.write_bytes(whole[:-8])
    refused(CorruptionError, "not a complete safetensors file")
    part.unlink()
    refused(ConfigError, "files that the index names are missing in .*: model-00002")
    part.write_bytes(whole)
    index.write_text(text.replace("model-00001", "../model-00001"))
    refused(CorruptionError, "names files in another folder")
    index.write_text(text[:-5])
    refused(CorruptionError, "not an index")
    index.unlink()
    refused(ConfigError, r"3 safetensors files, but no model.safetensors.index.json")
    refused(ConfigError, "does not exist", tmp_path / "nowhere")
    (tmp_path / "pipes").mkdir()
    # An open() of a pipe would block until another process opens it for writing.
    os.mkfifo(tmp_path / "pipes" / "model-1.safetensors")
    refused(ConfigError, "not a regular file", tmp_path / "pipes")
    refused(ConfigError, "neither a file nor a folder", tmp_path / "pipes" / "model-1.safetensors")
    os.mkfifo(tmp_path / "pipes" / "other.safetensors.index.json")
    refused(ConfigError, "not a regular file", tmp_path / "pipes")
    (tmp_path / "empty").mkdir()
    torch.save({}, tmp_path / "empty" / "pytorch_model.bin")
    refused(ConfigError, "has pickled files", tmp_path / "empty")
    (tmp_path / "distributed").mkdir()
    (tmp_path / "distributed" / "__0_0.distcp").touch()
    refused(ConfigError, "does not read.*dcp_to_torch_save.*save_file", tmp_path / "distributed")
    for rank in (1, 2):
        file = tmp_path / "distributed" / f"shard-0000{rank}-model-00001-of-00001.safetensors"
        save_file({"embed.weight": torch.zeros(20, 16, dtype=DTYPE)}, file)
    refused(ConfigError, "written by several ranks.*HuggingFaceStorageReader", tmp_path / "distributed")
    refused(ConfigError, r"embed.weight is bfloat16 of shape \[20, 16\]", file)


def test_model_on_meta_is_initialised_with_the_same_bits_as_in_memory(tmp_path, caplog):
    def built():
        return torch.nn.Sequential(
            torch.nn.Embedding(40, 16),
            torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True),
            Base(),
            torch.nn.Linear(16, 8),
        )

    caplog.set_level("INFO", "memascend")
    torch.manual_seed(9)
    model = built()
    with torch.device("meta"):
        other = built()
    torch.manual_seed(9)
    other, offloaded = begun(tmp_path / "run", other, torch.optim.SGD, units=["2"])
    assert "initialised by the model's own code" in caplog.text
    with offloaded:
        assert same_states(state(other), state(model))
        assert torch.equal(other[2].turned.angles, model[2].turned.angles)


def test_a_list_of_parameters_is_initialised_in_a_model_larger_than_a_unit(tmp_path):
    class Listed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Embedding(64, 64)
            self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.empty(48, 64)) for _ in range(1))
            self.reset_parameters()

        def reset_parameters(self):
            for weight in self.weights:
                torch.nn.init.normal_(weight)

    model = real(Listed, seed=9)
    other = bodiless(Listed)
    torch.manual_seed(9)
    other, offloaded = begun(tmp_path / "run", other.to(torch.float32))
    with offloaded:
        assert same_states({name: values.to(DTYPE) for name, values in state(other).items()}, state(model))


def test_offload_that_fails_while_filling_leaves_the_model_on_meta(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise OSError(errno.ENOSPC, "no space")

    with torch.device("meta"):
        model = chain(bias=True)
    owned = [*model.parameters()]
    monkeypatch.setattr(Engine, "fill", failing)
    with pytest.raises(OSError, match="no space"):
        begun(tmp_path / "run", model)
    assert all(one is other and one.is_meta for one, other in zip(model.parameters(), owned, strict=True))


def test_uninitialisable_parameter_or_buffer_is_rejected_by_name(tmp_path):
    class Odd(torch.nn.Module):
        def __init__(self, name):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            if name == "scale":
                self.scale = torch.nn.Parameter(torch.ones(4))
            else:
                self.register_buffer("mask", torch.ones(4), persistent=False)

    for name in ("scale", "mask"):
        with torch.device("meta"):
            model = Odd(name)
        with pytest.raises(ConfigError, match=rf"\b{name}\b"):
            begun(tmp_path / "run", model)
        assert not (tmp_path / "run").exists()
        assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
        model, offloaded = begun(tmp_path / "run", model, weights=lambda _, like: torch.full(like.shape, 3.0))
        with offloaded:
            assert bool((dict(model.named_buffers()).get(name, model.linear.weight) == 3).all())
        (tmp_path / "run").unlink()


def test_resume_reads_nonpersistent_buffers_from_the_weight_files(tmp_path):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("mask", torch.ones(4), persistent=False)

        def forward(self, x):
            return self.linear(x) * self.mask

    files = {"weights": saved(Masked(), tmp_path / "weights.safetensors", mask=torch.full((4,), 3.0))}
    for options in (files, {"existing": "resume", **files}):
        with torch.device("meta"):
            model = Masked()
        model, optimizer = begun(tmp_path / "run", model, **options)
        with optimizer:
            assert model.mask.tolist() == [3.0] * 4


def test_fp8_stack_accepts_one_scale_for_all_its_matrices(tmp_path):
    codes = torch.arange(32).view(2, 4, 4).to(torch.float8_e4m3fn)

    def files(scales):
        save_file({"stack": codes, "stack_scale_inv": scales}, tmp_path / "fp8.safetensors")
        return WeightFiles(tmp_path / "fp8.safetensors", method={"quant_method": "fp8"})

    for scale in (torch.tensor(0.5), torch.full((1, 1, 1), 0.5)):
        assert torch.equal(files(scale).at("stack", torch.float32), codes.float() * 0.5)
    with pytest.raises(CorruptionError, match="has 2 matrices, but scales for 3"):
        files(torch.ones(3, 1, 1)).at("stack", torch.float32)


def test_offload_from_meta_keeps_real_values_hooks_and_attributes(tmp_path):
    model, values, seen = bodiless(), state(real()), []
    adapter = model.adapter = torch.nn.Linear(3, 3)
    before = state(adapter)
    weight = model.base.blocks[0].up.weight
    weight.register_hook(lambda gradient: seen.append(gradient.shape))
    weight.note = "mine"
    model, offloaded = begun(tmp_path / "run", model, weights=lambda name, _: values[name])
    with offloaded:
        assert same_states(state(model.adapter), before)
        assert same_states(state(model.base), {name[5:]: values[name] for name in values if name.startswith("base.")})
        trained(model, offloaded, 1)
    assert seen == [weight.shape]
    assert weight.note == "mine"


def test_offload_from_meta_rejects_bad_weights_and_weak_references(tmp_path):
    model = real()
    with pytest.raises(ConfigError, match="no parameters on meta"):
        begun(tmp_path / "run", model, weights=tmp_path)
    model = bodiless()
    with pytest.raises(ConfigError, match="only one of the two"):
        begun(tmp_path / "run", model, weights=tmp_path, checkpoint=tmp_path)
    with pytest.raises(ConfigError, match="not 5"):
        begun(tmp_path / "run", model, weights=5)
    held = weakref.ref(model.base.embed.weight)
    with pytest.raises(ConfigError, match="weak reference"):
        begun(tmp_path / "run", model)
    assert held() is not None
    assert not (tmp_path / "run").exists()
