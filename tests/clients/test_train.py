"""Tests `memascend train`: the labels of each format of examples, packing, one-line errors, and the saved folder."""

import dataclasses
import datetime as dt
import json
import os
import re
import shutil
import subprocess
import sys
from argparse import ArgumentError

import datasets
import pytest
import torch
import transformers
import trl
from support.bits import same_bits
from support.disks import loop, small_ext4  # noqa: F401 - fixtures
from support.planned import peak_of
from support.small_folder import CHATML, GENERATION, make_model, make_tokenizer, write_rows

from memascend.cli import main
from memascend.cli.plan.model import recompute, trace
from memascend.cli.train.arguments import OFFLOAD, parse
from memascend.cli.train.training import _made, _stop_reported, batch_of
from memascend.errors import ConfigError
from memascend.plan.options import Options

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]

# False for the oldest versions of TRL. `trace()` cannot trace their loss of SFT, and predicts too much memory for DPO.
HAS_CHUNKED_LOSS = hasattr(trl.trainer.utils, "add_fused_lm_head")
needs_chunked_loss = pytest.mark.skipif(not HAS_CHUNKED_LOSS, reason="`trace()` does not know this TRL's loss")
ANSWERS = ["yes", "no, it is not", "the model learns", "It is a test.", "no"]
CHATS = [
    {
        "messages": [
            {"role": "system", "content": "The model learns."},
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": ANSWERS[number % 5]},
            {"role": "user", "content": "Is it?"},
            {"role": "assistant", "content": ANSWERS[(number + 1) % 5]},
        ]
    }
    for number in range(10)
]
# The text of a question and an answer in ChatML, with the system message "It is.".
SAID = "<|im_start|>system\nIt is.<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>\n"
# A chat template that does not mark answers and puts no special token after answers.
PLAIN = (
    "{% for message in messages %}{{ '[' + message['role'] + ']' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)
# A chat template that drops all answers except the last answer. So the text of the first messages is not the beginning
# of the text of all messages.
FORGETS = (
    "{% for message in messages %}{% if message['role'] != 'assistant' or loop.last %}{{ message['role'] + ': ' + "
    "message['content'] + '\\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def _caches(tmp_path, monkeypatch, one_thread):  # noqa: ARG001
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def filled(folder, dtype=torch.float32, template=CHATML):
    """Writes conversations and a model with the chat template `template` into `folder`; returns `folder`."""
    make_model(folder / "model", dtype, make_tokenizer(template))
    write_rows(folder / "rows.jsonl", CHATS)
    return folder


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with conversations and a model. The model's chat template does not mark answers."""
    return filled(tmp_path)


def words(folder, *more, rows="rows.jsonl"):
    places = {"model": folder / "model", "data": folder / rows, "output": folder / "out", "storage": folder / "store"}
    given = [word for name, place in places.items() for word in (f"--{name}", str(place))]
    return [*given, "--device", "cpu", "--disable_tqdm", "true", "--logging_steps", "1", *map(str, more)]


def trainer_of(folder, *more, kind="sft", **data):
    """Returns the Trainer of TRL that `memascend train` makes for these options."""
    return _made(parse([kind, *words(folder, *more, **data)]), dt.datetime(2024, 7, 26, tzinfo=dt.UTC))[0]


def learnt(trainer):
    """Returns for each example its text, and the parts of the text that have a loss."""
    tokenizer, found = trainer.processing_class, []
    for row in trainer.train_dataset:
        parts, last = [], False
        for token, label in zip(row["input_ids"], row["labels"], strict=True):
            if label != -100:
                assert label == token
                parts = [*parts[:-1], [*parts[-1], token]] if last else [*parts, [token]]
            last = label != -100
        found.append((tokenizer.decode(row["input_ids"]), [tokenizer.decode(part) for part in parts]))
    return found


# --- labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("template", "end", "separator"), [(CHATML, "<|im_end|>", "\n"), (PLAIN, "\n", "")])
def test_only_assistant_answers_and_their_end_tokens_have_a_loss(tmp_path, template, end, separator):
    """Only answers and their end tokens have a loss. The end token is special in ChatML, and a newline in PLAIN."""
    found = learnt(trainer_of(filled(tmp_path, template=template)))
    assert len(found) == len(CHATS)
    for (text, parts), row in zip(found, CHATS, strict=True):
        answers = [turn["content"] for turn in row["messages"] if turn["role"] == "assistant"]
        assert parts == [answer + end for answer in answers]
        for turn in row["messages"]:
            assert turn["content"] + end + separator in text


def test_labels_equal_trl_labels_of_a_template_that_marks_answers(tmp_path):
    """Two chat templates write the same text for the same conversations. Only the template GENERATION marks answers."""
    found = []
    for name, template in (("marked", GENERATION), ("plain", CHATML)):
        trainer = trainer_of(filled(tmp_path / name, template=template))
        found.append([(row["input_ids"], row["labels"]) for row in trainer.train_dataset])
        assert trainer.args.assistant_only_loss == (name == "marked")
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("row", "text", "parts"),
    [
        (
            {
                "system": "It is.",
                "conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "no"}],
            },
            SAID.format("What?", "no"),
            ["no<|im_end|>"],
        ),
        (
            {"instruction": "What is it?", "input": "a test", "output": "yes", "system": "It is."},
            SAID.format("What is it?\n\na test", "yes"),
            # TRL's labels cover all text after the prompt, including the last newline.
            ["yes<|im_end|>\n"],
        ),
        ({"prompt": "What is it?", "completion": "no"}, "What is it?no<|im_end|>", ["no<|im_end|>"]),
        # The test passes --columns for this row.
        ({"id": 3, "question": "What?", "answer": "no", "text": "a"}, "What?no<|im_end|>", ["no<|im_end|>"]),
        ({"text": "It is a test."}, "It is a test.<|im_end|>", ["It is a test.<|im_end|>"]),
    ],
)
def test_each_dataset_format_gets_its_text_and_labels(folder, row, text, parts):
    write_rows(folder / "others.jsonl", [row, row])
    more = ("--columns", "prompt=question,completion=answer") if "question" in row else ()
    assert learnt(trainer_of(folder, "--packing", "false", *more, rows="others.jsonl")) == [(text, parts)] * 2


def test_assistant_only_loss_false_gives_all_tokens_a_loss(folder):
    assert all(parts == [text] for text, parts in learnt(trainer_of(folder, "--assistant_only_loss", "false")))


@pytest.mark.parametrize("suffix", ["json", "csv", "tsv", "parquet", "txt"])
def test_files_of_each_kind_are_read(folder, suffix):
    file, rows = folder / f"others.{suffix}", [{"prompt": "What is it?", "completion": "no, it is"}] * 3
    write_rows(folder / "source.jsonl", rows)
    table = datasets.load_dataset("json", data_files=str(folder / "source.jsonl"), split="train")
    if suffix == "json":
        file.write_text(json.dumps(rows))
    elif suffix == "parquet":
        table.to_parquet(file)
    elif suffix == "txt":
        file.write_text("It is a test.\n\nThe model learns.\n" * 30)
    else:
        table.to_csv(file, index=False, sep="," if suffix == "csv" else "\t")
    found = learnt(trainer_of(folder, "--max_length", 64, rows=file.name))
    if suffix == "txt":
        # A long text becomes several sequences; no token is cut off.
        assert "".join(text for text, _ in sorted(found, reverse=True)).count("The model learns.") >= 29
        assert all(parts == [text] for text, parts in found)
        assert sum(len(text) for text, _ in found) == len(file.read_text()) + len("<|im_end|>")
    else:
        assert found == [("What is it?no, it is<|im_end|>", ["no, it is<|im_end|>"])] * 3


def test_several_files_and_patterns_are_one_data_set(folder):
    for number in range(3):
        write_rows(folder / f"part-{number}.jsonl", CHATS[number : number + 1])
    trainer = trainer_of(folder, "--data", folder / "rows.jsonl", rows="part-*.jsonl")
    assert len(trainer.train_dataset) == 3 + len(CHATS)


def test_template_date_is_the_date_of_the_first_start(tmp_path):
    template = "{{ strftime_now('%d %b %Y') }}\n" + CHATML
    trainer = trainer_of(filled(tmp_path, template=template))
    assert learnt(trainer)[0][0].startswith("26 Jul 2024\n")
    assert trainer.processing_class.chat_template == template


# --- packing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_have_the_same_logits_as_separate_examples(folder, attention):
    more = ("--attn_implementation", attention, "--max_length", 256)
    packed = trainer_of(folder, "--packing", *more)
    assert len(packed.train_dataset) < len(CHATS) / 2
    own = packed.train_dataset
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation=attention).eval()
    compared = 0
    for row in own:
        batch = packed.data_collator([row])
        # The batch is TRL's, but without labels, so that the model returns the logits of all tokens.
        together = model(**{name: batch[name] for name in batch if name != "labels"}, use_cache=False).logits[0]
        start = 0
        for length in row["seq_lengths"]:
            ids = torch.tensor([row["input_ids"][start : start + length]])
            alone = model(input_ids=ids).logits[0]
            assert torch.allclose(together[start : start + length], alone, atol=1e-5)
            # The first token of an example has no loss, because the model would predict it from the last token of
            # another example.
            assert batch["labels"][0, start] == -100
            start += length
            compared += 1
    assert compared == len(CHATS)


BERT = transformers.BertConfig(
    vocab_size=320, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
)
MAMBA = transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=4)


@pytest.mark.parametrize(
    ("kind", "config", "more", "message"),
    [
        ("MambaForCausalLM", MAMBA, ("--packing",), "MambaForCausalLM may mix examples that share a sequence"),
        # BERT's attention reads the tokens that a causal model has to predict, so the loss would mean nothing.
        ("BertForMaskedLM", BERT, (), "cannot be trained|not a causal decoder"),
        ("BertLMHeadModel", BERT, (), "not a causal decoder"),
    ],
)
def test_train_rejects_noncausal_models_and_packing_with_mamba(folder, kind, config, more, message):
    getattr(transformers, kind)(config).save_pretrained(folder / "model")
    with pytest.raises(ConfigError, match=message):
        trainer_of(folder, *more)


# --- defaults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_dtype_defaults_to_the_dtype_in_the_model_folder(tmp_path, dtype):
    trainer = trainer_of(filled(tmp_path, dtype))
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {dtype}
    assert not trainer.args.bf16
    assert all(parameter.is_meta for parameter in trainer.model.parameters())


def test_command_line_options_override_the_config_file(folder):
    (folder / "run.yaml").write_text(
        f"model: {folder / 'model'}\ndata:\n- {folder / 'rows.jsonl'}\noutput: {folder / 'out'}\n"
        f"storage: [{folder / 'a'}, {folder / 'b'}]\nlearning-rate: 1e-4\nmax_steps: 7\nhost_memory: 1GiB\n"
        "lr_scheduler_kwargs: {min_lr: 1e-6}\nlr_scheduler_type: cosine_with_min_lr\nuse_cpu: true\n"
    )
    command = parse(["--config", str(folder / "run.yaml"), "--max-steps=3", "--storage", "c", "--storage=d"])
    assert (command.kind, command.training.learning_rate, command.training.max_steps) == ("sft", 1e-4, 3)
    assert command.own.storage == ["c", "d"]
    assert command.own.host_memory == "1GiB"
    assert command.training.save_strategy == "no"
    assert parse(["dpo", "--config", str(folder / "run.yaml"), "--save_steps", "5"]).training.save_strategy == "steps"


def test_offload_arguments_of_train_are_fields_of_options():
    assert {*OFFLOAD} - {"clipping"} <= {*Options.__dataclass_fields__}


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("r.jsonl", '{"text": "a"}\n{"text": \n', r"r\.jsonl:2: not valid JSON: Expecting value"),
        ("r.json", '[{"text": "a"},\n{"text": }]', r"r\.json:2: not valid JSON"),
        ("r.jsonl", '{"text": "a"}\n{"text": 5}\n', r"r\.jsonl:2: `text` is 5, but must be a string"),
        ("r.jsonl", '{"prompt": "a", "completion": 5}',
         r"r\.jsonl:1: `completion` is 5, but must be a string or a list of messages"),
        ("r.jsonl", '{"instruction": "a", "input": 3, "output": "b"}', r"r\.jsonl:1: `input` is 3, but must be"),
        ("r.jsonl", '{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}', "be all strings, or all"),
        ("r.jsonl", '{"prompt": [{"role": "a", "content": "a"}], "completion": [{"role": "user", "content": "b"}]}',
         r"r\.jsonl:1: message 1 needs a role"),
        ("r.jsonl", '{"messages": [{"role": "assistant", "content": "b"}], "tools": "x"}', "`tools` is not valid JSON"),
        ("r.jsonl", '"a"\n', r"r\.jsonl:1: not an example"),
        ("r.jsonl", "\n\n", r"r\.jsonl has no examples"),
        ("r.jsonl", "", r"r\.jsonl is empty: give a file with examples"),
        ("r.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"r\.jsonl:2: not UTF-8"),
        ("r.csv", b"text\n\xe9\n", r"r\.csv:2: not UTF-8"),
        ("r.csv", "prompt,completion\na,b,c\n", r"r\.csv:2: 3 fields, but the first line has 2"),
        ("r.jsonl", '{"input_ids": ["a"]}', r"r\.jsonl: `input_ids` must be lists of whole numbers"),
        ("r.jsonl", '{"prompt": "a", "completion": "b"}\n{"prompt": "a", "completion": ""}\n',
         r"r\.jsonl:2: `completion` is missing or empty"),
        ("r.jsonl", '{"messages": [{"role": "user", "content": "a"}]}', r"r\.jsonl:1: no message is the assistant's"),
        ("r.jsonl", '{"conversations": [{"from": "human"}]}', r"r\.jsonl:1: message 1 needs a role"),
        ("r.csv", "prompt,completion\na,b\na\n", r"r\.csv: example 2: `completion` is missing"),
        ("r.xlsx", "x", r"r\.xlsx has an unknown suffix: .* name ends in one of \.jsonl"),
        ("r.jsonl", '{"q": "a"}', r"r\.jsonl has columns 'q', but memascend train sft needs `messages` or"),
        ("r.jsonl", '{"text": "a", "messages": [{"role": "assistant", "content": "a"}]}',
         "which fit `messages` or `text`: .* --columns text=text"),
        ("kto.jsonl", '{"prompt": "a", "completion": "b", "label": "no"}', '1: `label` is "no", but must be true'),
    ],
)  # fmt: skip
def test_train_rejects_an_invalid_data_file_with_a_one_line_error(folder, capsys, name, content, message):
    (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    kind = ["kto"] if name == "kto.jsonl" else []
    assert main(["train", *kind, *words(folder, rows=name)]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("memascend train:")]
    assert re.search(message, line)
    assert not (folder / "out").exists()
    assert not (folder / "store").exists()


def test_values_of_csv_files_are_texts(folder):
    (folder / "r.csv").write_text("prompt,completion\n3+4,007\nnothing,None\n")
    found = learnt(trainer_of(folder, rows="r.csv"))
    assert found == [("3+4007<|im_end|>", ["007<|im_end|>"]), ("nothingNone<|im_end|>", ["None<|im_end|>"])]


def test_a_template_that_does_not_show_the_answers_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: the chat template cannot be used: it does not show which"):
        trainer_of(filled(tmp_path, template=FORGETS))


def test_unknown_option_error_suggests_a_similar_option(folder):
    with pytest.raises(ArgumentError, match=r"--lerning_rate 1; did you mean --learning_rate\?"):
        parse(words(folder, "--lerning_rate", "1"))


def test_config_option_without_a_file_is_an_error(folder):
    with pytest.raises(ArgumentError, match="--config expects a file"):
        parse(words(folder, "--config"))


def test_evaluation_on_a_mixture_needs_held_out_examples(folder):
    (folder / "mixture.yaml").write_text(
        f"datasets:\n  - path: json\n    data_files: {folder / 'rows.jsonl'}\n    split: train\n"
    )
    mixture = ["--config", str(folder / "mixture.yaml"), "--eval_strategy", "epoch"]
    with pytest.raises(ConfigError, match="leaves no examples for evaluation: give --test_split_size or --eval FILE"):
        trainer_of(folder, *mixture)
    assert len(trainer_of(folder, *mixture, "--test_split_size", 0.5).eval_dataset)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--existing", "never"), "existing must be one of"),
        (("--host_memory", "1KiB"), "--host-memory 1KiB is too small"),
        (("--data", "nothing.jsonl"), r"nothing\.jsonl does not exist"),
        (("--eval_strategy", "epoch"), "give --eval FILE"),
        (("--model", "nothing/at/all"), "--model nothing/at/all does not exist"),
        (("--columns", "prompt=q"), "but no 'q': correct --columns"),
        (("--load_in_4bit", "true"), "--load_in_4bit quantizes the model with bitsandbytes"),
        (("--max_length", "4"), "no example for training is left: each has no token with a loss within --max_length 4"),
    ],
)
def test_train_rejects_invalid_options_before_it_creates_a_store(folder, capsys, more, message):
    assert main(["train", *words(folder, *more)]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not (folder / "store").exists()


# --- runs ---------------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_plan_and_changes_nothing(folder, capsys, monkeypatch):
    """An 8-bit optimizer's dry run does not need bitsandbytes."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    plans = []
    for more in ((), ("--optim", "adamw_8bit"), ("--state", "8bit")):
        assert main(["train", *words(folder, "--dry_run", *more)]) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] != plans[1] == plans[2]
    assert "Host memory:" in plans[0]
    says = r"in addition, torch takes [\d.]+ MiB for a micro-batch of \d+ x [\d,]+ tokens with a chunked loss"
    assert re.search(says if HAS_CHUNKED_LOSS else "torch's memory is not known", plans[0])
    assert plans[0].endswith("this was a dry run: nothing was changed\n")
    assert sorted(path.name for path in folder.iterdir()) == ["cache", "model", "rows.jsonl"]


@pytest.mark.parametrize(
    "kind", [pytest.param("sft", marks=needs_chunked_loss), pytest.param("dpo", marks=needs_chunked_loss), "reward"]
)
def test_predicted_peak_memory_matches_the_memory_of_the_trainers_loss(folder, kind):
    """Compares the trace with the bytes that the profiler counts. As in real models, the vocabulary is large."""
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    config.vocab_size, config.max_position_embeddings = 12_000, 64
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    if kind != "sft":
        long = {"prompt": "What is it? It is a test. " * 5}
        write_rows(folder / "rows.jsonl", [long | {name: KINDS[kind][0][name] for name in ("chosen", "rejected")}] * 8)
    trainer = trainer_of(folder, "--max_length", 64, "--per_device_train_batch_size", 4, "--dtype", "bfloat16",
                         "--bf16", "false", kind=kind)  # fmt: skip
    inputs = next(iter(trainer.get_train_dataloader()))
    batch = batch_of(trainer, kind, on_host=True)
    batch = dataclasses.replace(batch, length=inputs["input_ids"].shape[1])
    assert batch.sequences == len(inputs["input_ids"])
    found = trace(trainer.model, batch, recomputes=trainer.args.gradient_checkpointing)
    assert found.loss == ("score" if kind == "reward" else "chunked")
    trainer.model.to_empty(device="cpu")
    for parameter in trainer.model.parameters():
        parameter.data.normal_(std=0.02)
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    if getattr(trainer, "ref_model", None) is not None:
        trainer.ref_model.to_empty(device="cpu")
    if trainer.args.gradient_checkpointing:
        recompute(trainer.model)
    trainer.model.train()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(profile_memory=True, activities=cpu, acc_events=True) as profile:
        trainer.compute_loss(trainer.model, inputs).backward()
    assert found.peak == pytest.approx(peak_of(profile), rel=0.1)


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_examples_that_are_dropped_are_counted(folder, capsys, kind):
    long = {"prompt": "What is it? " * 20}
    short = KINDS[kind][:2] if kind != "sft" else [{"prompt": "What?", "completion": "no"}] * 2
    rows = [short[0] | long]
    write_rows(folder / "long.jsonl", [*short, *rows])
    assert main(["train", kind, *words(folder, "--max_length", 48, "--dry_run", rows="long.jsonl")]) == 0
    why = f"each {'is longer than' if kind == 'reward' else 'has no token with a loss within'} --max_length 48"
    dropped = f"1 dropped of 3: {why}"
    assert f"examples: 2 kept; {dropped}\n" in capsys.readouterr().out
    held_out = ("--eval", folder / "long.jsonl", "--eval_steps", 2)
    assert main(["train", kind, *words(folder, "--max_length", 48, "--dry_run", *held_out, rows="long.jsonl")]) == 0
    assert f"examples: 2 kept; {dropped}; for evaluation, {dropped}\n" in capsys.readouterr().out
    write_rows(folder / "long.jsonl", rows)
    assert main(["train", kind, *words(folder, "--max_length", 48, rows="long.jsonl")]) == 1
    assert f"memascend train: no example for training is left: {why}" in capsys.readouterr().err
    assert not (folder / "store").exists()


def test_only_the_first_rank_of_a_machine_prints_where_the_training_stopped(monkeypatch, capsys):
    for rank, says in ((None, True), ("0", True), ("1", False)):
        if rank is not None:
            monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(KeyboardInterrupt), _stop_reported(None):
            raise KeyboardInterrupt
        assert capsys.readouterr().err.startswith("memascend train: stopped before the training began") == says


KINDS = {
    "sft": CHATS,
    "dpo": [{"prompt": f"What is {n}?", "chosen": "yes, it is", "rejected": "no"} for n in range(8)],
    "reward": [{"prompt": f"What is {n}?", "chosen": "yes, it is", "rejected": "no"} for n in range(8)],
    "kto": [{"prompt": f"What is {n}?", "completion": "yes, it is", "label": bool(n % 2)} for n in range(8)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_train_equals_trl_in_memory_for_each_kind_and_its_output_loads(tmp_path, kind, capsys):
    """Compares `memascend train` with a Trainer of TRL that trains in memory with the same arguments."""
    make_model(tmp_path / "model", torch.float32)
    write_rows(tmp_path / "rows.jsonl", KINDS[kind])
    more = ("--max_steps", 3, "--max_grad_norm", 0, "--per_device_train_batch_size", 2, "--learning_rate", "1e-3")
    assert main(["train", kind, *words(tmp_path, *more)]) == 0
    assert "the training is done" in capsys.readouterr().out
    own = json.loads((tmp_path / "out" / "trainer_state.json").read_text())["log_history"]

    command = parse([kind, *words(tmp_path, *more)])
    command.training.output_dir = str(tmp_path / "plain")
    command.training.model_init_kwargs = {"dtype": "float32"}
    trained = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train")
    if kind == "sft":
        # Without the labels of `memascend train`, TRL would give all tokens a loss.
        trained = trainer_of(tmp_path, *more).train_dataset
    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO"}[kind]
    trainer = getattr(trl, f"{name}Trainer")(str(tmp_path / "model"), args=command.training, train_dataset=trained)
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert [line["loss"] for line in own if "loss" in line] == losses
    loaded = type(trainer.model).from_pretrained(tmp_path / "out")
    assert all(map(same_bits, loaded.state_dict().values(), trainer.model.state_dict().values()))
    assert len(transformers.AutoTokenizer.from_pretrained(tmp_path / "out")) == len(make_tokenizer())


def test_adapters_are_trained_evaluated_on_held_out_examples_and_saved(folder):
    more = ("--use_peft", "--lora_r", 4, "--lora_target_modules", "q_proj", "v_proj")
    held_out = ("--eval", folder / "rows.jsonl", "--eval_steps", 2)
    assert main(["train", *words(folder, *more, *held_out, "--max_steps", 4)]) == 0
    import peft

    model = peft.AutoPeftModelForCausalLM.from_pretrained(folder / "out")
    assert any(bool(value.any()) for name, value in model.named_parameters() if "lora_B" in name)
    history = json.loads((folder / "out" / "trainer_state.json").read_text())["log_history"]
    assert [line["step"] for line in history if "eval_loss" in line] == [2, 4]


def test_repeated_finished_run_writes_only_missing_files(folder, capsys):
    command = words(folder, "--max_steps", 2)
    assert main(["train", *command]) == 0
    file = folder / "out" / "model.safetensors"
    whole, changed = file.read_bytes(), file.stat().st_mtime_ns
    assert main(["train", *command]) == 0
    assert "this run is finished" in capsys.readouterr().out
    assert file.stat().st_mtime_ns == changed
    (folder / "out" / "memascend-train.json").unlink()
    file.unlink()
    assert main(["train", *command]) == 0
    assert file.read_bytes() == whole


@pytest.mark.root
def test_save_on_a_full_disk_fails_and_the_same_command_saves_later(folder, small_ext4, capsys):  # noqa: F811
    command = words(folder, "--output", small_ext4 / "out", "--max_steps", 2)
    filler = small_ext4 / "filler"
    # The remaining 100 KiB have room for memascend-train.json, but not for the model.
    filler.write_bytes(bytes(shutil.disk_usage(small_ext4).free - (100 << 10)))
    assert main(["train", *command]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    says = r"memascend train: .*no step is lost: give the same command again\): No space left on device$"
    assert re.search(says, line)
    filler.unlink()
    assert main(["train", *command]) == 0
    assert transformers.AutoModelForCausalLM.from_pretrained(small_ext4 / "out")


def test_train_opens_no_network_connection(folder):
    """Trains in a new process, which exits with an error if it tries to open a connection."""
    program = (
        "import socket, sys\n"
        "def refuse(*_, **__): raise SystemExit('the program tried to connect')\n"
        "socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse\n"
        "from memascend.cli import main\n"
        "code = main(['train', *sys.argv[1:]])\n"
        "sys.exit(code)"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "HF_HUB_OFFLINE")}
    line = [sys.executable, "-c", program, *words(folder, "--max_steps", "1")]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
