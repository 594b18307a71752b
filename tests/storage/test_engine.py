"""Tests stores and updates from Python: against the kernel in memory, killed, damaged, refused."""

import os
import re
import stat
import textwrap

import pytest
import torch
from support.bits import same_bits

from memascend import engine, kernels
from memascend.cli import main
from memascend.errors import ConfigError, CorruptionError, StorageError, UsageError

CHUNK = 2048
SIZES = [(1,), (13,), (2048,), (2049,), (3, 1741), (0, 5)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.5}


def parameters():
    torch.manual_seed(1)
    return {
        f"{str(dtype)[6:]}.{'x'.join(map(str, shape))}": torch.randn(shape).to(dtype)
        for dtype in DTYPES
        for shape in SIZES
    }


def made(path, **options):
    entries = [
        engine.Entry(name=name, values=values, state=engine.adam_state(values), unit=name.split(".")[0])
        for name, values in parameters().items()
    ]
    frozen = engine.Entry(name="frozen", values=torch.arange(5000.0).bfloat16(), state={}, unit="rest")
    buffer = engine.Entry(name="mean", values=torch.zeros(3), state={}, unit="rest", buffer=True)
    return engine.Store.create(path, [*entries, frozen, buffer], chunk_elements=CHUNK, **options)


@pytest.mark.parametrize("backend", ["io_uring", "threads"])
def test_a_hundred_steps_are_those_of_the_kernel_in_memory(tmp_path, backend):
    held = parameters()
    states = {name: engine.adam_state(values) for name, values in held.items()}
    counts = dict.fromkeys(held, 0)
    with made(tmp_path / "store", backend=backend) as store, engine.Engine(store, queue=30_000) as updates:
        for step in range(1, 101):
            for index, (name, values) in enumerate(held.items()):
                if index % 4 == 1 and step % 3:
                    continue  # an expert that got no token
                gradient = torch.randn(values.shape).to(values.dtype)
                if step % 10 == 5:
                    updates.update(name, torch.full_like(gradient, 9), engine.Adam(step=counts[name] + 1, **NUMBERS))
                    updates.finish()
                    updates.discard()
                counts[name] += 1
                updates.update(name, gradient, engine.Adam(step=counts[name], **NUMBERS))
                state = states[name]
                if values.dtype == torch.float32:
                    master, out = values, None
                else:
                    master, out = state["master"], values
                moments = state["exp_avg"], state["exp_avg_sq"]
                if step % 10 == 5:
                    updates.finish()
                    updates.commit(step)
                kernels.adamw(master, gradient, *moments, out, step=counts[name], **NUMBERS)
            updates.commit(step, user_state={"seen": step}, hyperparameters=NUMBERS)
        store.stage("mean", torch.ones(3), step=1)
        updates.commit(101)
        assert store.verify()[0] == 52
    with engine.Store.open(tmp_path / "store") as store:
        assert (store.step, store.user_state) == (101, {"seen": 100})
        assert store.hyperparameters["lr"] == 1e-2
        for name, values in held.items():
            stored, state = store.read(name)
            assert same_bits(stored, values), name
            for of, tensor in states[name].items():
                assert same_bits(state[of], tensor), (name, of)
        assert {entry["name"]: entry["step"] for entry in store.entries() if entry["state"]} == counts
        assert torch.equal(store.read("frozen")[0], torch.arange(5000.0).bfloat16())
        assert torch.equal(store.read("mean")[0], torch.ones(3))


KILLED = """
    import os, random, signal, sys, time
    import torch
    from memascend import engine, kernels

    torch.set_num_threads(1)
    path, kills = sys.argv[1], int(sys.argv[2])
    names = [f"w{index}" for index in range(6)]
    sizes = [1, 9_001, 2_048, 40_000, 7, 2_049]
    begun = {name: torch.linspace(-1, 1, size).bfloat16() for name, size in zip(names, sizes)}

    def gradient(name, step):
        generator = torch.Generator().manual_seed(step * 100 + names.index(name))
        return torch.randn(begun[name].shape, generator=generator).bfloat16()

    def child():
        with engine.Store.open(path) as store, engine.Engine(store) as updates:
            os.write(told, b"x")
            step = store.step
            while True:
                step += 1
                for name in names:
                    updates.update(name, gradient(name, step), engine.Adam(step=step))
                updates.commit(step, user_state=step)

    entries = [engine.Entry(name=n, values=v, state=engine.adam_state(v)) for n, v in begun.items()]
    engine.Store.create(path, entries, chunk_elements=2048).close()
    held = {name: values.clone() for name, values in begun.items()}
    states = {name: engine.adam_state(values) for name, values in begun.items()}
    at = 0
    dice = random.Random(5)
    for kill in range(kills):
        hears, told = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                child()
            finally:
                os._exit(1)
        os.close(told)
        # What it may do before it has begun takes as long as the machine is busy.
        assert dice.random() < 0.1 or os.read(hears, 1) == b"x", "the child ended by itself"
        os.close(hears)
        time.sleep(dice.uniform(0.01, 0.15))
        os.kill(pid, signal.SIGKILL)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "the child ended by itself"
        with engine.Store.open(path) as store:
            reached = store.step
            assert reached >= at and store.user_state == (reached or None)
            while at < reached:
                at += 1
                for name in names:
                    state = states[name]
                    kernels.adamw(
                        state["master"], gradient(name, at), state["exp_avg"], state["exp_avg_sq"], held[name],
                        lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2, step=at,
                    )
            for name in names:
                values, state = store.read(name)
                assert torch.equal(values.view(torch.uint8), held[name].view(torch.uint8)), (kill, at, name)
                for of in state:
                    assert torch.equal(state[of].view(torch.uint8), states[name][of].view(torch.uint8)), (kill, at, of)
    print("steps", at)
"""


@pytest.mark.parametrize("kills", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_is_what_was_never_killed(loaded, tmp_path, kills):
    output = loaded(textwrap.dedent(KILLED), tmp_path / "store", kills)
    assert int(output.split()[-1]) > kills  # it got somewhere between the kills


def test_what_is_there_is_refused_resumed_or_replaced(tmp_path):
    made(tmp_path).close()
    path = tmp_path / "memascend.store"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ConfigError, match="a store is there already"):
        made(tmp_path)
    with made(tmp_path, existing="resume") as store:
        assert not store.created
        with pytest.raises(StorageError, match="has it open already"):
            made(tmp_path, existing="resume")
    before = path.read_bytes()
    other = [engine.Entry(name="w", values=torch.zeros(3), state={})]
    with pytest.raises(ConfigError, match="does not fit"):
        engine.Store.create(tmp_path, other, existing="resume")
    with pytest.raises(ConfigError, match="the optimizer"):
        made(tmp_path, existing="resume", optimizer="SGD")
    assert path.read_bytes() == before
    with engine.Store.create(tmp_path, other, existing="replace") as store:
        assert len(store.entries()) == 1


def test_a_foreign_file_is_never_touched(tmp_path):
    path = tmp_path / "thesis.tex"
    path.write_bytes(b"\\documentclass{article}" * 1000)
    for existing in ("refuse", "resume", "replace"):
        with pytest.raises(StorageError, match="no memascend store"):
            made(path, existing=existing)
    assert path.read_bytes() == b"\\documentclass{article}" * 1000
    with pytest.raises(StorageError, match="there is no store"):
        engine.Store.open(tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()


def test_devices_that_are_swapped_missing_or_foreign_are_named(tmp_path):
    paths = [tmp_path / "one", tmp_path / "two"]
    made(paths).close()
    with pytest.raises(StorageError, match="is device 2 of the store and was given as device 1"):
        engine.Store.open(paths[::-1])
    with pytest.raises(StorageError, match="has 2 devices, and 1 were given"):
        engine.Store.open(paths[0])
    made([tmp_path / "three", tmp_path / "four"]).close()
    with pytest.raises(StorageError, match="another store") as error:
        engine.Store.open([paths[0], tmp_path / "four"])
    assert error.value.path == str(tmp_path / "four")
    with engine.Store.open(paths) as store:
        store.verify()


def test_memory_is_no_storage():
    folder = "/dev/shm"  # noqa: S108
    if not os.path.isdir(folder):
        pytest.skip("no tmpfs here")
    with pytest.raises(StorageError, match="file system in memory"):
        made(os.path.join(folder, "memascend-test"))
    assert not os.path.exists(os.path.join(folder, "memascend-test"))


def test_a_store_that_was_never_filled_is_refused(tmp_path, loaded):
    program = """
        import os, sys, torch
        from memascend import engine
        engine.Store.commit = lambda *arguments: os._exit(0)
        engine.Store.create(sys.argv[1], [engine.Entry(name="w", values=torch.zeros(3), state={})])
    """
    # A new file has no name before its first commit; the name of an empty one stays.
    (tmp_path / "store").touch()
    loaded(textwrap.dedent(program), tmp_path / "store")
    assert engine.commits(tmp_path / "store") == ([], None)
    with pytest.raises(StorageError, match="first write did not finish"):
        engine.Store.open(tmp_path / "store")


def test_a_flipped_bit_is_an_error_with_a_name(tmp_path, capsys):
    path = tmp_path / "store"
    with made(path) as store, engine.Engine(store) as updates:
        name = "bfloat16.3x1741"
        updates.update(name, torch.ones(3, 1741).bfloat16(), engine.Adam(step=1))
        updates.commit(1)
        values = store.read(name)[0]
    assert main(["store", "verify", str(path)]) == 0
    assert "step 1 is whole" in capsys.readouterr().out
    raw = bytearray(path.read_bytes())
    at = raw.find(values.view(torch.uint8).numpy().tobytes()[:4096])
    assert at > 0
    raw[at + 100] ^= 4
    path.write_bytes(raw)
    with engine.Store.open(path) as store:
        with pytest.raises(CorruptionError, match=f'chunk 0 of "{name}" is damaged') as error:
            store.read(name)
        assert error.value.offset == at
        assert store.read("bfloat16.13")[0].numel() == 13
    assert main(["store", "verify", str(path)]) == 1
    assert name in capsys.readouterr().err


def test_info(tmp_path, capsys):
    made(tmp_path).close()
    assert main(["store", "info", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    summary, entries = output.split("\n\n")
    assert "in 19 tensors (" in summary
    assert re.search(r"^buffers +1$", summary, re.MULTILINE)
    assert "19 parameters" not in summary
    assert len(entries.splitlines()) == 2 + 20
    assert "3 x 1741" in output
    assert main(["store", "info", str(tmp_path / "none")]) == 1


def test_what_does_not_fit_is_refused_and_loses_nothing(tmp_path):
    with made(tmp_path / "store") as store, engine.Engine(store) as updates:
        with pytest.raises(ConfigError, match="no entry"):
            updates.update("nobody", torch.zeros(1), engine.Adam(step=1))
        with pytest.raises(ConfigError, match="has shape"):
            updates.update("bfloat16.13", torch.zeros(14), engine.Adam(step=1))
        with pytest.raises(ConfigError, match="lr"):
            updates.update("bfloat16.13", torch.zeros(13), engine.Adam(step=1, lr=-1))
        with pytest.raises(ConfigError, match="Adam's state"):
            updates.update("frozen", torch.zeros(5000), engine.Adam(step=1))
        with pytest.raises(ConfigError, match="JSON"):
            updates.commit(1, user_state={1, 2})
        with pytest.raises(ConfigError, match="at most 65536"):
            updates.commit(1, user_state="x" * 70_000)
        updates.update("bfloat16.13", torch.zeros(13), engine.Adam(step=1))
        updates.finish()
        updates.update("bfloat16.13", torch.zeros(13), engine.Adam(step=1))
        with pytest.raises(UsageError, match="staged already"):
            updates.finish()
        with pytest.raises(UsageError, match="only be discarded"):
            updates.commit(1)
        updates.discard()
        assert store.step == 0
        updates.update("bfloat16.13", torch.zeros(13), engine.Adam(step=1))
        updates.commit(1)
        assert store.step == 1
    with pytest.raises(UsageError, match="closed"):
        store.stage("frozen", torch.zeros(5000).bfloat16(), step=1)
    store.close()
