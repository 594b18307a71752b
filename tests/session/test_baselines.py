"""Tests which update in memory an offloaded one is bit-identical to, as docs/how-it-works.md lists it."""

import re
import textwrap

PROGRAM = """
    import logging, sys, torch, memascend
    from torch import nn

    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)

    def made(dtype):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(dtype)

    def trained(model, optimizer, parameters=None):
        batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
        for scale in range(1, 9):
            model(batch.to(next(model.parameters()).dtype) * scale).float().square().mean().backward()
            if parameters is not None:
                for master, parameter in zip(parameters, model.parameters()):
                    master.grad = parameter.grad.float()
            optimizer.step()
            if parameters is not None:
                with torch.no_grad():
                    for master, parameter in zip(parameters, model.parameters()):
                        parameter.copy_(master)
            optimizer.zero_grad()
            model.zero_grad()
        return [values.clone() for values in model.state_dict().values()]

    def adamw(parameters, **options):
        return torch.optim.AdamW(parameters, lr=1e-2, **options)

    def plain(dtype, **options):
        model = made(dtype)
        return trained(model, adamw(model.parameters(), **options))

    def with_masters(dtype, **options):
        model = made(dtype)
        masters = [parameter.detach().float() for parameter in model.parameters()]
        return trained(model, adamw(masters, **options), masters)

    def offloaded(dtype, asked=None, **options):
        model = made(dtype)
        model, optimizer = memascend.offload(model, adamw(model.parameters(), **options), device="cpu", **(asked or {}))
        with optimizer:
            return trained(model, optimizer)

    def same(one, other):
        return all(map(torch.equal, one, other))

    wide, narrow, none = torch.float32, torch.bfloat16, {"master_dtype": None}
    print("wide")
    found = offloaded(wide)
    assert same(found, plain(wide, fused=True))
    assert not same(found, plain(wide)), "torch's default path is another baseline"
    for fused in (False, True):
        options = {"amsgrad": True, "fused": fused}
        assert same(offloaded(wide, **options), plain(wide, **options)), fused
    print("none")
    for options in ({}, {"fused": True}, {"amsgrad": True}):
        assert same(offloaded(narrow, none, **options), plain(narrow, **options)), options
    print("narrow")
    found = offloaded(narrow)
    assert same(found, with_masters(narrow, fused=True))
    assert not same(found, plain(narrow, fused=True)), "plain torch has no master weights"
"""


def test_each_update_has_the_bits_of_its_baseline_and_added_masters_are_logged(loaded):
    said = loaded(textwrap.dedent(PROGRAM))
    parts = re.split("^(?:wide|none|narrow)$", said, flags=re.MULTILINE)[1:]
    assert [part.count("master_dtype=None adds none") for part in parts] == [0, 0, 1], said
