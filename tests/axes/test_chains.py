"""Random chains of ops, and random products: what can be cut is cut, and run on every rank."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.axes.execution import Trial


@st.composite
def chains(draw):
    """The shape to begin with, steps (kind, dimension, detail), and the shapes of all that they make."""
    first = shape = draw(st.sampled_from([(2, 12), (4, 6), (2, 3, 4), (24,), (6, 2, 2), (3, 16), (8, 9)]))
    steps, out = [], []
    for _ in range(draw(st.integers(2, 6))):
        kind = draw(st.sampled_from(["view", "turn", "swap", "times", "step", "repeat", "tile"]))
        dim = draw(st.integers(0, len(shape) - 1))
        size, detail = shape[dim], None

        def resized(size, shape=shape, dim=dim):
            return (*shape[:dim], size, *shape[dim + 1 :])

        if kind == "view":
            shape = draw(shapes_of(torch.Size(shape).numel()))
        elif kind == "turn":
            detail = draw(st.integers(0, len(shape) - 1))
            shape = tuple(torch.empty(shape, device="meta").transpose(dim, detail).shape)
        elif kind == "times":
            detail = tuple(size if draw(st.booleans()) else 1 for size in shape)
        elif kind == "swap" and size > 1:
            detail = draw(st.integers(1, size - 1))
            out += [resized(detail), resized(size - detail)]
        elif kind == "step" and size % 2 == 0:
            detail = draw(st.integers(0, 1))
            shape = resized(size // 2)
        elif kind in ("repeat", "tile") and size < 7:
            shape = resized(size * 2)
        else:
            continue
        steps.append((kind, dim, detail))
        out.append(shape)
    return first, steps, out


@st.composite
def shapes_of(draw, size):
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        shape.append(draw(st.sampled_from([d for d in range(1, size + 1) if size % d == 0])))
        size //= shape[-1]
    return tuple(draw(st.permutations([*shape, size])))


def run(x, others, steps, out):
    """All tensors that the steps make; where an op is told sizes, they are those in `out`."""
    made, told, others = [], iter(out), iter(others)
    for kind, dim, detail in steps:
        if kind == "swap":
            parts = x.split([next(told)[dim], next(told)[dim]], dim)
            made += parts
            x = torch.cat(parts[::-1], dim)
            next(told)
        else:
            shape = next(told)
            times = [new // old for new, old in zip(shape, x.shape, strict=False)]
            if kind == "view":
                x = x.reshape(shape)
            elif kind == "turn":
                x = x.transpose(dim, detail)
            elif kind == "times":
                x = x * next(others)
            elif kind == "step":
                x = x[(*[slice(None)] * dim, slice(detail, None, 2))]
            elif kind == "repeat":
                x = x.repeat_interleave(times[dim], dim)
            else:
                x = x.repeat(times)
        made.append(x)
    return made


@settings(max_examples=60)
@given(chains())
def test_chains_of_ops(chain):
    first, steps, out = chain
    if out:
        shapes = [first, *(detail for kind, _, detail in steps if kind == "times")]
        given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        Trial(lambda x, *others, out: run(x, others, steps, out), *given, out=out).check()


def test_chains_can_be_cut():
    """So that the test above is about something."""
    x, y = torch.randn(3, 16, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    steps = [("view", 0, None), ("times", 0, None), ("view", 0, None), ("swap", 1, 8)]
    out = [(3, 4, 4), (3, 4, 4), (3, 16), (3, 8), (3, 8), (3, 16)]
    made = Trial(lambda x, *others, out: run(x, others, steps, out), x, y, out=out)
    assert made.claim() == "a([b|c]d),[b|c]1->a[b|c]d,a[b|c]d,a([b|c]d),a(bd),a(cd),a[(cd)|(bd)]"
    made.check()


@st.composite
def equations(draw):
    """An `einsum` of up to three operands; a dimension may be of size 1, and spread, in some of them."""
    sizes = {"i": 2, "j": 3, "k": 4, "l": 1}
    letters = st.lists(st.sampled_from("ijkl"), min_size=1, max_size=3)
    terms = draw(st.lists(letters, min_size=1, max_size=3))
    shapes = [tuple(draw(st.sampled_from((sizes[x], sizes[x], 1))) for x in term) for term in terms]
    used = sorted({letter for term in terms for letter in term})
    result = draw(st.lists(st.sampled_from(used), unique=True))
    arrow = draw(st.booleans())
    equation = ",".join(map("".join, terms)) + (f"->{''.join(result)}" if arrow else "")
    if draw(st.booleans()) and (not arrow or "j" in result):
        equation = equation.replace("j", "...")
    return equation, shapes


@settings(max_examples=60)
@given(equations())
def test_einsum(case):
    equation, shapes = case
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    try:
        torch.einsum(equation, *given)
    except RuntimeError:  # a letter twice in one operand, of two sizes
        return
    Trial(lambda *tensors: torch.einsum(equation, *tensors), *given).check()


@st.composite
def products(draw):
    """Shapes of two matrices, or vectors, with batches that broadcast."""
    batch = draw(st.lists(st.integers(2, 4), max_size=2))
    left, right = ([draw(st.sampled_from((size, size, 1))) for size in batch] for _ in range(2))
    rows, summed, columns = (draw(st.integers(1, 4)) for _ in range(3))
    x = draw(st.sampled_from([(summed,), (rows, summed), (*left, rows, summed)]))
    y = draw(st.sampled_from([(summed,), (summed, columns), (*right, summed, columns)]))
    return x, y


@settings(max_examples=60)
@given(products())
def test_matrix_products(shapes):
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    Trial(torch.matmul, *given).check()
