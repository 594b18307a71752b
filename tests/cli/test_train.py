"""Tests `memascend train`: the bits of a plain loop, whatever kills it, and no run that goes on as another."""

import json
import random
import shutil
import signal
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.bits import same_states  # noqa: E402
from support.small_folder import make_model, write_rows  # noqa: E402
from support.train_command import events, run_until  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP  # noqa: E402

from memascend.cli import main  # noqa: E402
from memascend.cli.train.data import seed_of  # noqa: E402
from memascend.cli.train.loop import JsonLines, Loop  # noqa: E402

# What a process begins with is loaded within a minute or two where ten others want the processors.
pytestmark = pytest.mark.timeout(900)

ANSWERS = ["yes", "no, it is not", "the model learns", "It is a test.", "no"]
ROWS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": ANSWERS[number % 5]},
        ]
    }
    for number in range(10)
]
LR = 1e-3


@pytest.fixture(autouse=True)
def _one_thread():
    """Sums have one order; the reference's too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of both dtypes, and rows."""
    folder = tmp_path_factory.mktemp("folders")
    for name in ("float32", "bfloat16"):
        make_model(folder / name, getattr(torch, name))
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "eval.jsonl", ROWS[:3])
    return folder


def arguments(folders, place, *more, dtype="float32"):
    """A command: 3 steps of an epoch, the last with half a batch."""
    return [
        "--model", str(folders / dtype), "--data", str(folders / "rows.jsonl"), "--output", str(place / "out"),
        "--storage", str(place / "store"), "--host-memory", "32MiB", "--device", "cpu", "--batch", "2",
        "--accumulate", "2", "--lr", str(LR), "--warmup", "0", "--schedule", "constant", "--max-length", "64",
        "--epochs", "2", "--json", *map(str, more),
    ]  # fmt: skip


def ran(capfd, *command, status=0):
    """The command's JSON lines, and what it said beside."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # Of libraries, when they are imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        assert main(["train", *command]) == status
    out, err = capfd.readouterr()
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


def weights_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def plain_loop(folder, steps):
    """The same training in memory, by hand: losses, and weights."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.train()
    # 16-bit values are updated as fp32 copies.
    masters = [parameter.detach().float().clone() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=0.0, fused=True)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed_of(0, "order", step // 3))
        order = torch.randperm(10, generator=generator)[4 * (step % 3) :][:4].tolist()
        pairs = [one_batch(tokenizer, [ROWS[row] for row in order[at : at + 2]]) for at in range(0, len(order), 2)]
        count = sum(int((labels[:, 1:] >= 0).sum()) for *_, labels in pairs)
        total = 0.0
        for number, (ids, mask, labels) in enumerate(pairs):
            torch.manual_seed(seed_of(0, f"step {step}", number))
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss = loss * (int((labels[:, 1:] >= 0).sum()) / count)
            loss.backward()
            total += loss.item()
        losses.append(total)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            master.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.copy_(master)
        model.zero_grad()
    return losses, model.state_dict()


def one_batch(tokenizer, rows):
    """What ChatML makes of question and answer, piece by piece, padded at its end."""
    made = []
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        before = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
        learnt = tokenizer(f"{answer}<|im_end|>")["input_ids"]
        after = tokenizer("\n")["input_ids"]
        made.append((before + learnt + after, [-100] * len(before) + learnt + [-100] * len(after)))
    length = max(len(ids) for ids, _ in made)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in made])
    mask = torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in made])
    labels = torch.tensor([labels + [-100] * (length - len(labels)) for _, labels in made])
    return ids, mask, labels


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_has_the_bits_of_a_plain_loop(folders, tmp_path, capfd, dtype):
    lines, err = ran(capfd, *arguments(folders, tmp_path, "--max-grad-norm", 0, dtype=dtype))
    losses, weights = plain_loop(folders / dtype, 6)
    steps = [line for line in lines if line["event"] == "step"]
    assert [step["loss"] for step in steps] == losses
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step["grad_norm"] > 0 and step["written_bytes"] > 0 and step["tokens"] > 0 for step in steps)
    assert same_states(weights_of(tmp_path / "out"), weights)
    assert lines[-1]["event"] == "save"
    assert "6 of 2 x 2 examples" in err
    # Beside the weights is all that a tokenizer and a chat need.
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template
    assert len(tokenizer) == len(transformers.AutoTokenizer.from_pretrained(folders / dtype))
    # It is finished, and says so, with or without its storage.
    (tmp_path / "store").unlink()
    ran(capfd, *arguments(folders, tmp_path, "--max-grad-norm", 0, dtype=dtype))


@pytest.mark.parametrize("moment", ["before", "forward", "step", "between", "save"])
def test_ctrl_c_and_the_same_command(folders, tmp_path, capfd, monkeypatch, moment):
    """Stopped in its fourth step, it ends as a run that nobody stopped."""
    command = arguments(folders, tmp_path, "--save-every", 4, "--eval", folders / "eval.jsonl")
    places = {"before": "of_step", "forward": "_loss", "step": "_step", "between": "_tell", "save": "_save_where_due"}
    stops = {"before": 4, "forward": 7, "step": 4, "between": 4, "save": 4}
    owner = "memascend.cli.train.data.Batches" if moment == "before" else "memascend.cli.train.loop.Loop"
    own = getattr(Loop, places[moment], None)
    if moment == "before":
        from memascend.cli.train.data import Batches

        own = Batches.of_step
    calls = []

    def stopped(*arguments):
        calls.append(1)
        if moment == "step" and len(calls) == stops[moment]:
            # Committed, and nobody told of it.
            own(*arguments)
        if len(calls) == stops[moment]:
            raise KeyboardInterrupt
        return own(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(f"{owner}.{places[moment]}", stopped)
        first, err = ran(capfd, *command, status=130)
    done = 4 if moment in ("step", "between", "save") else 3
    assert f"step {done} of 6 is on storage: run the same command to resume" in err
    second, err = ran(capfd, *command)
    assert f"resumes after step {done}" in err
    whole, _ = ran(capfd, *arguments(folders, tmp_path / "whole", "--save-every", 4, "--eval", folders / "eval.jsonl"))
    joined = {line["step"]: line["loss"] for line in first + second if line["event"] == "step"}
    expected = {line["step"]: line["loss"] for line in whole if line["event"] == "step"}
    assert joined == {step: loss for step, loss in expected.items() if moment not in ("step", "between") or step != 4}
    for name in ("eval", "save"):
        assert [line["step"] for line in first + second if line["event"] == name] == [4, 6]
    losses = [[line["eval_loss"] for line in lines if line["event"] == "eval"] for lines in (first + second, whole)]
    assert losses[0] == losses[1]
    assert same_states(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole/out"))


@pytest.mark.parametrize("kills", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_kills_change_nothing(folders, tmp_path, monkeypatch, kills):
    more = ["--epochs", 3 * kills, "--save-every", 2, "--eval", folders / "eval.jsonl"]
    calm, log = tmp_path / "calm.log", tmp_path / "killed.log"
    assert run_until(monkeypatch, arguments(folders, tmp_path / "calm", *more), calm) == 0
    generator = random.Random(kills)
    killed = 0
    command = arguments(folders, tmp_path / "killed", *more)
    for _ in range(kills):
        killed += run_until(monkeypatch, command, log, generator.uniform(0, 0.3)) == -signal.SIGKILL
        if (tmp_path / "killed/out/config.json").exists():
            weights_of(tmp_path / "killed/out")
    assert killed
    assert run_until(monkeypatch, command, log) == 0
    expected = events(calm)
    assert len(expected) == 9 * kills
    # A step that was committed and not told of before the kill is not told of again.
    assert events(log).items() <= expected.items()
    assert len(events(log)) >= len(expected) - killed
    assert events(log, "eval") == events(calm, "eval")
    assert same_states(weights_of(tmp_path / "killed/out"), weights_of(tmp_path / "calm/out"))


def test_a_kill_while_the_store_is_written(folders, tmp_path, monkeypatch):
    """What is there is no store yet, and belongs to nobody: the same command begins again."""
    command, log = arguments(folders, tmp_path, "--epochs", 0.3), tmp_path / "log"
    assert run_until(monkeypatch, command, log, weights=5) == -signal.SIGKILL
    assert (tmp_path / "store.new").stat().st_size
    assert not (tmp_path / "store").exists()
    assert run_until(monkeypatch, command, log) == 0
    assert list(events(log)) == [1]
    assert not (tmp_path / "store.new").exists()


def test_a_kill_before_the_first_step_leaves_nothing_that_stays(folders, tmp_path, capfd, monkeypatch):
    """While the store is written, and after it: the same command begins again."""
    import memascend.cli.train.job as jobs

    command = arguments(folders, tmp_path, "--epochs", 0.3)
    with monkeypatch.context() as patched:
        # As a kill would leave it: a record, and a store of which it does not know.
        patched.setattr("memascend.cli.train.output.Output.change", lambda *_, **__: jobs.missing())
        patched.setattr(jobs, "missing", lambda: (_ for _ in ()).throw(KeyboardInterrupt), raising=False)
        ran(capfd, *command, status=130)
    assert (tmp_path / "store").exists()
    lines, _ = ran(capfd, *command)
    assert [line["step"] for line in lines if line["event"] == "step"] == [1]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_of_another_run_is_refused(folders, tmp_path, capfd):
    short = ["--epochs", 0.3, "--save-every", 1]
    (tmp_path / "foreign/out").mkdir(parents=True)
    (tmp_path / "foreign/out/thesis.txt").write_text("mine")
    _, err = ran(capfd, *arguments(folders, tmp_path / "foreign", *short), status=1)
    assert "memascend train did not write it" in err
    ran(capfd, *arguments(folders, tmp_path / "one", *short))
    before = contents(tmp_path / "one")
    # Its storage with another folder, its folder with another storage.
    _, err = ran(capfd, *arguments(folders, tmp_path / "one", *short, "--output", tmp_path / "two"), status=1)
    assert f"holds the training state of the run of --output {tmp_path / 'one/out'}" in err
    assert not (tmp_path / "two").exists()
    ran(capfd, *arguments(folders, tmp_path / "three", *short))
    other = ["--storage", tmp_path / "three/store"]
    command = [word for word in arguments(folders, tmp_path / "one", *short) if word != str(tmp_path / "one/store")]
    command.remove("--storage")
    _, err = ran(capfd, *command, *map(str, other), status=1)
    assert "and not that of" in err
    # Other options: which, and what to do.
    changed = ["--lr", "0.5", "--seed", "1", "--data", folders / "eval.jsonl", "--model", folders / "bfloat16"]
    _, err = ran(capfd, *arguments(folders, tmp_path / "one", *short, *changed), status=1)
    for words in ("--lr 0.001 -> 0.5", "--seed 0 -> 1", "--data: other tokens", "--model: another", "start a new run"):
        assert words in err
    assert contents(tmp_path / "one") == before


def test_options_of_the_machine_may_change(folders, tmp_path, capfd, monkeypatch):
    command = arguments(folders, tmp_path, "--epochs", 1)
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_tell", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        ran(capfd, *command, status=130)
    lines, _ = ran(capfd, *command, "--host-memory", "64MiB", "--save-every", "2")
    assert [line["step"] for line in lines if line["event"] == "save"] == [2, 3]


# peft asks transformers for what later versions call otherwise.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters(folders, tmp_path, capfd, monkeypatch):
    peft = pytest.importorskip("peft")
    own, calls = LlamaMLP.forward, []
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: (calls.append(torch.is_grad_enabled()), own(self, x))[1])
    lines, err = ran(capfd, *arguments(folders, tmp_path, "--lora", 4, "--save-every", 1, "--epochs", 1))
    # Five batches, two blocks, and each is computed again in the backward: its activations are not kept.
    assert calls == [True] * 20
    assert "adapters of rank 4" in err
    assert (tmp_path / "out/adapter_model.safetensors").is_file()
    assert not (tmp_path / "out/model.safetensors").exists()
    base = transformers.AutoModelForCausalLM.from_pretrained(folders / "float32")
    made = peft.PeftModel.from_pretrained(base, tmp_path / "out").state_dict()
    assert all(value.any() for name, value in made.items() if "lora_" in name)
    # What is below them is as it was.
    untouched = weights_of(folders / "float32")
    assert torch.equal(
        made["base_model.model.model.layers.0.mlp.up_proj.base_layer.weight"],
        untouched["model.layers.0.mlp.up_proj.weight"],
    )
    # Adapters begin as nothing: the first loss is the model's own.
    whole, _ = ran(capfd, *arguments(folders, tmp_path / "whole", "--epochs", 0.3))
    assert lines[0]["loss"] == whole[0]["loss"]


def test_a_dry_run_shows_the_plan_and_changes_nothing(folders, tmp_path, capfd):
    assert main(["train", *arguments(folders, tmp_path, "--dry-run")]) == 0
    out = capfd.readouterr().out
    for words in ("trained", "10 examples of `messages`", "6 of 2 x 2 examples", "budget", "nothing was changed"):
        assert words in out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--batch", 0], "--batch must be at least 1, not 0"),
        (["--lr", 0], "--lr must be a number above 0, not 0"),
        (["--warmup", 1.5], "--warmup must be a fraction of all steps"),
        (["--lora", 0], "--lora must be a rank of at least 1, not 0"),
        (["--host-memory", "much"], "--host-memory is a number of bytes"),
        (["--model", "/nowhere"], "hf download"),
        (["--data", "/nowhere.jsonl"], "/nowhere.jsonl does not exist"),
        (["--max-length", 4], "none of 10 examples has a token to train on within --max-length 4"),
        (["--host-memory", "1MiB"], "too small"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_there(folders, tmp_path, capfd, more, said):
    _, err = ran(capfd, *arguments(folders, tmp_path, *more), status=1)
    assert said in err
    assert not list(tmp_path.iterdir())


def test_several_ranks_are_started_by_torchrun(folders, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    _, err = ran(capfd, *arguments(folders, tmp_path), status=1)
    assert "start several ranks by torchrun" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("WORLD_SIZE", "abc", "the environment has WORLD_SIZE='abc', which is not a number"),
        ("WORLD_SIZE", "-1", "RANK is 0 of WORLD_SIZE -1"),
        ("RANK", "abc", "the environment has RANK='abc', which is not a number"),
        ("RANK", "2", "RANK is 2 of WORLD_SIZE 2"),
        ("MASTER_PORT", "abc", "cannot connect: invalid literal for int() with base 10: 'abc'; start several ranks"),
    ],
)
def test_what_is_no_number_of_the_environment_is_named(folders, tmp_path, capfd, monkeypatch, name, value, said):
    whole = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for each, number in {**whole, name: value}.items():
        monkeypatch.setenv(each, number)
    _, err = ran(capfd, *arguments(folders, tmp_path), status=1)
    assert said in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("generation_config.json", "[]", "generation_config.json: TypeError"),
        ("generation_config.json", "{", "generation_config.json: OSError"),
        ("config.json", '{"model_type": "qwen2", "num_hidden_layers": 1000000000}', "more than 10000 layers"),
        ("config.json", "[]", "is no config: it holds a list"),
    ],
)
def test_configurations_that_make_no_model_are_named(folders, tmp_path, capfd, file, text, said):
    other = tmp_path / "model"
    shutil.copytree(folders / "float32", other)
    (other / file).write_text(text)
    _, err = ran(capfd, *arguments(folders, tmp_path, "--model", other), status=1)
    assert said in err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_loss_that_is_no_number_is_not_learnt(folders, tmp_path, capfd, monkeypatch):
    own = Loop._loss
    calls = []

    def broken(self, batch):
        calls.append(1)
        return own(self, batch) * (float("nan") if len(calls) == 3 else 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_loss", broken)
        _, err = ran(capfd, *arguments(folders, tmp_path), status=1)
    assert "the loss of step 2 is nan" in err
    lines, _ = ran(capfd, *arguments(folders, tmp_path))
    assert [line["step"] for line in lines if line["event"] == "step"] == [2, 3, 4, 5, 6]


def test_the_log_has_each_step_although_standard_output_is_closed(folders, tmp_path, capfd, monkeypatch):
    own = JsonLines.event

    def closed(self, name, values, text):
        if values.get("step") == 2:
            raise BrokenPipeError
        own(self, name, values, text)

    with monkeypatch.context() as patched:
        patched.setattr(JsonLines, "event", closed)
        main(["train", *arguments(folders, tmp_path)])
    ran(capfd, *arguments(folders, tmp_path))
    log = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log if line["event"] == "step"] == [1, 2, 3, 4, 5, 6]


def test_plain_lines(folders, tmp_path, capfd):
    command = [word for word in arguments(folders, tmp_path, "--epochs", 0.3) if word != "--json"]
    assert main(["train", *command]) == 0
    out = capfd.readouterr().out
    assert "step 1/1: loss " in out
    assert "tokens/s" in out
    assert " moved, 0 s left" in out
