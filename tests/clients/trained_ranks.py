"""A user's script that trains by a Trainer under torchrun or `accelerate launch`, offloaded in one line.

usage: [TRAINED_OPTIONS=JSON] trained_ranks.py plain|supervised STORE FOLDER [RANKS STEP]

RANKS, as "1" or "0,1", are killed after a step.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
import transformers
from support.torchrun import as_if_on_gpus
from support.trained_program import made, model, rows

__all__ = []


class Killed(transformers.TrainerCallback):
    """Kills ranks at the end of a step."""

    def __init__(self, ranks="", step=0):
        self.ranks, self.step = ranks.split(","), int(step)

    def on_step_end(self, args, state, *_, **__):
        if state.global_step == self.step and str(args.process_index) in self.ranks:
            os.kill(os.getpid(), signal.SIGKILL)


def trained(kind, folder, killed, options):
    """The Trainer of transformers, or TRL's."""
    if kind == "plain":
        # Dropout depends on the rank.
        return made(folder / "out", killed, data=rows(48), own=model(attention_dropout=0.0), **options)
    from clients.trained_trainers import SHARED, supervised, texts

    SHARED.update(options)
    # As many as make whole steps.
    return supervised(str(folder / "out"), killed, lambda count=48: texts(count))


def main(kind, store, folder, *kill):
    import memascend.trainer

    torch.set_num_threads(1)
    folder = Path(folder)
    options = json.loads(os.environ.get("TRAINED_OPTIONS", "{}"))
    trainer = trained(kind, folder, Killed(*kill), options)
    # The default of ranks, since torch's norm depends on their number.
    memascend.trainer.offload(trainer, storage=store, **({} if trainer.is_fsdp_enabled else {"clipping": "exact"}))
    trainer.train()
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        as_if_on_gpus()
    main(*sys.argv[1:])
