"""Uses CUDA, accelerate and Trainer together with `offload()`, as users do, on the simulated CUDA."""

from __future__ import annotations

import logging
import tempfile
import threading
import warnings

import torch
from device.simulated import runtime
from device.simulated.order import begun, made

import memascend
from memascend.device.device import Device


def checked(*, device="cuda", middle=lambda: None, **options):
    """Trains two steps and checks every read. Calls `middle` between forward and backward, and after each step."""
    with begun(gradients="fused", device=device, **options) as training:
        for step in range(2):
            training.check.step = step
            found = training.forward()
            middle()
            torch.autograd.backward(found, [torch.empty_like(y) for y in found])
            training.commit(step)
            middle()
        return {
            **training.compare(),
            "on": str(next(training.model.parameters()).device),
            "name": torch.cuda.get_device_name(training.streams["in"].device),
            "contexts": contexts(),
        }


def on_the_device_already():
    return checked(placed="cuda")


def under_a_default_device():
    with torch.device("cuda"):
        return checked()


def second_device():
    """Trains on the second device.

    The run must make no context on the first device, because a context takes memory.
    """
    with torch.cuda.device(1):
        return checked(device="cuda:1")


def copies_to_the_second_device(ours):
    """Copies to and from the second device in a new thread; if `ours`, the thread first calls `enter_thread`."""
    device, host, back = Device(torch.device("cuda", 1)), torch.arange(64, dtype=torch.uint8), torch.zeros(64).byte()

    def copy():
        if ours:
            device.enter_thread()
        memory = device.memory(host.nbytes)
        device.bring(host, memory, [device.mark(device.stream())]).order()
        device.take(memory, back, [device.mark(device.stream())]).wait()

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    return {"same": torch.equal(host, back), "contexts": contexts()}


def contexts():
    return [runtime.library.simulated_active(index) for index in range(torch.cuda.device_count())]


def cache_emptied():
    return checked(middle=torch.cuda.empty_cache)


def linear(**options):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(3)))
    return model, {"storage": None, "device": "cuda", "gradients": "fused", **options}


def offloaded(model, **options):
    # Warnings about the temporary store and about autocast over fp32 weights do not matter here.
    warnings.simplefilter("ignore")
    return memascend.offload(model, made(model.parameters()), **options)


def usual(model):
    model(torch.zeros(8, 64, device="cuda")).sum().backward()


def trained(model, optimizer, backward=usual):
    """Trains two steps; returns the number of committed steps, and the forbidden uses of CUDA."""
    with optimizer:
        for _ in range(2):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        return {"steps": optimizer.steps, "faults": runtime.faults()}


def autocast():
    def backward(model):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = model(torch.zeros(8, 64, device="cuda"))
        assert y.dtype == torch.bfloat16
        y.sum().backward()

    model, options = linear()
    return trained(*offloaded(model, **options), backward)


def refused_device():
    model, options = linear()
    try:
        memascend.offload(model, made(model.parameters()), **options)
    except memascend.ConfigError as error:
        return str(error)
    raise AssertionError("offload() accepted a device that is not visible")


def dispatched(where):
    """Places a model with accelerate, as transformers does for `device_map=`, and trains it.

    If offload() raises an error, returns the error's class and message, and requires that no weight has moved.
    """
    from accelerate import dispatch_model, infer_auto_device_map

    model, options = linear()
    count = len(model)
    maps = {
        "cuda": {"": 0},
        "auto": infer_auto_device_map(model, max_memory={0: "1GiB"}),
        "several": {str(index): index % 2 for index in range(count)},
        "offloaded": {str(index): "cpu" if index else 0 for index in range(count)},
    }
    model = dispatch_model(model, maps[where], force_hooks=where != "cuda")
    before = {name: value.device for name, value in model.state_dict().items()}
    try:
        model, optimizer = offloaded(model, **options)
    except memascend.MemascendError as error:
        for name, value in model.state_dict().items():
            assert value.device == before[name], name
        return {"refused": type(error).__name__, "why": str(error)}
    return trained(model, optimizer)


def prepared(before):
    """Calls `Accelerator.prepare()` on a CUDA device, and trains.

    The call comes before offload() if `before` is true, and otherwise after offload().
    """
    warnings.simplefilter("ignore")
    from accelerate import Accelerator

    model, options = linear()
    accelerator = Accelerator()
    assert accelerator.device.type == "cuda"
    if before:
        model = accelerator.prepare(model)
        assert next(model.parameters()).device.type == "cuda"
    model, optimizer = offloaded(model, **options)
    if not before:
        model, wrapped = accelerator.prepare(model, optimizer)
        assert wrapped.optimizer is optimizer
    x = torch.zeros(8, 64, device="cuda")
    return trained(model, optimizer, lambda model: accelerator.backward(model(x).sum()))


COUNT, STEPS = 4, 4


def trainer(room):
    """Trains with a Trainer. After the first step, limits the device memory.

    The limit is `room` times the memory that a step by layer is predicted to need.
    """
    import transformers

    import memascend.trainer
    from memascend.trainer import by_layer

    rooms, lines = [], []

    class Kept(by_layer.Room):
        def __init__(self, *given):
            super().__init__(*given)
            rooms.append(self)

    by_layer.Room = Kept
    log = logging.getLogger("memascend")
    log.setLevel(logging.INFO)
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    # cuDNN's attention kernels need a device that computes.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    folder = tempfile.mkdtemp()
    config = transformers.Qwen2Config(
        vocab_size=8192, hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    tokens = torch.arange(512) % 500
    limits = []

    class Limit(transformers.TrainerCallback):
        def on_step_end(self, _, state, *__, **___):
            if state.global_step == 1:
                total = torch.cuda.get_device_properties(0).total_memory
                limits.append(rooms[0]._peak + (COUNT - 1) * (rooms[0]._kept + rooms[0]._tied))
                torch.cuda.empty_cache()
                torch.cuda.set_per_process_memory_fraction(room * limits[0] / total)
                torch.cuda.reset_peak_memory_stats()

    arguments = transformers.TrainingArguments(
        folder + "/out", per_device_train_batch_size=8, gradient_accumulation_steps=COUNT, max_steps=STEPS,
        max_grad_norm=0, save_strategy="no", report_to=[], activation_checkpointing=True, disable_tqdm=True,
    )  # fmt: skip
    made = transformers.Trainer(
        transformers.Qwen2ForCausalLM(config), arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 8 * COUNT * STEPS, callbacks=[Limit()],
    )  # fmt: skip
    # The simulated device computes nothing, so gradients may not be finite. With `nonfinite="commit"`, step() accepts
    # gradients that are not finite.
    memascend.trainer.offload(made, storage=folder + "/run.store", nonfinite="commit")
    made.train()
    return {
        "in turn": [line for line in lines if "no room for the activations" in line],
        "peak": torch.cuda.max_memory_allocated(),
        "needed": limits[0],
        "kept": rooms[0]._kept,
        "steps": made.state.global_step,
        "faults": runtime.faults(),
    }
