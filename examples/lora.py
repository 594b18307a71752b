"""Trains LoRA adapters with peft. The frozen model streams from storage; only the adapters have optimizer state.

    python examples/small_model.py small
    python examples/lora.py --model small/model --data small/data/prompts.jsonl --output adapters

offload() streams the weights from the model's files to storage, one parameter at a time. The command `memascend train
--use_peft --lora_r 8` also trains adapters, and resumes after a kill.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import memascend


def first_values(folder: Path) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Returns a function for `offload(weights=)`. The function returns the initial values of the parameter `name`."""
    places = {}
    for path in folder.glob("*.safetensors"):
        file = safe_open(path, framework="pt")
        places |= dict.fromkeys(file.keys(), file)

    def values(name: str, like: torch.Tensor) -> torch.Tensor:
        if ".lora_A." in name:
            return torch.nn.init.kaiming_uniform_(torch.empty_like(like, device="cpu"), a=5**0.5)
        if ".lora_B." in name:
            # With B = 0, an adapter does not change the model at first.
            return torch.zeros_like(like, device="cpu")
        key = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        return places[key].get_tensor(key)

    return values


def main() -> None:
    """Trains LoRA adapters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="JSON lines with `prompt` and `completion`")
    parser.add_argument("--storage", help="a folder, file or NVMe device; without it a temporary file is used")
    parser.add_argument("--output", default="adapters", help="the folder for the trained adapters")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    config = AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
        model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    model.train()
    # Turn on activation checkpointing: autograd saves only the inputs of each block, and the backward computes the
    # block's other activations again when it reaches the block. Before 5.23, transformers called this method
    # gradient_checkpointing_enable().
    blocks = model.base_model.model
    (getattr(blocks, "activation_checkpointing_enable", None) or blocks.gradient_checkpointing_enable)()
    model.print_trainable_parameters()

    # Give the optimizer only the trained parameters. offload() also offloads the frozen parameters, and writes them
    # only once.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    model, optimizer = memascend.offload(model, optimizer, storage=options.storage, weights=first_values(options.model))
    lines = options.data.read_text(encoding="utf-8").splitlines()
    with optimizer:
        for step in range(options.steps):
            row = json.loads(lines[step % len(lines)])
            prompt = tokenizer(row["prompt"])["input_ids"]
            answer = tokenizer(row["completion"], add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            ids = torch.tensor([prompt + answer], device=model.device)
            labels = torch.tensor([[-100] * len(prompt) + answer], device=model.device)
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {optimizer.steps}: loss {loss.item():.4f}")
        print(f"\n{optimizer.report()}")
        # save_pretrained() of peft writes only the adapters.
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
