"""Rows with other figures are what `dataclasses.replace` makes."""

from dataclasses import replace

from autoshard.capture.changed import changed
from autoshard.capture.graph import Op, Storage


def test_changed_is_replace():
    op = Op(index=3, target=None, call=2, inputs=(1, 2), outputs=(3,), flops=7)
    assert changed(op, flops=5) == replace(op, flops=5) and op.flops == 7
    storage = Storage(index=0, nbytes=8, kind="activation", born=1, died=2)
    assert changed(storage, nbytes=4, died=3) == replace(storage, nbytes=4, died=3)
