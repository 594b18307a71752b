"""Cases of small transformers and peft models, made from configurations; nothing is downloaded."""

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
    """Transformers warns of names that it will drop in version 6, and that every version 5 has."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


def texts(generator, batches=4):
    ids = [torch.randint(3, VOCABULARY, (2, 12), generator=generator) for _ in range(batches)]
    return [{"input_ids": each, "labels": each} for each in ids]


def pictures(generator, batches=4):
    return [
        {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
            "labels": torch.randint(0, 4, (2,), generator=generator),
        }
        for _ in range(batches)
    ]


def loss(model, batch):
    dtype = next(model.parameters()).dtype
    return model(**{key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}).loss


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


def albert():
    """One layer called four times, under parents that own parameters too."""
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = AlbertConfig(**TEXT, **SIZES, embedding_size=16, num_hidden_layers=4, max_position_embeddings=32)
    return AlbertForMaskedLM(config).train()


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**LLAMA, num_local_experts=8, num_experts_per_tok=1, output_router_logits=True)
    return MixtralForCausalLM(config).train()


def qwen2_moe():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    config = Qwen2MoeConfig(
        **LLAMA, moe_intermediate_size=16, shared_expert_intermediate_size=32, num_experts=6, num_experts_per_tok=2
    )
    return Qwen2MoeForCausalLM(config).train()


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


def vit():
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**SIZES, num_hidden_layers=2, image_size=32, patch_size=8, num_labels=4)
    return ViTForImageClassification(config).train()


def resnet():
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=4, num_channels=3
    )
    return ResNetForImageClassification(config).train()


def lora():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "down_proj"])
    with old_names():
        return get_peft_model(qwen2(tied=True), config).train()


def case_of(name, model, *, batches=texts, **options):
    return Case(name=name, model=model, batches=batches, loss=loss, **options)


BF16 = torch.bfloat16
TRANSFORMERS = [
    case_of("qwen2-tied-bf16", lambda: qwen2(tied=True), dtype=BF16, everywhere=True),
    case_of("qwen2-untied", lambda: qwen2(tied=False)),
    case_of("gpt2", gpt2),
    case_of("gpt2-bf16", gpt2, dtype=BF16),
    case_of("checkpointed", lambda: checkpointed(reentrant=False), dtype=BF16, learns_budget=True),
    case_of("checkpointed-reentrant", lambda: checkpointed(reentrant=True), learns_budget=True),
    case_of("albert", albert),
    case_of("mixtral-bf16", mixtral, dtype=BF16),
    case_of("qwen2-moe", qwen2_moe),
    case_of("t5", t5),
    case_of("vit", vit, batches=pictures),
    case_of("resnet", resnet, batches=pictures),
    case_of("resnet-channels-last", lambda: resnet().to(memory_format=torch.channels_last), batches=pictures),
    case_of("lora", lora, dtype=BF16),
]
