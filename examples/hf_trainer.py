"""Trains with the Hugging Face Trainer's defaults: clipping, scheduler, accumulation, checkpoints, evaluation.

    python examples/hf_trainer.py --model Qwen/Qwen2.5-0.5B --storage /mnt/nvme/run1 --text corpus.txt

Without --model a small one with random values is trained on its own configuration's bytes, which needs no download.
Kill it whenever you like: started again, it goes on from the last checkpoint, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Trainer, TrainingArguments
from transformers.optimization import get_linear_schedule_with_warmup

import memascend
from memascend.trainer import Callback, last_checkpoint

_LENGTH = 64


class Pieces(torch.utils.data.Dataset):
    """A text in pieces of equal length."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens) // _LENGTH

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = self.tokens[index * _LENGTH : (index + 1) * _LENGTH]
        return {"input_ids": piece, "labels": piece}


class Continues(Trainer):
    """Its evaluation also lets the model go on with the beginning of a text."""

    def evaluate(self, *arguments: object, **options: object) -> dict[str, float]:
        """The loss as ever, and a sample."""
        metrics = super().evaluate(*arguments, **options)
        self.model.eval()
        beginning = self.eval_dataset[0]["input_ids"][None, :16]
        with torch.no_grad():
            made = self.model.generate(beginning, max_new_tokens=8, do_sample=False, pad_token_id=0)
        print("goes on:", made[0, 16:].tolist())
        return metrics


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a name or folder; without it a small model with random values")
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--storage", help="a folder, file or NVMe device; without it a temporary file is used")
    parser.add_argument("--output", default="trained", help="where the Trainer writes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()

    if options.model:
        # 16-bit weights with fp32 masters, which is what saves most; the masters are on storage, too.
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16)
        tokens = AutoTokenizer.from_pretrained(options.model)(options.text.read_text())["input_ids"]
    else:
        sizes = {"hidden_size": options.width, "intermediate_size": 4 * options.width}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = Qwen2Config(vocab_size=256, num_hidden_layers=options.layers, **sizes, **heads)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).bfloat16()
        tokens = list(options.text.read_bytes())

    # What the Trainer resumes from is what the storage begins from; without a checkpoint both begin anew.
    last = last_checkpoint(options.output)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = memascend.offload(model, optimizer, storage=options.storage, existing="replace", checkpoint=last)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=options.steps)

    arguments = TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        # Recomputes activations, which are what is left in memory.
        gradient_checkpointing=True,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=options.save_steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        report_to=[],
        use_cpu=True,
    )
    pieces = Pieces(torch.tensor(tokens))
    held_out = torch.utils.data.Subset(pieces, range(4))
    with optimizer:
        # The optimizer is handed over, so that the Trainer does not make its own.
        trainer = Continues(
            model,
            arguments,
            train_dataset=pieces,
            eval_dataset=held_out,
            callbacks=[Callback()],
            optimizers=(optimizer, scheduler),
        )
        trainer.train(resume_from_checkpoint=None if last is None else str(last))
        # Real weights, written one by one; loads with from_pretrained.
        trainer.save_model()
        print(optimizer.report())


if __name__ == "__main__":
    main()
