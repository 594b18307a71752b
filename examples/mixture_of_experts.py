"""Trains a mixture of experts on a text, with gradient clipping and the router's load-balancing loss.

    python examples/small_model.py small --kind mixtral
    python examples/mixture_of_experts.py --model small/model --data small/data/text.txt --output tuned --storage state

offload() streams the weights from the model's files to storage. Each expert has its own tensors in the files, but in
transformers all experts of a layer share parameters. offload() fuses the tensors of the experts, and save_pretrained()
separates them again. You can kill the script at any moment, and start it again: the training continues at the next
step. The result is bit-identical to that of a run that was not killed.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import memascend


def read(tokenizer: AutoTokenizer, file: Path, length: int) -> torch.Tensor:
    """Returns the tokens of a text file in rows of `length` tokens. Drops an incomplete last row."""
    text = file.read_text(encoding="utf-8")
    # Encode line by line, because a tokenizer warns about texts that are longer than the model's longest sequence.
    lines = text.splitlines(keepends=True)
    ids = [token for part in tokenizer(lines, add_special_tokens=False)["input_ids"] for token in part]
    if len(ids) < length:
        raise SystemExit(f"{file} has {len(ids)} tokens, but a row needs {length}: use more text or a smaller --length")
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def main() -> None:
    """Trains a model. If the storage already has a training run, resumes this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="a text file")
    parser.add_argument("--output", required=True, type=Path, help="the folder for the trained model")
    parser.add_argument("--storage", required=True, help="a folder, file or NVMe device for the training state")
    parser.add_argument(
        "--host-memory", help='a hard budget such as "8GiB"; default: the least memory that allows full speed'
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="the number of tokens in a row")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = read(tokenizer, options.data, options.length)
    config = AutoConfig.from_pretrained(options.model)
    # Add the load-balancing loss. Without this loss, the router may send most tokens to a few experts.
    config.output_router_logits = True
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.train()
    # Turn on activation checkpointing: autograd saves only the inputs of each block, and the backward computes the
    # block's other activations again when it reaches the block. Before 5.23, transformers called this method
    # gradient_checkpointing_enable().
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    model, optimizer = memascend.offload(
        model,
        optimizer,
        storage=options.storage,
        existing="resume",
        host_memory=options.host_memory,
        # Clipping needs all gradients before the first update, so the gradients wait on storage until step().
        max_grad_norm=1.0,
        # offload() reads the weights only if the storage has no training state yet.
        weights=options.model,
    )
    with optimizer:
        for step in range(optimizer.steps, options.steps):
            chosen = torch.randint(len(rows), (options.batch,), generator=torch.Generator().manual_seed(step))
            tokens = rows[chosen].to(model.device)
            found = model(input_ids=tokens, labels=tokens)
            found.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(
                f"step {optimizer.steps}: loss {found.loss.item():.4f}, of which the experts' balance "
                f"{config.router_aux_loss_coef * found.aux_loss.item():.4f}, norm {optimizer.grad_norm:.3f}",
                flush=True,
            )
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        print(f"\n{optimizer.report()}\n\nfrom_pretrained({str(options.output)!r}) loads the trained model")


if __name__ == "__main__":
    main()
