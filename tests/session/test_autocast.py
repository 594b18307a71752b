"""Tests the warning that autocast holds 16-bit copies of 32-bit weights."""

import warnings

import pytest
import torch
from support.chains import offloaded
from torch import nn


def forward(model, dtype):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.ones(2, 32, dtype=dtype)).float().sum().backward()


def test_it_is_said_at_the_first_forward_that_sees_it(tmp_path):
    model, optimizer = offloaded(tmp_path / "run.store", nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    with optimizer:
        model(torch.ones(2, 32)).sum().backward()
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match=r"autocast.*bfloat16.*fp32 master weights"):
            forward(model, torch.float32)
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            forward(model, torch.float32)


def test_nothing_is_said_of_small_parts_in_32_bits(tmp_path):
    model, optimizer = offloaded(
        tmp_path / "run.store", nn.Sequential(nn.Linear(32, 32).bfloat16(), nn.LayerNorm(32), nn.Linear(32, 2))
    )
    with optimizer, warnings.catch_warnings():
        warnings.simplefilter("error")
        forward(model, torch.bfloat16)
