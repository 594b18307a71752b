"""Programs of users who train by TRL and sentence-transformers, offloaded in one line.

usage: trained_trainers.py KIND STORE LOG [MOMENT STEP]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import datasets
import peft
import torch
import trl
from clients.test_adapters import language_model
from clients.test_trl import pairs, reward_model, tokenizer
from support import trained_program

SHARED = {
    "use_cpu": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "num_train_epochs": 2,
    "logging_steps": 3, "eval_strategy": "steps", "eval_steps": 4, "save_steps": 5, "learning_rate": 1e-3,
    "warmup_steps": 2, "lr_scheduler_type": "cosine", "report_to": "none", "disable_tqdm": True,
    "optim": "adamw_torch_fused",
}  # fmt: skip
# TRL's tokens of a chat, with marks around what the assistant wrote.
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


if __name__ == "__main__":
    trained_program.main(*sys.argv[2:], make=KINDS[sys.argv[1]], device="cpu")
