"""Provides the fixtures of command tests: disks, the config of a small model, cached traces."""

import pytest
from support.disks import backend, child, faulty, loop, path, small_ext4
from support.planned import config

from memascend.cli.plan import model

__all__ = ["backend", "child", "config", "faulty", "loop", "path", "small_ext4"]


@pytest.fixture(scope="session", autouse=True)
def _a_trace_is_made_once():
    """Caches `trace`: one call takes seconds, and many tests trace the same config."""
    own, found = model.trace, {}

    def trace(of, batch, *, recomputes):
        shapes = str([(name, parameter.shape, parameter.dtype) for name, parameter in of.named_parameters()])
        config = of.config.to_json_string() if hasattr(of, "config") else ""
        key = (type(of), config, shapes, batch, recomputes)
        if key not in found:
            found[key] = own(of, batch, recomputes=recomputes)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "trace", trace)
        yield
