"""Tests that killed and restarted runs, of `memascend train` and of Trainers, have the bits of uninterrupted runs.

usage: test_train_killed.py KIND STORE LOG [MOMENT STEP]

Run as a program, this file makes a Trainer and trains: in memory if STORE is "memory", and otherwise offloaded. The
program kills itself at MOMENT of STEP.
"""

import hashlib
import json
import random
import signal
import sys
import tempfile
from pathlib import Path

import datasets
import peft
import pytest
import torch
import trl
from clients.test_trl import language_model, pairs, reward_model, tokenizer
from support import trained_program
from support.lives import life
from support.small_folder import make_model, write_rows
from support.trained_program import compared, logged

from memascend.storage import look

STEPS, KILLS = 24, 5
ROWS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n * 7}."}]}
    for n in range(40)
]
YAML = """
model: {folder}/model
data: {folder}/rows.jsonl
eval: {folder}/rows.jsonl
output: {folder}/{name}
storage: {folder}/{name}.store
use_cpu: true
packing: true
max_length: 48
eval_steps: 5
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 1e-3
warmup_steps: 3
max_steps: {steps}
disable_tqdm: true
{more}
"""


def prepare(folder, dtype):
    make_model(folder / "model", dtype)
    write_rows(folder / "rows.jsonl", ROWS)


def run(folder, name, more, **how):
    """Runs `memascend train` once, until it ends or is killed."""
    config = folder / f"{name}.yaml"
    config.write_text(YAML.format(folder=folder, name=name, steps=STEPS, more=more))
    return life([sys.executable, "-m", "memascend", "train", "--config", config], HF_HOME=str(folder / "hub"), **how)


def results(folder, name):
    """Returns the digest of the weights, and the log lines of steps and evaluations."""
    digest = hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest()
    history = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    return digest, [compared(line) for line in history if "train_loss" not in line]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("logging", [1, 10])
def test_killed_train_command_has_the_results_of_an_uninterrupted_run(tmp_path, logging):
    prepare(tmp_path, torch.bfloat16)
    more = f"logging_steps: {logging}"
    run(tmp_path, "whole", more)
    rng = random.Random(logging)
    # For each word, `run` kills a run up to 0.15 s after the run prints the word, unless the run ends first. A run
    # prints "Map" while it loads data, 'loss' and 'eval_loss' during steps and evaluations, and 'train_runtime' at the
    # end.
    places = ["Map", *[rng.choice(("'loss'", "'eval_loss'")) for _ in range(KILLS - 2)], "'train_runtime'"]
    ends = [
        run(tmp_path, "killed", more, kill=(place,), after=rng.uniform(0, 0.15), ends=(0, -signal.SIGKILL))
        for place in places
    ]
    assert any(status for status, _ in ends)
    run(tmp_path, "killed", more)
    assert results(tmp_path, "killed") == results(tmp_path, "whole")


@pytest.mark.timeout(600)
def test_stopped_train_names_the_committed_step_and_resumes_there(tmp_path):
    prepare(tmp_path, torch.float32)
    more, step = "logging_steps: 1\nlr_scheduler_type: constant", None
    for place, stop, status in (("'loss'", signal.SIGINT, 130), ("resuming at", signal.SIGTERM, 143)):
        printed = run(tmp_path, "own", more, kill=(place,), after=0.2, by=stop, ends=status).splitlines()
        title = f"a new run of {STEPS} steps" if step is None else f"resuming at step {step + 1} of {STEPS}"
        assert f"memascend: {title}" in printed
        with look([tmp_path / "own.store"]) as store:
            step = store.step
        assert printed[-1] == (
            f"memascend train: stopped after step {step}, which is committed: run the same command to continue"
        )
    run(tmp_path, "own", more)


# --- TRL's Trainers, and the Trainer of sentence-transformers -------------------------------------------------

SHARED = {
    "use_cpu": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
    "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 5, "learning_rate": 1e-3,
    "warmup_steps": 2, "lr_scheduler_type": "cosine", "report_to": "none", "disable_tqdm": True,
    "optim": "adamw_torch_fused",
}  # fmt: skip
# A chat template that marks the assistant's answers for TRL.
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
)


def texts(count=34):
    return datasets.Dataset.from_dict({"text": [f"w{row} w{row * 7 % 60} w{row * 3 % 60}" for row in range(count)]})


def chats(count=26):
    def turn(role, row):
        return {"role": role, "content": f"w{row % 60} w{row * 5 % 60}"}

    return datasets.Dataset.from_list(
        [{"messages": [turn("user", row), turn("assistant", row + 9)]} for row in range(count)]
    )


def judged(count=26):
    rows = [
        {"prompt": f"w{row} w{row + 1}", "completion": f" w{row + 2}", "label": row % 3 > 0} for row in range(count)
    ]
    return datasets.Dataset.from_list(rows)


def supervised(out, log, data=texts, template=None, **options):
    adapters = options.pop("adapters", None)
    words = tokenizer()
    words.chat_template = template
    arguments = trl.SFTConfig(out, bf16=False, max_length=8, **SHARED, **options)
    return trl.SFTTrainer(
        language_model(), args=arguments, train_dataset=data(), eval_dataset=data(6), processing_class=words,
        callbacks=[log], peft_config=adapters,
    )  # fmt: skip


def with_adapters(out, log):
    torch.manual_seed(1)
    chosen = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    return supervised(out, log, adapters=chosen)


def of_trl(name, model, data, *reference):
    def made(out, log):
        arguments = getattr(trl, f"{name}Config")(out, bf16=False, **SHARED)
        return getattr(trl, f"{name}Trainer")(
            model(), *(one() for one in reference), args=arguments, train_dataset=data(26), eval_dataset=data(6),
            processing_class=tokenizer(), callbacks=[log],
        )  # fmt: skip

    return made


def encoder(folder):
    import transformers
    from sentence_transformers import SentenceTransformer, models

    tokenizer().save_pretrained(folder)
    shape = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    config = transformers.BertConfig(**shape, **still, num_attention_heads=4)
    transformers.BertModel(config).save_pretrained(folder)
    body = models.Transformer(str(folder), max_seq_length=16)
    return SentenceTransformer(modules=[body, models.Pooling(64)], device="cpu")


def embedding(out, log):
    import sentence_transformers
    from sentence_transformers import losses

    data = [{"anchor": f"w{row} w{row + 1}", "positive": f"w{row + 1} w{row + 2}"} for row in range(30)]
    rows = datasets.Dataset.from_list(data)
    with tempfile.TemporaryDirectory() as folder:
        model = encoder(Path(folder))
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(out, **SHARED)
    return sentence_transformers.SentenceTransformerTrainer(
        model=model, args=arguments, train_dataset=rows, eval_dataset=rows.select(range(6)), callbacks=[log],
        loss=losses.MultipleNegativesRankingLoss(model),
    )  # fmt: skip


KINDS = {
    "packed": lambda out, log: supervised(out, log, packing=True, packing_strategy="wrapped"),
    "answers": lambda out, log: supervised(out, log, chats, TEMPLATE, assistant_only_loss=True),
    "adapters": with_adapters,
    "preferences": of_trl("DPO", language_model, pairs, language_model),
    "judgements": of_trl("KTO", language_model, judged, language_model),
    "reward": of_trl("Reward", reward_model, pairs),
    "sentences": embedding,
}
MOMENTS = [
    ("creation", 0), ("micro-batch", 1), ("after the commit", 2), ("evaluation", 4), ("checkpoint", 5),
    ("end of the step", 6), ("before the step", 7),
]  # fmt: skip


def start(folder, name, kind, *words, **how):
    """Runs this file as a program, until it ends or is killed; returns its output.

    If the program is not killed, the last line of its output is a digest of the weights.
    """
    store = "memory" if name == "memory" else folder / name
    line = [sys.executable, __file__, kind, store, folder / f"{name}.log", *words]
    return life(line, PYTHONWARNINGS="ignore", HF_HOME=str(folder / "hub"), **how)


def digest(output):
    return output.splitlines()[-1]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("kills", ["one", pytest.param("all", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_killed_offloaded_trainer_ends_with_the_bits_of_a_run_in_memory(tmp_path, kind, kills):
    want = digest(start(tmp_path, "memory", kind))
    number = list(KINDS).index(kind)
    for kill in MOMENTS if kills == "all" else [MOMENTS[number]]:
        start(tmp_path, "killed", kind, *kill, ends=-signal.SIGKILL)
    assert digest(start(tmp_path, "killed", kind)) == want
    assert logged(tmp_path / "killed.log") == logged(tmp_path / "memory.log")
    assert len(logged(tmp_path / "killed.log")) >= 6


if __name__ == "__main__":
    trained_program.main(*sys.argv[2:], make=KINDS[sys.argv[1]], device="cpu")
