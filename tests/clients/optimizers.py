"""Tries the optimizers of the client libraries in memory and offloaded; `make clients-table` writes the results."""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity.reference import threads_of_torch

import memascend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "optimizers.md"
LIBRARIES = ("torch", "pytorch-optimizer", "schedulefree", "timm", "torchao", "transformers")
_STEPS = 9
# The number of steps after which `_outcome` closes and resumes the offloaded run.
_RESUMED = 5
_BEGIN = "<!-- made by `make clients-table` -->"


@dataclass(frozen=True)
class Case:
    """An optimizer class of a library, and the options that make() passes to this class."""

    library: str
    name: str
    kind: Any
    options: dict[str, Any]

    def make(self, model: torch.nn.Module) -> Any:
        matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
        groups = [{"params": matrices}, {"params": others}]
        if self.name in _ONLY_MATRICES:
            for parameter in others:
                parameter.requires_grad_(False)
            groups = groups[:1]
        if self.name in _BY_USE:
            groups = [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]
        if self.name in _WRAPPERS:
            return self.kind(torch.optim.AdamW(groups, lr=0.01), **self.options)
        return self.kind(model if self.name in _OF_MODELS else groups, **self.options)


_BY_USE = {"AdaGO", "AdaMuon", "DistributedMuon", "Muon", "MuonClip", "NorMuon"}
_ONLY_MATRICES = {"SpectralSphere", "torch.optim.Muon"}
_OF_MODELS = {"AdamMini", "LOMO", "AdaLOMO"}
_WRAPPERS = {"Lookahead", "ScheduleFreeWrapper"}
_OPTIONS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 10},
    "Ranger21": {"num_iterations": 20},
    "Adafactor (transformers)": {"lr": 1e-3, "relative_step": False, "scale_parameter": False},
}


def cases(library: str) -> list[Case]:
    """Returns one case for each optimizer class of a library."""
    found = {"torch": _of_torch, "pytorch-optimizer": _of_pytorch_optimizer, "timm": _of_timm}.get(library)
    kinds = found() if found else _of_module(library)
    return [Case(library, name, kind, _options(name)) for name, kind in sorted(kinds.items())]


_WITHOUT_LR = {"SGD", "SGD32bit", "SGD8bit", "LARS", "LARS32bit", "LARS8bit", "PytorchLARS"}


def _options(name: str) -> dict[str, Any]:
    if name in ("torch.optim.Adam", "torch.optim.AdamW"):
        # The engine computes the same bits as torch with `fused=True`.
        return {"fused": True}
    if name in _WITHOUT_LR:
        return {"lr": 0.01, "momentum": 0.9}
    return _OPTIONS.get(name, {})


def _of_torch() -> dict[str, Any]:
    own = [kind for kind in vars(torch.optim).values() if _is_optimizer(kind) and kind is not torch.optim.Optimizer]
    return {f"torch.optim.{kind.__name__}": kind for kind in own}


def _of_pytorch_optimizer() -> dict[str, Any]:
    import pytorch_optimizer

    kinds = [pytorch_optimizer.load_optimizer(name) for name in pytorch_optimizer.get_supported_optimizers()]
    own = {kind.__name__: kind for kind in kinds if not kind.__module__.startswith("torch.optim")}
    return {**own, "Lookahead": pytorch_optimizer.Lookahead}


def _of_timm() -> dict[str, Any]:
    import timm.optim

    kinds = []
    for name in timm.optim.list_optimizers():
        # Without a GPU, `get_optimizer_class` raises AssertionError for some classes of other libraries.
        with contextlib.suppress(AssertionError):
            kinds.append(timm.optim.get_optimizer_class(name))
    own = {kind.__name__: kind for kind in kinds if getattr(kind, "__module__", "").startswith("timm.")}
    return {**own, "Lookahead": timm.optim.Lookahead}


def _of_module(library: str) -> dict[str, Any]:
    if library == "transformers":
        from transformers.optimization import Adafactor

        return {"Adafactor (transformers)": Adafactor}
    module = importlib.import_module("torchao.optim" if library == "torchao" else library)
    return {name: kind for name, kind in vars(module).items() if _is_optimizer(kind) and name[0] != "_"}


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def model() -> torch.nn.Module:
    """Returns a model with small and large matrices. 8-bit optimizers quantise the state of large matrices only."""
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 128),
        torch.nn.LayerNorm(128),
        torch.nn.Linear(128, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 8),
    )


def train(trained: torch.nn.Module, optimizer: Any, steps: range) -> None:
    for mode in (optimizer, trained):
        if callable(getattr(mode, "train", None)):
            mode.train()
    for step in steps:
        inputs = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
        trained(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()


def outcome(case: Case) -> str:
    """Returns the table's text for a case.

    "streams": the offloaded run has the bits of the run in memory. "DIFFERS": it has other bits. "not tried: REASON":
    the run in memory fails. "rejected: REASON": offload() raises a ConfigError. "CHANGED by a rejection: ERROR":
    offload() raises a ConfigError after it has changed a weight.
    """
    silent = contextlib.redirect_stdout(io.StringIO())
    with threads_of_torch(1), warnings.catch_warnings(), torch.compiler.set_stance("force_eager"), silent:
        warnings.simplefilter("ignore")
        return _outcome(case)


def _outcome(case: Case) -> str:
    plain = model()
    try:
        reference = case.make(plain)
        train(plain, reference, range(_RESUMED))
        train(plain, reference, range(_RESUMED, _STEPS))
    except Exception as error:
        return f"not tried: in memory {type(error).__name__}: {_reason(str(error) or 'without words')}"
    trained = model()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        optimizer = case.make(trained)
        try:
            trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/store")
        except memascend.ConfigError as error:
            same = all(map(torch.equal, before, trained.parameters()))
            return f"rejected: {_reason(str(error))}" if same else f"CHANGED by a rejection: {error}"
        with contextlib.ExitStack() as run:
            run.callback(optimizer.close)
            train(trained, optimizer, range(_RESUMED))
            optimizer.close()
            trained = model()
            optimizer = case.make(trained)
            trained, optimizer = memascend.offload(trained, optimizer, storage=f"{folder}/store", existing="resume")
            run.callback(optimizer.close)
            train(trained, optimizer, range(_RESUMED, _STEPS))
            with memascend.materialized(trained):
                same = all(map(torch.equal, plain.parameters(), trained.parameters()))
    return "streams" if same else "DIFFERS"


def _reason(message: str) -> str:
    for begin in (" cannot run on streamed state: ", " is rejected: "):
        if begin in message:
            message = message.split(begin, 1)[1]
    return message.split(";")[0].split(", but only the groups")[0].splitlines()[0].replace("|", "/")


def row(case: Case) -> str:
    """Returns the table's row for a case."""
    return f"| {case.name} | {outcome(case)} |"


def heading(library: str) -> str:
    return f"## {library} {importlib.metadata.version(library).split('+')[0]}"


def written() -> dict[str, list[str]]:
    """Returns the table rows that main() wrote to the page: a list for each heading."""
    found: dict[str, list[str]] = {}
    _, tables = PAGE.read_text().split(_BEGIN)
    for line in tables.splitlines():
        if line.startswith("## "):
            rows_of = found.setdefault(line, [])
        elif line.startswith("| ") and found and not line.startswith(("| class", "| ---")):
            rows_of.append(line)
    return found


def main() -> None:
    text = PAGE.read_text()
    parts = [text[: text.index(_BEGIN)] + _BEGIN]
    for library in LIBRARIES:
        table = "\n".join(map(row, cases(library)))
        print(library, table, flush=True)
        parts.append(f"{heading(library)}\n\n| class | offloaded |\n| --- | --- |\n{table}")
    PAGE.write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    sys.exit(main())
