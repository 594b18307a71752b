"""Tests embeddings read by rows: exactness, plans, fallbacks, refusals."""

import contextlib
import logging

import pytest
import torch
from parity.zoo_rows import CLASSES, PADDING, VOCABULARY, WIDTH, Classifier, UsedElsewhere, classes, words
from support.bits import same_bits
from support.grids import covered
from torch import nn

import memascend
from memascend import kernels
from memascend.residency.row_gradient import RowGradient, Term

MATRIX = VOCABULARY * WIDTH * 4


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


@contextlib.contextmanager
def training(model, folder, **options):
    torch.manual_seed(0)
    model, optimizer = memascend.offload(model, adamw(model), storage=folder, device="cpu", **options)
    with optimizer:
        yield model, optimizer


def smallest_budget(model, folder):
    with pytest.raises(memascend.BudgetError) as refused:
        memascend.offload(model, adamw(model), storage=folder, device="cpu", host_memory=1)
    return refused.value.smallest


def batches():
    return words(torch.Generator().manual_seed(1))


def trained(model, optimizer, count=2):
    for batch in batches()[:count]:
        classes(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


# --- the gradient -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width", "named"), [(50, 33, 700), (3000, 64, 900), (3, 100, 5000), (20000, 7, 90)])
@pytest.mark.parametrize("padding", [-1, 1])
def test_windows_of_a_gradient_are_torchs_bits(dtype, rows, width, named, padding):
    generator = torch.Generator().manual_seed(named)
    indices = torch.randint(0, rows, (2, named // 2), generator=generator)
    gradient = torch.randn(2, named // 2, width, generator=generator).to(dtype)
    wanted = torch.ops.aten.embedding_dense_backward(gradient, indices, rows, padding, False)
    made = RowGradient((Term.of(gradient, indices, padding),), (rows, width), dtype)
    assert same_bits(made.dense(), wanted)
    step = max(1, rows // 7)
    parts = [made.window(first, min(rows, first + step)) for first in range(0, rows, step)]
    assert same_bits(torch.cat(parts), wanted)
    # As the engine asks: whole chunks, whatever a row is.
    count = 2048
    flat = [made.elements(at, min(count, rows * width - at)) for at in range(0, rows * width, count)]
    assert same_bits(torch.cat(flat), wanted.flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_look_ups_are_added_as_torch_adds_them(dtype):
    generator = torch.Generator().manual_seed(0)
    rows, width = 300, 17
    terms, total = [], None
    for _ in range(3):
        indices = torch.randint(0, rows, (200,), generator=generator)
        gradient = torch.randn(200, width, generator=generator).to(dtype)
        gradient[::3] = -0.0
        dense = torch.ops.aten.embedding_dense_backward(gradient, indices, rows, -1, False)
        total = dense if total is None else total + dense
        terms.append(RowGradient((Term.of(gradient, indices, -1),), (rows, width), dtype))
    made = terms[0] + terms[1] + terms[2]
    assert isinstance(made, RowGradient)
    assert same_bits(made.dense(), total)
    # Beside a gradient of all of it, which somebody else has.
    other = torch.randn(rows, width, generator=generator).to(dtype)
    assert same_bits(other + made, other + total)
    assert same_bits(made.clone() * 2, total * 2)
    with pytest.raises(memascend.UsageError, match="cannot be changed"):
        made.mul_(2)


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_gradient_is_measured_as_a_dense_one_is(spoiled):
    generator = torch.Generator().manual_seed(0)
    rows, width = 9000, 40
    indices = torch.randint(0, rows, (300,), generator=generator)
    gradient = torch.randn(300, width, generator=generator)
    if spoiled:
        gradient[7, 3] = torch.inf
    made = RowGradient((Term.of(gradient, indices, -1),), (rows, width), torch.float32)
    found, squared = kernels.check_and_unscale(made.dense())
    # A user's default device is none of its business.
    with torch.device("meta"):
        measured = made.measured(kernels.check_and_unscale)
    assert measured == (bool(found), float(squared))


# --- the look-up --------------------------------------------------------------


# Rows that are a part of a piece, that lie in two, and that are longer than one.
@pytest.mark.parametrize(
    ("shape", "dtype"),
    covered([(VOCABULARY, 96), (30011, 77), (70, 150_001)], [torch.bfloat16, torch.float32]),
)
def test_a_look_up_gives_the_rows(tmp_path, shape, dtype):
    rows, width = shape

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(rows, width)
            self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, ids):
            return self.embed(ids)

    model = Model().to(dtype)
    whole = model.embed.weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    with training(model, tmp_path) as (_, optimizer):
        assert optimizer.plan.by_rows == ("embed",)
        asked = [torch.randint(0, rows, (5, 9), generator=generator), torch.arange(rows).flip(0)]
        asked += [torch.tensor(rows - 1), torch.zeros(0, 3, dtype=torch.long), torch.full((2000,), 1).int()]
        for ids in asked:
            with torch.no_grad():
                got = model(ids)
            assert same_bits(got, nn.functional.embedding(ids, whole))
        fetches = optimizer.report().units["fetches"]
        assert fetches <= 3, "an embedding was read whole"


def test_an_index_that_is_not_there_is_torchs_error(tmp_path):
    with training(Classifier(), tmp_path) as (model, optimizer):
        for wrong in (-1, VOCABULARY):
            with pytest.raises(IndexError, match="index out of range"):
                model(torch.tensor([[1, wrong]]))
        with pytest.raises(RuntimeError, match="Expected tensor for argument"):
            model(torch.ones(1, 2))
        trained(model, optimizer)


def test_a_damaged_row_is_an_error_with_a_name(tmp_path):
    model = Classifier()
    with torch.no_grad():
        model.embed.weight[777] = 0.123456
    row = model.embed.weight.detach()[777].numpy().tobytes()
    with training(model, tmp_path):
        pass
    store = tmp_path / "memascend.store"
    content = store.read_bytes()
    assert content.count(row) == 1
    at = content.index(row)
    with store.open("r+b") as file:
        file.seek(at + 8)
        file.write(b"\x55")
    with training(Classifier(), tmp_path, existing="resume") as (model, _):
        model(torch.tensor([[15000, 2000]]))
        with pytest.raises(memascend.CorruptionError, match=r"embed\.weight"):
            model(torch.tensor([[1, 777]]))
        # The chunks are free again.
        model(torch.tensor([[15000, 2000]]))


def test_an_error_that_is_kept_holds_no_slot(tmp_path):
    def fail(start, part):
        raise ValueError(start, part.nbytes)

    with training(Classifier(), tmp_path) as (model, optimizer):
        with pytest.raises(ValueError, match="0") as kept:
            optimizer._session.run.resources.units.rows.each_part("embed", fail)
        trained(model, optimizer, 4)
        assert kept.tb is not None


def test_gradients_are_plain_where_somebody_looks(tmp_path):
    seen = []
    with training(Classifier(), tmp_path, gradients="ssd") as (model, _):
        loss = classes(model, batches()[0])
        (gradient,) = torch.autograd.grad(loss, model.embed.weight, retain_graph=True)
        assert type(gradient) is torch.Tensor
        model.embed.weight.register_hook(lambda gradient: seen.append(type(gradient)))
        loss.backward()
        assert seen == [torch.Tensor]
        assert torch.equal(model.embed.weight.grad.clone(), gradient)


def test_an_arithmetic_that_flushes_denormals_is_the_callers(tmp_path):
    """Two tokens whose gradients are below what is normal: they are summed by whoever called backward()."""

    def gradient(model):
        x = model.embed(torch.tensor([[7, 7]]))
        (x * 1e-30).backward(torch.full_like(x, 1e-9))
        return model.embed.weight.grad.clone()[7]

    plain = Classifier()
    found = {}
    with training(Classifier(), tmp_path, gradients="ssd") as (model, optimizer):
        for flushes in (False, True):
            if not torch.set_flush_denormal(flushes):
                pytest.skip("this processor does not flush")
            try:
                plain.embed.weight.grad = None
                found[flushes] = gradient(plain), gradient(model)
            finally:
                torch.set_flush_denormal(False)
            optimizer.zero_grad()
    for wanted, got in found.values():
        assert same_bits(wanted, got)
    assert not torch.equal(found[False][0], found[True][0])


def test_closing_lets_the_memory_go(tmp_path):
    with training(Classifier(), tmp_path) as (model, optimizer):
        region = optimizer._session.run.resources.units._ring.region
        trained(model, optimizer, 1)
    assert optimizer.report().to_dict()["host"]["owners"].get("embedding rows") is not None
    assert region.closed
    assert not optimizer._session.run.resources.units.rows._chunks


# --- the plan and the memory --------------------------------------------------


class Wide(Classifier):
    """An embedding of 30 MB, and blocks of next to nothing."""

    def __init__(self):
        super().__init__(lambda: nn.Embedding(75_000, WIDTH))


@pytest.mark.parametrize("gradients", ["fused", "ssd"])
def test_memory_does_not_have_the_matrix_in_it(tmp_path, gradients):
    matrix = 75_000 * WIDTH * 4
    with training(Wide(), tmp_path, gradients=gradients) as (model, optimizer):
        trained(model, optimizer)
        host = optimizer.report().to_dict()["host"]
        assert host["peak"] <= host["budget"] < matrix
        owners = host["owners"]
        assert owners["units"]["peak"] + owners["gradients"]["peak"] + owners["embedding rows"]["peak"] < matrix / 4
        held = {name: owner["bytes"] for name, owner in owners.items()}
        assert held["embedding rows"] == optimizer.plan.host["embedding rows"]


def test_the_smallest_budget_works_and_one_byte_less_is_refused(tmp_path):
    model = Wide()
    smallest = smallest_budget(model, tmp_path)
    with pytest.raises(memascend.BudgetError):
        memascend.offload(model, adamw(model), storage=tmp_path, device="cpu", host_memory=smallest - 1)
    with training(model, tmp_path, host_memory=smallest) as (model, optimizer):
        assert optimizer.plan.by_rows == ("embed",)
        trained(model, optimizer)
        host = optimizer.report().to_dict()["host"]
        assert host["peak"] <= host["budget"] == smallest < 75_000 * WIDTH * 4


def test_a_budget_that_has_room_keeps_the_matrix(tmp_path):
    with training(Classifier(), tmp_path, host_memory="1GiB") as (model, optimizer):
        assert optimizer.plan.by_rows == ()
        trained(model, optimizer)


def test_the_plan_says_so(tmp_path):
    with training(Classifier(), tmp_path) as (_, optimizer):
        text = str(optimizer.plan)
        assert "read by rows" in text
        assert "embedding rows" in text
        assert optimizer.plan.to_dict()["by_rows"] == ("embed",)
        assert sum(optimizer.plan.host.values()) == optimizer.plan.host_peak


class Tied(Classifier):
    def __init__(self):
        super().__init__(lambda: nn.Embedding(VOCABULARY, WIDTH))
        self.words = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.words.weight = self.embed.weight

    def forward(self, ids):
        return self.words(self.vectors(ids).mean(-2))[..., :CLASSES]


class OtherForward(nn.Embedding):
    def forward(self, ids):
        return self.weight[ids]


@pytest.mark.parametrize(
    "model",
    [
        Tied,
        lambda: Classifier(lambda: nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)),
        lambda: Classifier(lambda: nn.Embedding(VOCABULARY, WIDTH, scale_grad_by_freq=True)),
        lambda: Classifier(lambda: OtherForward(VOCABULARY, WIDTH)),
        lambda: Classifier(lambda: nn.Embedding(50, WIDTH)),
        lambda: nn.Sequential(nn.Embedding(VOCABULARY, WIDTH)),
    ],
    ids=["tied", "max-norm", "by-frequency", "another-forward", "small", "nothing-else"],
)
def test_what_is_not_read_by_rows(tmp_path, model):
    with training(model(), tmp_path) as (_, optimizer):
        assert optimizer.plan.by_rows == ()


def test_a_head_of_the_same_size_needs_the_room_anyway(tmp_path):
    class Language(Classifier):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    with training(Language(), tmp_path) as (_, optimizer):
        assert optimizer.plan.by_rows == ()


# --- all of it ----------------------------------------------------------------


def test_another_use_is_exact_within_the_budget_and_told_once(tmp_path, caplog):
    smallest = smallest_budget(UsedElsewhere(), tmp_path)
    caplog.set_level(logging.WARNING, "memascend")
    with training(UsedElsewhere(), tmp_path, host_memory=smallest) as (model, optimizer):
        assert optimizer.plan.by_rows == ("embed",)
        trained(model, optimizer, 3)
        host = optimizer.report().to_dict()["host"]
        assert host["peak"] <= host["budget"] < MATRIX + host["owners"]["update staging"]["bytes"]
    told = [record.getMessage() for record in caplog.records if "all of embed.weight" in record.getMessage()]
    assert len(told) == 1
    enough = int(told[0].rpartition("host_memory=")[2].split()[0])
    with training(UsedElsewhere(), tmp_path, host_memory=enough, existing="replace") as (model, optimizer):
        assert optimizer.plan.by_rows == ()
        trained(model, optimizer)


def test_state_dicts_and_real_parameters(tmp_path):
    model = Classifier()
    before = model.embed.weight.detach().clone()
    with training(model, tmp_path) as (model, optimizer):
        kept = model.state_dict()["embed.weight"]
        assert torch.equal(kept, before)
        trained(model, optimizer)
        after = model.state_dict()["embed.weight"]
        assert torch.equal(kept, before)
        assert not torch.equal(after, before)
        master = optimizer.state_of(model.embed.weight)["exp_avg"].clone()
        with memascend.materialized(model, modify=True):
            model.embed.weight.data[5] = 1.5
        assert torch.equal(model.embed(torch.tensor([5])), torch.full((1, WIDTH), 1.5))
        assert torch.equal(optimizer.state_of(model.embed.weight)["exp_avg"], master)
        model.load_state_dict({**model.state_dict(), "embed.weight": before})
        assert torch.equal(model.embed(torch.tensor([5, PADDING])), before[[5, PADDING]])
        trained(model, optimizer)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_model_that_is_compiled_later_has_real_parameters(tmp_path):
    batch = batches()[0]
    plain = Classifier()
    torch.manual_seed(0)
    model = Classifier()
    model.load_state_dict(plain.state_dict())
    with training(model, tmp_path) as (model, optimizer):
        assert optimizer.plan.by_rows == ("embed",)
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(batch[0]), plain(batch[0]))
        trained(compiled, optimizer)
        assert torch.isfinite(compiled(batch[0])).all()


def test_a_run_goes_on_with_another_budget(tmp_path):
    torch.manual_seed(0)
    with training(Classifier(), tmp_path) as (model, optimizer):
        trained(model, optimizer, 1)
        trained(model, optimizer, 2)
        wanted = model.state_dict()["embed.weight"].clone()
    torch.manual_seed(0)
    with training(Classifier(), tmp_path, existing="replace") as (model, optimizer):
        assert optimizer.plan.by_rows
        trained(model, optimizer, 1)
    with training(Classifier(), tmp_path, existing="resume", host_memory="1GiB") as (model, optimizer):
        assert not optimizer.plan.by_rows
        trained(model, optimizer, 2)
        assert torch.equal(model.state_dict()["embed.weight"], wanted)
