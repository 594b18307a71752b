"""Tests existing="previous", which opens the commit before the newest, and `memascend store` on both commits."""

import json

import pytest
import torch
from parity.harness import adamw
from parity.zoo_plain import Stack
from support.chains import everything

import memascend
from memascend import ConfigError, CorruptionError, StorageError, engine
from memascend.cli import main

ROOTS = (4096, 8192)
SECTORS = (0, 4096 - 512)

# The command line's advice on how to return to the commit before the newest.
PREVIOUS = '`memascend train ... --existing previous`, or existing="previous" of offload(),'


class Noted(Stack):
    """A stack with a buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, *inputs):
        self.seen += 1
        return super().forward(*inputs)


def trained(offloaded, steps, **options):
    """Trains and closes a run. Returns a list with the `picture` of the run after each step."""
    model = Noted()
    # With host_memory=None, the run keeps no record in RAM. Otherwise close() would write the records of the RAM tier
    # in one more commit, and the commit before the newest would be a commit of the same step.
    training = offloaded(model, adamw(model), **{"host_memory": None, **options})
    pictures = []
    for index in range(steps):
        training.optimizer.param_groups[0]["lr"] = 0.01 * (index + 1)
        training.optimizer.user_state = {"index": index}
        training.step(index)
        pictures.append(picture(training))
    training.optimizer.close()
    return pictures


def picture(training):
    """Returns the step, learning rate, user state and all values of a run, for comparison."""
    optimizer = training.optimizer
    values = {name: value.tolist() for name, value in everything(training.model, optimizer).items()}
    return optimizer.steps, optimizer.param_groups[0]["lr"], optimizer.user_state, values


def again(offloaded, existing, lr=None, **options):
    """Offloads a new model to the store of the run. The learning rate in the store replaces `lr`."""
    model = Noted()
    optimizer = adamw(model)
    if lr is not None:
        optimizer.param_groups[0]["lr"] = lr
    return offloaded(model, optimizer, existing=existing, **options)


def damage_newest_root(path):
    """Damages both copies of the store's newest root."""
    with engine.look(path) as store:
        slot = store.info()["generation"] & 1
    flip(path, *(ROOTS[slot] + sector + 40 for sector in SECTORS))


def flip(path, *places):
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 8]))


@pytest.mark.parametrize("damaged", [True, False])
def test_run_resumes_from_the_previous_commit_with_the_same_bits(offloaded, tmp_path, damaged):
    path = tmp_path / "run.store"
    pictures = trained(offloaded, 4)
    if damaged:
        damage_newest_root(path)
        with pytest.raises(CorruptionError, match='step 3, is whole: existing="previous"') as error:
            again(offloaded, "resume")
        assert error.value.offset in ROOTS
    training = again(offloaded, "previous", lr=0.03)
    assert picture(training) == pictures[2]
    # Repeating the step gives the same bits.
    training.optimizer.param_groups[0]["lr"] = 0.04
    training.optimizer.user_state = {"index": 3}
    training.step(3)
    assert picture(training) == pictures[3]
    training.optimizer.close()
    assert picture(again(offloaded, "resume", lr=0.04)) == pictures[3]


@pytest.mark.parametrize(
    ("user", "hyperparameters"),
    [
        ("[" * 60_000, None),
        (None, "nothing"),
        (None, '{"groups": [1]}'),
        (None, '{"groups": [], "attributes": 5}'),
    ],
    ids=lambda text: str(text)[:30],
)
def test_invalid_contents_with_a_right_checksum_raise_corruption_error(offloaded, tmp_path, user, hyperparameters):
    path = tmp_path / "run.store"
    pictures = trained(offloaded, 2)
    with engine.Store.open(path) as store:
        store.commit_as(3, user, hyperparameters, None, None)
    before = path.read_bytes()
    with pytest.raises(CorruptionError, match="The checksum is right, so another program wrote these contents"):
        again(offloaded, "resume")
    assert path.read_bytes() == before
    assert picture(again(offloaded, "previous", lr=0.02)) == pictures[1]


def test_existing_previous_rejects_a_store_without_previous_commit(offloaded, tmp_path, unchanged):
    model = Stack()
    optimizer = adamw(model)
    check = unchanged(model, optimizer, tmp_path / "run.store")
    with pytest.raises(StorageError, match="there is no store"):
        memascend.offload(model, optimizer, storage=tmp_path / "run.store", existing="previous")
    with pytest.raises(ConfigError, match="existing='previous' needs storage="):
        memascend.offload(model, optimizer, existing="previous")
    check()
    assert not (tmp_path / "run.store").exists()
    trained(offloaded, 0)
    with pytest.raises(ConfigError, match="one commit and none before it"):
        again(offloaded, "previous")
    with pytest.raises(ConfigError, match="'resume' or 'previous'"):
        engine.Store.open(tmp_path / "run.store", existing="replace")


def test_existing_previous_with_another_model_changes_no_byte(offloaded, tmp_path):
    trained(offloaded, 2)
    before = (tmp_path / "run.store").read_bytes()
    model = Stack(depth=3)
    with pytest.raises(ConfigError, match="does not fit"):
        memascend.offload(model, adamw(model), storage=tmp_path / "run.store", existing="previous")
    assert (tmp_path / "run.store").read_bytes() == before
    # offload() compares the number of groups only after it has read the options of the previous commit.
    model = Noted()
    decayed, others = list(model.parameters())[::2], list(model.parameters())[1::2]
    two_groups = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01)
    with pytest.raises(ConfigError, match="1 parameter groups, but the optimizer has 2"):
        memascend.offload(model, two_groups, storage=tmp_path / "run.store", existing="previous")
    assert (tmp_path / "run.store").read_bytes() == before


# --- memascend store ------------------------------------------------------------------------


def verified(path, capsys):
    """Runs `memascend store verify` without and with `--json`, and requires that the file does not change.

    Returns the exit status, the output, the errors of both calls, and the output of `--json`.
    """
    before = path.read_bytes()
    status = main(["store", "verify", "--json", str(path)])
    assert main(["store", "verify", str(path)]) == status
    assert path.read_bytes() == before
    output = capsys.readouterr()
    found, text = output.out.split("\n", 1)
    return status, text, output.err, json.loads(found)


def test_verify_and_info_report_both_commits(offloaded, tmp_path, capsys):
    path = tmp_path / "run.store"
    trained(offloaded, 3)
    status, text, wrong, found = verified(path, capsys)
    assert (status, wrong) == (0, "")
    assert "step 3 is whole" in text
    assert f"step 2, generation 3 is older, and is whole, too: {PREVIOUS} goes back" in text
    assert [(commit["step"], commit["whole"]) for commit in found["commits"]] == [(3, True), (2, True)]
    assert main(["store", "info", str(path)]) == 0
    assert "step 3 of AdamW" in capsys.readouterr().out

    damage_newest_root(path)
    status, text, wrong, found = verified(path, capsys)
    assert status == 1
    assert "the root is damaged at offset" in wrong
    assert f"step 2, generation 3 is whole: {PREVIOUS} opens this commit" in text
    assert [(commit["step"], commit["whole"]) for commit in found["commits"]] == [(None, False), (2, True)]
    before = path.read_bytes()
    assert main(["store", "info", str(path)]) == 1
    output = capsys.readouterr()
    assert "the root is damaged" in output.err
    assert "cannot be opened as it is" in output.out
    assert "step 2 of AdamW" in output.out
    assert main(["store", "info", "--json", str(path)]) == 1
    assert json.loads(capsys.readouterr().out)["step"] == 2
    assert path.read_bytes() == before

    again(offloaded, "previous", lr=0.02).optimizer.close()
    status, _, wrong, found = verified(path, capsys)
    assert (status, wrong) == (0, "")
    assert [(commit["step"], commit["whole"]) for commit in found["commits"]] == [(2, True)]


def test_verify_names_the_offset_of_a_damaged_extent(offloaded, tmp_path, capsys):
    path = tmp_path / "run.store"
    trained(offloaded, 1)
    with engine.Store.open(path) as store:
        values = store.read(store.records()[0]["name"])[0]
    raw = path.read_bytes()
    at = raw.find(values.contiguous().view(torch.uint8).numpy().tobytes())
    assert at > 0
    flip(path, at + 3)
    status, text, wrong, found = verified(path, capsys)
    assert status == 1
    assert f"is damaged at offset {at}" in wrong
    assert "store verify" not in wrong + str(found)
    # Both commits share the extents that the last step did not change. The damaged extent is not shared.
    assert f"step 0, generation 1 is whole: {PREVIOUS} opens this commit" in text
    assert len(found["commits"][0]["damages"]) == 1
    assert found["commits"][0]["extents"] == found["commits"][1]["extents"] - 1
    flip(path, *(root + sector + 40 for root in ROOTS for sector in SECTORS))
    assert main(["store", "verify", str(path)]) == 1
    assert "the root is damaged" in capsys.readouterr().err


def test_verify_accepts_a_store_closed_in_the_middle_of_a_step(offloaded, tmp_path, capsys):
    path = tmp_path / "run.store"
    model = Noted()
    # The budget keeps no record in RAM, so the backward writes to the store.
    training = offloaded(model, adamw(model), gradients="fused", steps=2, host_memory=None)
    training.loss(3).backward()
    training.optimizer.close()
    status, text, wrong, _ = verified(path, capsys)
    assert (status, wrong) == (0, "")
    assert "step 2 is whole" in text
    assert "this is normal once the next step has begun" in text
