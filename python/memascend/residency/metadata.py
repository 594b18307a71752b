"""Lists what torch may ask of a parameter without its values: shapes, dtypes, flags."""

from __future__ import annotations

from typing import Any

import torch


def _metadata() -> frozenset[Any]:
    attributes = [
        "shape",
        "dtype",
        "device",
        "layout",
        "ndim",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_meta",
        "is_cpu",
        "is_cuda",
        "is_xpu",
        "is_mps",
        "is_mkldnn",
        "is_nested",
        "is_leaf",
        "requires_grad",
        "grad",
        "grad_fn",
        "output_nr",
        "names",
        "itemsize",
        "nbytes",
        "_backward_hooks",
        "_version",
        "_grad",
        "_base",
        "name",
        "retains_grad",
        "_post_accumulate_grad_hooks",
        "is_mtia",
        "is_ipu",
        "is_vulkan",
        "is_ort",
        "is_maia",
        "volatile",
        "_has_symbolic_sizes_strides",
    ]
    methods = [
        "size",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "get_device",
        "is_same_size",
        "is_coalesced",
        "requires_grad_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "__len__",
        "__hash__",
        "is_inference",
        "is_conj",
        "is_neg",
        "has_names",
        "_is_view",
        "dim_order",
        "is_distributed",
        "is_shared",
    ]
    found: set[Any] = set()
    for name in attributes:
        attribute = getattr(torch.Tensor, name, None)
        if attribute is not None and hasattr(attribute, "__get__"):
            found.add(attribute.__get__)
    for name in ("requires_grad", "grad", "_grad", "names", "_backward_hooks", "_post_accumulate_grad_hooks"):
        attribute = getattr(torch.Tensor, name, None)
        for setter in ("__set__", "__delete__"):
            if hasattr(attribute, setter):
                found.add(getattr(attribute, setter))
    found |= {getattr(torch.Tensor, name) for name in methods if hasattr(torch.Tensor, name)}
    found |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_conj, torch.is_neg, torch.is_signed}
    found |= {torch.is_inference, torch.is_same_size}
    found.add(torch._has_compatible_shallow_copy_type)  # noqa: SLF001
    return frozenset(found)


METADATA = _metadata()
