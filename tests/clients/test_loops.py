"""Compares offloaded runs of accelerate, Lightning, and weight averages of three libraries with runs in memory."""

import contextlib
import copy

import accelerate
import lightning.pytorch as lightning
import pytest
import torch
from clients.beside import both, door
from clients.optimizers import model, train
from diffusers.training_utils import EMAModel
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from support.bits import same_bits, same_states
from support.chains import batch, everything, step, values
from timm.utils import ModelEmaV2, ModelEmaV3
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, update_bn

import memascend

WIDTH, STEPS = 64, 6


def stack(dtype):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()) for _ in range(5)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH)).to(dtype)


def by_diffusers(model, optimizer, average, inputs):
    """Trains with a weight average of diffusers; evaluates the model with averaged weights after every second step."""
    seen = []
    for number in range(STEPS):
        step(model, optimizer, number)
        average.step(model.parameters())
        if number % 2:
            # `store` and `restore` keep the trained weights during the evaluation.
            average.store(model.parameters())
            with door(model, optimizer):
                average.copy_to(model.parameters())
            model.eval()
            with torch.no_grad():
                seen.append(model(inputs))
            with door(model, optimizer):
                average.restore(model.parameters())
            model.train()
    seen += average.state_dict()["shadow_params"]
    with door(model, optimizer):
        average.copy_to(model.parameters())
    return seen


def by_modules(model, optimizer, average, inputs):
    """Trains with a weight average that is a module.

    If `average` is an AveragedModel of torch, `average` and `model` get new batch statistics after the training.
    """
    seen, is_torchs = [], isinstance(average, AveragedModel)
    for number in range(STEPS):
        step(model, optimizer, number)
        (average.update_parameters if is_torchs else average.update)(model)
        with torch.no_grad():
            seen.append(average(inputs))
    for module, count in [(average, 3), (model, 2)] if is_torchs else ():
        update_bn([inputs + number for number in range(count)], module)
    return [*seen, *average.state_dict().values()]


def of_diffusers(foreach):
    return lambda model: EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, foreach=foreach)


# Maps a name to a loop, and to a function that makes the weight average of a model.
AVERAGES = {
    "diffusers', one by one": (by_diffusers, of_diffusers(foreach=False)),
    "diffusers', foreach": (by_diffusers, of_diffusers(foreach=True)),
    "timm's second": (by_modules, lambda model: ModelEmaV2(model, decay=0.9)),
    "timm's third": (by_modules, lambda model: ModelEmaV3(model, decay=0.9)),
    "torch's equal": (by_modules, AveragedModel),
    "torch's exponential": (
        by_modules,
        lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
    ),
}


# `gradients` is the option of offload(). If `before` is true, the test makes the weight average before it offloads the
# model.
@pytest.mark.parametrize(
    ("dtype", "gradients", "before"), [(torch.float32, "fused", True), (torch.bfloat16, "ssd", False)], ids=str
)
@pytest.mark.parametrize("kind", AVERAGES)
def test_weight_averages_have_the_same_bits_as_in_memory(tmp_path, dtype, gradients, before, kind):
    (loop, average_of), begun, inputs = AVERAGES[kind], [], batch(99, WIDTH, dtype)

    def make():
        model = stack(dtype)
        begun[:] = [average_of(model)] if before else []
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def run(model, optimizer):
        average = begun[0] if before else average_of(model)
        found = [value.detach().clone() for value in loop(model, optimizer, average, inputs)]
        model.eval()
        with torch.no_grad():
            found.append(model(inputs))
        return [*found, *values(model).values()]

    options = {"master_dtype": None} if dtype != torch.float32 else {}
    found = both(tmp_path, make, run, gradients=gradients, **options)
    assert len(found[0]) > STEPS
    assert all(map(same_bits, *found))


# --- Lightning, with its own averages ------------------------------------------------------------------


def real(module):
    """Returns the context in which a callback may write to a module's weights, also if the module is not offloaded."""
    if module.folder is None:
        return contextlib.nullcontext()
    return memascend.materialized(module if module.whole else module.layers, modify=True)


class Equal(WeightAveraging):
    """Averages the weights of all steps equally; swaps weights inside `materialized(modify=True)`."""

    def _swap_models(self, pl_module):
        with real(pl_module):
            super()._swap_models(pl_module)

    def _copy_average_to_current(self, pl_module):
        with real(pl_module):
            super()._copy_average_to_current(pl_module)


class Stochastic(StochasticWeightAveraging):
    """Averages weights by stochastic weight averaging; transfers weights inside `materialized(modify=True)`."""

    @staticmethod
    def transfer_weights(src_pl_module, dst_pl_module):
        with real(dst_pl_module):
            StochasticWeightAveraging.transfer_weights(src_pl_module, dst_pl_module)


class Exponential(Equal):
    """Averages weights exponentially once `step_idx` is at least 2, as an example of Lightning does."""

    def __init__(self):
        super().__init__(avg_fn=get_ema_avg_fn(0.9))

    def should_update(self, step_idx=None, epoch_idx=None):  # noqa: ARG002
        return step_idx is not None and step_idx >= 2


class Module(lightning.LightningModule):
    """Layers with batch norm. If `folder` is given, offloads the whole module (`whole=True`) or only the layers."""

    def __init__(self, folder=None, whole=False, **options):
        super().__init__()
        self.folder, self.whole, self.options = folder, whole, options
        self.layers = stack(torch.float32)
        self.seen = []

    def training_step(self, batch, index):  # noqa: ARG002
        return self.layers(batch).pow(2).mean()

    def validation_step(self, batch, index):  # noqa: ARG002
        self.seen.append(self.layers(batch).detach().clone())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.layers.parameters(), lr=1e-2, fused=True)
        if self.folder is not None:
            _, optimizer = memascend.offload(
                self if self.whole else self.layers, optimizer, storage=self.folder / "run.store", **self.options
            )
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2)}


def batches(count, seed):
    values = torch.randn(count * 4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.DataLoader(values, batch_size=4)


def fit(folder, module, *callbacks, **options):
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options |= {"accelerator": "cpu", "max_epochs": 4, "num_sanity_val_steps": 0, **dict.fromkeys(quiet, False)}
    trainer = lightning.Trainer(default_root_dir=folder, callbacks=list(callbacks), **options)
    trainer.fit(module, batches(3, 1), batches(1, 2))
    return trainer


def kept(module):
    return [value.detach().clone() for value in copy.copy(module).state_dict().values()]


# Maps a name to a function that makes the callbacks, and to options of the Trainer.
CASES = {
    "none": (list, {}),
    "equal": (lambda: [Equal()], {}),
    "accumulated and clipped": (lambda: [Equal()], {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "exponential": (lambda: [Exponential()], {}),
    "stochastic": (lambda: [Stochastic(swa_lrs=1e-2, swa_epoch_start=2, annealing_epochs=2)], {}),
}


@pytest.mark.parametrize(("whole", "gradients"), [(False, "ssd"), (True, "auto")], ids=["layers", "module"])
@pytest.mark.parametrize("case", CASES)
def test_lightning_has_the_same_weights_and_validations_as_in_memory(tmp_path, case, whole, gradients):
    callbacks, options = CASES[case]
    plain, trained = Module(), Module(tmp_path, whole, gradients=gradients)
    fit(tmp_path, plain, *callbacks(), **options)
    trainer = fit(tmp_path, trained, *callbacks(), **options)
    assert len(plain.seen) >= 4
    assert all(map(same_bits, plain.seen, trained.seen))
    assert all(map(same_bits, kept(plain), kept(trained)))
    trainer.optimizers[0].close()


def test_weight_averaging_swap_outside_materialized_is_rejected(tmp_path):
    with pytest.raises(memascend.UsageError, match=r"written to .*materialized\(model, modify=True\)"):
        fit(tmp_path, Module(tmp_path), WeightAveraging())


# --- accelerate ----------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield accelerate.Accelerator(cpu=True, project_dir=tmp_path)
    accelerate.state.GradientState._reset_state()


def made():
    trained = model()
    return trained, torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)


def test_accelerate_loop_has_the_same_bits_as_in_memory(tmp_path, accelerator):
    def loop(trained, optimizer):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = torch.utils.data.DataLoader(torch.randn(24, 64, generator=torch.Generator().manual_seed(2)), 4)
        prepared, stepped, data, scheduler = accelerator.prepare(trained, optimizer, data, scheduler)
        for inputs in data:
            accelerator.backward(prepared(inputs).square().mean())
            accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
            stepped.step()
            scheduler.step()
            stepped.zero_grad()
        found = values(accelerator.unwrap_model(prepared))
        accelerator.free_memory()
        return found

    assert same_states(*both(tmp_path, made, loop, gradients="ssd"))


def test_load_state_accepts_the_last_step_and_rejects_an_older_step(tmp_path, accelerator):
    for existing in ("refuse", "resume"):
        trained, optimizer = memascend.offload(*made(), storage=tmp_path / "run.store", existing=existing)
        prepared, stepped = accelerator.prepare(trained, optimizer)
        if existing == "refuse":
            train(prepared, stepped, range(2))
            accelerator.save_state(str(tmp_path / "two"))
            saved = values(trained)
        accelerator.load_state(str(tmp_path / "two"))
        assert optimizer.steps == 2
        assert same_states(saved, values(trained))
        if existing == "refuse":
            accelerator.free_memory()
            optimizer.close()
    train(prepared, stepped, range(2, 4))
    before = everything(trained, optimizer)
    with pytest.raises(memascend.UsageError, match=r"step 2 of .* step 4 of .* weights .* remain loaded.*checkpoint="):
        accelerator.load_state(str(tmp_path / "two"))
    assert optimizer.steps == 4
    after = everything(trained, optimizer)
    assert all(same_bits(after[name], values) for name, values in before.items() if "exp_avg" in name)
    optimizer.close()


def test_offload_unwraps_the_optimizer_of_accelerate(tmp_path, accelerator):
    plain, in_memory = made()
    train(plain, in_memory, range(5))
    prepared, optimizer = accelerator.prepare(*made())
    train(prepared, optimizer, range(2))
    prepared, offloaded = memascend.offload(prepared, optimizer, storage=tmp_path / "run.store")
    # Code that still refers to accelerate's wrapper of the optimizer can continue to call this wrapper.
    train(prepared, optimizer, range(2, 4))
    train(prepared, offloaded, range(4, 5))
    assert offloaded.steps == 3
    assert same_states(values(prepared), values(plain))
    accelerator.free_memory()
    offloaded.close()
