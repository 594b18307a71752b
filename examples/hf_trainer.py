"""Trains the model of a folder with the Trainer's defaults: clipping, scheduler, accumulation, checkpoints, evaluation.

    python examples/small_model.py small
    python examples/hf_trainer.py --model small/model --data small/data/text.txt --output trained --storage state

Weights go from their files to storage one by one. Kill it whenever you like: started again, it goes on from the last
checkpoint, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

import memascend
from memascend.trainer import Callback, last_checkpoint


class Extents(torch.utils.data.Dataset):
    """A text in pieces of equal length."""

    def __init__(self, tokens: list[int], length: int) -> None:
        self.tokens = torch.tensor(tokens)
        self.length = length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        extent = self.tokens[index * self.length : (index + 1) * self.length]
        return {"input_ids": extent, "labels": extent}


class Continues(Trainer):
    """Its evaluation also lets the model go on with the beginning of the text."""

    def evaluate(self, *arguments: object, **options: object) -> dict[str, float]:
        """The loss as ever, and a sample."""
        metrics = super().evaluate(*arguments, **options)
        self.model.eval()
        beginning = self.eval_dataset[0]["input_ids"][None, :16].to(self.model.device)
        seen = torch.ones_like(beginning)
        with torch.no_grad():
            made = self.model.generate(
                beginning, attention_mask=seen, max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        print(f"goes on: {self.processing_class.decode(made[0, 16:])!r}")
        return metrics


def main() -> None:
    """Train, or go on training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="a text")
    parser.add_argument("--storage", help="a folder, file or NVMe device; without it a temporary file is used")
    parser.add_argument("--host-memory", help='a hard budget such as "8GiB"; else as little as runs at full speed')
    parser.add_argument("--output", default="trained", help="where the Trainer writes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=64, help="tokens of an extent")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    # Line by line: a tokenizer warns of a text that is longer than its model takes.
    lines = options.data.read_text(encoding="utf-8").splitlines(keepends=True)
    parts = tokenizer(lines, add_special_tokens=False)["input_ids"]
    extents = Extents([token for part in parts for token in part], options.length)
    held_out = torch.utils.data.Subset(extents, range(4))

    # No weight is in memory: they are read from the folder, or from the last checkpoint, into the storage.
    config = AutoConfig.from_pretrained(options.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype)
    # What the Trainer resumes from is what the storage begins from; without a checkpoint both begin anew.
    last = last_checkpoint(options.output)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0)
    model, optimizer = memascend.offload(
        model,
        optimizer,
        storage=options.storage,
        existing="replace",
        host_memory=options.host_memory,
        weights=options.model if last is None else None,
        checkpoint=last,
    )
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=options.steps)

    # Its name before transformers 5.23, and since.
    recompute = "gradient_checkpointing"
    if hasattr(TrainingArguments, "activation_checkpointing"):
        recompute = "activation_checkpointing"
    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        # Recomputes activations, which are what is left in memory.
        **{recompute: True},
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.save_steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        report_to=[],
        use_cpu=model.device.type == "cpu",
    )
    with optimizer:
        # The optimizer is handed over, so that the Trainer does not make its own.
        trainer = Continues(
            model,
            arguments,
            train_dataset=torch.utils.data.Subset(extents, range(4, len(extents))),
            eval_dataset=held_out,
            processing_class=tokenizer,
            callbacks=[Callback()],
            optimizers=(optimizer, scheduler),
        )
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        # Real weights, written one by one, and the tokenizer; from_pretrained loads them.
        trainer.save_model()
        print(optimizer.report())


if __name__ == "__main__":
    main()
