"""Tests torch's optimizers on a real store: the engine's chunks, orders and commits, bit for bit."""

import pytest
import torch
from support.bits import same_bits

from memascend import engine
from memascend.optim import generic
from memascend.optim.state import describe

CASES = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.NAdam, {"weight_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
    (torch.optim.ASGD, {"t0": 2}),
    (torch.optim.Adafactor, {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_store_holds_what_torch_has_in_memory(tmp_path, kind, options, dtype):
    torch.manual_seed(1)
    # torch's Adafactor divides by the number of elements.
    shapes = [(4097,), (3, 1741), (1,), (), (2,) if kind is torch.optim.Adafactor else (0, 5)]
    first = [*(torch.randn(shape) for shape in shapes), torch.randn(8, 6, 13, 11).to(memory_format=torch.channels_last)]
    first = [values.to(dtype) for values in first]
    original = kind([torch.nn.Parameter(values.clone()) for values in first], **options)
    (group,) = original.param_groups
    twins = [torch.nn.Parameter(values.float()) for values in first]
    reference = kind(twins, **options)
    kept = [describe(original, parameter) for parameter in group["params"]]
    given = [generic.import_state(original, *pair) for pair in zip(group["params"], kept, strict=True)]
    entries = [
        engine.Entry(name=str(index), values=values, state=part.tensors, order=engine.order_of(values))
        for index, (values, part) in enumerate(zip(first, kept, strict=True))
    ]
    whole = max(part.whole_bytes for part in kept)
    with (
        engine.Store.create(tmp_path / "store", entries, chunk_elements=2048, fill=False) as store,
        engine.Engine(store, whole=whole + (1 << 16)) as updates,
    ):
        for index, values in enumerate(first):
            updates.fill(str(index), values, given[index][0] or None)
        updates.commit(0)
        counts = [count for _, count in given]
        for step in range(1, 5):
            for index, twin in enumerate(twins):
                twin.grad = None
                if (step + index) % 4 == 1:
                    continue
                gradient = torch.empty_like(first[index]).copy_(torch.randn(first[index].shape))
                twin.grad = gradient.float()
                function = generic.Update(original, group, kept[index], first=counts[index] == 0)
                counts[index] += 1
                whole_too = kept[index].whole
                updates.apply(str(index), function, step=counts[index], gradient=gradient, whole=whole_too)
            updates.commit(step)
            reference.step()
        for index, twin in enumerate(twins):
            values, state = store.read(str(index))
            assert same_bits(values, twin.detach().to(dtype)), kept[index].shape
            exported = generic.export_state(kept[index], state)
            for name, value in reference.state[twin].items():
                assert same_bits(exported[name], value), name
