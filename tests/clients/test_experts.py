"""Tests mixtures of experts as users train them: Qwen3's and gpt-oss, by TRL's SFTTrainer and by `memascend train`.

On several threads torch adds up the gradient of an indexed tensor in float32 (the biases of gpt-oss's experts) in any
order, from some ten thousand elements on; the runs that are compared have one thread. Sizes are multiples of 16, since
torch's fused AdamW computes the elements beyond them otherwise.
"""

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
import torch
import transformers
import trl
from support.bits import same_bits
from support.lives import life
from support.quantized import in_mxfp4, quantize
from support.small_folder import make_tokenizer, write_rows

import memascend.trainer

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]
SIZE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": None,
    "num_experts_per_tok": 2, "tie_word_embeddings": False, "output_router_logits": True,
}  # fmt: skip
KINDS = {
    "qwen3": transformers.Qwen3MoeConfig(**SIZE, num_experts=16, moe_intermediate_size=32, router_aux_loss_coef=0.1),
    "gpt-oss": transformers.GptOssConfig(**SIZE, num_local_experts=16, router_aux_loss_coef=0.1),
}
PROGRAM = Path(__file__).parent / "loaded_program.py"
TEXTS = [f"What is it? {row} It is a test of a small model." for row in range(24)]
STEPS = 6


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make(kind, folder, dtype):
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(KINDS[kind], dtype=dtype).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def trained(folder, name, *, offloads, size=1, count=4):
    """Losses, norms and weights of an SFTTrainer, in memory or offloaded."""
    arguments = trl.SFTConfig(
        str(folder / name), per_device_train_batch_size=size, gradient_accumulation_steps=count, max_steps=STEPS,
        learning_rate=1e-3, max_length=32, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, optim="adamw_torch_fused", disable_tqdm=True, model_init_kwargs={"dtype": "auto"},
    )  # fmt: skip
    with memascend.trainer.loading() if offloads else contextlib.nullcontext():
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        trainer = trl.SFTTrainer(str(folder / "model"), args=arguments, train_dataset=rows)
    optimizer = memascend.trainer.offload(trainer, storage=folder / f"{name}.store") if offloads else None
    trainer.train()
    values = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    if optimizer is not None:
        optimizer.close()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return [(log["loss"], log["grad_norm"]) for log in logs], values


@pytest.mark.parametrize(("size", "count"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_sft_has_the_bits_of_the_trainer_in_memory(tmp_path, kind, size, count):
    make(kind, tmp_path / "model", torch.float32)
    log, values = trained(tmp_path, "memory", offloads=False, size=size, count=count)
    their_log, their_values = trained(tmp_path, "offloaded", offloads=True, size=size, count=count)
    assert len(log) == STEPS
    assert log == their_log
    assert all(same_bits(value, their_values[name]) for name, value in values.items())


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def command(folder, name, **how):
    """One `life` of `memascend train`."""
    words = [sys.executable, "-m", "memascend", "train", "--model", "model", "--data", "rows.jsonl", "--output", name,
             "--storage", f"{name}.store", "--device", "cpu", "--max_length", "32",
             "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4",
             "--max_steps", STEPS, "--logging_steps", "1",
             "--learning_rate", "1e-3", "--disable_tqdm", "true", "--bf16", "false"]  # fmt: skip
    return life(words, cwd=folder, HF_HOME=str(folder / "hub"), **how)


LIMIT = 320 << 20


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quantized_model_larger_than_the_cgroups_memory_trains(tmp_path, cgroup):
    size = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 40, "num_attention_heads": 8}
    config = transformers.GptOssConfig(**SIZE | size, num_local_experts=8, layer_types=None)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 1.5 * LIMIT
    model.save_pretrained(tmp_path / "model", max_shard_size="1GB")
    del model
    make_tokenizer().save_pretrained(tmp_path / "model")
    quantize(tmp_path / "model", in_mxfp4, MXFP4)
    found = []
    for name, limit in (("limited", (str(cgroup), str(LIMIT))), ("free", ())):
        (tmp_path / name).mkdir()
        words = [sys.executable, PROGRAM, "sft", tmp_path / "model", tmp_path / name, *limit]
        done = subprocess.run(words, capture_output=True, text=True, timeout=400, check=False)
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        found.append(json.loads(done.stdout.split("found ")[1].splitlines()[0])["digest"])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_and_its_model_loads(tmp_path, kind):
    make(kind, tmp_path / "model", torch.bfloat16)
    if kind == "gpt-oss":
        quantize(tmp_path / "model", in_mxfp4, MXFP4)
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in TEXTS])
    command(tmp_path, "whole")
    command(tmp_path, "killed", kill=("'loss'", 3), ends=-signal.SIGKILL)
    assert "goes on after step" in command(tmp_path, "killed")
    one, other = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="auto") for name in ("whole", "killed")
    )
    values = other.state_dict()
    assert all(same_bits(value, values[name]) for name, value in one.state_dict().items())
    assert {value.dtype for value in values.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "whole" / "config.json").read_text())
    ids = torch.arange(8)[None]
    assert one(input_ids=ids, labels=ids).loss.isfinite()
