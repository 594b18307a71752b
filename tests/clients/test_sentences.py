"""Tests the training of sentence-transformers beside the same Trainer in memory, bit for bit."""

import datasets
import sentence_transformers
import tokenizers
import torch
import transformers
from sentence_transformers import losses, models
from support.bits import same_bits

import memascend


def encoder(folder):
    words = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, **{f"w{word}": 4 + word for word in range(60)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="[PAD]",  # noqa: S106
        unk_token="[UNK]",  # noqa: S106
        cls_token="[CLS]",  # noqa: S106
        sep_token="[SEP]",  # noqa: S106
    ).save_pretrained(folder)
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(folder)
    body = models.Transformer(str(folder), max_seq_length=16)
    return sentence_transformers.SentenceTransformer(modules=[body, models.Pooling(64)], device="cpu")


def test_sentences_are_embedded_as_after_training_in_memory(tmp_path):
    rows = datasets.Dataset.from_dict(
        {
            "anchor": [f"w{row} w{row + 1}" for row in range(16)],
            "positive": [f"w{row + 1} w{row + 2} w{row}" for row in range(16)],
        }
    )
    found = []
    for offloaded in (False, True):
        model = encoder(tmp_path / "encoder")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if offloaded:
            model, optimizer = memascend.offload(model, optimizer, storage=tmp_path / "run.store", gradients="ssd")
        settings = sentence_transformers.SentenceTransformerTrainingArguments(
            output_dir=str(tmp_path / "output"),
            use_cpu=True,
            per_device_train_batch_size=4,
            max_steps=6,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        sentence_transformers.SentenceTransformerTrainer(
            model=model,
            args=settings,
            train_dataset=rows,
            loss=losses.MultipleNegativesRankingLoss(model),
            optimizers=(optimizer, None),
        ).train()
        embedded = model.encode(["w3 w4 w5", "w9"], convert_to_tensor=True)
        found.append([embedded, *(value.detach().clone() for value in model.state_dict().values())])
        if offloaded:
            optimizer.close()
    assert all(map(same_bits, *found))
