"""Tests loops of accelerate beside memory, which of its saved states are loaded, and its wrapper of an optimizer."""

import accelerate
import pytest
import torch
from clients.optimizers import model, train
from support.bits import same_bits

import memascend


@pytest.fixture
def accelerator(tmp_path):
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    yield accelerate.Accelerator(cpu=True, project_dir=tmp_path)
    accelerate.state.GradientState._reset_state()


def offload(folder, trained, optimizer, **options):
    return memascend.offload(trained, optimizer, storage=folder / "run.store", **options)


def values(trained):
    return [parameter.detach().clone() for parameter in trained.parameters()]


def test_a_loop_of_accelerate_has_the_bits_of_memory(tmp_path, accelerator):
    found = []
    for offloaded in (False, True):
        trained = model()
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2, fused=True)
        if offloaded:
            trained, optimizer = offload(tmp_path, trained, optimizer, gradients="ssd")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        data = torch.utils.data.DataLoader(torch.randn(24, 64, generator=torch.Generator().manual_seed(2)), 4)
        prepared, stepped, data, scheduler = accelerator.prepare(trained, optimizer, data, scheduler)
        for inputs in data:
            accelerator.backward(prepared(inputs).square().mean())
            accelerator.clip_grad_norm_(prepared.parameters(), 0.1)
            stepped.step()
            scheduler.step()
            stepped.zero_grad()
        found.append(values(accelerator.unwrap_model(prepared)))
        accelerator.free_memory()
        if offloaded:
            optimizer.close()
    assert all(map(same_bits, *found))


def begun(folder, **options):
    trained = model()
    return offload(folder, trained, torch.optim.AdamW(trained.parameters(), fused=True), **options)


def test_a_state_of_the_last_step_is_loaded_also_in_a_run_that_was_resumed(tmp_path, accelerator):
    for existing in ("refuse", "resume"):
        trained, optimizer = begun(tmp_path, existing=existing)
        prepared, stepped = accelerator.prepare(trained, optimizer)
        if existing == "refuse":
            train(prepared, stepped, range(2))
            accelerator.save_state(str(tmp_path / "two"))
            saved = values(trained)
        accelerator.load_state(str(tmp_path / "two"))
        assert optimizer.steps == 2
        assert all(map(same_bits, saved, values(trained)))
        if existing == "resume":
            train(prepared, stepped, range(2, 3))
            assert optimizer.steps == 3
        accelerator.free_memory()
        optimizer.close()


def test_a_state_of_an_older_step_is_refused(tmp_path, accelerator):
    trained, optimizer = begun(tmp_path)
    prepared, stepped = accelerator.prepare(trained, optimizer)
    train(prepared, stepped, range(2))
    accelerator.save_state(str(tmp_path / "two"))
    train(prepared, stepped, range(2, 4))
    masters = [optimizer.state_of(one)["exp_avg"] for one in trained.parameters()]
    with pytest.raises(memascend.UsageError, match=r"step 2 of .* step 4 of .* weights .* stay.*checkpoint="):
        accelerator.load_state(str(tmp_path / "two"))
    assert optimizer.steps == 4
    assert all(map(same_bits, masters, (optimizer.state_of(one)["exp_avg"] for one in trained.parameters())))
    optimizer.close()


def test_its_optimizer_is_taken_off(tmp_path, accelerator):
    plain = model()
    train(plain, torch.optim.AdamW(plain.parameters(), fused=True), range(5))
    trained = model()
    prepared, optimizer = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), fused=True))
    train(prepared, optimizer, range(2))
    prepared, offloaded = offload(tmp_path, prepared, optimizer)
    # Who holds the wrapper goes on with it.
    train(prepared, optimizer, range(2, 4))
    train(prepared, offloaded, range(4, 5))
    assert offloaded.steps == 3
    assert all(map(same_bits, values(prepared), values(plain)))
    accelerator.free_memory()
    offloaded.close()
