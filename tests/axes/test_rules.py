"""Every rule is checked by execution: what it says can be cut is cut, and run on every rank."""

import inspect
from functools import partial

import pytest
import torch

from autoshard.axes import rules
from autoshard.axes.batch_rules import TABLE
from autoshard.axes.rules import RULES
from autoshard.capture.traits import traits_of
from tests.axes import cases, moving_cases
from tests.axes.execution import Trial

aten = torch.ops.aten
FILES = vars(cases) | vars(moving_cases)
TABLES = {name: table for name, table in FILES.items() if name.isupper() and isinstance(table, list)}


def trial(function, inputs):
    """Run a case: a tuple stands for a tensor of that shape, and a list at the end for the shapes of the results."""
    torch.manual_seed(0)
    out = inputs[-1] if isinstance(inputs[-1], list) else None
    given = [torch.randn(item, dtype=torch.float64) if isinstance(item, tuple) else item for item in inputs]
    return Trial(function, *(given[:-1] if out is not None else given), out=out)


def name(table, claim, function):
    text = function.__name__ if function.__name__ != "<lambda>" else inspect.getsource(function).strip()
    return f"{table} {claim} {text.partition('lambda')[2] or text}"[:90]


@pytest.mark.parametrize(
    "claim, function, inputs",
    [
        pytest.param(claim, function, inputs, id=name(table, claim, function))
        for table, rows in TABLES.items()
        for claim, function, *inputs in rows
    ],
)
def test_what_a_rule_says_is_true(claim, function, inputs):
    made = trial(function, inputs)
    assert made.claim() == claim
    made.check()


@pytest.mark.parametrize(
    "claim, function, shapes",
    [
        ("a..->a.", lambda x: x.diagonal(0, 1, 2), [(3, 4, 4)]),
        ("abc,ab->abc", lambda x, y: x.index_put((y > 0,), torch.zeros(())), [(3, 4, 5), (3, 4)]),
        ("ab,b->ab", lambda x, y: x.zero_().copy_(y), [(3, 4), (4,)]),
        ("a.->a1", lambda x: (1e6 * x).softmax(-1).multinomial(1), [(3, 4)]),
        ("a.b,ab->ab", lambda x, y: aten.nll_loss_nd(x, (y > 0).long(), None, 0, -100), [(3, 4, 5), (3, 5)]),
        ("a.,a->a", lambda x, y: aten.cross_entropy_loss(x, (y > 0).long(), None, 0, -100, 0.0), [(3, 4), (3,)]),
    ],
)  # fmt: skip
def test_what_the_rules_for_the_batch_say_is_true(claim, function, shapes):
    torch.manual_seed(0)
    made = Trial(function, *(torch.randn(shape, dtype=torch.float64) for shape in shapes), table=TABLE)
    assert made.claim() == claim
    made.check()


def elementwise_ops():
    for word in sorted(set(dir(aten)) - {"name"}):
        packet = getattr(aten, word)
        for overload in packet.overloads() if isinstance(packet, torch._ops.OpOverloadPacket) else ():
            op = getattr(packet, overload)
            kinds = [str(argument.type) for argument in op._schema.arguments if not argument.has_default_value()]
            makes = [str(result.type) for result in op._schema.returns]
            if (
                kinds[:1] == ["Tensor"]
                and "Tensor" in makes
                and not overload.endswith(("out", "grad_input", "hacked_twin"))
                and overload != "a"
            ):
                rule = RULES.get(packet)
                if rule is rules.pointwise or (rule is None and traits_of(op).pointwise):
                    yield op, kinds


def test_elementwise_ops_are():
    """Each op without a rule that has the tag, and each one listed as such, on tensors that broadcast."""
    shapes = [(3, 4), (4,), (3, 1), (3, 4), (3, 4)]
    done = 0
    for op, kinds in elementwise_ops():
        tensors = [shape for shape, kind in zip(shapes, kinds, strict=False) if "Tensor" in kind]
        if "backward" in op.name():
            tensors = [(3, 4)] * len(tensors)
        rest = [{"Scalar": 2, "number": 2, "int": 1, "float": 0.5, "bool": False}.get(kind) for kind in kinds]

        def call(*given, op=op, kinds=kinds, rest=rest):
            left = list(given)
            args = [left.pop(0) if "Tensor" in kind else item for kind, item in zip(kinds, rest, strict=True)]
            return op(*args)

        for dtype in (torch.float64, torch.int64, torch.bool):
            given = [torch.rand(shape, dtype=torch.float64).mul(3).to(dtype) for shape in tensors]
            try:
                call(*(tensor.clone() for tensor in given))
            except (RuntimeError, TypeError):  # not for this dtype
                continue
            made = Trial(call, *given)
            assert made.claim().startswith("ab"), f"{op}: {made.claim()}"
            assert "." not in made.claim(), f"{op}: {made.claim()}"
            made.check()
            done += 1
            break
    assert done > 300


def test_every_rule_has_a_case():
    ran = {
        op.target.overloadpacket
        for rows in TABLES.values()
        for _, function, *inputs in rows
        for op in trial(function, inputs).ops
    }
    ruled = {packet for packet, rule in RULES.items() if rule is not rules.pointwise}
    rare = {aten.pin_memory}  # needs a GPU
    assert not ruled - ran - rare, sorted(str(packet) for packet in ruled - ran)


@pytest.mark.parametrize("function", [torch.nn.functional.dropout, torch.nn.functional.dropout2d])
def test_masks_that_are_drawn_are_noted(function):
    x = torch.randn(2, 4, 3, 3)
    assert len(Trial(lambda x: function(x, 0.5, True), x).walk.random_calls) == 1
    assert len(Trial(lambda x: function(x, 0.5, True, inplace=True), x).walk.random_calls) == 1
    assert not Trial(lambda x: function(x, 0.5, False), x).walk.random_calls


@pytest.mark.parametrize(("q", "k", "noted"), [((2, 4, 3, 5),) * 2 + (1,), ((3, 5), (2, 3, 5), 0)])
def test_weights_that_attention_drops_are_noted_where_they_have_the_heads_of_queries(q, k, noted):
    attend = partial(torch.nn.functional.scaled_dot_product_attention, dropout_p=0.5)
    assert len(Trial(attend, torch.randn(q), torch.randn(k), torch.randn(k)).walk.random_calls) == noted


def test_arguments_that_a_rule_was_not_written_for_block():
    """As if there were no rule; never an error."""
    x = torch.randn(3, 4)
    made = Trial(lambda x: torch.sum(x, dim=1, out=torch.empty(3)), x)
    assert made.claim() in ("..->.", "ab->a")
    assert Trial(lambda x: aten.native_group_norm(x, None, None, 3, 4, 1, 1, 1e-5), torch.randn(3, 4, 1)).claim() == (
        "..1->..1,.1,.1"
    )


@pytest.mark.parametrize(
    "op, rule, inputs",
    [
        (aten.softmax, rules.pointwise, [(3, 4)]),
        (aten.sum, lambda walk, x, dim: [x.axes[:1]], [(3, 4)]),
        (aten.matmul, lambda walk, x, y: [(x.axes[0], x.axes[1])], [(4, 4), (4, 4)]),
    ],
)
def test_a_rule_that_claims_too_much_is_found(monkeypatch, op, rule, inputs):
    monkeypatch.setitem(RULES, op, rule)
    with pytest.raises((AssertionError, RuntimeError)):
        trial(lambda *given: op(*given, 1) if len(given) == 1 else op(*given), inputs).check()
