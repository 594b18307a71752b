"""Trains in a plain PyTorch loop with one additional line, offload(). The data are Python's own source files.

    python examples/plain_loop.py --storage state --steps 20
    python examples/plain_loop.py --storage state --steps 40    # continues after step 20

You can kill the script at any moment, and start it again. No step that the script has printed is lost.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn

import memascend


class Model(nn.Module):
    """A language model that predicts bytes."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        block = {"nhead": width // 64, "dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True}
        # offload() makes each of these blocks a unit: a group of parameters that are read and evicted together.
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, **block) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next byte, for each byte in `tokens`."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(hidden)


def weights_file(storage: Path) -> Path:
    """Returns the path for the weights: in a storage folder, or beside a storage file.

    For a device, the path is in the current folder.
    """
    if storage.is_dir():
        return storage / "weights.pt"
    if storage.is_file():
        return storage.with_name(f"{storage.name}.weights.pt")
    return Path("weights.pt")


def main() -> None:
    """Trains a model. If the storage already has a training run, resumes this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", help="a folder, file or NVMe device; without it a temporary file is used")
    parser.add_argument(
        "--host-memory", help='a hard budget such as "8GiB"; default: the least memory that allows full speed'
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:100]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)

    torch.manual_seed(0)
    model = Model(options.layers, options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    # offload() is the one additional line. It moves the model's parameters and the optimizer's state to storage.
    model, optimizer = memascend.offload(
        model,
        optimizer,
        storage=options.storage,
        host_memory=options.host_memory,
        existing="resume" if options.storage else "refuse",
    )
    # optimizer.schedule() restores the scheduler after a resume, and makes step() advance the scheduler. After a
    # resume, continue the data at step optimizer.steps, the number of committed steps. If a resume needs more state,
    # set optimizer.user_state before each step().
    optimizer.schedule(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20)))
    print(optimizer.plan, "\n")
    # offload() chooses CUDA if the machine has a CUDA GPU; offload(device="cpu") chooses the CPU.
    device = next(model.parameters()).device

    with optimizer:
        for step in range(optimizer.steps, options.steps):
            starts = torch.randint(len(text) - 129, (4,), generator=torch.Generator().manual_seed(step))
            tokens = torch.stack([text[start : start + 129] for start in starts]).long().to(device)
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            # step() commits: all updates of the step become visible and durable at once.
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {optimizer.steps}: loss {loss.item():.4f}")
        print(f"\n{optimizer.report()}")
        if options.storage:
            weights = weights_file(Path(options.storage))
            # state_dict() returns ordinary tensors, whose memory is mapped from temporary files.
            torch.save(model.state_dict(), weights)
            print(f"the weights are in {weights}")


if __name__ == "__main__":
    main()
