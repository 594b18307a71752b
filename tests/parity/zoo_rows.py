"""Cases whose embedding is large beside their blocks and is read row by row."""

from __future__ import annotations

import torch
from parity import loops
from parity.harness import KEPT, Case
from parity.zoo_loops import WHOLE, other
from support.blocks import Residual
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# A row is no part of a chunk, and a matrix is larger than all else that a plan has for it.
VOCABULARY, WIDTH, CLASSES = 20011, 100, 5
PADDING = 3


class Classifier(nn.Module):
    """An embedding, blocks, a small head. `table` makes the embedding."""

    def __init__(self, table=lambda: nn.Embedding(VOCABULARY, WIDTH, padding_idx=PADDING)):
        super().__init__()
        self.embed = table()
        self.blocks = nn.ModuleList(Residual(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def vectors(self, ids):
        return self.embed(ids)

    def forward(self, ids):
        x = self.vectors(ids)
        for block in self.blocks:
            x = self.block(block, x)
        return self.head(x.mean(-2))

    def block(self, block, x):
        return block(x)


class Twice(Classifier):
    """The embedding is used twice in a forward, with other rows, of which some are the same."""

    def vectors(self, ids):
        return self.embed(ids) - 0.5 * torch.tanh(self.embed((ids * 7) % VOCABULARY)) + self.embed(ids[..., :1])


class Two(Classifier):
    """Two embeddings that are read by rows, and a small one that is not."""

    def __init__(self):
        super().__init__(lambda: nn.Embedding(VOCABULARY, WIDTH))
        self.other = nn.Embedding(VOCABULARY - 4, WIDTH, padding_idx=-1)
        self.places = nn.Embedding(64, WIDTH)

    def vectors(self, ids):
        x = self.embed(ids) + self.other(ids % (VOCABULARY - 4))
        return x + self.places(torch.arange(ids.shape[-1], dtype=torch.int32))


class UsedElsewhere(Classifier):
    """The weight is used as a whole, too, by code that no module tree tells of."""

    def forward(self, ids):
        x = self.vectors(ids)
        for block in self.blocks:
            x = block(x)
        near = functional.linear(x.mean(-2), self.embed.weight)[..., :CLASSES]
        return self.head(x.mean(-2)) + near


class Penalized(Classifier):
    def forward(self, ids):
        return super().forward(ids) + self.embed.weight.float().square().mean()


class Recomputed(Classifier):
    """All of it is in a checkpoint, the embedding too."""

    def forward(self, ids):
        return checkpoint(super().forward, ids, use_reentrant=False)


class RecomputedBlocks(Classifier):
    def vectors(self, ids):
        # A reentrant checkpoint has a gradient to pass on, and a look-up of its own.
        x = self.embed(ids)
        return checkpoint(self.more, x, ids, use_reentrant=True)

    def more(self, x, ids):
        return x * torch.sigmoid(self.embed((ids + 1) % VOCABULARY))

    def block(self, block, x):
        return checkpoint(block, x, use_reentrant=True)


class Scaled(nn.Embedding):
    """As Gemma has it."""

    def forward(self, ids):
        return super().forward(ids) * 10.0


def frozen():
    model = Classifier()
    model.embed.weight.requires_grad_(False)
    return model


def words(generator, batches=4, length=11):
    """Few words come often, one is padding, and each batch names others."""
    made = []
    for index in range(batches):
        ids = torch.randint(0, VOCABULARY, (3, length), generator=generator)
        ids[:, :4] = torch.randint(0, 6, (3, 4), generator=generator)
        ids[0, -1], ids[-1, -1] = 0, VOCABULARY - 1
        made.append((ids if index % 2 else ids.int(), torch.randint(0, CLASSES, (3,), generator=generator)))
    return made


def repeated(generator, batches=4):
    """One word more often than a window has rows."""
    made = words(generator, batches, length=700)
    for ids, _ in made:
        ids[:, :600] = 17
    return made


def classes(model, batch):
    ids, wanted = batch
    return functional.cross_entropy(model(ids).float(), wanted)


def case(name, model=Classifier, loop=None, **options):
    fields = {"model": model, "batches": words, "loss": classes, **options}
    return Case(name=f"rows-{name}", **({"loop": loop} if loop else {}), **fields)


def asks_for_gradients(run):
    for index in range(3):
        loss = run.loss(index)
        run.record(torch.autograd.grad(loss, run.model.embed.weight, retain_graph=True)[0])
        loss.backward()
        loops.finish(run)


def hooks(run):
    """A hook on the parameter gets a tensor, and what it makes of that is the gradient."""

    def hook(gradient):
        run.record(gradient)
        return gradient * 0.5

    run.model.embed.weight.register_hook(hook)
    for index in range(3):
        run.loss(index).backward()
        loops.finish(run)


def penalizes(run):
    """A backward through the backward of a look-up."""
    for index in range(3):
        ids, _ = run.batches[index]
        x = run.model.embed(ids)
        (slope,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
        loss = slope.square().mean() + run.loss(index)
        run.record(loss)
        loss.backward()
        loops.finish(run)


def looks_from_outside(run):
    """A look-up without the module, by functional and by index, and a norm of all of it."""
    for index in range(3):
        ids, _ = run.batches[index]
        run.record(functional.embedding(ids, run.model.embed.weight), run.model.embed.weight[ids.long()].sum())
        run.loss(index).backward()
        loops.finish(run)
        run.record(run.model.embed.weight.norm())


BF16, FP16 = torch.bfloat16, torch.float16

ROWS = [
    case("words", everywhere=True),
    case("words-bf16", dtype=BF16),
    case("words-bf16-without-masters", dtype=BF16, options={"master_dtype": None}),
    case("repeated", batches=repeated),
    case("repeated-bf16", batches=repeated, dtype=BF16),
    case("twice", Twice, everywhere=True),
    case("twice-bf16", Twice, dtype=BF16),
    case("two", Two, dtype=BF16),
    case("frozen", frozen),
    case("scaled", lambda: Classifier(lambda: Scaled(VOCABULARY, WIDTH))),
    case("used-elsewhere", UsedElsewhere, everywhere=True),
    case("used-elsewhere-bf16", UsedElsewhere, dtype=BF16),
    case("penalized", Penalized),
    case("recomputed", Recomputed, learns_budget=True),
    case("recomputed-blocks", RecomputedBlocks),
    case("accumulate", loop=loops.accumulates, dtype=BF16, gradients=WHOLE),
    case("accumulate-declared", loop=loops.accumulates, options={"accumulation_steps": 3}),
    case("clip", loop=loops.clips, gradients=WHOLE),
    case("max-grad-norm", loop=loops.clips_in_step, gradients=WHOLE, options={"max_grad_norm": loops.CLIPPED}),
    case("scaled-loss", loop=loops.scales, dtype=FP16),
    case("grad-scaler", loop=loops.grad_scaler_clips, gradients=WHOLE),
    case("zero-grad-to-zero", loop=loops.keeps_zeroes, gradients=KEPT),
    case("drop-some", loop=loops.drops_some),
    case("assign", loop=loops.assigns),
    case("evaluate", loop=loops.evaluates),
    case("retain", loop=loops.retains),
    case("fail", loop=loops.fails_and_goes_on),
    case("watch", loop=loops.watches, learns_budget=True),
    case("read-gradients", loop=loops.reads_gradients, gradients=WHOLE),
    case("edit-gradients", loop=loops.edits_gradients, gradients=WHOLE),
    case("state-dict", loop=loops.takes_state),
    case("autograd-grad", loop=asks_for_gradients, gradients=WHOLE),
    case("hooks", loop=hooks),
    case("penalty", loop=penalizes),
    case("outside", loop=looks_from_outside),
    case("sgd", optimizer=other(torch.optim.SGD, lr=0.1, momentum=0.9)),
    case("adafactor", optimizer=other(torch.optim.Adafactor, lr=1e-2)),
]
