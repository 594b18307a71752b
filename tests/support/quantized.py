"""Replaces tensors of checkpoints with quantised tensors, in the layouts of published checkpoints."""

import json

import torch
from safetensors.torch import load_file, save_file

__all__ = ["in_mxfp4", "quantize"]


def quantize(folder, stored, method):
    """Replaces each tensor of a checkpoint with the tensors that `stored(name, tensor)` returns.

    Writes `method` to the checkpoint's config.
    """
    for path in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(path).items():
            tensors |= stored(name, tensor)
        save_file(tensors, path, metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | {"quantization_config": method}))


def in_mxfp4(name, tensor, exponents=(122, 123)):
    """Returns, by name, the tensors that replace `tensor` in gpt-oss's MXFP4 layout.

    For an expert tensor: a tensor of random codes and a tensor of random exponents. For any other tensor: the tensor
    itself.
    """
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, columns, rows = tensor.shape
    groups, drawn = (experts, rows, columns // 32), torch.Generator().manual_seed(7)
    return {
        f"{name}_blocks": torch.randint(256, (*groups, 16), dtype=torch.uint8, generator=drawn),
        f"{name}_scales": torch.randint(*exponents, groups, dtype=torch.uint8, generator=drawn),
    }
