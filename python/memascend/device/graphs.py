"""Refuses CUDA graphs by name: torch.compile writes the addresses of weights into them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memascend.errors import UsageError

if TYPE_CHECKING:
    from types import FrameType

    import torch

# Of Dynamo's function that runs compiled code; its context is called `self` there.
_DYNAMO = "torch/_dynamo/eval_frame.py"
# The option of inductor's that mode="reduce-overhead" and mode="max-autotune" set.
_OPTION = "triton.cudagraphs"
_REFUSED = (
    "CUDA graphs do not work with an offloaded model, whose weights are at other addresses each time: compile with "
    'mode="default" or "max-autotune-no-cudagraphs" (not "reduce-overhead" or "max-autotune"), or with '
    'options={"triton.cudagraphs": False}'
)


def refuse_graphs(module: torch.nn.Module, *, whole: bool) -> None:
    """Look at what calls a module, and at itself; `whole`: at all that is in it, too.

    Raises:
        UsageError: it is compiled so that it would be captured.
    """
    for part in module.modules() if whole else (module,):
        compiled: Any = part._compiled_call_impl  # noqa: SLF001
        if compiled is not None and _captures(_context_of(compiled)):
            raise UsageError(_REFUSED)
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001
    while frame is not None:
        if frame.f_code.co_filename.endswith(_DYNAMO) and _captures(frame.f_locals.get("self")):
            raise UsageError(_REFUSED)
        frame = frame.f_back


def _context_of(compiled: Any) -> Any:
    """What stands in Dynamo's closure."""
    code, cells = getattr(compiled, "__code__", None), getattr(compiled, "__closure__", None) or ()
    free = () if code is None else code.co_freevars
    return next((cell.cell_contents for name, cell in zip(free, cells, strict=False) if name == "self"), None)


def _captures(context: Any) -> bool:
    """Whether a context that runs compiled code has graphs made of it."""
    config = getattr(context, "compiler_config", None)
    if isinstance(config, dict) and config.get(_OPTION):
        return True
    backend: Any = getattr(context, "callback", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend  # noqa: SLF001
    return getattr(backend, "compiler_name", None) == "cudagraphs"
