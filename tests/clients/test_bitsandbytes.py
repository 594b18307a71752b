"""Tests bitsandbytes' 8-bit Adams on offloaded models: their bits in RAM, and their state taken over."""

import bitsandbytes
import pytest
import torch
from support.bits import same_bits
from support.moments import exact_root

import memascend

STEPS = 12
VOCABULARY, WIDTH, WIDE = 32, 160, 70


@pytest.fixture(autouse=True)
def an_exact_root(monkeypatch):
    # torch's may be a library's, a unit off in the last place: bitsandbytes in RAM would have the bits of the machine.
    monkeypatch.setattr(torch.Tensor, "sqrt", exact_root)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def model(dtype):
    torch.manual_seed(4)
    made = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, WIDTH),
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, WIDE, bias=False),
        torch.nn.GELU(),
        torch.nn.Linear(WIDE, WIDTH),
    )
    return made.to(dtype)


def loss_of(made, step):
    tokens = torch.randint(0, VOCABULARY, (3, 5), generator=torch.Generator().manual_seed(step))
    return made(tokens).float().square().mean() * (0.0 if step == 5 else 10.0**-step if step % 4 == 3 else 1.0)


class InRam:
    """bitsandbytes on float32 masters with upcast gradients, and torch's AdamW for what keeps 32 bits."""

    def __init__(self, made, kind, **options):
        self.made = list(made.parameters())
        self.masters = [torch.nn.Parameter(p.detach().float().clone()) for p in self.made]
        narrow = [m for m in self.masters if m.numel() >= 4096 and m.shape[0] != VOCABULARY]
        wide = [m for m in self.masters if not any(m is one for one in narrow)]
        self.theirs = kind(narrow, **options)
        # Their sizes are multiples of 16, of which all elements are computed by one formula.
        self.torchs = torch.optim.AdamW(wide, fused=True, **options)

    def step(self):
        for p, master in zip(self.made, self.masters, strict=True):
            master.grad = p.grad.float()
            p.grad = None
        self.theirs.step()
        self.torchs.step()
        with torch.no_grad():
            for p, master in zip(self.made, self.masters, strict=True):
                p.copy_(master)


OPTIONS = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("kind", ["AdamW8bit", "Adam8bit", "PagedAdamW8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_8_bit_adam_has_its_bits_in_ram(tmp_path, kind, dtype):
    kind = getattr(bitsandbytes.optim, kind)
    plain, expected = model(dtype), []
    reference = InRam(plain, kind, **OPTIONS)
    for step in range(STEPS):
        expected.append(loss_of(plain, step))
        expected[-1].backward()
        reference.step()
    made = model(dtype)
    overridden(made)
    made, optimizer = memascend.offload(
        made, kind(made.parameters(), **OPTIONS), storage=tmp_path / "store", host_memory="32MiB"
    )
    with optimizer:
        for step in range(STEPS):
            loss = loss_of(made, step)
            assert same_bits(loss.detach(), expected[step].detach()), step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        for name, parameter in made.named_parameters():
            state = optimizer.state_of(parameter)
            assert state["exp_avg"].dtype == torch.float32
            place = [one for one, _ in plain.named_parameters()].index(name)
            assert same_bits(state["master"], reference.masters[place].detach()), name


def overridden(made):
    """As the Trainer of transformers has it."""
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    for module in made.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def test_its_state_is_taken_over(tmp_path):
    plain, made = model(torch.float32), model(torch.float32)
    bitsandbytes.optim.GlobalOptimManager.get_instance().initialize()

    def of(given):
        return [p for p in given.parameters() if p.requires_grad]

    # Without what keeps 32 bits all of it is bitsandbytes'.
    for given in (plain, made):
        for p in given.parameters():
            p.requires_grad_(p.numel() >= 4096)
    reference = bitsandbytes.optim.AdamW8bit(of(plain), **OPTIONS)
    theirs = bitsandbytes.optim.AdamW8bit(of(made), **OPTIONS)
    for optimizer, given in ((reference, plain), (theirs, made)):
        for step in range(4):
            loss_of(given, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    made, optimizer = memascend.offload(made, theirs, storage=tmp_path / "store")
    with optimizer:
        for step in range(4, STEPS):
            expected = loss_of(plain, step)
            expected.backward()
            reference.step()
            reference.zero_grad()
            loss = loss_of(made, step)
            assert same_bits(loss.detach(), expected.detach()), step
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert int(optimizer.state_of(made[2].weight)["step"]) == STEPS


def test_what_is_said_of_one_parameter_alone_is_refused(tmp_path):
    made = model(torch.float32)
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    manager.register_module_override(made[2], "weight", {"lr": 1.0})
    with pytest.raises(memascend.ConfigError, match="GlobalOptimManager has 'lr'"):
        memascend.offload(made, bitsandbytes.optim.AdamW8bit(made.parameters()), storage=tmp_path / "store")
    manager.initialize()
