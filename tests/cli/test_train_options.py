"""Tests the options of `memascend train`: a file of them, optimizers, how a run ends, what is kept and told."""

import argparse
import json
import os
import stat
import warnings
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402
from support.bits import same_states  # noqa: E402
from support.small_folder import make_model, make_tokenizer, write_rows  # noqa: E402

from memascend.cli import main  # noqa: E402
from memascend.cli.train import job  # noqa: E402
from memascend.cli.train.data import Batch  # noqa: E402
from memascend.cli.train.loop import Loop  # noqa: E402
from memascend.cli.train.model import keeps_rows_apart  # noqa: E402
from memascend.cli.train.settings import Settings, add_arguments  # noqa: E402
from memascend.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.timeout(900)

ROWS = [{"prompt": f"What is {number}?", "completion": "yes, " * (1 + number % 4)} for number in range(8)]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("folder")
    make_model(folder / "model", torch.float32)
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


def arguments(folder, place, *more):
    """A command of 2 steps."""
    return [
        "--model", str(folder / "model"), "--data", str(folder / "rows.jsonl"), "--output", str(place / "out"),
        "--storage", str(place / "store"), "--host-memory", "32MiB", "--device", "cpu", "--batch", "2",
        "--accumulate", "2", "--lr", "1e-3", "--warmup", "0", "--max-length", "64", "--json", *map(str, more),
    ]  # fmt: skip


def ran(capfd, *command, status=0):
    with warnings.catch_warnings():
        # Of libraries, when they are imported.
        warnings.simplefilter("ignore", DeprecationWarning)
        assert main(["train", *map(str, command)]) == status
    out, err = capfd.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def steps(lines):
    return {line["step"]: line["loss"] for line in lines if line["event"] == "step"}


def weights_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


# --- what is no causal decoder ---------------------------------------------------------------------------------------

SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "intermediate_size": 32}  # fmt: skip
ENCODERS = {
    "BertForMaskedLM": ("BertConfig", SMALL),
    "BertLMHeadModel": ("BertConfig", SMALL),
    "BigBirdForMaskedLM": ("BigBirdConfig", SMALL),
    "XLMWithLMHeadModel": ("XLMConfig", {"vocab_size": 320, "emb_dim": 32, "n_layers": 1, "n_heads": 2}),
    "T5ForConditionalGeneration": ("T5Config", {"vocab_size": 320, "d_model": 32, "d_kv": 16, "d_ff": 32,
                                                "num_layers": 1, "num_heads": 2}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_refused_by_name(folder, tmp_path, capfd, kind):
    config, values = ENCODERS[kind]
    getattr(transformers, kind)(getattr(transformers, config)(**values)).save_pretrained(tmp_path / "encoder")
    make_tokenizer().save_pretrained(tmp_path / "encoder")
    _, err = ran(capfd, *arguments(folder, tmp_path, "--model", tmp_path / "encoder"), status=1)
    assert "is an encoder" in err
    assert [path.name for path in tmp_path.iterdir()] == ["encoder"]


def test_a_decoder_of_the_same_class_is_trained(folder, tmp_path, capfd):
    model = transformers.BertLMHeadModel(transformers.BertConfig(**SMALL, is_decoder=True))
    model.save_pretrained(tmp_path / "decoder")
    make_tokenizer().save_pretrained(tmp_path / "decoder")
    lines, _ = ran(capfd, *arguments(folder, tmp_path, "--model", tmp_path / "decoder"))
    assert len(steps(lines)) == 2


# --- the end ---------------------------------------------------------------------------------------------------------


def test_the_files_that_can_be_removed_are_named_and_no_others(folder, tmp_path, capfd):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/thesis.txt").write_text("mine")
    place = ["--storage", f"{tmp_path}/runs/"]
    command = [word for word in arguments(folder, tmp_path) if word not in ("--storage", str(tmp_path / "store"))]
    _, err = ran(capfd, *command, *place)
    said = f"{tmp_path}/runs/memascend.store holds its training state, which more epochs need"
    assert said in err.splitlines()[-1]
    _, err = ran(capfd, *command, *place)
    assert said in err.splitlines()[-1]
    # With another --storage nothing there is ours.
    _, err = ran(capfd, *command, "--storage", tmp_path / "nowhere")
    assert err.splitlines()[-1] == f"this run is finished: {tmp_path}/out holds the model of step 2"
    (tmp_path / "runs/memascend.store").unlink()
    _, err = ran(capfd, *command, *place)
    assert "removed" not in err


def test_another_runs_file_is_named(folder, tmp_path, capfd):
    (tmp_path / "runs").mkdir()
    command = [word for word in arguments(folder, tmp_path) if word not in ("--storage", str(tmp_path / "store"))]
    ran(capfd, *command, "--storage", tmp_path / "runs")
    _, err = ran(capfd, *command, "--storage", tmp_path / "runs", "--output", tmp_path / "other", status=1)
    assert f"or remove {tmp_path}/runs/memascend.store if nothing in it is needed" in err


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_the_folder_has_the_mode_that_the_user_wants(folder, tmp_path, capfd, mask):
    before = os.umask(mask)
    try:
        ran(capfd, *arguments(folder, tmp_path, "--save-every", 1))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~mask
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert set(files.values()) == {0o666 & ~mask}, files


def test_it_says_at_once_what_it_looks_at(folder, tmp_path, capfd):
    _, err = ran(capfd, *arguments(folder, tmp_path, "--max-steps", 1))
    assert err.startswith(f"memascend train: reading {folder / 'model'} and {folder / 'rows.jsonl'}\n")
    assert "steps: 1 of 2 x 2 examples; learning rate starts at 0.001 and falls linearly to 0" in err


def stopped(monkeypatch, capfd, command, after):
    """The command, until so many steps are committed."""
    own, calls = Loop._tell, []

    def tell(*told):
        own(*told)
        calls.append(1)
        if len(calls) == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Loop, "_tell", tell)
        return ran(capfd, *command, status=130)


def test_more_epochs_after_the_end(folder, tmp_path, capfd):
    constant = ["--schedule", "constant", "--warmup", 0.5]
    ran(capfd, *arguments(folder, tmp_path, *constant, "--epochs", 2))
    lines, _ = ran(capfd, *arguments(folder, tmp_path, *constant, "--epochs", 3))
    assert list(steps(lines)) == [5, 6]
    # As one run that warmed up for as many steps.
    whole, _ = ran(
        capfd, *arguments(folder, tmp_path / "whole", "--schedule", "constant", "--warmup", 2, "--epochs", 3)
    )
    assert steps(lines).items() <= steps(whole).items()
    assert same_states(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole/out"))
    _, err = ran(capfd, *arguments(folder, tmp_path, *constant, "--epochs", 1), status=1)
    assert "has done 6 steps, and --epochs 3.0 -> 1.0 would end it at 2" in err
    twice = ["--epochs", 4, "--data", folder / "rows.jsonl"]
    _, err = ran(capfd, *arguments(folder, tmp_path, *constant, *twice), status=1)
    assert "--epochs 3.0 -> 4.0; --data: other tokens" in err
    (tmp_path / "store").unlink()
    _, err = ran(capfd, *arguments(folder, tmp_path, *constant, "--epochs", 4), status=1)
    assert "the training state of" in err


def test_more_epochs_under_another_schedule_are_refused_with_what_would_do(folder, tmp_path, capfd):
    ran(capfd, *arguments(folder, tmp_path))
    before = (tmp_path / "out/memascend-train.json").read_bytes()
    _, err = ran(capfd, *arguments(folder, tmp_path, "--epochs", 2), status=1)
    for words in ("--epochs 1.0 -> 2.0", "--schedule linear", "only --schedule constant", f"--model {tmp_path}/out"):
        assert words in err
    assert (tmp_path / "out/memascend-train.json").read_bytes() == before


def test_the_step_before_the_last(folder, tmp_path, capfd, monkeypatch):
    command = arguments(folder, tmp_path, "--epochs", 2)
    _, err = ran(capfd, *command, "--previous", status=1)
    assert "--previous resumes a run" in err
    first, _ = stopped(monkeypatch, capfd, command, 3)
    own, asked = job.offload, []
    monkeypatch.setattr(job, "offload", lambda *given, **options: (asked.append(options), own(*given, **options))[1])
    again, _ = ran(capfd, *command, "--previous")
    assert [options["existing"] for options in asked] == ["previous"]
    # What close() commits is of the last step, too.
    assert list(steps(again)) in ([3, 4], [4])
    whole, _ = ran(capfd, *arguments(folder, tmp_path / "whole", "--epochs", 2))
    assert {**steps(first), **steps(again)} == steps(whole)
    assert same_states(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole/out"))


def test_store_verify_names_the_option(folder, tmp_path, capfd):
    ran(capfd, *arguments(folder, tmp_path))
    assert main(["store", "verify", str(tmp_path / "store")]) == 0
    out = capfd.readouterr().out
    assert "`memascend train ... --previous`" in out or "before it, is not" in out


# --- a file of options -----------------------------------------------------------------------------------------------


def read(*words):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Settings.of(parser.parse_args(list(map(str, words))))


def test_a_file_has_every_option_and_flags_go_before_it(folder, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {folder}/model\ndata: [a.jsonl, b.jsonl]\noutput: out\nstorage: store\nlr: 1e-4\nbetas: [0.9, 0.95]\n"
        "max_steps: 7\npacking: true\nmerge: false\ncolumns: {prompt: question}\nlora: 8\n"
        "lora-targets: [q_proj, v_proj]\n"
    )
    settings = read("--config", path)
    assert (settings.lr, settings.max_steps, settings.packing, settings.merge) == (1e-4, 7, True, False)
    assert (settings.data, settings.storage) == (("a.jsonl", "b.jsonl"), ("store",))
    assert (settings.betas, settings.columns, settings.lora_targets) == ("0.9,0.95", "prompt=question", "q_proj,v_proj")
    assert settings.pair_of_betas() == (0.9, 0.95)
    given = read("--config", path, "--lr", 1e-3, "--data", "c.jsonl")
    assert (given.lr, given.data, given.max_steps) == (1e-3, ("c.jsonl",), 7)
    # What is kept of it says the same again.
    path.write_text(settings.resolved())
    assert read("--config", path).of_the_result() == settings.of_the_result()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate: 1", "memascend train has no option learning_rate"),
        ("weight_decy: 1", "did you mean weight-decay"),
        ("lr: fast", "argument --lr: invalid float value: 'fast'"),
        ("schedule: quick", "invalid choice: 'quick'"),
        ("[1]", "has no options"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_wrong_file_of_options_is_named(tmp_path, text, said):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as error:
        read("--config", path)
    assert str(path) in str(error.value)


def test_what_a_run_was_started_with_is_kept(folder, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines, _ = ran(capfd, *arguments(folder, tmp_path, "--save-every", 1))
    command = ["--config", "out/run.yaml", "--output", "again", "--storage", "store2"]
    again, _ = ran(capfd, *command)
    assert steps(again) == steps(lines)
    assert "save-every: 1\n" in (tmp_path / "again/run.yaml").read_text()
    with pytest.raises(SystemExit) as ended:
        main(["train", "--data", "a"])
    assert ended.value.code == 2
    assert "required: --model, --output, --storage" in capfd.readouterr().err


# --- learning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        ["--optimizer", "muon", "--weight-decay", 0.1],
        ["--optimizer", "SGD", "--momentum", 0.9],
        ["--betas", "0.8,0.9", "--eps", 1e-6, "--weight-decay", 0.1, "--min-lr", 1e-4],
        ["--optimizer", "adafactor", "--max-grad-norm", 0],
    ],
    ids=["muon", "sgd", "adamw", "adafactor"],
)
def test_an_optimizer_goes_on_with_its_bits(folder, tmp_path, capfd, monkeypatch, options):
    command = arguments(folder, tmp_path, *options, "--epochs", 2)
    first, _ = stopped(monkeypatch, capfd, command, 2)
    second, _ = ran(capfd, *command)
    whole, _ = ran(capfd, *arguments(folder, tmp_path / "whole", *options, "--epochs", 2))
    assert {**steps(first), **steps(second)} == steps(whole)
    assert len(set(steps(whole).values())) == 4
    assert same_states(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole/out"))
    _, err = ran(capfd, *command, "--weight-decay", 0.2, status=1)
    assert "--weight-decay" in err


class Decoder(torch.nn.Module):
    """What `memascend train` asks of a model's ends."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 4)
        self.hidden = torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head


def test_muon_trains_matrices_of_hidden_layers_and_adamw_the_rest():
    from memascend.cli.train.model import Described, make_optimizer

    model = Decoder()
    places = {"model": "m", "data": ("d",), "output": Path("o"), "storage": ("s",)}
    options = {"lr": 0.1, "weight_decay": 0.2, "momentum": 0.9, "betas": "0.8,0.95", "eps": 1e-6}
    settings = Settings(**places, optimizer="muon", **options)
    muon, adamw = make_optimizer(settings, Described(model, "m", adapted=False))
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    (hidden,) = muon.param_groups
    assert list(map(id, hidden["params"])) == [id(model.hidden.weight)]
    assert (hidden["lr"], hidden["weight_decay"], hidden["momentum"]) == (0.1, 0.2, 0.9)
    assert hidden["adjust_lr_fn"] == "match_rms_adamw"
    matrices, vectors = adamw.param_groups
    assert [id(one) for one in matrices["params"]] == [id(model.embed.weight), id(model.head.weight)]
    assert [id(one) for one in vectors["params"]] == [id(model.hidden.bias)]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.2, 0.0)
    assert (matrices["betas"], matrices["eps"]) == ((0.8, 0.95), 1e-6)
    assert {group["initial_lr"] for group in (hidden, matrices, vectors)} == {0.1}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--optimizer", "nonsense"], "--optimizer must be muon or one of torch.optim's"),
        (["--optimizer", "sgd", "--betas", "0.9,0.9"], "SGD has no option --betas"),
        (["--betas", "0.9;1"], "--betas takes two numbers"),
        (["--betas", "0.9"], "--betas takes two numbers"),
        (["--optimizer", "sparseadam"], "--optimizer must be muon or one of torch.optim's"),
        (["--optimizer", "lbfgs"], "--optimizer must be muon or one of torch.optim's"),
        (["--min-lr", 1], "--min-lr must be from 0 to --lr"),
        (["--merge"], "--merge is an option of adapters"),
        (["--eval-every", 2], "also give --eval FILE"),
        (["--lora", 2, "--lora-targets", "nonsense"], "--lora-targets nonsense"),
        (["--lora", 2, "--lora-targets", "embed_tokens"], "which is not linear"),
        (["--max-steps", 0], "--max-steps must be at least 1"),
        (["--columns", "prompt"], "--columns takes OURS=THEIRS"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_wrong_options_are_refused(folder, tmp_path, capfd, more, said):
    _, err = ran(capfd, *arguments(folder, tmp_path, *more), status=1)
    assert said in err
    assert not list(tmp_path.iterdir())


# --- packing ---------------------------------------------------------------------------------------------------------

FAMILIES = {
    "LlamaConfig": {"num_key_value_heads": 2},
    "GPT2Config": {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 128},
    "Qwen2Config": {"num_key_value_heads": 2},
    "Gemma2Config": {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 2},
    "MistralConfig": {"num_key_value_heads": 1, "sliding_window": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_loss_of_each_row_alone(family):
    torch.manual_seed(1)
    config = getattr(transformers, family)(**{**SMALL, "pad_token_id": 0, **FAMILIES[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    assert keeps_rows_apart(model)
    rows = [(ids, ids.clone()) for ids in (torch.randint(3, 300, (length,)) for length in (5, 11, 2, 7))]
    packed = Batch.of_packs([rows[:3], rows[3:]], 0)
    with torch.no_grad():
        # As the loop calls it: with a cache, transformers does not tell rows apart.
        together = model(
            input_ids=packed.input_ids, position_ids=packed.position_ids, labels=packed.labels, use_cache=False
        ).loss
        alone = [(model(input_ids=ids[None], labels=labels[None]).loss, len(ids) - 1) for ids, labels in rows]
    expected = sum(loss * count for loss, count in alone) / sum(count for _, count in alone)
    torch.testing.assert_close(together, expected, rtol=1e-5, atol=0)


def test_a_model_that_would_mix_rows_leaves_them_alone(folder, tmp_path, capfd):
    config = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert not keeps_rows_apart(model)
    model.save_pretrained(tmp_path / "mamba")
    make_tokenizer().save_pretrained(tmp_path / "mamba")
    assert main(["train", *arguments(folder, tmp_path, "--model", tmp_path / "mamba", "--packing", "--dry-run")]) == 0
    assert "not packed: MambaForCausalLM would mix examples" in capfd.readouterr().out


def test_a_packed_run_goes_on_with_its_bits(folder, tmp_path, capfd, monkeypatch):
    more = ["--packing", "--accumulate", 1, "--epochs", 2]
    first, err = stopped(monkeypatch, capfd, arguments(folder, tmp_path, *more), 1)
    assert "with attention within each example" in err
    second, _ = ran(capfd, *arguments(folder, tmp_path, *more))
    whole, _ = ran(capfd, *arguments(folder, tmp_path / "whole", *more))
    assert {**steps(first), **steps(second)} == steps(whole)
    assert same_states(weights_of(tmp_path / "out"), weights_of(tmp_path / "whole/out"))


# --- what is kept and told -------------------------------------------------------------------------------------------


def test_models_are_kept_beside_the_best(folder, tmp_path, capfd, monkeypatch):
    losses = iter([3.0, 2.0, 1.0, 2.5, 2.6, 2.7])
    monkeypatch.setattr(Loop, "evaluate", lambda *_: next(losses))
    more = ["--epochs", 3, "--save-every", 1, "--keep", 2, "--eval", folder / "rows.jsonl"]
    lines, _ = ran(capfd, *arguments(folder, tmp_path, *more))
    assert [line["eval_loss"] for line in lines if line["event"] == "eval"] == [3.0, 2.0, 1.0, 2.5, 2.6, 2.7]
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["best", "checkpoint-5", "checkpoint-6"]
    assert same_states(weights_of(out), weights_of(out / "checkpoint-6"))
    assert not same_states(weights_of(out / "checkpoint-5"), weights_of(out / "checkpoint-6"))
    assert json.loads((out / "memascend-train.json").read_text())["best"] == 1.0
    short = ["--epochs", 3, "--save-every", 3, "--schedule", "linear"]
    third = arguments(folder, tmp_path / "third", *short)
    stopped(monkeypatch, capfd, third, 4)
    assert same_states(weights_of(out / "best"), weights_of(tmp_path / "third/out"))


def test_a_loss_is_told_as_often_as_is_wanted(folder, tmp_path, capfd):
    more = ["--epochs", 3, "--save-every", 4, "--eval-every", 2, "--eval", folder / "rows.jsonl"]
    lines, _ = ran(capfd, *arguments(folder, tmp_path, *more))
    assert [line["step"] for line in lines if line["event"] == "eval"] == [2, 4, 6]
    assert [line["step"] for line in lines if line["event"] == "save"] == [4, 6]


def test_a_log_has_every_step(folder, tmp_path, capfd, monkeypatch):
    command = arguments(folder, tmp_path, "--epochs", 2, "--save-every", 3)
    first, _ = stopped(monkeypatch, capfd, command, 2)
    with (tmp_path / "out/log.jsonl").open("a") as log:
        log.write('{"event": "st')  # as a loss of power may leave it
    second, _ = ran(capfd, *command)
    lines = (tmp_path / "out/log.jsonl").read_text().splitlines()
    assert [json.loads(line) for number, line in enumerate(lines) if number != len(first)] == first + second
    ran(capfd, *arguments(folder, tmp_path / "other", "--log", tmp_path / "logs/own.jsonl"))
    assert len((tmp_path / "logs/own.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "other/out/log.jsonl").exists()


@pytest.mark.filterwarnings("ignore")
def test_adapters_have_options_and_are_merged(folder, tmp_path, capfd):
    peft = pytest.importorskip("peft")
    more = ["--lora", 2, "--lora-alpha", 3, "--lora-dropout", 0.1, "--lora-targets", "q_proj,up_proj"]
    ran(capfd, *arguments(folder, tmp_path, *more))
    out = tmp_path / "out"
    assert not (out / "merged").exists()
    _, err = ran(capfd, *arguments(folder, tmp_path, *more, "--merge"))
    assert f"{out}/merged the model with adapters added" in err
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["lora_alpha"], config["lora_dropout"], sorted(config["target_modules"])) == (
        3, 0.1, ["q_proj", "up_proj"],
    )  # fmt: skip
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    theirs = peft.PeftModel.from_pretrained(base, out).merge_and_unload().state_dict()
    ours = weights_of(out / "merged")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-6, atol=1e-7)
    changed = [name for name, value in weights_of(folder / "model").items() if not torch.equal(ours[name], value)]
    assert len(changed) == 4
    assert len(load_file(out / "adapter_model.safetensors")) == 8
    assert transformers.AutoTokenizer.from_pretrained(out / "merged").chat_template
