"""Tests that large allocations are mapped once a model is offloaded, and that the heap can be left alone."""

import pytest

# Freed once, a tensor of 20 MiB lets glibc take all up to that size from its heap.
PROGRAM = """if True:
    import ctypes, sys
    import torch
    import memascend

    class Mallinfo(ctypes.Structure):
        names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        _fields_ = tuple((name, ctypes.c_size_t) for name in names.split())

    def mapped(nbytes):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = Mallinfo
        before = library.mallinfo2().hblkhd
        kept = torch.empty(nbytes, dtype=torch.uint8)
        return library.mallinfo2().hblkhd - before >= nbytes

    torch.empty(20 << 20, dtype=torch.uint8)
    model = torch.nn.Linear(4, 4)
    model, optimizer = memascend.offload(model, torch.optim.AdamW(model.parameters()), storage=sys.argv[1])
    optimizer.close()
    print(mapped(5 << 20), mapped(20 << 10))
"""


@pytest.mark.parametrize(
    ("environment", "mapped"),
    [
        pytest.param({}, "True False", id="fixed"),
        pytest.param({"MEMASCEND_MALLOC": "system"}, "False False", id="left-alone"),
        pytest.param({"MALLOC_MMAP_THRESHOLD_": "1"}, "False False", id="chosen-by-glibcs-own-variable"),
    ],
)
def test_what_is_large_is_mapped(loaded, tmp_path, environment, mapped):
    assert loaded(PROGRAM, tmp_path / "store", env=environment).split()[-2:] == mapped.split()
