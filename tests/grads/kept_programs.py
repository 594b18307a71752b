"""Programs that keep something between micro-batches or between blocks, in memory and by `accumulate()`.

A program is a function that returns a model and its `loss_of`, both anew for each run. Run as a script, this compares
all of them with the plain loop in a fresh process, and prints the name of each that is equal.
"""

from __future__ import annotations

import collections
import itertools
import random
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import memascend

WIDTH, BLOCKS, MICRO_BATCHES, STEPS = 32, 4, 3, 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    """Blocks, between which `between(number, x)` runs."""

    def __init__(self, between=lambda _, x: x, end=lambda x: x):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.between, self.end = between, end

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = self.between(number, block(x))
        return self.end(self.head(x))


def square(model):
    return lambda batch: model(batch).square().mean()


def passed_on(put, take):
    """Each block puts its features somewhere, where the next one finds those of the same micro-batch."""

    def between(number, x):
        if number:
            x = x + 0.1 * take()
        put(x)
        return x

    model = Stack(between)
    return model, square(model)


def in_deque():
    kept = collections.deque(maxlen=1)
    return passed_on(kept.append, lambda: kept[0])


def in_numpy():
    kept = np.zeros((4, WIDTH), dtype=np.float32)
    return passed_on(lambda x: kept.__setitem__(..., x.detach().numpy()), lambda: torch.from_numpy(kept.copy()))


def in_bytearray():
    kept = bytearray(4)
    return passed_on(
        lambda x: kept.__setitem__(0, int(x.detach().abs().sum()) % 256), lambda: torch.tensor(kept[0] / 64)
    )


def in_list_in_dict():
    kept = {"features": [None]}
    return passed_on(lambda x: kept["features"].__setitem__(0, x), lambda: kept["features"][0])


class Slotted:
    __slots__ = ("features",)


def in_slots():
    kept = Slotted()
    return passed_on(lambda x: setattr(kept, "features", x), lambda: kept.features)


class Callable:
    features = None

    def __call__(self, x):
        self.features = x


def in_callable():
    kept = Callable()
    return passed_on(kept, lambda: kept.features)


def in_class_attribute():
    kind = type("Kind", (), {"features": None})
    return passed_on(lambda x: setattr(kind, "features", x), lambda: kind.features)


def in_long_list():
    kept = [None] * 300
    return passed_on(lambda x: kept.__setitem__(299, x), lambda: kept[299])


def in_buffer_through_numpy():
    model, loss_of = passed_on(lambda _: None, lambda: 0)
    model.register_buffer("noted", torch.zeros(4, WIDTH))
    memory = model.noted.numpy()

    def between(number, x):
        if number:
            x = x + 0.1 * model.noted.clone()
        memory[:] = x.detach().numpy()
        return x

    model.between = between
    return model, loss_of


def in_thread_local():
    kept = threading.local()
    kept.scale = 0.5

    def between(number, x):
        kept.scale = kept.scale + 0.01 * number
        return x * kept.scale

    model = Stack(between)
    return model, square(model)


def features_by_hooks():
    model, features = Stack(), {}
    for number, block in enumerate(model.blocks):
        block.register_forward_hook(lambda _m, _a, out, number=number: features.__setitem__(number, out))
    return model, lambda batch: model(batch).square().mean() + sum(one.abs().mean() for one in features.values())


def features_of_transformers():
    from transformers import Qwen2Config, Qwen2ForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model, features = Qwen2ForCausalLM(Qwen2Config(vocab_size=48, num_hidden_layers=4, **shape)), {}
    for number, block in enumerate(model.model.layers):
        block.register_forward_hook(lambda _m, _a, out, number=number: features.__setitem__(number, out))

    def loss_of(batch):
        tokens = (batch.abs() * 10).long() % 48
        loss = model(input_ids=tokens, labels=tokens).loss
        return loss + sum((one[0] if isinstance(one, tuple) else one).square().mean() for one in features.values())

    return model, loss_of


def auxiliary_losses():
    losses = []

    def between(_, x):
        losses.append(x.square().mean())
        return x

    model = Stack(between)

    def loss_of(batch):
        losses.clear()
        return model(batch).mean() + 0.1 * sum(losses)

    return model, loss_of


def noise_of(draw):
    model = Stack(lambda _, x: x * draw())
    return model, square(model)


def own_generator():
    generator = torch.Generator().manual_seed(3)
    return noise_of(lambda: torch.rand((), generator=generator))


def numpy_generator():
    generator = np.random.default_rng(3)
    return noise_of(lambda: float(generator.random()))


def python_generator():
    generator = random.Random(3)
    return noise_of(generator.random)


def default_generators():
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002 - the generator that all code shares
    return noise_of(lambda: torch.rand(()) * random.random() * np.random.random())  # noqa: NPY002 - likewise


def dropout():
    model = Stack(lambda _, x: nn.functional.dropout(x, 0.3))
    return model, square(model)


def truncated_bptt():
    model, state = Stack(), [torch.zeros(4, WIDTH)]

    def loss_of(batch):
        out = model(batch + state[0])
        state[0] = out.detach()
        return out.square().mean()

    return model, loss_of


def memory_of_examples():
    model, memory = Stack(), []

    def loss_of(batch):
        out = model(batch)
        memory.append(out.detach())
        return (out - torch.stack(memory[-4:]).mean(0)).square().mean() + out.mean()

    return model, loss_of


def iterator_around_the_model():
    model, numbers = Stack(), itertools.count(1)

    def loss_of(batch):
        out = model(batch * next(numbers))
        return out.square().mean() / next(numbers)

    return model, loss_of


def toggled_requires_grad():
    model = Stack()
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(True)

    def between(number, x):
        if number == 0:
            model.blocks[1].requires_grad_(False)
        if number == 1:
            model.blocks[1].requires_grad_(True)
        return x

    model.between = between
    return model, square(model)


def kernel_of_attention():
    def between(_, x):
        with sdpa_kernel(SDPBackend.MATH):
            return nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]

    model = Stack(between)
    return model, square(model)


def default_dtype():
    def between(number, x):
        torch.set_default_dtype(torch.float64 if number % 2 == 0 else torch.float32)
        return (x * torch.ones(WIDTH).cos()).float()

    def end(x):
        torch.set_default_dtype(torch.float32)
        return x

    model = Stack(between, end)
    return model, square(model)


def batch_norm():
    model = Stack()
    model.norm = nn.BatchNorm1d(WIDTH)
    return model, lambda batch: model(model.norm(batch)).square().mean()


PROGRAMS = [
    in_deque, in_numpy, in_bytearray, in_list_in_dict, in_slots, in_callable, in_class_attribute, in_long_list,
    in_buffer_through_numpy, in_thread_local, features_by_hooks, features_of_transformers, auxiliary_losses,
    own_generator, numpy_generator, python_generator, default_generators, dropout, truncated_bptt, memory_of_examples,
    iterator_around_the_model, toggled_requires_grad, kernel_of_attention, default_dtype, batch_norm,
]  # fmt: skip


# Those for which it matters when the micro-batches are made.
DRAWING = [default_generators, dropout]


def drawn_batches():
    """Micro-batches that are made as they are asked for, from the generator that dropout draws from, too."""
    for _ in range(MICRO_BATCHES):
        yield torch.randn(4, WIDTH)


def listed_batches():
    """The same in a list."""
    return [torch.randn(4, WIDTH) for _ in range(MICRO_BATCHES)]


def trained(program, batches, storage=None, **options):
    """Losses and values after the run; without storage in memory."""
    torch.manual_seed(0)
    model, loss_of = program()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if storage is not None:
        model, optimizer = memascend.offload(model, optimizer, storage=storage, **options)
    found = []
    for _ in range(STEPS):
        if storage is None:
            for batch in batches():
                loss = loss_of(batch)
                (loss * (1 / MICRO_BATCHES)).backward()
                found.append(loss.detach())
        else:
            found += optimizer.accumulate(loss_of, batches(), scale=1 / MICRO_BATCHES)
        optimizer.step()
        optimizer.zero_grad()
    found += [torch.rand(2), *(value.clone() for value in model.state_dict().values())]
    if storage is not None:
        optimizer.close()
    return found


def main(folder, gradients):
    """Print the names of all programs that equal the plain loop."""
    torch.set_num_threads(1)
    for number, program in enumerate(PROGRAMS):
        for batches in (listed_batches, drawn_batches) if program in DRAWING else (listed_batches,):
            wanted = trained(program, batches)
            storage = Path(folder, f"{number}-{batches.__name__}.store")
            try:
                found = trained(program, batches, storage, gradients=gradients)
            except Exception as error:
                print(f"{program.__name__}, {batches.__name__}: {error!r}")
                continue
            same = [torch.equal(one, other) for one, other in zip(wanted, found, strict=True)]
            print(f"{program.__name__}, {batches.__name__}: {'equal' if all(same) else f'different: {same}'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
