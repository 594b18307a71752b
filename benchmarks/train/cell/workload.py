"""Defines workloads. A workload is a model, its batches, and the rules of training. It is the same for every system."""

from __future__ import annotations

import types
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

__all__ = [
    "LEARNING_RATE",
    "LOSS_SCALE_POWER",
    "OVERFLOWING_STEP",
    "OVERFLOW_FACTOR",
    "WORKLOADS",
    "Workload",
    "adapted",
    "configuration",
    "made",
    "prepared",
    "tokens",
    "workload",
]

LEARNING_RATE = 1e-4
# In a workload with `overflow`, the cell multiplies the loss of the step `OVERFLOWING_STEP` (counted from 0) by
# `OVERFLOW_FACTOR` before the backward.
OVERFLOWING_STEP = 1
OVERFLOW_FACTOR = 1e7
# Each system that scales an fp16 loss begins with two to this power as its loss scale.
LOSS_SCALE_POWER = 16
# The number of tokens in a chunk. A chunked loss has only the logits of one chunk in memory at a time.
_CHUNK_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model of Qwen2's shape, the batch of a step, and the rules of training."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 32_000
    tied: bool = False  # True: the LM head and the embeddings share one weight
    dtype: str = "bfloat16"
    batch: int = 1
    micro_batches: int = 1
    length: int = 128
    checkpoint: bool = False  # True: the backward recomputes blocks
    loss: Literal["full", "chunked"] = "full"  # "full": all logits in memory at once; "chunked": one chunk's
    clip: float | None = None  # the largest norm of the gradients; None: no limit
    overflow: bool = False  # True: the gradients of one step overflow
    device: str = "cpu"
    card: int | None = None  # bytes of the device's memory that torch may use; None: all

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields, for JSON."""
        return asdict(self)

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, computed from its shape."""
        head = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.kv_heads * head
        biases = self.hidden + 2 * self.kv_heads * head
        block = attention + biases + 3 * self.hidden * self.intermediate + 2 * self.hidden
        ends = 1 if self.tied else 2
        return self.layers * block + ends * self.vocabulary * self.hidden + self.hidden


_SHAPES: dict[str, dict[str, Any]] = {
    "4M": {"layers": 4, "hidden": 256, "intermediate": 683, "heads": 4, "kv_heads": 2, "vocabulary": 2048},
    "25M": {"layers": 8, "hidden": 384, "intermediate": 1024, "heads": 6, "kv_heads": 2, "vocabulary": 16_000},
    "125M": {"layers": 12, "hidden": 768, "intermediate": 2048, "heads": 12, "kv_heads": 4},
    "500M": {"layers": 24, "hidden": 1152, "intermediate": 4608, "heads": 18, "kv_heads": 6, "vocabulary": 16_000},
    "1.5B": {"layers": 28, "hidden": 2048, "intermediate": 6144, "heads": 16, "kv_heads": 4},
}


def _named() -> dict[str, Workload]:
    found: dict[str, Workload] = {}
    for size, shape in _SHAPES.items():
        plain = Workload(name=size, **shape)
        variants: dict[str, dict[str, Any]] = {
            "1x128": {},
            "1x128-clip": {"clip": 1.0},
            "8x1x128": {"micro_batches": 8},
            "4x512": {"batch": 4, "length": 512},
            "fp16": {"dtype": "float16", "overflow": True},
            "1x2048-checkpointed": {"length": 2048, "checkpoint": True},
        }
        for variant, changes in variants.items():
            name = f"{size}-{variant}"
            found[name] = replace(plain, name=name, **changes)
    return found


WORKLOADS = _named()


def adapted(work: Workload, device: str, dtype: str) -> Workload:
    """Returns `work` for the device `device` ("cpu" or "cuda"), and in `dtype` if `work` is in bfloat16.

    The new workload's name ends with what differs from `work`.
    """
    changes: dict[str, Any] = {}
    if device != work.device:
        changes["device"] = device
    if work.dtype == "bfloat16" and dtype != work.dtype:
        changes["dtype"] = dtype
    return replace(work, name="-".join([work.name, *changes.values()]), **changes)


def workload(values: dict[str, Any]) -> Workload:
    """Returns the workload with the fields `values`, which `to_dict` returned."""
    return Workload(**values)


def configuration(work: Workload) -> Any:
    """Returns the configuration of a workload's model, for transformers."""
    import transformers

    return transformers.Qwen2Config(
        num_hidden_layers=work.layers,
        hidden_size=work.hidden,
        intermediate_size=work.intermediate,
        num_attention_heads=work.heads,
        num_key_value_heads=work.kv_heads,
        vocab_size=work.vocabulary,
        max_position_embeddings=max(4096, work.length),
        tie_word_embeddings=work.tied,
    )


def made(work: Workload) -> Any:
    """Returns the model, ready to train. Its values are the same in every process.

    transformers makes the model in the workload's dtype, so there is no larger fp32 copy of it.
    """
    import torch
    import transformers

    dtype = getattr(torch, work.dtype)
    torch.manual_seed(0)
    models: Any = transformers.AutoModelForCausalLM
    model = models.from_config(configuration(work), dtype=dtype)
    # DeepSpeed casts not only parameters, but also buffers. `to()` does the same for the other systems that call this
    # function.
    return prepared(work, model.to(dtype))


def prepared(work: Workload, model: Any) -> Any:
    """Puts a model into training mode, without a key-value cache; returns the model.

    Also sets the workload's activation checkpointing and the workload's loss.
    """
    model.train()
    model.config.use_cache = False
    if work.checkpoint:
        model.gradient_checkpointing_enable()
    if work.loss == "chunked":
        model.forward = types.MethodType(_chunked, model)
    return model


def _chunked(model: Any, input_ids: Any, labels: Any) -> Any:
    """Computes the loss in chunks, in place of the model's own forward.

    Neither this forward nor its backward has the logits of all tokens in memory at the same time.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    def summed(hidden: Any, words: Any) -> Any:
        return torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), words, reduction="sum")

    hidden = model.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
    words = labels[:, 1:].flatten()
    chunks = zip(hidden.split(_CHUNK_TOKENS), words.split(_CHUNK_TOKENS), strict=True)
    losses = [checkpoint(summed, *chunk, use_reentrant=False) for chunk in chunks]
    return types.SimpleNamespace(loss=torch.stack(losses).sum() / len(words))


def tokens(work: Workload) -> list[Any]:
    """Returns the micro-batches of a step.

    All steps have the same micro-batches, so that the loss falls in training.
    """
    import torch

    # The tokens are not random, because random numbers may differ between versions of torch.
    shape = (work.micro_batches, work.batch, work.length)
    count = work.micro_batches * work.batch * work.length
    return list((torch.arange(count) * 7919 % 9973 % work.vocabulary).view(shape).to(work.device))
