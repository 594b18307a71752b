"""Trains the model of a folder offloaded, with SFTTrainer or DPOTrainer. Run as a program.

The arguments are: "sft", or "dpo" for a training that also has a reference model; the folder of the model; the folder
for the output. Two optional arguments follow: a memory cgroup, which the program joins, and its limit in bytes.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import datasets
import torch
import transformers
import trl

import memascend
import memascend.trainer
from memascend.memory import limits

__all__ = []

kind, model, folder, *limit = sys.argv[1:]
rows = range(8)
settings = {
    "output_dir": f"{folder}/output", "use_cpu": True, "bf16": False, "max_steps": 2, "logging_steps": 1,
    "per_device_train_batch_size": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    "gradient_checkpointing": False,
}  # fmt: skip
texts = datasets.Dataset.from_dict({"text": [f"it is a test {row}" for row in rows]})
pairs = datasets.Dataset.from_dict(
    {name: [f"{text} {row}" for row in rows] for name, text in [("prompt", "it"), ("chosen", "is"), ("rejected", "no")]}
)
tokenizer = transformers.AutoTokenizer.from_pretrained(model)
limits()
if limit:
    group = Path(limit[0])
    old = group / "memory.limit_in_bytes"
    (old if old.exists() else group / "memory.max").write_text(limit[1])
    (group / "cgroup.procs").write_text(str(os.getpid()))
with memascend.trainer.loading():
    if kind == "sft":
        trainer = trl.SFTTrainer(model, trl.SFTConfig(**settings), train_dataset=texts, processing_class=tokenizer)
    else:
        trainer = trl.DPOTrainer(model, args=trl.DPOConfig(**settings), train_dataset=pairs, processing_class=tokenizer)
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
optimizer = memascend.trainer.offload(trainer, storage=f"{folder}/run.store", host_memory="210MiB")
begun = optimizer.steps
trainer.train()
digest = hashlib.sha256()
with memascend.materialized(trainer.model):
    for _, parameter in sorted(trainer.model.named_parameters()):
        for part in parameter.detach().reshape(-1).split(1 << 20):
            digest.update(part.view(torch.uint8).numpy().tobytes())
losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
print("found", json.dumps({"begun": begun, "losses": losses, "digest": digest.hexdigest()}))
optimizer.close()
