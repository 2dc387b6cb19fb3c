"""What is done to traced tensors, done by reading: the values that it gives when done to real ones, in any box."""

import itertools

import pytest
import torch

from autoshard.checkpoint.traced import evaluate, fill, leaf, missing, traced

CALLS = {
    "as it is": lambda t: t["a"],
    "cast": lambda t: t["a"].to(torch.bfloat16),
    "two roundings": lambda t: t["a"].to(torch.float16).to(torch.float32),
    "transposed": lambda t: t["a"].T.contiguous(),
    "permuted": lambda t: t["c"].permute(2, 0, 1),
    "split unevenly": lambda t: torch.split(t["a"], [1, 3, 2])[1],
    "view": lambda t: t["a"].view(2, 3, -1).transpose(0, 1)[1],
    "cat of rows": lambda t: torch.cat([t["a"], t["b"]]),
    "cat of columns and dtypes": lambda t: torch.cat([t["b"].double(), t["a"]], dim=-1),
    "fused experts": lambda t: torch.cat([torch.stack([t["a"], t["b"]]), torch.stack([t["b"], t["a"]])], dim=1),
    "cast experts": lambda t: torch.stack([t["a"], t["b"]]).to(torch.float16),
    "transposed experts": lambda t: torch.stack([t["a"], t["b"]]).transpose(1, 2).contiguous(),
    "permuted experts": lambda t: torch.stack([t["a"], t["b"]], dim=-1).permute(2, 0, 1),
    "one expert back": lambda t: torch.stack([t["a"], t["b"]], dim=1)[:, 1].half(),
    "experts back": lambda t: t["c"].contiguous().chunk(3, dim=1)[1].contiguous().split(1)[0].squeeze(0),
    "scalars": lambda t: torch.stack([t["s"], t["s"] * 2]),
    "a scalar": lambda t: t["s"].clone(),
    "interleaved": lambda t: t["a"].reshape(3, 2, 4).transpose(0, 1).reshape(6, 4).contiguous(),
    "strided": lambda t: t["c"].transpose(0, 2).contiguous().as_strided((5,), (3,), 1),
    "with a constant": lambda t: t["a"] * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "nothing left": lambda t: t["a"][2:2],
}
VALUES = {"a": torch.randn(6, 4), "b": torch.randn(6, 4), "c": torch.randn(2, 3, 5), "s": torch.tensor(2.5)}


def of(values):
    return {name: traced(leaf(name, tuple(value.shape), value.dtype)) for name, value in values.items()}


def copy(into, value):
    assert into.shape == value.shape
    into.copy_(value)


@pytest.mark.parametrize("name", CALLS)
def test_every_box_has_the_values_of_the_real_tensors(name):
    expected, made = CALLS[name](VALUES), CALLS[name](of(VALUES))
    assert (made.shape, made.dtype, made.device) == (expected.shape, expected.dtype, expected.device)
    assert torch.equal(evaluate(made.expression, VALUES.__getitem__), expected)
    stretches = [[(0, size), (size // 3, size - size // 2)] for size in expected.shape]
    for box in itertools.product(*stretches):
        wanted = expected
        for dim, (begin, length) in enumerate(box):
            wanted = wanted.narrow(dim, begin, length)
        for dtype in (expected.dtype, torch.float64):
            into = torch.full_like(wanted, 77, dtype=dtype)
            fill(into, made.expression, VALUES.__getitem__, copy, tuple(begin for begin, _ in box))
            assert torch.equal(into, wanted.to(dtype)), box


def test_writes_are_refused_unless_they_do_no_harm():
    x = traced(leaf("x", (6, 4), torch.float32))
    for write in (x.zero_, x[1].zero_, x.view(-1).normal_):
        with pytest.raises(NotImplementedError, match="values come from elsewhere"):
            write()
    missing(torch.empty(3)).normal_()[1].fill_(2)
    total = x + 1
    row = total[0]
    total.zero_()
    with pytest.raises(NotImplementedError, match="was written to"):
        evaluate(row.expression, {"x": torch.ones(6, 4)}.__getitem__)


def test_values_are_read_where_the_library_compares_them():
    values = torch.randn(3)
    one, two, other = (traced(leaf(name, (3,), torch.float32, lambda v=v: v)) for name, v in
                       (("one", values), ("two", values.clone()), ("other", values + 1)))  # fmt: skip
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert float(one[0]) == float(values[0])
    with pytest.raises(NotImplementedError, match="values of unknown"):
        torch.equal(one, traced(leaf("unknown", (3,), torch.float32)))
