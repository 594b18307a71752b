"""Makes stores, and parameters of many sizes and dtypes; damages the file of a store."""

import itertools

import torch

from memascend import engine

CHUNK = 2048
SIZES = [(1,), (13,), (2048,), (2049,), (3, 1741), (0, 5), ()]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
NUMBERS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.5}


def parameters(dtypes=tuple(DTYPES), sizes=tuple(SIZES)):
    """Returns a parameter of each dtype and shape, by names such as "float32.(3, 1741)"."""
    torch.manual_seed(1)
    return {f"{dtype}.{shape}"[6:]: torch.randn(shape).to(dtype) for dtype, shape in itertools.product(dtypes, sizes)}


def filled(path, records, **options):
    """Opens or creates a store; fills a new store with the values and state of `records`, and commits them."""
    store = engine.Store.create(path, records, **options)
    store.go_back()
    if store.created:
        with engine.Engine(store) as filling:
            for record in records:
                filling.fill(record.name, record.values, record.state)
            filling.commit(0)
    return store


def two_units(folder, elements=50_000):
    """Returns a store of the units "first" and "second".

    Each unit has two records, and each record has several chunks of 8 KiB.
    """
    records = []
    for number, unit in enumerate(("first", "second")):
        values = torch.randn(elements, generator=torch.Generator().manual_seed(number))
        for part, of in enumerate(values.chunk(2)):
            state = engine.adam_state(of)
            records.append(engine.Record(name=f"{unit}.{part}", values=of.contiguous(), state=state, unit=unit))
    return filled(folder / "run.store", records, chunk_elements=CHUNK)


def pages(nbytes):
    whole = torch.empty(nbytes + 4096, dtype=torch.uint8)
    return whole[-whole.data_ptr() % 4096 :][:nbytes]


def in_one(updates, unit):
    """Reads a unit with one fetch; returns the bytes of the unit."""
    into = pages(sum(updates.parts(unit, 1 << 30).places()[-1]))
    updates.fetch(unit, into).wait()
    return into


def damage(path, content, at=0):
    """Flips a bit of byte `at` in each occurrence of `content` in the file; returns the first occurrence's offset."""
    whole = path.read_bytes()
    first = place = whole.find(content)
    assert place >= 0, "the file does not contain the bytes to damage"
    with path.open("r+b") as file:
        while place >= 0:
            file.seek(place + at)
            file.write(bytes([whole[place + at] ^ 16]))
            place = whole.find(content, place + len(content))
    return first
