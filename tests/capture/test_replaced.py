"""Rows with other figures are what `dataclasses.replace` makes."""

from dataclasses import replace

from autoshard.capture.graph import Op, Storage
from autoshard.capture.replaced import changed


def test_changed_is_replace():
    ops = [Op(index=i, target=None, call=2, inputs=(1, 2), outputs=(i,), flops=7) for i in range(3)]
    found = changed(ops, flops=[5, 7, 6])
    assert found == (replace(ops[0], flops=5), ops[1], replace(ops[2], flops=6)) and ops[0].flops == 7
    assert found[1] is ops[1]
    storages = [Storage(index=i, nbytes=8, kind="activation", born=1, died=2) for i in range(2)]
    assert changed(storages, nbytes=[8, 4], died=[2, 3]) == (storages[0], replace(storages[1], nbytes=4, died=3))
    assert changed((), nbytes=()) == ()
