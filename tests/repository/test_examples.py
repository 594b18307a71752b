"""Tests that the examples run, resume, and write the files that their docstrings name."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = ("--layers", "2", "--width", "64")

# These tests allow warnings of libraries, and the warning that a resumed run keeps its stored options.
pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


@pytest.fixture
def run(monkeypatch, capfd):
    """Returns a function that runs an example and returns the example's output.

    The example runs in this process, which has already imported torch.
    """

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return run


def losses(output):
    return re.findall(r"step (\d+): loss (\S+)", output)


def test_plain_loop_resumes_with_the_same_losses_and_weights(run, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    whole = losses(run("plain_loop.py", *TINY, "--steps", 5, "--storage", tmp_path / "one"))
    first = losses(run("plain_loop.py", *TINY, "--steps", 3, "--storage", tmp_path / "two"))
    second = losses(run("plain_loop.py", *TINY, "--steps", 5, "--storage", tmp_path / "two"))
    assert [step for step, _ in whole] == list("12345")
    assert first + second == whole
    assert (tmp_path / "one/weights.pt").read_bytes() == (tmp_path / "two/weights.pt").read_bytes()


def test_plain_loop_writes_weights_next_to_a_store_file(run, tmp_path):
    """If the storage path does not exist, the store is a file, and the weights are written to a file next to it."""
    store = tmp_path / "store"
    out = run("plain_loop.py", *TINY, "--steps", 1, "--storage", store)
    assert len(losses(out)) == 1
    assert store.is_file()
    weights = tmp_path / "store.weights.pt"
    assert str(weights) in out
    assert all(value.isfinite().all() for value in torch.load(weights).values())


def test_hf_trainer_saves_the_model_and_its_second_run_takes_no_step(run, small, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    options = (*small[:2], "--data", write_text(tmp_path), *small[4:], "--steps", 4, "--output", tmp_path / "trained")
    out = run("hf_trainer.py", *options)
    assert len(re.findall(r"'loss': '?([^',]+)", out)) == 4
    assert "_bytes'" not in out
    assert "4 steps" in out
    # A second start takes no step, and logs no loss.
    again = run("hf_trainer.py", *options)
    assert not re.findall(r"'loss': '?([^',]+)", again)
    assert "'train_runtime'" in again
    assert (tmp_path / "trained/tokenizer.json").is_file()
    # The saved model loads with from_pretrained(). Its values are finite, and differ from the values before training.
    trained, first = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("trained", "model")
    )
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
    assert not torch.equal(trained.lm_head.weight, first.lm_head.weight)


def test_lora_saves_trained_adapters_and_writes_frozen_values_once(run, small, tmp_path):
    pytest.importorskip("peft")
    from safetensors.torch import load_file
    from support.small_folder import write_rows

    data = write_rows(tmp_path / "prompts.jsonl", [{"prompt": "What is it? ", "completion": "a test"}] * 2)
    out = run("lora.py", *small[:2], "--data", data, "--steps", 3, "--output", tmp_path / "adapters")
    assert [step for step, _ in losses(out)] == list("123")
    adapters = load_file(tmp_path / "adapters/adapter_model.safetensors")
    # Each of two layers has two modules with adapters, and each adapter has two factors, which makes eight tensors. The
    # second factors are zero before training, so the test fails if training does not change them.
    assert len(adapters) == 8
    assert all(tensor.isfinite().all() and tensor.any() for tensor in adapters.values())
    assert (tmp_path / "adapters/tokenizer.json").is_file()
    # Frozen values are written only once, before the first step. The values that a step writes therefore have less than
    # a tenth of the bytes of all first values.
    written = dict(re.findall(r"^written +(\S+(?: \S+)*?)  +(\S+ \S+)", out, re.MULTILINE))
    assert size(written["values"]) / 3 < size(written["first values"]) / 10


def size(shown):
    number, unit = shown.split()
    return float(number) * 1024 ** ("bytes", "KiB", "MiB", "GiB").index(unit)


def test_mixture_of_experts_resumes_and_saves_separate_experts(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    run("small_model.py", tmp_path, *TINY, "--kind", "mixtral", "--vocabulary", 300, "--rows", 4)
    given = ("--model", tmp_path / "model", "--data", write_text(tmp_path), "--storage", tmp_path / "store")
    given += ("--length", 16, "--output", tmp_path / "out")
    out = "".join(run("mixture_of_experts.py", *given, "--steps", steps) for steps in (1, 3))
    assert [step for step, _ in losses(out)] == list("123")
    assert all(float(norm) > 0 for norm in re.findall(r"norm (\S+)", out))
    assert all(float(share) > 0 for share in re.findall(r"balance (\S+),", out))
    # During training, the experts of a layer share parameters. In the saved file, the experts have separate tensors, as
    # in the original file.
    assert tensors(tmp_path / "out/model.safetensors") == tensors(tmp_path / "model/model.safetensors")
    trained, first = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("out", "model"))
    assert not torch.equal(trained.model.layers[1].mlp.experts.down_proj, first.model.layers[1].mlp.experts.down_proj)


def tensors(file):
    from safetensors import safe_open

    with safe_open(file, framework="pt") as found:
        return sorted(found.keys())


def write_text(folder):
    """Writes a text in words that the small tokenizer knows; returns its path."""
    (folder / "text.txt").write_text("What is it? It is a test of a small model.\n" * 60, encoding="utf-8")
    return folder / "text.txt"


@pytest.fixture
def small(tmp_path):
    """Makes a folder with a model, and a file with conversations.

    Returns the options with which an example uses the model, the file and a new store.
    """
    pytest.importorskip("transformers")
    from support.small_folder import make_model, write_rows

    make_model(tmp_path / "model", torch.bfloat16)
    turns = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is a test."}]
    write_rows(tmp_path / "rows.jsonl", [{"messages": turns}] * 12)
    return ("--model", tmp_path / "model", "--data", tmp_path / "rows.jsonl", "--storage", tmp_path / "store")


def test_interrupted_finetune_resumes_with_the_same_losses_and_weights(run, small, tmp_path, monkeypatch):
    import transformers

    more = ("--batch", 2, "--accumulate", 2, "--lr", 1e-3)
    whole = losses(run("finetune.py", *small[:4], "--storage", tmp_path / "other", "--output", tmp_path / "a", *more))
    assert [step for step, _ in whole] == list("123")
    # Interrupts the run within its second step. The schedule of the learning rate still has three steps.
    stopped = iter(range(3))
    own = torch.optim.lr_scheduler.LambdaLR.step

    def step(self, *rest):
        own(self, *rest)
        # The constructor of the scheduler makes the first call of step().
        if next(stopped) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(torch.optim.lr_scheduler.LambdaLR, "step", step)
        with pytest.raises(KeyboardInterrupt):
            run("finetune.py", *small, "--output", tmp_path / "b", *more)
    # The output also contains the output of the interrupted run, because the interrupted call did not read its own
    # output.
    joined = losses(run("finetune.py", *small, "--output", tmp_path / "b", *more))
    assert joined == whole
    one, two = (transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "a").chat_template


def test_finetune_leaves_out_rows_whose_answers_are_cut_off(run, small, tmp_path):
    _, _, _, data, *_ = small
    row = data.read_text().splitlines()[0]
    data.write_text("\n".join([row, row.replace("What is it?", "What is it? " * 100), row]))
    more = ("--accumulate", 1, "--max-length", 100)
    found = run("finetune.py", *small, "--output", tmp_path / "out", *more)
    assert "cuts off their answers: 1\n" in found
    assert [step for step, _ in losses(found)] == list("12")


def test_small_model_writes_a_loadable_model_and_training_data(run, tmp_path):
    """small_model.py makes the files that README's commands use.

    The files are a model that from_pretrained() loads, and training data.
    """
    transformers = pytest.importorskip("transformers")
    run("small_model.py", tmp_path, *TINY, "--vocabulary", 300, "--rows", 20)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.float32
    assert len(tokenizer) == model.config.vocab_size == 300
    data = tmp_path / "data"
    rows = [json.loads(line) for line in (data / "messages.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 18
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    assert rows[0]["messages"][1]["content"] in tokenizer.decode(tokenizer(text)["input_ids"])
    assert set(json.loads((data / "prompts_eval.jsonl").read_text(encoding="utf-8").splitlines()[0])) == {
        "prompt",
        "completion",
    }
    assert (data / "text.txt").stat().st_size > 1000
