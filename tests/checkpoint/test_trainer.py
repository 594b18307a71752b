"""Tests checkpoints of a Trainer: it resumes bit for bit, and rejects a checkpoint that does not fit the store."""

import json
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers
from parity.reference import Reference, threads_of_torch
from support import trained_program
from support.bits import same_states
from support.chains import offloaded
from support.chains import values as weights
from support.trained_program import Ended, compared, rows
from transformers import Trainer, TrainerCallback, TrainingArguments

import memascend
from memascend.errors import ConfigError, UsageError
from memascend.session.report import Report
from memascend.trainer import Callback
from memascend.trainer.reference import offload_both

STEPS = 6
FIGURES = {"host_memory_bytes", "read_bytes", "written_bytes", "waiting_seconds"}

# These tests allow warnings of libraries. They also allow memascend's warning that a resumed run keeps its stored
# options.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("quiet")]


class EndsWithin(TrainerCallback):
    """Ends the training within its fifth step."""

    def on_substep_end(self, args, state, control, **others):  # noqa: ARG002
        if state.global_step == 4:
            raise Ended


def built(seed=0):
    """Returns a bfloat16 model with dropout, and its optimizer. With dropout, losses depend on the random numbers."""
    model = trained_program.model(seed).bfloat16()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def trainer(model, optimizer, output, *callbacks, **more):
    """Makes a Trainer with the default clipping of gradients and with two micro-batches per step."""
    options = {"gradient_accumulation_steps": 2, "logging_steps": 1, "save_steps": 2, "save_total_limit": 2}
    options |= {"max_steps": STEPS, "eval_steps": 3, **more}
    return trained_program.made(output, *callbacks, own=model, optimizers=(optimizer, None), **options)


def message(trained):
    """Returns the log lines that have a loss, after removing their times and storage figures."""
    return [compared(entry) for entry in trained.state.log_history if "loss" in entry or "eval_loss" in entry]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Trains in memory with `Reference`, without interruption; returns the log and the weights."""
    with threads_of_torch(1):
        model, optimizer = built()
        run = trainer(model, Reference(optimizer), tmp_path_factory.mktemp("undisturbed"), save_strategy="no")
        run.train()
    assert len(message(run)) == STEPS + 2
    return message(run), weights(model)


def begun(tmp_path, *, existing="refuse", checkpoint=None, seed=0):
    model, optimizer = built(seed)
    return memascend.offload(
        model, optimizer, storage=tmp_path / "store", existing=existing, checkpoint=checkpoint, host_memory="64MiB"
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """Ends a training within its fifth step; returns the training's folder, which has a checkpoint of step 4."""
    folder = tmp_path_factory.mktemp("first")
    with threads_of_torch(1):
        model, optimizer = begun(folder)
        with optimizer:
            run = trainer(model, optimizer, folder / "trained", Callback(), EndsWithin())
            with pytest.raises(Ended):
                run.train()
    return folder


@pytest.fixture
def ended(first, tmp_path):
    """Copies the folder of `first`; returns the Trainer's output folder in the copy."""
    shutil.copytree(first, tmp_path, dirs_exist_ok=True)
    return tmp_path / "trained"


@pytest.mark.parametrize("existing", ["replace", "resume"])
def test_trainer_resumed_from_a_checkpoint_equals_uninterrupted_training(
    tmp_path, monkeypatch, caplog, ended, undisturbed, existing
):
    output = ended
    # Pretends that training waited for the drive half of the time. The log must report this wait exactly once.
    monkeypatch.setattr(Report, "waited", 0.5)
    # memascend writes the weights of a checkpoint. The Trainer must not call the model's `save_pretrained()`, which
    # would write the weights a second time.
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", lambda *_, **__: pytest.fail("saved twice"))
    last = output / "checkpoint-4"
    model, optimizer = begun(tmp_path, existing=existing, checkpoint=last, seed=9)
    with optimizer:
        assert optimizer.steps == 4
        run = trainer(model, optimizer, output, Callback())
        run.train(resume_from_checkpoint=True)
        assert (message(run), optimizer.steps) == (undisturbed[0], STEPS)
        assert same_states(weights(model), undisturbed[1])
        for entry in run.state.log_history:
            assert ("loss" in entry) == FIGURES.issubset(entry)
            if "loss" in entry:
                assert 0 < entry["host_memory_bytes"] <= 64 << 20
                # All records are kept in RAM, so a step may read 0 bytes from the drive.
                assert entry["read_bytes"] >= 0 < entry["written_bytes"]
                assert entry["waiting_seconds"] >= 0
        assert caplog.text.count("The drive bounds this run: training waited for it 50% of the time") == 1
        assert "save_pretrained" not in vars(model)
    with memascend.engine.Store.open(tmp_path / "store") as store:
        # The commit of the last step contains the scheduler's state, and the learning rate that the scheduler set after
        # this step.
        (scheduled,) = store.hyperparameters["schedule"]["schedulers"]
        assert (scheduled["scheduler"], scheduled["state"]["last_epoch"]) == ("LambdaLR", STEPS)
        assert store.hyperparameters["groups"][0]["lr"] == scheduled["state"]["_last_lr"][0] == 0.0
    # `save_total_limit` keeps the last two checkpoints. transformers loads the newest checkpoint, whose files are
    # complete.
    assert sorted(os.listdir(output)) == ["checkpoint-4", "checkpoint-6"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(output / "checkpoint-6")
    assert same_states(weights(loaded), undisturbed[1])
    files = set(os.listdir(output / "checkpoint-6"))
    assert {"memascend", "config.json", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= files


def test_store_started_from_a_checkpoint_resumes_from_that_checkpoint(tmp_path, ended, undisturbed):
    model, optimizer = begun(tmp_path, existing="replace", checkpoint=ended / "checkpoint-4")
    optimizer.close()
    # The store is at the step of the checkpoint, but the store's id differs from the id in the checkpoint.
    model, optimizer = begun(tmp_path, existing="resume", seed=9)
    with optimizer:
        run = trainer(model, optimizer, ended, Callback())
        run.train(resume_from_checkpoint=str(ended / "checkpoint-4"))
        assert message(run) == undisturbed[0]
        before = weights(model)
        with pytest.raises(UsageError, match=r"weights that differ .* belong to step 6 of"):
            run.train(resume_from_checkpoint=str(ended / "checkpoint-4"))
        assert same_states(weights(model), before)
        other = trainer(model, optimizer, tmp_path / "other", Callback(), max_steps=1, save_strategy="no")
        # Between two trainings, the program itself may call load_state_dict(). memascend does not treat these calls as
        # a resume.
        model.load_state_dict({name: values + 1 for name, values in before.items()}, strict=False)
        model.load_state_dict(before, strict=False)
        other.train()
        assert optimizer.steps == 7
    model, optimizer = begun(tmp_path, existing="resume", seed=9)
    with optimizer:
        state = torch.load(ended / "checkpoint-4" / "optimizer.pt", weights_only=True)
        with pytest.raises(UsageError, match=r"of step 4 of store .* the storage has step 7 of store"):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("callbacks", [(), (Callback,)])
def test_checkpoint_older_than_the_store_is_rejected(tmp_path, ended, callbacks):
    model, optimizer = begun(tmp_path, existing="resume")
    with optimizer:
        for row in rows(2):
            model(**{name: torch.tensor([tokens]) for name, tokens in row.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.steps == 5
        before = weights(model)
        run = trainer(model, optimizer, ended, *(callback() for callback in callbacks))
        says = (
            r"weights that differ .* belong to step 5 of"
            if callbacks
            else r"is of step 4 of .* the storage has step 5 of"
        )
        with pytest.raises(UsageError, match=rf"{says}.*checkpoint="):
            run.train(resume_from_checkpoint=str(ended / "checkpoint-4"))
        assert optimizer.steps == 5
        # With the callback, the rejected checkpoint changes no weights. Without the callback, memascend cannot know
        # that the Trainer loads the weights from a checkpoint, so the weights change before the error.
        assert same_states(weights(model), before) == bool(callbacks)


class Plain(torch.nn.Module):
    """A module that is not a model of transformers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(8, 16)
        self.outer = torch.nn.Linear(16, 4)

    def forward(self, x, labels=None):
        out = self.outer(torch.relu(self.inner(x)))
        return {"loss": (out - labels).square().mean(), "logits": out}


def vectors(count):
    return [{"x": torch.randn(8), "labels": torch.randn(4)} for _ in range(count)]


def adapted():
    """Returns a model with adapters. Checkpoints of this model have the files of peft and the files of memascend."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(built()[0], peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))


# Maps a kind to three items: a function that makes the model; the Trainer's options for the data; the name of the
# weights file in a checkpoint.
KINDS = {
    "plain": (Plain, {"data": vectors(64), "collate": transformers.default_data_collator}, "model.safetensors"),
    "adapters": (adapted, {}, "adapter_model.safetensors"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_plain_and_adapter_models_resume_from_a_checkpoint(tmp_path, kind):
    make, data, file = KINDS[kind]

    def run(output, checkpoint=None, **more):
        model = make()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = memascend.offload(model, torch.optim.AdamW(trained, lr=1e-2), checkpoint=checkpoint)
        with optimizer:
            run = trainer(model, optimizer, output, Callback(), max_steps=4, eval_strategy="no", **data, **more)
            run.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
            return weights(model)

    whole, folder = run(tmp_path / "whole"), tmp_path / "whole/checkpoint-2"
    assert (folder / file).is_file()
    assert json.loads((folder / "memascend/manifest.json").read_text())["step"] == 2
    assert same_states(run(tmp_path / "rest", folder), whole)
    run(tmp_path / "only", save_only_model=True)
    assert not list((tmp_path / "only").rglob("manifest.json"))


def test_callback_rejects_an_optimizer_that_is_not_offloaded(tmp_path):
    model, optimizer = built()
    with pytest.raises(ConfigError, match="optimizer is not offloaded"):
        trainer(model, optimizer, tmp_path, Callback())


def test_a_reference_model_takes_a_part_of_the_budget(tmp_path):
    (model, optimizer), (other, _) = built(), built()
    both = SimpleNamespace(model=model, optimizer=optimizer, ref_model=other, is_fsdp_enabled=False)
    with offload_both(both, {"storage": str(tmp_path / "store"), "host_memory": "128MiB"}) as optimizer:
        reference = other.__dict__["_memascend"]
        assert optimizer.plan.budget + reference.plan.budget == 128 << 20
        reference.close()


class ByFunctions(torch.optim.lr_scheduler.LambdaLR):
    """A scheduler whose state contains a function. A commit cannot store functions."""

    def state_dict(self):
        return {**super().state_dict(), "rule": max}


SCHEDULERS = {
    "metric": torch.optim.lr_scheduler.ReduceLROnPlateau,
    "functions": lambda optimizer: ByFunctions(optimizer, lambda step: 1 / (step + 1)),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_scheduler_that_cannot_be_committed_is_left_to_the_trainer(tmp_path, kind, caplog):
    model, optimizer = offloaded(tmp_path / "store", Plain(), torch.optim.SGD, 0.5)
    settings = {"max_steps": 2, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    output = TrainingArguments(str(tmp_path / "out"), **settings)
    optimizers = optimizer, SCHEDULERS[kind](optimizer)
    caplog.set_level("INFO", "memascend")
    with optimizer:
        Trainer(model, output, train_dataset=vectors(16), callbacks=[Callback()], optimizers=optimizers).train()
        assert optimizer.steps == 2
    assert ("'rule' in the state of ByFunctions" in caplog.text) == (kind == "functions")
    with memascend.engine.Store.open(tmp_path / "store") as store:
        assert "schedule" not in store.hyperparameters
        # close() commits the final learning rate. Only the scheduler of "functions" has changed the learning rate.
        assert store.hyperparameters["groups"][0]["lr"] == (0.5 if kind == "metric" else 0.5 / 3)
