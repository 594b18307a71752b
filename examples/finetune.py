"""Fine-tunes a model on conversations in a plain PyTorch loop, without a Trainer.

    python examples/small_model.py small
    python examples/finetune.py --model small/model --data small/data/messages.jsonl --output tuned --storage state

offload() streams the weights from the model's files to storage, one parameter at a time. You can kill the script while
it trains, and start it again: the training continues at the next step. The result is bit-identical to that of a run
that was not killed.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import memascend


def encode(tokenizer: AutoTokenizer, messages: list[dict[str, str]], length: int) -> tuple[list[int], list[int]]:
    """Returns the first `length` token ids of a conversation, and their labels.

    The last message must be the assistant's. Only this message contributes to the loss: all other labels are -100.
    """
    before = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    if messages[-1]["role"] != "assistant" or not whole.startswith(before):
        raise SystemExit(
            "the last message of a conversation is not the assistant's, or the chat template changes earlier messages: "
            "use `memascend train`, which supports more conversations and templates"
        )
    tokens = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids = tokens["input_ids"][:length]
    ends = [end for _, end in tokens["offset_mapping"]]
    return ids, [one if end > len(before) else -100 for one, end in zip(ids, ends, strict=False)]


def read_rows(tokenizer: AutoTokenizer, path: Path, length: int) -> list[tuple[list[int], list[int]]]:
    """Reads and encodes conversations. Leaves out a conversation if `length` cuts off the assistant's whole message.

    Such a row has no labels, so the model would compute NaN as the mean of its loss.
    """
    with path.open(encoding="utf-8") as file:
        encoded = [encode(tokenizer, json.loads(line)["messages"], length) for line in file]
    rows = [(ids, labels) for ids, labels in encoded if any(label != -100 for label in labels[1:])]
    if len(rows) < len(encoded):
        print(f"rows left out, because --max-length {length} cuts off their answers: {len(encoded) - len(rows)}")
    return rows


def collate(rows: list[tuple[list[int], list[int]]], device: torch.device) -> dict[str, torch.Tensor]:
    """Makes a batch of rows. Pads shorter rows with tokens that attention and loss ignore."""
    length = max(len(ids) for ids, _ in rows)

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([one + [value] * (length - len(one)) for one in lists], device=device)

    return {
        "input_ids": padded([ids for ids, _ in rows], 0),
        "attention_mask": padded([[1] * len(ids) for ids, _ in rows], 0),
        "labels": padded([labels for _, labels in rows], -100),
    }


def main() -> None:
    """Trains a model. If the storage already has a training run, resumes this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="JSON lines with `messages`")
    parser.add_argument("--output", required=True, type=Path, help="the folder for the trained model")
    parser.add_argument("--storage", required=True, help="a folder, file or NVMe device for the training state")
    parser.add_argument(
        "--host-memory", help='a hard budget such as "8GiB"; default: the least memory that allows full speed'
    )
    parser.add_argument("--max-length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="the number of rows that are computed at once")
    parser.add_argument("--accumulate", type=int, default=8, help="the number of batches in a step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--steps", type=int, help="default: one pass over the data")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    rows = read_rows(tokenizer, options.data, options.max_length)
    together = options.batch * options.accumulate
    per_epoch = len(rows) // together
    steps = options.steps or per_epoch
    if not per_epoch:
        raise SystemExit(
            f"{len(rows)} rows are too few for a step of {together}: use more data or a smaller --accumulate"
        )

    # Make the model on meta, without memory. offload() then reads the weights from the folder, one parameter at a time.
    config = AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    model.train()
    # Turn on activation checkpointing: autograd saves only the inputs of each block, and the backward computes the
    # block's other activations again when it reaches the block. Before 5.23, transformers called this method
    # gradient_checkpointing_enable().
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.0)
    model, optimizer = memascend.offload(
        model,
        optimizer,
        storage=options.storage,
        existing="resume",
        host_memory=options.host_memory,
        max_grad_norm=1.0,
        accumulation_steps=options.accumulate,
        # offload() reads the weights only if the storage has no training state yet.
        weights=options.model,
    )
    # optimizer.schedule() restores the schedule after a resume, and makes step() advance the schedule. After a resume,
    # continue the data at step optimizer.steps, the number of committed steps.
    warmup = math.ceil(0.03 * steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (warmup + 1), (steps - step) / max(1, steps - warmup))
    )
    optimizer.schedule(schedule)
    with optimizer:
        for step in range(optimizer.steps, steps):
            epoch, place = divmod(step, per_epoch)
            order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(epoch)).tolist()
            chosen = [rows[number] for number in order[place * together :][:together]]
            count = sum(label != -100 for _, labels in chosen for label in labels[1:])
            # Seed with the step's number, so that dropout does not depend on the step at which this process began.
            torch.manual_seed(step)
            total = 0.0
            for start in range(0, together, options.batch):
                batch = collate(chosen[start : start + options.batch], model.device)
                learnt = int((batch["labels"][:, 1:] != -100).sum())
                # Weight each batch's loss by its number of labelled tokens. The sum over the batches is then the mean
                # over all labelled tokens of the step.
                loss = model(**batch, use_cache=False).loss * (learnt / count)
                optimizer.backward(loss)
                total += loss.item()
            # step() commits: all updates of the step become visible and durable at once.
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {optimizer.steps}: loss {total:.4f}, norm {optimizer.grad_norm:.3f}", flush=True)
        model.save_pretrained(options.output)
        tokenizer.save_pretrained(options.output)
        print(f"\n{optimizer.report()}\n\nfrom_pretrained({str(options.output)!r}) loads the trained model")


if __name__ == "__main__":
    main()
