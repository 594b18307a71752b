"""Tests mixtures of experts as users train them: Qwen3's and gpt-oss, by TRL's SFTTrainer and by `memascend train`.

On several threads torch adds up the gradient of an indexed tensor in float32 (the biases of gpt-oss's experts) in any
order, from some ten thousand elements on; the runs that are compared have one thread. Sizes are multiples of 16, since
torch's fused AdamW computes the elements beyond them otherwise.
"""

import contextlib
import json
import signal
import sys

import datasets
import pytest
import torch
import transformers
import trl
from clients.beside import results, same_results
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


def trained(folder, *, offloads, size, count):
    """Losses, norms and weights of an SFTTrainer, in memory or offloaded."""
    arguments = trl.SFTConfig(
        str(folder / "output"), per_device_train_batch_size=size, gradient_accumulation_steps=count, max_steps=STEPS,
        learning_rate=1e-3, max_length=32, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, optim="adamw_torch_fused", disable_tqdm=True, model_init_kwargs={"dtype": "auto"},
    )  # fmt: skip
    with memascend.trainer.loading() if offloads else contextlib.nullcontext():
        rows = datasets.Dataset.from_dict({"text": TEXTS})
        trainer = trl.SFTTrainer(str(folder / "model"), args=arguments, train_dataset=rows)
    return results(trainer, folder / "run.store" if offloads else None)


@pytest.mark.parametrize(("size", "count"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_sft_has_the_bits_of_the_trainer_in_memory(tmp_path, kind, size, count):
    make(kind, tmp_path / "model", torch.float32)
    in_memory = trained(tmp_path, offloads=False, size=size, count=count)
    assert len(in_memory[0]) == STEPS
    assert same_results(in_memory, trained(tmp_path, offloads=True, size=size, count=count))


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def command(folder, name, **how):
    """One `life` of `memascend train`."""
    words = [sys.executable, "-m", "memascend", "train", "--model", "model", "--data", "rows.jsonl", "--output", name,
             "--storage", f"{name}.store", "--device", "cpu", "--max_length", "32",
             "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4",
             "--max_steps", STEPS, "--logging_steps", "1",
             "--learning_rate", "1e-3", "--disable_tqdm", "true", "--bf16", "false"]  # fmt: skip
    return life(words, cwd=folder, HF_HOME=str(folder / "hub"), **how)


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
