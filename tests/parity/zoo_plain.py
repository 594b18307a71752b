"""Defines test cases. Each case trains a small model with one feature that is hard to offload."""

from __future__ import annotations

import torch
from parity.harness import Case, usual_loop
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

VOCABULARY, WIDTH = 64, 32


def vectors(width=WIDTH, count=6):
    """Returns a function that makes batches. Each batch has `count` input vectors and `count` target vectors."""

    def make(generator, batches=4):
        return [tuple(torch.randn(count, width, generator=generator) for _ in range(2)) for _ in range(batches)]

    return make


def tokens(generator, batches=4):
    return [torch.randint(0, VOCABULARY, (2, 9), generator=generator) for _ in range(batches)]


def squares(model, batch):
    x, y = batch
    parameter = next(model.parameters())
    return functional.mse_loss(model(x.to(parameter.dtype)).float(), y)


def classified(model, batch):
    x, y = batch
    return functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), y)


def next_token(model, batch):
    return functional.cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


class Block(nn.Module):
    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """A model of an embedding, blocks and an LM head. With `tied`, the embedding and the LM head share a weight."""

    def __init__(self, depth=3, *, tied=False, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def odd_mlp():
    """Returns an MLP with odd sizes. Its parameters need padding, and they fill chunks and blocks only partly."""
    return nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.Linear(33, 13), nn.Tanh(), nn.Linear(13, 1), nn.Linear(1, 7))


class Repeated(nn.Module):
    """A model with two layers: forward() calls `shared` three times in a row, and calls `other` twice."""

    def __init__(self):
        super().__init__()
        self.shared = Block()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for _ in range(3):
            x = self.shared(x)
        return self.other(torch.tanh(self.other(x)))


class IdleExperts(nn.Module):
    """A model of eight experts. Each batch uses two experts; the optimizer skips the six experts without a gradient."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(8))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for index in (self.calls % 8, (3 * self.calls + 1) % 8):
            x = self.experts[index](x)
        return x


class Towers(nn.Module):
    """A model of two towers that share no parameters. A forward computes one of the two towers."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(Block(), Block())
        self.right = nn.Sequential(Block(), nn.Linear(WIDTH, 8))

    def forward(self, x, tower):
        return getattr(self, tower)(x.to(self.left[0].up.weight.dtype))


class Rooted(nn.Module):
    """A model whose root module owns a scalar, a row that forward() expands, and a parameter that gets no gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.randn(1, WIDTH))
        self.unused = nn.Parameter(torch.randn(5))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.seen += 1
        for block in self.blocks:
            x = block(x) * self.scale + self.shift.expand(x.shape[0], -1)
        return x


class Turned(nn.Module):
    """A model with permuted, dense parameters. The strides of these parameters match none of torch's memory formats."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.transposed = nn.Parameter(torch.randn(WIDTH + 3, WIDTH).t())
        self.permuted = nn.Parameter(torch.randn(3, WIDTH, WIDTH + 3).permute(2, 0, 1))
        self.heads = nn.Parameter(torch.randn(2, 3, 4, WIDTH // 4, 4).permute(4, 2, 0, 3, 1))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        wide = torch.tanh(x @ self.transposed)
        x = x + torch.einsum("bk,kjd->bd", wide, self.permuted) / 8
        scale = self.heads.transpose(0, 2).sum(dim=(0, 1, 4)).reshape(-1)
        return x * scale.expand(WIDTH // scale.numel(), -1).reshape(-1)


class KeepsTransposed(torch.autograd.Function):
    """An autograd function that keeps a view of a weight in an attribute. Saved-tensor hooks do not get this view."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x)
        ctx.transposed = weight.t()
        return x @ ctx.transposed

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.transposed.t(), gradient.t() @ x


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(KeepsTransposed.apply(x, layer.weight) + layer.bias)
        return x


def normed(parametrization):
    return lambda: nn.Sequential(*(parametrization(nn.Linear(WIDTH, WIDTH)) for _ in range(3)))


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.cells = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(VOCABULARY)
        self.head(torch.zeros(1, WIDTH * (2 if options.get("bidirectional") else 1)))

    def forward(self, ids):
        return self.head(self.cells(self.embed(ids))[0])


class EncoderDecoder(nn.Module):
    """A transformer. Its attention layers read `out_proj.weight` without calling the module `out_proj`."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Transformer(WIDTH, 4, 2, 2, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return self.head(self.body(self.embed(ids), self.embed(ids), tgt_mask=mask))


def images(generator, batches=4):
    return [
        (torch.randn(2, 3, 16, 16, generator=generator), torch.randint(0, 8, (2,), generator=generator))
        for _ in range(batches)
    ]


def convolutions():
    """Returns a model with grouped and transposed convolutions, and with batch norms, whose statistics are buffers."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, groups=4),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 3, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def channels_last():
    """Returns a model whose weights are not row-major. Gradients and optimizer state must have the weights' strides."""
    return convolutions().to(memory_format=torch.channels_last)


class SparseBag(nn.Module):
    def __init__(self, *, head=True):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, VOCABULARY) if head else None

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(x) if self.head else torch.cat([x, -x], dim=-1)


def frozen_stack():
    model = Stack()
    for frozen in (model.embed, model.blocks[1]):
        frozen.requires_grad_(False)
    return model


def stack(name, loop=usual_loop, **options):
    """Returns a case that trains a `Stack`. `options` may replace the `Stack` by another model that reads tokens."""
    return Case(name=name, loop=loop, **{"model": Stack, "batches": tokens, "loss": next_token, **options})


def of_vectors(name, model, loop=usual_loop, *, width=WIDTH, **options):
    return Case(name=name, model=model, batches=vectors(width), loss=squares, loop=loop, **options)


BF16 = torch.bfloat16
PLAIN = [
    of_vectors("odd-mlp", odd_mlp, width=7, everywhere=True),
    of_vectors("odd-mlp-bf16", odd_mlp, width=7, dtype=BF16),
    stack("stack-tied-bf16", model=lambda: Stack(tied=True), dtype=BF16, everywhere=True),
    stack("stack-dropout", model=lambda: Stack(dropout=0.3)),
    of_vectors("repeated-layers", Repeated),
    of_vectors("repeated-layers-bf16", Repeated, dtype=BF16),
    of_vectors("idle-experts", IdleExperts, everywhere=True),
    of_vectors("rooted", Rooted),
    of_vectors("custom-function", Custom, learns_budget=True),
    of_vectors("weight-norm", normed(parametrizations.weight_norm)),
    of_vectors("spectral-norm", normed(parametrizations.spectral_norm)),
    stack("lstm", model=lambda: Recurrent(nn.LSTM, dropout=0.1)),
    stack("gru-bidirectional", model=lambda: Recurrent(nn.GRU, bidirectional=True)),
    stack("nn-transformer", model=EncoderDecoder, dtype=BF16),
    Case(name="convolutions", model=convolutions, batches=images, loss=classified),
    Case(name="convolutions-bf16", model=convolutions, batches=images, loss=classified, dtype=BF16),
    Case(name="channels-last", model=channels_last, batches=images, loss=classified),
    of_vectors("turned", Turned),
    of_vectors("turned-bf16", Turned, dtype=BF16),
    stack("frozen", model=frozen_stack),
]
