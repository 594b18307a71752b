"""Tests memory that a user gives to weights and writes to later: they follow as in torch, or an error is raised."""

import textwrap

PROGRAM = """
    import numpy as np, sys, torch, memascend
    from torch import nn
    from torch.nn.utils import vector_to_parameters

    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def step(model, optimizer):
        model(torch.ones(3, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def vector(model):
        given = torch.linspace(-1, 1, sum(p.numel() for p in model.parameters()))
        vector_to_parameters(given, model.parameters())
        return given

    def data(model):
        model[0].weight.data = given = torch.full((16, 16), 0.1)
        return given

    def view(model):
        return model[0].weight.data

    def write(given):
        with torch.no_grad():
            given.mul_(0.5).add_(0.25)

    def run(model, optimizer, give):
        step(model, optimizer)
        given = give(model)
        step(model, optimizer)
        write(given)
        step(model, optimizer)
        write(given)
        return [values.clone() for values in model.state_dict().values()], given.clone()

    def offloaded():
        model = made()
        return memascend.offload(model, adamw(model), device="cpu")

    def inside(give):
        def given(model):
            with memascend.materialized(model, modify=True):
                return give(model)
        return given

    for give in (vector, data, view):
        model = made()
        expected, kept = run(model, adamw(model), give)
        for way in (give, inside(give)):
            model, optimizer = offloaded()
            found, own = run(model, optimizer, way)
            assert torch.equal(own, kept), give
            assert all(map(torch.equal, found, expected)), (give, way is give)
            optimizer.close()

    def array(model):
        model[0].weight.data = torch.from_numpy(np.ones((16, 16), "float32"))

    def through_numpy(model):
        model[0].weight.data = torch.from_numpy(model[0].weight.detach().numpy())

    def shared(model):
        model[0].weight.data = torch.ones(16, 16).share_memory_()

    def together(model):
        model[0].weight.data = model[2].weight.data[:16]

    model, optimizer = offloaded()
    step(model, optimizer)
    before = [values.clone() for values in model.state_dict().values()]
    for give in (array, through_numpy, shared, together, inside(array), inside(shared), inside(together)):
        try:
            give(model)
        except memascend.UsageError as error:
            print(error)
        assert all(map(torch.equal, model.state_dict().values(), before)), give
    step(model, optimizer)
    model.state_dict()
    optimizer.close()
"""


def test_weights_follow_memory_that_was_given_to_them_or_refuse_it(python):
    said = python(textwrap.dedent(PROGRAM)).splitlines()
    said = [line for line in said if line.startswith("'0.weight'")]
    assert len(said) == 7
    outside, inside = said[:4], said[4:]
    assert all("memascend.materialized(model, modify=True)" in line for line in outside[:3])
    assert all("torch did not allocate" in line for line in [*outside[:3], *inside[:2]])
    assert all("share memory" in line for line in (outside[3], inside[2]))
    assert all("nothing was changed" in line for line in inside)
