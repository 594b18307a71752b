"""Tests the digest of what is staged, by which stores of the same records are compared before a commit."""

import torch
from support.stores import filled

from memascend.engine import Engine, Record


def store(folder, name, **options):
    """A store of two records, one of which does not fill its last page."""
    values = {"even": torch.arange(4096.0), "odd": torch.arange(1001.0)}
    records = [Record(name=name, values=one, state={"moment": one.clone()}, unit="u") for name, one in values.items()]
    return filled(folder / name, records, chunk_elements=2048, **options)


def stage(made, changed=0.0, of="moment"):
    with Engine(made) as filling:
        for name in ("odd", "even") if changed else ("even", "odd"):
            values, state = made.read(name)
            values = values + 1
            tensors = {"": values, **state}
            if name == "odd":
                tensors[of][-1] += changed
            filling.fill(name, values, state, step=1)
        filling.finish()


def test_stores_have_the_same_digest_if_the_same_bytes_are_staged(tmp_path):
    with store(tmp_path, "one") as one, store(tmp_path, "two") as two, store(tmp_path, "three") as three:
        for each in (one, two):
            each.compare(range(each.count()))
        three.compare([three.index("even")])
        assert one.digest() == two.digest() == 0
        for each in (one, two, three):
            stage(each)
        same = one.digest()
        assert same == two.digest() != 0
        assert three.digest() not in (0, same)
        # In another order, too; and whatever was dropped before.
        for changed, of in ((1e-3, ""), (1e-3, "moment")):
            two.discard()
            assert two.digest() == 0
            stage(two, changed, of)
            assert two.digest() != same
        two.discard()
        stage(two)
        assert two.digest() == same
        for each in (one, two, three):
            each.commit(1)
            assert each.digest() == 0
