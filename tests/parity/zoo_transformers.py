"""Defines test cases of small transformers and peft models, which are built from configurations without downloads."""

from __future__ import annotations

import contextlib
import warnings

import torch
from parity.harness import Case

VOCABULARY = 128
TEXT = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
LLAMA = {**TEXT, **SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "max_position_embeddings": 64}


@contextlib.contextmanager
def old_names():
    """Ignores the warnings that transformers 6 will remove some names.

    All releases of transformers 5 have these names.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def texts(generator, batches=4):
    ids = [torch.randint(3, VOCABULARY, (2, 12), generator=generator) for _ in range(batches)]
    return [{"input_ids": each, "labels": each} for each in ids]


def loss(model, batch):
    return model(**batch).loss


def qwen2(*, tied, **options):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=tied, **options))


def checkpointed(*, reentrant):
    model = qwen2(tied=False)
    model.train()
    with old_names():
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**TEXT, n_embd=32, n_layer=2, n_head=4, n_positions=32)).train()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**LLAMA, num_local_experts=8, num_experts_per_tok=1, output_router_logits=True)
    return MixtralForCausalLM(config).train()


def gpt_oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return GptOssForCausalLM(GptOssConfig(**LLAMA, **experts, head_dim=8)).train()


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config).train()


def lora(*, recomputes=False):
    from peft import LoraConfig, get_peft_model

    base = checkpointed(reentrant=False) if recomputes else qwen2(tied=True)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    with old_names():
        return get_peft_model(base, config).train()


def case_of(name, model, **options):
    return Case(name=name, model=model, batches=texts, loss=loss, **options)


BF16 = torch.bfloat16
TRANSFORMERS = [
    case_of("qwen2-tied-bf16", lambda: qwen2(tied=True), dtype=BF16, everywhere=True),
    case_of("qwen2-untied", lambda: qwen2(tied=False)),
    case_of("gpt2-bf16", gpt2, dtype=BF16),
    case_of("checkpointed", lambda: checkpointed(reentrant=False), dtype=BF16, learns_budget=True),
    case_of("checkpointed-reentrant", lambda: checkpointed(reentrant=True), learns_budget=True),
    case_of("mixtral-bf16", mixtral, dtype=BF16),
    case_of("gpt-oss", gpt_oss),
    case_of("t5", t5),
    case_of("lora", lora, dtype=BF16),
    case_of("lora-checkpointed", lambda: lora(recomputes=True), dtype=BF16, learns_budget=True),
]
