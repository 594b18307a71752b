"""Tests loops of accelerate beside memory, which of its saved states are loaded, and its wrapper of an optimizer."""

import accelerate
import pytest
import torch
from clients.beside import both
from clients.optimizers import model, train
from support.bits import same_bits, same_states
from support.chains import everything, values

import memascend


@pytest.fixture
def accelerator(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield accelerate.Accelerator(cpu=True, project_dir=tmp_path)
    accelerate.state.GradientState._reset_state()


def made():
    trained = model()
    return trained, torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)


def begun(folder, **options):
    return memascend.offload(*made(), storage=folder / "run.store", **options)


def test_a_loop_of_accelerate_has_the_bits_of_memory(tmp_path, accelerator):
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


def test_a_state_of_the_last_step_is_loaded_also_in_a_run_that_was_resumed_and_an_older_one_is_not(
    tmp_path, accelerator
):
    for existing in ("refuse", "resume"):
        trained, optimizer = begun(tmp_path, existing=existing)
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
    with pytest.raises(memascend.UsageError, match=r"step 2 of .* step 4 of .* weights .* stay.*checkpoint="):
        accelerator.load_state(str(tmp_path / "two"))
    assert optimizer.steps == 4
    after = everything(trained, optimizer)
    assert all(same_bits(after[name], values) for name, values in before.items() if "exp_avg" in name)
    optimizer.close()


def test_its_optimizer_is_taken_off(tmp_path, accelerator):
    plain, in_memory = made()
    train(plain, in_memory, range(5))
    prepared, optimizer = accelerator.prepare(*made())
    train(prepared, optimizer, range(2))
    prepared, offloaded = memascend.offload(prepared, optimizer, storage=tmp_path / "run.store")
    # Who holds the wrapper goes on with it.
    train(prepared, optimizer, range(2, 4))
    train(prepared, offloaded, range(4, 5))
    assert offloaded.steps == 3
    assert same_states(values(prepared), values(plain))
    accelerator.free_memory()
    offloaded.close()
