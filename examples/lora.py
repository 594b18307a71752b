"""Trains LoRA adapters with peft: the frozen model streams from storage, only adapters have optimizer state.

    python examples/lora.py --model Qwen/Qwen2.5-7B --storage /mnt/nvme/run1

Without --model a small one with random values is trained, which needs no download.
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen2Config

import memascend


def main() -> None:
    """Train adapters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder; without it a small model with random values")
    parser.add_argument("--storage", help="a folder, file or NVMe device; without it a temporary file is used")
    parser.add_argument("--output", default="adapters", help="where the adapters are written")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
    else:
        sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(vocab_size=256, num_hidden_layers=options.layers, **sizes, **heads)
        model = AutoModelForCausalLM.from_config(config).bfloat16()
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.print_trainable_parameters()

    # Only what is trained goes to the optimizer; offload() takes care of the rest of the model all the same. Frozen
    # values are never written again.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model, optimizer = memascend.offload(model, optimizer, storage=options.storage)

    with optimizer:
        for step in range(optimizer.steps, options.steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(256, (2, 64), generator=generator).to(model.device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {optimizer.steps}: loss {loss.item():.4f}")
        print(f"\n{optimizer.report()}")
        # peft's own way to save: the adapters alone, with their real values.
        model.save_pretrained(options.output)


if __name__ == "__main__":
    main()
