"""Tests the store's format from Python: elements of any size, copies of labels, upgraded stores."""

import hashlib
import importlib.util
import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch
from support.bits import as_bytes, same_bits
from torch import nn

import memascend
from memascend import cli, engine
from memascend.engine.compact import master_of
from memascend.errors import ConfigError, StorageError

VERSION_1 = Path(__file__).parent / "version_1"
ONE_BYTE = [
    name
    for name in (
        "bool",
        "int8",
        "uint8",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]
COMPLEX = ["complex32", "complex64", "complex128"]


def training():
    """The training that the stores of version 1 were made from."""
    spec = importlib.util.spec_from_file_location("training_of_version_1", VERSION_1 / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def filled(dtype, numel):
    values = torch.randint(0, 2 if dtype == torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return values.view(dtype)


# --- elements of any size -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", ONE_BYTE + COMPLEX)
def test_values_of_any_size_beside_twenty_bytes_of_state_come_back(tmp_path, name):
    torch.manual_seed(1)
    narrow = filled(getattr(torch, name), 200_000)
    wide = torch.randn(120_000)
    state = {f"state.{index}": torch.randn(120_000) for index in range(5)}
    entries = [
        engine.Entry(name="wide", values=wide, state=state, unit="one"),
        engine.Entry(name="narrow", values=narrow, state={}, unit="one", buffer=True),
        engine.Entry(name="after", values=torch.randn(7), state={}, unit="one", buffer=True),
    ]
    path = tmp_path / "store"
    engine.Store.create(path, entries).close()
    with engine.Store.open(path) as store:
        store.verify()
        for entry in entries:
            values, found = store.read(entry.name)
            assert values.dtype == entry.values.dtype
            assert same_bits(values, entry.values), entry.name
            assert all(torch.equal(found[of], tensor) for of, tensor in entry.state.items())


def test_chunks_are_those_of_before_where_they_end_with_pages():
    def chunk(*dtypes, numel=200_000, spill=None):
        state = {f"state.{index}": torch.empty(numel, device="meta") for index in range(5)}
        of = [torch.empty(numel, dtype=dtype, device="meta") for dtype in dtypes]
        return engine.chunk_elements_of(
            [engine.Entry(name=str(index), values=values, state=state, spill=spill) for index, values in enumerate(of)]
        )

    assert chunk(torch.float32) == chunk(torch.bfloat16, torch.complex64) == 51_200
    assert chunk(torch.float32, torch.bool) == chunk(torch.bfloat16, spill=torch.float8_e5m2) == 49_152
    # One chunk has none behind it.
    assert chunk(torch.bool, numel=51_200) == 51_200
    entry = engine.Entry(name="mask", values=torch.zeros(51_201, dtype=torch.bool), state={})
    with pytest.raises(ConfigError, match=r"ends inside a page.*multiple of 4096"):
        engine.sizes([entry], chunk_elements=51_200)


class Masked(nn.Module):
    """A weight with a mask and a table of rotations, which are persistent buffers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(400, 500))
        self.register_buffer("mask", torch.rand(400, 500) > 0.3)
        self.register_buffer("turns", torch.polar(torch.ones(500), torch.arange(500.0)))

    def forward(self, batch):
        return ((batch * self.turns).abs() @ (self.weight * self.mask).t()).square().mean()


def test_a_model_with_a_mask_trains_as_in_memory(tmp_path):
    def run(storage=None):
        torch.manual_seed(2)
        model = Masked()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if storage is not None:
            model, optimizer = memascend.offload(model, optimizer, storage=storage, host_memory="64MiB")
        losses = []
        for _ in range(3):
            loss = model(torch.randn(4, 500))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        if storage is not None:
            optimizer.close()
        return losses

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert run(tmp_path / "store") == run()
    finally:
        torch.set_num_threads(threads)
    with engine.Store.open(tmp_path / "store") as store:
        store.verify()
        torch.manual_seed(2)
        assert torch.equal(store.read("mask")[0], Masked().mask)


# --- copies -------------------------------------------------------------------------------


def test_a_damaged_label_is_named_by_verify_and_repaired_by_the_next_step(tmp_path, capsys):
    path = tmp_path / "store"
    values = torch.randn(100)
    engine.Store.create(path, [engine.Entry(name="weight", values=values, state={})]).close()
    with path.open("r+b") as file:
        file.write(b"\0" * 4096)
    assert cli.main(["store", "verify", str(path)]) == 1
    assert "the first label of" in capsys.readouterr().out
    assert cli.main(["store", "verify", "--json", str(path)]) == 1
    assert len(json.loads(capsys.readouterr().out)["damaged"]) == 1
    with engine.Store.open(path) as store:
        store.stage("weight", values + 1, step=1)
        store.commit(1)
    assert cli.main(["store", "verify", str(path)]) == 0
    with engine.Store.open(path) as store:
        assert store.damaged() == []
        assert torch.equal(store.read("weight")[0], values + 1)


# --- version 1 ----------------------------------------------------------------------------


def unpacked(folder, name):
    """A store that version 1 wrote: killed in the middle of its fourth step."""
    paths = []
    for packed in sorted(VERSION_1.glob(f"{name}?.store.xz")):
        path = folder / packed.name.removesuffix(".xz")
        path.write_bytes(lzma.decompress(packed.read_bytes()))
        paths.append(path)
    return paths


def digest(tensor):
    return hashlib.sha256(as_bytes(tensor).numpy().tobytes()).hexdigest()[:32]


# Two devices, durability "step"; one, with "close", of a boot that has gone.
@pytest.mark.parametrize("name", ["step", "close"])
def test_a_store_of_version_1_is_upgraded_and_trained_on(tmp_path, capsys, name):
    of = training()
    paths = unpacked(tmp_path, name)
    for attempt in (
        lambda: engine.Store.open(paths),
        lambda: of.offloaded(paths, existing="resume"),
        lambda: of.offloaded(paths, existing="refuse"),
    ):
        with pytest.raises((StorageError, ConfigError), match=r"memascend store upgrade|a store is there already"):
            attempt()
    assert cli.main(["store", "upgrade", *map(str, paths)]) == 0
    assert cli.main(["store", "upgrade", "--json", *map(str, paths)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == '{"upgraded": false}'

    # Bit for bit what version 1 read of it.
    wanted = json.loads((VERSION_1 / f"{name}.json").read_text())
    kept = {}
    with engine.Store.open(paths) as store:
        store.verify()
        assert store.damaged() == []
        assert store.step == wanted["step"] == of.STEPS
        assert {entry["name"] for entry in store.entries()} == set(wanted["entries"])
        for entry in store.entries():
            values, state = store.read(entry["name"])
            found = {"step": entry["step"], "values": digest(values), "compact": entry["compact"]}
            found |= {of_state: digest(tensor) for of_state, tensor in state.items()}
            assert found == wanted["entries"][entry["name"]], entry["name"]
            kept[entry["name"]] = (entry, values, state)
    assert any(entry["compact"] for entry, _, _ in kept.values())

    # Trained on, it is what a store of this version with the same state is.
    twins = [tmp_path / f"twin{index}" for index in range(len(paths))]
    for path, twin in zip(paths, twins, strict=True):
        shutil.copy(path, twin)
    losses = {}
    for storage in (paths, twins):
        layers, ours = of.offloaded(storage, existing="resume")
        with ours:
            losses[storage[0]] = of.train(layers, ours, range(of.STEPS, of.STEPS + 2))
    assert losses[paths[0]] == losses[twins[0]]

    # And what torch makes of the same master and moments in memory.
    layers = of.model()
    plain = of.optimizer(layers)
    masters = in_memory(layers, plain, kept, of.STEPS)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        in_ram = trained_in_memory(of, layers, plain, masters, range(of.STEPS, of.STEPS + 2))
    finally:
        torch.set_num_threads(threads)
    assert losses[paths[0]] == in_ram
    with engine.Store.open(paths) as store:
        assert store.step == of.STEPS + 2
        for parameter, tensor in layers.named_parameters():
            assert torch.equal(store.read(parameter)[0], tensor), parameter


def in_memory(layers, plain, kept, step):
    """A model and torch's optimizer with what a store kept; the float32 masters are what the optimizer owns."""
    masters = {}
    with torch.no_grad():
        for name, tensor in [*layers.named_parameters(), *layers.named_buffers()]:
            tensor.copy_(kept[name][1])
        for name in dict(layers.named_parameters()):
            whole = master_of(kept[name][1], kept[name][2])
            masters[name] = nn.Parameter(whole["master"].clone())
            plain.state[masters[name]] = {
                "step": torch.tensor(float(step)),
                "exp_avg": whole["exp_avg"].clone(),
                "exp_avg_sq": whole["exp_avg_sq"].clone(),
            }
    plain.param_groups[0]["params"] = list(masters.values())
    plain.param_groups[0]["fused"] = True
    return masters


def trained_in_memory(of, layers, plain, masters, steps):
    losses = []
    for step in steps:
        loss = of.loss_of(layers, step)
        loss.backward()
        for name, tensor in layers.named_parameters():
            masters[name].grad = tensor.grad.float()
            tensor.grad = None
        plain.step()
        with torch.no_grad():
            for name, tensor in layers.named_parameters():
                tensor.copy_(masters[name])
        losses.append(loss.item())
    return losses


def test_a_store_of_version_1_whose_chunks_lie_over_each_other_is_refused_by_name(tmp_path, capsys):
    (path,) = unpacked(tmp_path, "narrow")
    before = path.read_bytes()
    assert cli.main(["store", "upgrade", str(path)]) == 1
    said = capsys.readouterr().err
    assert 'a chunk of 2048 elements of "mask" ends inside a page' in said
    assert "begin from a checkpoint" in said
    assert path.read_bytes() == before


def test_what_was_damaged_before_an_upgrade_is_told_by_it(tmp_path, capsys):
    # Not the one of durability "close": what another boot left unflushed is verified before it is upgraded at all.
    paths = unpacked(tmp_path, "step")
    with paths[0].open("r+b") as file:
        file.seek(1_376_256)  # values of small entries, and the first state
        file.write(b"\xff" * 65_536)
    assert cli.main(["store", "upgrade", *map(str, paths)]) == 1
    said = capsys.readouterr()
    assert "the store has version 2 of the format now" in said.out
    assert "is damaged" in said.err
