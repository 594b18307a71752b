"""Runs a loop of accelerate as a script, which `accelerate launch` starts.

accelerate divides on GPUs alone: `as_if_on_gpus` lets it divide on the CPU what it would divide there.
"""

import os
import sys

import torch

import memascend

__all__ = ["CONFIG", "as_if_on_gpus", "llama", "rows"]

# As docs/hosts.md has it.
CONFIG = """
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
"""


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


def main(folder):
    """Train, and save the checkpoint."""
    torch.set_num_threads(1)
    with by_accelerate(folder) as optimizer:
        optimizer.save(f"{folder}/saved")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
