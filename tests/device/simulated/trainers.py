"""Trains by transformers' Trainer on the simulated CUDA, whose kernels do nothing: only memory and order are real."""

import logging
import tempfile

import torch
import transformers
from device.simulated import runtime

import memascend.trainer
from memascend.trainer import by_layer

COUNT, STEPS = 4, 4


def step(room):
    """Trains with as much room as the micro-batches of a step need together, times `room`; says what was needed."""
    rooms, lines = [], []

    class Kept(by_layer.Room):
        def __init__(self, *given):
            super().__init__(*given)
            rooms.append(self)

    by_layer.Room = Kept
    log = logging.getLogger("memascend")
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    # Its kernels need a device that computes.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    folder = tempfile.mkdtemp()
    config = transformers.Qwen2Config(
        vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    tokens = torch.arange(512) % 500
    limits = []

    class Limit(transformers.TrainerCallback):
        def on_step_end(self, _, state, *__, **___):
            if state.global_step == 1:
                total = torch.cuda.get_device_properties(0).total_memory
                limits.append(rooms[0]._peak + (COUNT - 1) * (rooms[0]._kept + rooms[0]._tied))
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(room * limits[0] / total)
                torch.cuda.reset_peak_memory_stats()

    arguments = transformers.TrainingArguments(
        folder + "/out", per_device_train_batch_size=8, gradient_accumulation_steps=COUNT, max_steps=STEPS,
        max_grad_norm=0, save_strategy="no", report_to=[], activation_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = transformers.Trainer(
        transformers.Qwen2ForCausalLM(config), arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8 * COUNT * STEPS, callbacks=[Limit()],
    )  # fmt: skip
    # What is computed is whatever memory had.
    memascend.trainer.offload(trainer, storage=folder + "/run.store", nonfinite="commit")
    trainer.train()
    return {
        "in turn": [line for line in lines if "no room for the activations" in line],
        "peak": torch.cuda.max_memory_allocated(),
        "needed": limits[0],
        "kept": rooms[0]._kept,
        "steps": trainer.state.global_step,
        "faults": runtime.faults(),
    }
