"""Trains on several ranks as torchtitan does: model on meta, named device mesh, fully_shard() of each block.

    torchrun --standalone --nproc-per-node 2 examples/fsdp.py --storage state
    torchrun --standalone --nproc-per-node 4 examples/fsdp.py --storage replicas --replicas 2

You can kill the script at any moment, and start it again: the training continues at the next step. Runs with 1, 2 and 4
ranks give bit-identical results, with and without replicas.
"""

import argparse
import os

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import memascend

MICRO_BATCHES = 4  # the number of micro-batches in a step, of all ranks together
parser = argparse.ArgumentParser()
parser.add_argument("--storage", required=True)
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--replicas", type=int, default=1)
options = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
sizes = {"pp": 1, "dp_replicate": options.replicas, "dp_shard": ranks // options.replicas, "cp": 1, "tp": 1}
mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
mesh = mesh["dp_replicate", "dp_shard"] if options.replicas > 1 else mesh["dp_shard"]

with torch.device("meta"):  # offload() later initialises the parameters, unit by unit
    shape = {"nhead": 4, "dim_feedforward": 512, "dropout": 0.0, "batch_first": True}
    blocks = [nn.TransformerEncoderLayer(128, **shape) for _ in range(4)]
    model = nn.Sequential(nn.Embedding(256, 128), *blocks, nn.Linear(128, 256))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
for block in blocks:  # the last block stays gathered, because the backward begins with this block
    fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block is not blocks[-1])
fully_shard(model, mesh=mesh, mp_policy=policy)
torch.manual_seed(0)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
model, optimizer = memascend.offload(
    model, optimizer, storage=options.storage, existing="resume", device=device, max_grad_norm=1.0
)
optimizer.schedule(scheduler)  # step() advances and commits the scheduler
for step in range(optimizer.steps, options.steps):
    for micro in range(rank, MICRO_BATCHES, ranks):
        generator = torch.Generator().manual_seed(step * MICRO_BATCHES + micro)
        tokens = torch.randint(0, 256, (2, 33), generator=generator).to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss * ranks / MICRO_BATCHES).backward()  # FSDP divides gradients by the number of ranks
    optimizer.step()
    optimizer.zero_grad()
    print(f"rank {rank}, step {step}: {loss.item():.4f}, norm {optimizer.grad_norm:.4f}", flush=True)
optimizer.save(f"{options.storage}-saved")
optimizer.close()
torch.distributed.destroy_process_group()
