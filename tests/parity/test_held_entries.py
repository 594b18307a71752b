"""Tests that a run has the same bits whether none, some or all of its state is held in memory."""

from __future__ import annotations

import pytest
import torch
from parity import loops
from parity.harness import (
    PARTS,
    Case,
    Run,
    differences,
    held_budget,
    last_of,
    play,
    reference,
    require_reference,
)
from parity.test_resume import in_one_go, steps_from
from parity.zoo_loops import BF16, FP16, stack
from parity.zoo_plain import Rooted, Stack, classified, convolutions, images, squares, vectors

import memascend


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adafactor(model):
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


CASES = [
    stack("held-fp32", in_one_go),
    stack("held-bf16", in_one_go, model=lambda: Stack(tied=True), dtype=BF16),
    stack("held-sgd", in_one_go, optimizer=sgd),
    stack("held-sgd-bf16", in_one_go, optimizer=sgd, dtype=BF16),
    stack("held-adafactor", in_one_go, optimizer=adafactor, dtype=BF16),
    stack("held-clipped", in_one_go, gradients=("ssd", "ram"), options={"max_grad_norm": loops.CLIPPED}),
    stack("held-accumulates", loops.accumulates, gradients=("ssd",), dtype=BF16),
    stack("held-drops", loops.drops_some, dtype=BF16),
    stack("held-fails", loops.fails_and_goes_on),
    stack("held-overflows", loops.scales, dtype=FP16, gradients=("ssd",)),
    Case(name="held-rooted", model=Rooted, batches=vectors(), loss=squares, loop=in_one_go),
    Case(name="held-buffers", model=convolutions, batches=images, loss=classified, loop=in_one_go),
]
IN_MEMORY = (
    "held-bf16",
    "held-adafactor",
    "held-clipped",
    "held-accumulates",
    "held-fails",
    "held-overflows",
    "held-buffers",
)


def held_part(optimizer):
    held, trained = len(optimizer.plan.held), len(optimizer.param_groups[0]["params"])
    return "none" if not held else "all" if held >= trained else "some"


def chosen(cases, durabilities):
    """Each case at each part; in memory alone, where nothing is durable, those of the engine's own arithmetic."""
    for case in cases:
        for durability in durabilities:
            for part in PARTS:
                # Of those that say the same in most of it, one in the fast set.
                fast = durability == "step" or (part == "all" and case.name in IN_MEMORY)
                marks = [] if fast else [pytest.mark.slow]
                yield pytest.param(case, part, durability, id=f"{case.name}-{part}-{durability}", marks=marks)


@pytest.mark.parametrize(("case", "part", "durability"), list(chosen(CASES, ("step", "none"))))
def test_what_is_held_has_the_bits_of_what_is_read(case, part, durability, tmp_path):
    options = {"storage": tmp_path / "run.store", "gradients": case.gradients[0], "durability": durability}
    budget = held_budget(case, part, **options)
    reports = []

    def take(model, original):
        made = memascend.offload(model, original, host_memory=budget, **options, **case.options)
        assert held_part(made[1]) == part
        return made

    class Read:
        def __init__(self, model, optimizer):
            self.optimizer, self.real = optimizer, memascend.materialized(model)
            reports.append(optimizer.report())

        def __enter__(self):
            self.real.__enter__()

        def __exit__(self, *error):
            self.real.__exit__(*error)
            self.optimizer.close()

    outcome = play(case, 1, take, read=Read)
    assert differences(reference(case, 1), outcome) == []
    (report,) = reports
    assert report.peak <= budget
    reads = {kind: report.read[kind] for kind in ("values", "values, update", "state")}
    if part == "none":
        assert report.held == 0
        assert reads["values"] > 0
        return
    assert report.owners["held entries"].bytes > 0
    assert report.owners["held gradients"].peak > 0
    if part == "some":
        assert sum(reads.values()) > 0
        return
    # Not even once: they are held as they are written first.
    assert reads == {"values": 0, "values, update": 0, "state": 0}
    # Code of torch's is staged until it has run to its end.
    if durability == "none" and case.optimizer is not adafactor:
        assert report.written["values"] == report.written["state"] == 0


@pytest.mark.parametrize("gradients", ["fused", "ssd", "ram"])
def test_ten_resumes_with_other_budgets_end_in_the_bits_of_one_run(gradients, tmp_path):
    case = stack(
        f"held-resumed-{gradients}", lambda run: steps_from(run, 0, 10), model=lambda: Stack(tied=True), dtype=BF16
    )
    options = {"storage": tmp_path / "run.store", "gradients": gradients}
    batches, records = case.batches(torch.Generator().manual_seed(2)), []
    for step in range(10):
        torch.manual_seed(1)
        model = case.model().to(case.dtype)
        budget = held_budget(case, PARTS[step * 7 % 3], **options)
        original = case.optimizer(model)
        # Whatever the run before had.
        options["durability"] = ("none", "step", "step")[step % 3]
        model, optimizer = memascend.offload(model, original, host_memory=budget, existing="resume", **options)
        assert optimizer.steps == step
        steps_from(Run(model, optimizer, original, batches, case.loss, records), step, step + 1)
        # Staged and dropped: what is held then is of no commit.
        optimizer.backward(case.loss(model, batches[0]))
        if step == 9:
            optimizer.zero_grad()
            last_state = last_of(model, optimizer)
        optimizer.close()
    require_reference(case, records, last_state)


def test_a_weight_that_is_written_in_place_is_refused_and_read_anew(tmp_path):
    case = stack("held-in-place", in_one_go)
    budget = held_budget(case, "all", storage=tmp_path / "run.store")
    model = case.model()
    model, optimizer = memascend.offload(
        model, case.optimizer(model), storage=tmp_path / "run.store", host_memory=budget
    )
    with optimizer:
        batch = case.batches(torch.Generator().manual_seed(2))[0]
        before = case.loss(model, batch).item()
        module = next(module for module in model.modules() if list(module.parameters(recurse=False)))

        def scribble(module, *_):
            with torch.no_grad():
                next(module.parameters(recurse=False)).mul_(2)

        hook = module.register_forward_pre_hook(scribble)
        optimizer.backward(case.loss(model, batch))
        with pytest.raises(memascend.UsageError):
            optimizer.step()
        hook.remove()
        optimizer.zero_grad()
        assert case.loss(model, batch).item() == before


def in_memory(tmp_path, **options):
    case = stack("held-in-memory", in_one_go)
    torch.manual_seed(1)
    model = case.model()
    options = {"storage": tmp_path / "run.store", **options}
    budget = held_budget(case, "all", **options)
    model, optimizer = memascend.offload(model, case.optimizer(model), host_memory=budget, **options)
    return case, model, optimizer, case.batches(torch.Generator().manual_seed(2))


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_weight_that_is_written_past_the_counters_is_refused_before_the_step(durability, tmp_path):
    case, model, optimizer, batches = in_memory(tmp_path, durability=durability, gradients="fused")
    with optimizer:
        before = case.loss(model, batches[0]).item()
        module = next(module for module in model.modules() if list(module.parameters(recurse=False)))

        def scribble(module, *_):
            next(module.parameters(recurse=False)).data.mul_(2)

        hook = module.register_forward_pre_hook(scribble)
        optimizer.backward(case.loss(model, batches[0]))
        hook.remove()
        with pytest.raises(memascend.UsageError, match=r"was written to through \.data"):
            optimizer.step()
        assert optimizer.steps == 0
        optimizer.zero_grad()
        assert case.loss(model, batches[0]).item() == before
        optimizer.backward(case.loss(model, batches[0]))
        optimizer.step()


def test_a_graph_that_kept_a_weight_over_a_step_is_refused(tmp_path):
    _, model, optimizer, batches = in_memory(tmp_path)
    with optimizer:
        linear = next(module for module in model.modules() if isinstance(module, torch.nn.Linear))
        x = torch.ones(2, linear.in_features, requires_grad=True)
        kept = linear(x).square().sum()
        optimizer.backward(linear(x.detach()).square().sum())
        optimizer.step()
        with pytest.raises((memascend.UsageError, RuntimeError), match=r"before step\(\)|inplace operation"):
            kept.backward()
    del batches


def test_what_is_held_is_computed_with_where_it_lies(tmp_path):
    case, model, optimizer, batches = in_memory(tmp_path)
    with optimizer:
        seen = set()

        def note(module, *_):
            seen.update(parameter.data_ptr() for parameter in module.parameters(recurse=False))

        for module in model.modules():
            module.register_forward_pre_hook(note)
        for _ in range(3):
            optimizer.backward(case.loss(model, batches[0]))
            optimizer.step()
            optimizer.zero_grad()
        assert len(seen) == len(list(model.parameters())), "each has one address for the whole run"
        report = optimizer.report()
        assert report.units["fetches"] == 0
        assert report.read["values"] == report.read["state"] == 0


def test_a_checkpoint_of_what_only_memory_has_is_that_of_a_run_on_storage(tmp_path):
    saved = {}
    for durability in ("step", "none"):
        case, model, optimizer, batches = in_memory(
            tmp_path, storage=tmp_path / durability, durability=durability, gradients="ssd"
        )
        with optimizer:
            for batch in batches[:2]:
                optimizer.backward(case.loss(model, batch))
                optimizer.step()
                optimizer.zero_grad()
            optimizer.save(tmp_path / f"saved-{durability}")
            # Nothing of that wrote to the store, or ended the run.
            optimizer.backward(case.loss(model, batches[0]))
            optimizer.step()
            saved[durability] = {name: values.clone() for name, values in model.state_dict().items()}
    for name, values in saved["step"].items():
        assert torch.equal(values, saved["none"][name]), name
    # The store of a run that was closed has it all.
    model = case.model()
    model, optimizer = memascend.offload(model, case.optimizer(model), storage=tmp_path / "none", existing="resume")
    with optimizer:
        assert optimizer.steps == 3
        for name, values in model.state_dict().items():
            assert torch.equal(values, saved["none"][name]), name


def test_parameters_that_were_on_meta_are_held_one_by_one(tmp_path):
    """Where they are away they are made of one tensor; what a step does to one is not what somebody does to another."""
    torch.manual_seed(8)
    trained = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4)))
    values = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    plain = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(4)))
    plain.load_state_dict(values)
    trained = trained.to("meta")
    in_memory = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    trained, streamed = memascend.offload(
        trained,
        torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True),
        weights=lambda name, _: values[name],
        storage=tmp_path / "store",
        host_memory="64MiB",
    )
    with streamed:
        assert held_part(streamed) == "all"
        for step in range(3):
            for model, optimizer in ((plain, in_memory), (trained, streamed)):
                for half in range(2):
                    inputs = torch.randn(3, 16, generator=torch.Generator().manual_seed(2 * step + half))
                    model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found = trained.state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in plain.state_dict().items())
