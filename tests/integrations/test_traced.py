"""What is done to traced tensors, done to real ones, gives what it gives when done to these at once."""

import pytest
import torch

from autoshard.integrations.traced import Call, evaluate, lean, leaves, traced

CHANGES = {
    "experts": lambda x, y: [one.contiguous().squeeze(0) for one in x.chunk(2, dim=1)[1].contiguous().split(1)],
    "unbound": lambda x, y: [one.T for one in x.clone().unbind(0)],
    "uneven": lambda x, y: torch.cat([x, y]).contiguous().split([1, 2, 1], dim=1),
    "views": lambda x, y: [x.transpose(0, 1).contiguous().view(4, 18)[1:3, ::2]],
    "interleaved": lambda x, y: [torch.stack([x, y[:3]], dim=2).reshape(3, 8, 6)],
    "strided": lambda x, y: [x.transpose(0, 2).contiguous().as_strided((5,), (3,), 1)],
    "filled": lambda x, y: [torch.cat([x.new_zeros(1, 4, 6), x.to(torch.float64), y + 1])],
}


@pytest.mark.parametrize("name", CHANGES)
def test_results_are_those_of_the_real_tensors(name):
    values = {"x": torch.randn(3, 4, 6), "y": torch.randn(5, 4, 6)}
    expected = CHANGES[name](*values.values())
    found = CHANGES[name](*(traced(key, value.shape, value.dtype) for key, value in values.items()))
    assert len(found) == len(expected)
    for one, wanted in zip(found, expected, strict=True):
        assert (one.shape, one.dtype, one.device) == (wanted.shape, wanted.dtype, wanted.device)
        for way in (one.expression, lean(one.expression)):
            assert torch.equal(evaluate(way, {key: values[key] for key in leaves(way)}), wanted)


def test_lean_expressions_copy_nothing_and_make_one_piece():
    x = torch.randn(4, 6, 2)
    piece = CHANGES["experts"](traced("x", x.shape, x.dtype), None)[2]
    assert evaluate(lean(piece.expression), {"x": x}).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    def items(part):
        return [] if not isinstance(part, Call) else [part.item, *(one for arg in part.args for one in items(arg))]

    assert set(items(lean(piece.expression))) == {None}


def test_values_are_not_read_and_given_tensors_not_written_to():
    x = traced("x", (2, 2), torch.float32)
    with pytest.raises((NotImplementedError, KeyError)):
        bool(x.sum() > 0)
    with pytest.raises(NotImplementedError, match="writes into a tensor"):
        x.add_(1)
