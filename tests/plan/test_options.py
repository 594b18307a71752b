"""Tests the options of offload(): accepted values, the converted form of values, and the errors for rejected values."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import torch

from memascend import ConfigError, offload
from memascend.plan.options import Options, parse_bytes
from memascend.plan.spare import Spare


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("8 GiB", 8 << 30),
        ("500MB", 500_000_000),
        ("1.1 gb", 1_100_000_000),
        (".5kib", 512),
        (" 2 TiB ", 2 << 40),
        ("9007199254740993B", 9007199254740993),
        ("8e9", 8_000_000_000),
        ("1.5E+3 MB", 1_500_000_000),
        ("9007199254740993e0", 9007199254740993),
    ],
)
def test_parse_bytes_accepts_numbers_and_text_with_units(text, nbytes):
    assert parse_bytes(text) == nbytes


NO_SIZES = ["", "8G", "GiB", "-1GiB", "1e", "e9", "1e-9", "1e999", "8 GiB 1", "nan", "inf", None, 1.5, True, b"8GiB"]


@pytest.mark.parametrize("text", [*NO_SIZES, float("nan"), float("inf"), float("-inf"), "٣GiB", "1.5.2GiB"])
def test_parse_bytes_error_shows_the_invalid_value(text):
    with pytest.raises(
        ConfigError, match=r'host_memory must be a number of bytes, or text such as "8GiB".*, not '
    ) as refused:
        parse_bytes(text, "host_memory")
    assert str(refused.value).endswith(f"not {text!r}")


@pytest.mark.parametrize("text", [0, -5, "0", "0.0001B", 0.0, -8e9, "0e9"])
def test_sizes_are_at_least_a_byte(text):
    with pytest.raises(ConfigError, match="at least 1 byte"):
        parse_bytes(text)


def test_options_are_frozen_and_keyword_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().gradients = "ssd"
    with pytest.raises(TypeError):
        Options("somewhere")


def test_options_convert_paths_sizes_and_unit_names(tmp_path, monkeypatch):
    options = Options(storage=tmp_path, host_memory="1 MiB", units=["a", "b"])
    assert (options.paths, options.host_bytes, options.unit_names) == ((str(tmp_path),), 1 << 20, ("a", "b"))
    assert Options(storage=[Path("/a"), "/b"]).paths == ("/a", "/b")
    assert (Options().paths, Options().host_bytes, Options().unit_names) == (None, None, None)
    words = [Options(host_memory=word) for word in ("auto", "default", None)]
    assert [(one.host_bytes, one.spare) for one in words] == [(None, Spare()), (None, None), (None, None)]
    monkeypatch.setattr("memascend.memory.limits", lambda: {"available": 1000})
    assert Options(host_memory="12.5 %").host_bytes == 125


@pytest.mark.parametrize(
    "good",
    [
        {"device": torch.device("cpu")},
        {"device": "cuda", "device_memory": "8GiB"},
        {"device": "cuda", "device_memory": 8e9, "host_memory": 8e9},
        {"max_grad_norm": float("inf")},
        {"loss_scale": 1024},
        {"existing": "replace"},
    ],
)
def test_options_accept_valid_combinations(good):
    """These combinations of options are valid."""
    Options(**good)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"gradients": "gpu"}, "'auto', 'fused', 'ssd', 'ram'"),
        ({"existing": "overwrite"}, "'refuse', 'resume', 'replace'"),
        ({"existing": "resume"}, "needs storage="),
        ({"durability": "close"}, "'step', 'none', not 'close'"),
        ({"nonfinite": "ignore"}, "'raise', 'skip', 'commit'"),
        ({"gradients": "fused", "max_grad_norm": 1.0}, "gradients='ssd'"),
        ({"device": "meta"}, "pass None, 'cpu', 'cuda' or 'cuda:1'"),
        ({"device": "toaster"}, "device must be None, 'cpu', 'cuda'"),
        ({"device": "cpu", "device_memory": "1GiB"}, "remove device_memory"),
        ({"device": "cuda", "device_memory": "much"}, "device_memory must be a number of bytes"),
        ({"activations": "disk"}, "'device', 'host', 'ssd'"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"max_grad_norm": float("nan")}, "above 0"),
        ({"accumulation_steps": 0}, "at least 1"),
        ({"accumulation_steps": True}, "at least 1"),
        ({"log_steps": -1}, "log_steps must be an integer from 0 to 4096"),
        ({"log_steps": 5000}, "log_steps must be an integer"),
        ({"log_steps": 4}, "log_steps does not work with a temporary store (storage=None)"),
        ({"log_steps": 4, "storage": "/a", "durability": "none"}, "log_steps does not work with durability='none'"),
        ({"loss_scale": 0}, "above 0"),
        ({"loss_scale": float("inf")}, "above 0"),
        ({"loss_scale": "static"}, "'dynamic'"),
        ({"master_dtype": torch.float16}, "torch.float32 or None"),
        ({"host_memory": "much"}, "8GiB"),
        ({"host_memory": 0}, "at least 1 byte"),
        ({"state": "int8"}, "state must be one of None, 'fp32', 'bf16', '8bit', not 'int8'"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"rounding": "stochastic"}, "master_dtype=None"),
        ({"seed": -1}, "seed must be an integer"),
        ({"seed": 1 << 64}, "seed must be an integer"),
        ({"storage": []}, "one or more paths"),
        ({"storage": ""}, "a path or a list of paths"),
        ({"storage": ["/a", Path("/a")]}, "once"),
        ({"scratch": ["/a"]}, "a folder"),
        ({"storage": "/a/" + "x" * 5000}, "storage is not a valid path (5003 bytes are too long)"),
        ({"storage": ["/a", "/a/" + "x" * 5000]}, "too long"),
        ({"storage": "a\0b"}, "null"),
        ({"checkpoint": "x" * 256}, "checkpoint is not a valid path (256 bytes"),
        ({"units": "layers.0"}, "list of module names"),
    ],
)
def test_options_error_names_the_option_and_valid_values(wrong, says):
    with pytest.raises(ConfigError) as refused:
        Options(**wrong)
    output = str(refused.value)
    assert says in output
    assert any(name in output for name in wrong)


def test_offload_has_an_argument_for_each_option_and_no_other():
    arguments = dict(inspect.signature(offload).parameters)
    assert [arguments.pop("model").name, arguments.pop("optimizer").name] == ["model", "optimizer"]
    options = {option.name: option.default for option in dataclasses.fields(Options)}
    # `Options` also works without torch, so `Options.master_dtype` is the name of a dtype instead of a torch.dtype.
    options["master_dtype"] = getattr(torch, options["master_dtype"])
    assert {name: argument.default for name, argument in arguments.items()} == options
