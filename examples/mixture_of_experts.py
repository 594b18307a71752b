"""Trains a mixture of experts with clipping: experts that a step does not use are not written.

    python examples/mixture_of_experts.py --storage /mnt/nvme/run1 --experts 64

An expert that no token went to has no gradient, so that its moments, its step count and its values stay as they are,
bit for bit as in torch.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM, MixtralConfig

import memascend


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="a folder, file or NVMe device; without it a temporary file is used")
    parser.add_argument("--host-memory", help='a hard budget such as "8GiB"; else as little as runs at full speed')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=options.width,
        intermediate_size=2 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=options.experts,
        num_experts_per_tok=2,
        output_router_logits=True,
    )
    model = AutoModelForCausalLM.from_config(config).bfloat16()
    # What a step recomputes need not stay in memory.
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = memascend.offload(
        model,
        optimizer,
        storage=options.storage,
        host_memory=options.host_memory,
        # Clipping needs all gradients before the first update, so they wait on storage until step().
        max_grad_norm=1.0,
    )
    with optimizer:
        for step in range(optimizer.steps, options.steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(256, (2, 64), generator=generator).to(model.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {optimizer.steps}: loss {loss.item():.4f}, norm {optimizer.grad_norm:.3f}")
        print(f"\n{optimizer.report()}")


if __name__ == "__main__":
    main()
