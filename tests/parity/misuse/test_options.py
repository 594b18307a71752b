"""Tests options, models, optimizers and storage that offload() rejects; a rejected call changes nothing."""

import functools
import re
import tempfile
from pathlib import Path

import pytest
import torch
from parity.harness import adamw
from parity.zoo_plain import Stack
from torch import nn

import memascend
from memascend import BudgetError, ConfigError, StorageError, UsageError

# Each value is wrong, so offload() must raise and change nothing. tests/plan/test_options.py tests all values that
# `Options` rejects.
OPTIONS = {
    "gradients": "sometimes",
    "host_memory": 1,
    "device": "cuda",
    "units": ["blocks.0", "no.such.module"],
    "weights": "/no/such/weights.safetensors",
    "checkpoint": "/no/such/checkpoint",
}


def refused(tmp_path, unchanged, model, optimizer, **options):
    storage = options.setdefault("storage", tmp_path / "run.store")
    check = unchanged(model, optimizer)
    with pytest.raises((BudgetError, ConfigError)) as error:
        memascend.offload(model, optimizer, **options)
    check()
    assert not storage.exists()
    return str(error.value)


@pytest.mark.parametrize("option", OPTIONS)
def test_offload_error_names_the_invalid_option(tmp_path, unchanged, option):
    model = Stack()
    assert option in refused(tmp_path, unchanged, model, adamw(model), **{option: OPTIONS[option]})


class AdamW8bit(torch.optim.AdamW):
    __module__ = "bitsandbytes.optim.adamw"


NO_BITSANDBYTES = r'^AdamW8bit of bitsandbytes is rejected.*state="8bit"'
# For each case: the model, the optimizer, further options of offload(), and a regular expression that the error
# matches.
REFUSED = {
    "bitsandbytes": (Stack, lambda model: AdamW8bit(model.parameters()), {}, NO_BITSANDBYTES),
    "bitsandbytes in 8 bits": (Stack, lambda model: AdamW8bit(model.parameters()), {"state": "8bit"}, NO_BITSANDBYTES),
    "nobody updates some": (Stack, lambda model: torch.optim.AdamW(model.blocks.parameters()), {}, r"embed\.weight"),
    "some of another model": (
        Stack, lambda model: torch.optim.AdamW([*model.parameters(), *nn.Linear(3, 3).parameters()]), {}, "not .*model"
    ),
    "all of another model": (Stack, lambda _: adamw(nn.Linear(3, 3)), {}, "not .*model"),
    "no parameters": (lambda: nn.Sequential(nn.ReLU()), lambda _: adamw(nn.Linear(3, 3)), {}, "no parameters"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "optimizer", "options", "says"), REFUSED.values(), ids=REFUSED)
def test_offload_rejects_an_optimizer_that_does_not_fit_the_model(tmp_path, unchanged, make, optimizer, options, says):
    model = make()
    assert re.search(says, refused(tmp_path, unchanged, model, optimizer(model), **options))


def test_offload_rejects_objects_other_than_a_model_and_an_optimizer(tmp_path):
    model = Stack()
    for arguments in ((model.embed.weight, adamw(model)), (model, list(model.parameters())), (model, None)):
        with pytest.raises(ConfigError):
            memascend.offload(*arguments, storage=tmp_path / "run.store")
    assert not (tmp_path / "run.store").exists()


def test_offload_rejects_an_already_offloaded_model_or_optimizer(offloaded, tmp_path):
    training = offloaded(steps=1)
    for model, optimizer in (
        (training.model, training.optimizer),
        (training.model, adamw(training.model)),
        (training.model.blocks[0], adamw(training.model.blocks[0])),
        (Stack(), training.optimizer),
    ):
        with pytest.raises(ConfigError):
            memascend.offload(model, optimizer, storage=tmp_path / "second.store")
    assert not (tmp_path / "second.store").exists()
    training.step(1)
    assert training.optimizer.steps == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"])
def test_multi_device_wrappers_are_rejected_and_fully_shard_is_named(tmp_path, unchanged, offloaded, kind):
    """offload() rejects a wrapped model, and wrapping an offloaded model raises. The errors name fully_shard."""
    wrap = {
        "DataParallel": nn.DataParallel,
        "DistributedDataParallel": nn.parallel.DistributedDataParallel,
        "FullyShardedDataParallel": functools.partial(
            torch.distributed.fsdp.FullyShardedDataParallel, device_id=torch.device("cpu")
        ),
    }[kind]
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = wrap(Stack())
        output = refused(tmp_path, unchanged, wrapped, adamw(wrapped))
        assert kind in output
        assert "fully_shard" in output
        training = offloaded()
        with pytest.raises(UsageError, match=f"^{kind} .*fully_shard"):
            wrap(training.model)
    finally:
        torch.distributed.destroy_process_group()


# --- storage --------------------------------------------------------------------


def test_offload_rejects_storage_in_a_memory_file_system():
    model = Stack()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        pytest.raises((ConfigError, StorageError), match="file system in memory"),
    ):
        memascend.offload(model, adamw(model), storage=Path(folder, "run.store"))


@pytest.mark.parametrize("existing", ["refuse", "replace", "resume"])
def test_offload_rejects_and_keeps_a_file_that_is_not_a_store(tmp_path, unchanged, existing):
    model, storage = Stack(), tmp_path / "letters.txt"
    storage.write_bytes(b"do not lose this\n" * 1000)
    optimizer = adamw(model)
    check = unchanged(model, optimizer, storage)
    with pytest.raises(StorageError, match="wipefs" if existing == "replace" else "letters.txt"):
        memascend.offload(model, optimizer, storage=storage, existing=existing)
    check()


def test_existing_store_is_rejected_without_existing_resume_or_replace(offloaded):
    offloaded(steps=2).optimizer.close()
    with pytest.raises(ConfigError, match="existing="):
        offloaded()
    again = offloaded(existing="resume").optimizer
    assert again.steps == 2
    again.close()
    assert offloaded(existing="replace").optimizer.steps == 0


def test_resume_error_names_how_the_store_and_the_model_differ(offloaded, tmp_path, unchanged):
    """The error names some of the records, shapes and dtypes that differ, and counts the remaining differences."""
    offloaded(steps=1).optimizer.close()
    there = Stack()

    def output(model, kind=adamw):
        optimizer = kind(model)
        check = unchanged(model, optimizer, tmp_path / "run.store")
        with pytest.raises(ConfigError, match=r"run\.store does not fit: .*; nothing was changed") as error:
            memascend.offload(model, optimizer, storage=tmp_path / "run.store", existing="resume")
        check()
        return str(error.value)

    model = Stack(depth=5)
    names = [name for name, _ in model.named_parameters()]
    new = [name for name in names if name not in dict(there.named_parameters())]
    words = output(model)
    assert f'it is missing {len(new)} records: "{new[0]}", "{new[1]}", "{new[2]}" and {len(new) - 3} more' in words
    assert names[0] not in words
    assert re.search(r'it has \d+ records: "blocks\.2\..*" and \d+ more, which the model', output(Stack(depth=2)))
    model = Stack()
    model.head = nn.Linear(model.head.in_features, 2 * model.head.out_features)
    assert re.search(r'the shape of "head.weight" is \[\d+, \d+\] in the store, but this run needs', output(model))
    words = output(Stack().bfloat16())
    assert 'the dtype of "' in words
    assert "more records differ" in words
    assert len(words) < 1000
    assert "AdamW" in output(Stack(), lambda model: torch.optim.SGD(model.parameters()))
    assert offloaded(existing="resume").optimizer.steps == 1
