"""Trains with memascend in TRL's SFTTrainer. The model comes from a checkpoint, and the dataset contains token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.train.cell.systems import ours
from benchmarks.train.cell.workload import LEARNING_RATE, Workload, tokens

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

    from benchmarks.train.cell.record import Record

__all__ = ["Trainer", "begin", "ready", "substeps", "tokenizer"]


def ready() -> list[ModuleType]:
    """Imports the libraries that a user of this system imports; returns them."""
    import trl

    import memascend.trainer

    # TRL imports a Trainer's code at the first access to its class.
    trl.SFTTrainer  # noqa: B018
    return [*ours.ready(), trl, memascend.trainer]


def begin(work: Workload, settings: dict[str, Any], storage: Path) -> Trainer:
    """Makes a Trainer and offloads its model and optimizer.

    `settings` may have these entries:

    - `weights`: the checkpoint folder of the model. If it names no folder, `begin` writes a new checkpoint.
    - `turns`: True means that micro-batches are computed one after the other, not by layer.
    - `host_memory`, `activations`: options of `memascend.trainer.offload()`. The default of `host_memory` is "default".
    """
    import trl
    from datasets import Dataset
    from transformers import PrinterCallback

    import memascend.trainer

    folder = ours.checkpoint(work, settings, storage)
    rows = [row.tolist() for batch in tokens(work) for row in batch]
    config = trl.SFTConfig(
        str(storage / "output"), per_device_train_batch_size=work.batch, max_length=work.length,
        gradient_accumulation_steps=work.micro_batches, max_steps=1 << 20, learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant", weight_decay=0.01, max_grad_norm=work.clip or 0.0,
        gradient_checkpointing=work.checkpoint, logging_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True, use_cpu=work.device == "cpu", bf16=False, model_init_kwargs={"dtype": work.dtype},
    )  # fmt: skip
    with memascend.trainer.loading():
        trainer = trl.SFTTrainer(
            str(folder), args=config, train_dataset=Dataset.from_dict({"input_ids": rows}),
            processing_class=tokenizer(),
        )  # fmt: skip
    # PrinterCallback would print each log to standard output, where the cell prints its answer.
    trainer.remove_callback(PrinterCallback)
    # Without `host_memory`, `memascend.trainer.offload()` uses the memory that the machine can spare. With "default",
    # it uses the default budget of `memascend.offload()`.
    options = {name: settings[name] for name in ("host_memory", "activations") if name in settings}
    options.setdefault("host_memory", "default")
    optimizer = memascend.trainer.offload(
        trainer, storage=storage / "memascend.store", existing="replace", device=work.device, **options
    )
    return Trainer(trainer, optimizer, turns=bool(settings.get("turns")))


def tokenizer() -> Any:
    """Returns a tokenizer.

    Its tokens are the words w0 to w999, a token for padding, and a token for the end of a text.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = "<pad>", "<end>"
    words = [pad, end, *(f"w{number}" for number in range(1000))]
    found = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, pad))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast: Any = PreTrainedTokenizerFast
    return fast(tokenizer_object=found, pad_token=pad, eos_token=end)


class Trainer:
    """Trains with the training loop of TRL's SFTTrainer."""

    def __init__(self, trainer: Any, optimizer: Any, *, turns: bool) -> None:
        self.trainer, self.optimizer = trainer, optimizer
        if turns:
            trainer.add_callback(substeps())

    def train(self, record: Record) -> None:
        """Makes steps until the record has enough of them."""
        self.trainer.add_callback(_clock(record))
        self.trainer.train()

    def counted(self) -> int | None:
        """Returns the bytes moved so far, from the optimizer's report."""
        return ours.moved(self.optimizer)

    def way(self) -> str:
        """Returns the part of the next step that writes deferred updates, as `ours.way` does."""
        return ours.way(self.optimizer)

    def end(self) -> dict[str, Any]:
        """Closes the optimizer; returns its report and its plan, as `ours.ended` does."""
        return ours.ended(self.optimizer)


def _clock(record: Record) -> Any:
    """Returns a callback that adds each step to `record`, and stops the Trainer when `record` has enough steps.

    A step ends when the Trainer logs its loss. The next step begins at this moment. The first step begins when the
    callback is made.
    """
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.last = record.now()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002 - passed by name
            if "loss" not in kwargs["logs"]:
                return
            now = record.now()
            record.add(float(kwargs["logs"]["loss"]), [self.last, now])
            self.last = now
            control.should_training_stop = record.enough

    return Clock()


def substeps() -> Any:
    """Returns a callback that overrides `on_substep_end()`.

    With such a callback, memascend computes micro-batches one after the other, not by layer.
    """
    from transformers import TrainerCallback

    class Substeps(TrainerCallback):
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            """Does nothing."""

    return Substeps()
