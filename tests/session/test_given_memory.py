"""Tests memory that a program gives to weights within materialized(): it is watched, or refused."""

import textwrap

PROGRAM = """
    import numpy as np, torch, memascend
    from torch import nn
    from torch.nn.utils import vector_to_parameters

    def offloaded():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 32))
        return memascend.offload(model, torch.optim.AdamW(model.parameters(), lr=0.01), device="cpu")

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

    def array(model):
        model[0].weight.data = torch.from_numpy(np.ones((16, 16), "float32"))

    def shared(model):
        model[0].weight.data = torch.ones(16, 16).share_memory_()

    def together(model):
        model[0].weight.data = model[2].weight.data[:16]

    def refused(do, *arguments):
        try:
            do(*arguments)
        except memascend.UsageError as error:
            print(error)
        else:
            raise AssertionError(do)

    def inside(model, give):
        with memascend.materialized(model, modify=True):
            return give(model)

    for give in (vector, data):
        model, optimizer = offloaded()
        step(model, optimizer)
        refused(give, model)
        given = inside(model, give)
        before = [values.clone() for values in model.state_dict().values()]
        refused(step, model, optimizer)
        optimizer.zero_grad()
        given.mul_(0.5)
        refused(step, model, optimizer)
        optimizer.zero_grad()
        assert all(map(torch.equal, model.state_dict().values(), before))
        del given
        step(model, optimizer)
        model.state_dict()
        optimizer.close()

    model, optimizer = offloaded()
    step(model, optimizer)
    before = [values.clone() for values in model.state_dict().values()]
    for give in (array, shared, together):
        refused(inside, model, give)
        assert all(map(torch.equal, model.state_dict().values(), before)), give
    step(model, optimizer)
    model.state_dict()
    optimizer.close()
"""


def test_memory_that_is_given_to_weights_is_watched_or_refused(python):
    said = [line for line in python(textwrap.dedent(PROGRAM)).splitlines() if "0.weight" in line]
    assert len(said) == 9
    for outside, held, written in (said[:3], said[3:6]):
        assert "is offloaded, and is not given other memory through .data: write to weights within" in outside
        assert "is about to change, and your code holds" in held
        assert "was written to" in written
    assert all("nothing was changed" in line for line in said[6:])
    assert all("torch may not have alone" in line for line in said[6:8])
    assert "share memory" in said[8]
