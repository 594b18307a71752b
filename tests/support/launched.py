"""Runs the loops of docs/hosts.md as a script, which torchrun and `accelerate launch` start; see `main`.

accelerate divides on GPUs alone: `as_if_on_gpus` lets it divide on the CPU what it would divide there.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

import memascend

__all__ = ["llama", "rows"]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_key_value_heads=2, max_position_embeddings=64, **sizes)
    return LlamaForCausalLM(config)


def rows():
    return [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(number)) for number in range(12)]


def as_if_on_gpus():
    """Let accelerate divide on the CPU what it divides on GPUs alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "1")
    os.environ.setdefault("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])
    begin = PartialState.__init__

    def begun(self, *values, **options):
        begin(self, *values, **options)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begun


def by_torchrun(folder):
    torch.distributed.init_process_group("gloo")
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = llama()
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/run")
    for batch in list(torch.utils.data.DataLoader(rows(), batch_size=2))[rank::count]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer


def by_accelerate(folder):
    as_if_on_gpus()
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    assert accelerator.is_fsdp2
    model = llama()
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # Accelerate's schedulers take a step for each rank.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer = memascend.offload(model, optimizer, storage=f"{folder}/run")
    for batch in loader:
        accelerator.backward(model(input_ids=batch, labels=batch).loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return optimizer


def by_trainer(folder, kill="0", accumulate="1"):
    """Train by `memascend.trainer.offload()`; rank 1 is killed after step `kill`."""
    as_if_on_gpus()
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import memascend.trainer

    class Killed(TrainerCallback):
        def on_step_end(self, args, state, *_, **__):
            if state.global_step == int(kill) and args.process_index == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    data = [{"input_ids": tokens, "labels": tokens} for tokens in rows()]
    arguments = TrainingArguments(
        f"{folder}/out", fsdp=True, fsdp_config={"fsdp_version": 2, "version": 2}, report_to=[], logging_steps=2,
        per_device_train_batch_size=1, gradient_accumulation_steps=int(accumulate), num_train_epochs=3, use_cpu=True,
        save_strategy="no", warmup_steps=2, learning_rate=1e-2,
    )  # fmt: skip
    trained = Trainer(llama(), arguments, train_dataset=data, callbacks=[Killed()])
    memascend.trainer.offload(trained, storage=f"{folder}/run")
    trained.train()
    values = {name: one.full_tensor().detach() for name, one in trained.model.named_parameters()}
    if torch.distributed.get_rank() == 0:
        torch.save(values, f"{folder}/values")
        figures = ("loss", "learning_rate", "grad_norm", "epoch", "train_loss")
        log = [{name: said[name] for name in figures if name in said} for said in trained.state.log_history]
        Path(folder, "log.json").write_text(json.dumps(log))
    torch.distributed.barrier()


def main(loop, folder, *options):
    """Train by one of the loops, and save the checkpoint."""
    torch.set_num_threads(1)
    if loop == "trainer":
        by_trainer(folder, *options)
    else:
        with {"torchrun": by_torchrun, "accelerate": by_accelerate}[loop](folder) as optimizer:
            optimizer.save(f"{folder}/saved")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
