"""Trains a model with the Trainer of transformers. If the process is killed, the same command resumes the training.

    python examples/small_model.py small
    python examples/hf_trainer.py --model small/model --data small/data/text.txt --output trained --storage state

Inside loading(), from_pretrained() makes the model without its weights. offload() then streams the weights from the
model's files to storage, one parameter at a time.
"""

import argparse
from pathlib import Path

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

import memascend.trainer


def main() -> None:
    """Trains a model. If the storage already has a training run, resumes this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, type=Path, help="a folder with config, safetensors and tokenizer")
    parser.add_argument("--data", required=True, type=Path, help="a text file")
    parser.add_argument("--storage", required=True, help="a folder, file or NVMe device")
    parser.add_argument(
        "--host-memory", help='a hard budget such as "8GiB"; default: the least memory that allows full speed'
    )
    parser.add_argument("--output", default="trained", help="the folder for the trained model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lines = [line for line in options.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    rows = [tokenizer(line, truncation=True, max_length=64) for line in lines]
    arguments = TrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-4,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="no",
        report_to=[],
    )
    with memascend.trainer.loading():
        trainer = Trainer(
            AutoModelForCausalLM.from_pretrained(options.model),
            arguments,
            train_dataset=rows[8:],
            eval_dataset=rows[:8],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
            processing_class=tokenizer,
        )
    optimizer = memascend.trainer.offload(trainer, storage=options.storage, host_memory=options.host_memory)
    trainer.train()
    trainer.save_model()
    print(optimizer.report())
    optimizer.close()


if __name__ == "__main__":
    main()
