"""Tests functions that the engine applies to streamed state: equal bits to torch in memory, threads, and failures."""

import ctypes
import gc
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.bits import same_bits
from support.stores import CHUNK, SIZES, filled, parameters

from memascend import engine
from memascend.errors import ConfigError, StorageError, UsageError


def state_of(values):
    return {
        "step": torch.tensor([0.0]),
        "moment": torch.randn(values.shape),
        "rows": torch.randn(300_000 if values.numel() == 13 else 5).double(),
        "counts": torch.zeros(values.shape, dtype=torch.int16),
    }


def made(path, *, spill=None, **options):
    held = parameters(sizes=[*SIZES, (30_001,)])
    states = {name: state_of(values) for name, values in held.items()}
    records = [
        engine.Record(name=name, values=values, state=states[name], spill=spill) for name, values in held.items()
    ]
    store = filled(path, records, chunk_elements=CHUNK, optimizer="SGD", **options)
    return store, held, {name: {of: tensor.clone() for of, tensor in state.items()} for name, state in states.items()}


def arithmetic(values, gradient, state, *, first, last):
    """Updates a chunk in place.

    The update is elementwise. With `first`, it also changes "step". With `last`, it also changes "rows".
    """
    if first:
        state["step"] += 1
    state["moment"].mul_(0.9).add_(gradient.float())
    state["counts"] += 1
    values.copy_(values.float() - 0.1 * state["step"].sum() * state["moment"])
    if last:
        state["rows"] *= -1.5


def on_chunk(chunk):
    assert threading.current_thread() is not threading.main_thread()
    assert not torch.is_grad_enabled()
    arithmetic(chunk.values, chunk.gradient, chunk.state, first=chunk.start == 0, last=chunk.last)


@pytest.mark.parametrize(
    ("slots", "spilled", "chunks"),
    [(0, False, 2), (0, True, 4), (1, False, 4), (1, True, 2), (2, False, 2), (2, True, 4)],
)
def test_applied_update_has_same_bits_as_torch_in_memory(tmp_path, slots, spilled, chunks):
    store, held, states = made(tmp_path / "store", spill=torch.bfloat16)
    whole = slots > 0
    room = 30_001 * (4 + 4 + 2 + 2) + 4 * 64 if whole else 0
    following = room if slots == 2 else 0
    with store, engine.Engine(store, chunks=chunks, queue=100_000, whole=room, whole_next=following) as applying:
        for step in range(1, 4):
            for name, values in held.items():
                gradient = torch.randn(values.shape).bfloat16()
                if spilled:
                    applying.spill(name, gradient)
                given = None if spilled else gradient
                applying.apply(name, on_chunk, step=step, whole=whole, gradient=given)
                arithmetic(values, gradient, states[name], first=True, last=True)
            applying.commit(step)
        assert applying.counters()["applied"] == 3 * len(held)
        store.verify()
        for name, values in held.items():
            stored, state = store.read(name)
            assert same_bits(stored, values), name
            assert all(same_bits(state[of], tensor) for of, tensor in states[name].items()), name
        # The staging memory has the chunks of the ring, and the memory for whole parameters. It also has two slots for
        # state tensors whose shape differs from their parameter's shape. A slot is as large as the largest record
        # needs. The staging memory does not grow with the number of records.
        sizes = store.info()
        assert sizes["index_bytes"] < 1 << 20
        assert (
            room + following
            < applying.staging_bytes
            < room + following + 2 * (300_000 * 8 + 8192) + chunks * (1 << 20) + (1 << 17)
        )


def test_apply_keeps_strides_that_are_not_row_major(tmp_path):
    values = torch.randn(8, 6, 20, 30).contiguous(memory_format=torch.channels_last)
    order = engine.order_of(values)
    state = {"moment": torch.zeros_like(values)}
    records = [engine.Record(name="conv", values=values, state=state, order=order, spill=torch.float32)]
    gradient = torch.randn(8, 6, 20, 30).contiguous(memory_format=torch.channels_last)
    store = filled(tmp_path / "store", records, chunk_elements=CHUNK)
    wanted = values.clone()

    def function(chunk):
        assert chunk.values.stride() == chunk.gradient.stride() == chunk.state["moment"].stride()
        chunk.state["moment"] += chunk.gradient
        chunk.values -= chunk.state["moment"]

    with store, engine.Engine(store, whole=1 << 20) as applying:
        for step, (whole, spilled) in enumerate([(False, False), (True, False), (False, True), (True, True)], 1):
            if spilled:
                applying.spill("conv", gradient)
            applying.apply("conv", function, step=step, gradient=None if spilled else gradient, whole=whole)
            applying.commit(step)
            wanted -= step * gradient
            read = store.read("conv")[0]
            assert read.stride() == values.stride()
            assert torch.allclose(read, wanted, atol=1e-4), (whole, spilled)


@pytest.mark.parametrize("whole", [False, True])
def test_exception_in_an_applied_function_fails_the_step_as_its_cause(tmp_path, whole):
    store, held, _ = made(tmp_path / "store")
    names = [name for name in held if "float32" in name]
    with store, engine.Engine(store, whole=8 << 20, whole_next=1 << 16) as applying:
        for raised in 6 * [KeyError("mine"), RuntimeError("mine")]:

            def function(chunk, raised=raised):
                here = chunk.values.reshape(-1)[:5]
                if len(here) == 5 and chunk.start + chunk.count == 5223:
                    raise raised
                chunk.values.fill_(7)

            says = r"a function that the engine called for .float32.*failed.*mine"
            with pytest.raises(UsageError, match=says) as error:  # noqa: PT012 - either call may raise
                for name in names:
                    applying.apply(name, function, step=1, gradient=torch.zeros(held[name].shape), whole=whole)
                applying.finish()
            assert error.value.__cause__ is raised
            with pytest.raises(UsageError, match="only be discarded") as again:
                applying.commit(1)
            assert again.value.__cause__ is None
            applying.discard()
        for name in names:
            assert same_bits(store.read(name)[0], held[name])
            applying.apply(name, lambda chunk: chunk.values.fill_(7), step=1, gradient=held[name], whole=whole)
        applying.commit(1)
        assert all((store.read(name)[0] == 7).all() for name in names)


def test_chunk_tensor_kept_by_an_applied_function_fails_the_step(tmp_path):
    store, held, _ = made(tmp_path / "store")
    name, kept = "float32.(2049,)", []
    with store, engine.Engine(store, chunks=3, whole=1000) as applying:
        with pytest.raises(ConfigError, match="takes 20672 bytes, and the engine has 1000"):
            applying.apply(name, print, step=1, gradient=held[name], whole=True)
        for keep in (lambda chunk: chunk.values[3:], lambda chunk: chunk.state["rows"], lambda chunk: chunk):
            applying.apply(name, lambda chunk, keep=keep: kept.append(keep(chunk)), step=1, gradient=held[name])
            with pytest.raises(UsageError, match="kept a tensor of its chunk"):
                applying.finish()
            applying.discard()
        assert torch.equal(kept[0], held[name][3:2048])
        kept.clear()
        cycle = []

        def function(chunk):
            cycle.append([chunk])
            cycle[-1].append(cycle[-1])
            cycle.clear()
            chunk.values.fill_(1)

        gc.disable()
        try:
            applying.apply(name, function, step=1, gradient=held[name])
            applying.commit(1)
        finally:
            gc.enable()
        assert (store.read(name)[0] == 1).all()


@pytest.fixture
def openmp():
    """Yields the OpenMP library with which torch divides operations among threads."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split(maxsplit=5)[5] for line in maps if line.endswith((".so", ".1")) and "omp" in line})
    (path,) = [path for path in paths if Path(path).name.startswith(("libgomp", "libiomp"))]
    before = torch.get_num_threads()
    yield ctypes.CDLL(path)
    torch.set_num_threads(before)


@pytest.mark.parametrize("whole", [False, True])
def test_applied_function_runs_with_the_thread_count_of_its_caller(tmp_path, openmp, whole):
    store, held, _ = made(tmp_path / "store")
    seen = []
    (name, values), *_ = ((name, values) for name, values in held.items() if values.numel() == 13)
    with store, engine.Engine(store, chunks=2, queue=100_000, whole=1 << 16) as applying:
        # OpenMP stores a number of threads for each calling thread. The engine's thread must take the caller's number.
        # Otherwise it would use the number of processors at first, and later the number that it used last.
        for step, threads in enumerate((1, 3, 1), 1):
            torch.set_num_threads(threads)
            applying.apply(
                name,
                lambda _: seen.append(openmp.omp_get_max_threads()),
                step=step,
                gradient=torch.zeros(values.shape).bfloat16(),
                whole=whole,
            )
            applying.commit(step)
    assert seen == [1, 3, 1]


def test_failed_function_after_the_commit_makes_the_store_unusable(tmp_path):
    store, held, _ = made(tmp_path / "store", durability="none")
    first, second = list(held)[-2:]

    def fails(_):
        raise ArithmeticError("at the end")

    with engine.Engine(store, chunks=2) as applying:
        store.hold([first, second])
        store.refresh([first, second])
        applying.apply(first, on_chunk, step=1, gradient=torch.ones(held[first].shape).bfloat16(), after_commit=True)
        applying.apply(second, fails, step=1, gradient=torch.ones(held[second].shape).bfloat16(), after_commit=True)
        with pytest.raises(UsageError, match="at the end"):
            applying.commit(1)
        with pytest.raises(StorageError, match="was not applied to its end"):
            store.commit(2)
    store.close()
    with pytest.raises(StorageError, match="not closed"):
        engine.Store.open(tmp_path / "store")


def test_interrupt_does_not_split_functions_applied_after_the_commit(tmp_path):
    store, held, states = made(tmp_path / "store", durability="none")
    gradients = {name: torch.randn(values.shape).bfloat16() for name, values in held.items()}

    def interrupted(chunk):
        signal.raise_signal(signal.SIGINT)
        on_chunk(chunk)

    with store, engine.Engine(store, chunks=2, queue=100_000) as applying:
        store.hold(list(held))
        store.refresh(list(held))
        for name, gradient in gradients.items():
            applying.apply(name, interrupted, step=1, gradient=gradient, after_commit=True)
            arithmetic(held[name], gradient, states[name], first=True, last=True)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - either line may raise
            applying.commit(1)
            time.sleep(1)
        assert store.info()["step"] == 1
        assert all(same_bits(store.read(name)[0], values) for name, values in held.items())
