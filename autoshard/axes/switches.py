"""Branches that a model takes if no row of a batch is masked, and why both of them give such a row the same.

    if mask.all(): attention(q, k, v, is_causal=True)           the whole batch     a part in which no row is padded
    else:          attention(q, k, v, causal & mask)            with a padded row

A row without padding may so be computed in two ways. The two runs are compared value by value, by what computes each
of them, knowing of the mask what the first branch knows: then `causal & mask` is a table that code alone decides. Where
the two still compute something else, the division is refused. No number of the model is asked.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from autoshard.axes.given import arguments_of, computed, literals, overwritten_by, plain, reads_bits
from autoshard.axes.hits import Hit
from autoshard.axes.reshaping import MOVES, RESHAPES
from autoshard.capture.graph import ModelGraph, Op, maker_of, name_of, sole_maker
from autoshard.capture.traits import traits_of
from autoshard.torch_private import OpOverload

MOST_NUMBERS = 1 << 20
"""Elements of a table that is computed again."""
_NEUTRAL = {"add": 0, "mul": 1}
"""Numbers that change nothing."""
Fact = tuple[Any, bool | int]
"""A value, by what computes it, and what all of its elements are: true, false, or a number."""


class Numbering:
    """Numbers for what computes values, the same for the same in all graphs that are numbered with it."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._keys: dict[int, Any] = {}
        self._content: dict[int, torch.Tensor] = {}
        self._by_shape = True

    def of(
        self, graph: ModelGraph, facts: Mapping[Any, bool | int], hits: Mapping[int, Hit] | None = None,
        without: Collection[int] = (),
    ) -> dict[int, int]:  # fmt: skip
        """Number the values of a graph, knowing that some are true, or false, everywhere.

        `hits`: values that are one number of what a mask chooses; `without`: ops that are left out.
        """
        made: dict[int, int] = {}
        self._by_shape = hits is None  # how many entries there are depends on the run
        names = {tensor.value: tensor.name for tensor in reversed(graph.tensors)}
        for place, value in enumerate(graph.inputs):
            made[value] = self._known(("input", place), graph, value, facts)
        contents = literals(graph)

        def number(value: int) -> int:
            if value not in made:
                if value in contents:
                    made[value] = self._table(contents[value])
                elif value in names:
                    made[value] = self._number(("tensor", names[value]))
                else:
                    made[value] = self._number(("unknown", object()))
            return made[value]

        is_random = 0
        for op in graph.ops:
            if op.index in without:
                continue
            given = [number(value) for value in op.inputs]
            is_random += _is_random(op)
            self._op(graph, op, given, made, facts, is_random)
            for value in op.outputs:
                if hits and value in hits:
                    made[value] = self._number(("hit", number(hits[value].mask), hits[value].number))
        return made

    def fact_of(self, graph: ModelGraph, value: int, numbers: Mapping[int, int], truth: bool) -> list[Fact]:
        """What is known where all elements of a value are true, or false: of it and of what it was made of."""
        facts: list[Fact] = []
        chain = [value]
        while (op := sole_maker(graph, chain[-1])) is not None and len(op.inputs) == 1:
            chain.append(op.inputs[0])
        kept = chain[:1]
        for made, source in pairwise(chain):
            op = maker_of(graph, made)
            assert op is not None
            name = name_of(op)
            if not (name in RESHAPES or name in MOVES or name in ("to", "_to_copy", "alias", "detach", "clone")):
                break
            if torch.Size(graph.values[made].shape).numel() < torch.Size(graph.values[source].shape).numel():
                break  # a part of it
            kept.append(source)
        for one in kept:
            if graph.values[one].dtype is not torch.bool:
                facts.append(((("nonzero", numbers[one]), 0), truth))
            else:
                facts.append((self._keys[numbers[one]], truth))
        for key, true in list(facts):
            if true and key[0][0] == "aten.eq.Scalar" and len(key[0][1]) == 1:
                number = key[0][2][1]
                if number.lstrip("-").isdigit():
                    facts.append((self._keys[key[0][1][0]], int(number)))
        opposite = {"nonzero": "zero", "zero": "nonzero"}
        for key, true in list(facts):
            if key[0] and key[0][0] in opposite:
                facts.append((((opposite[key[0][0]], key[0][1]), 0), not true))
        return facts

    # ---- one op

    def _number(self, key: Any) -> int:
        number = self._numbers.setdefault(key, len(self._numbers))
        self._keys.setdefault(number, key)
        return number

    def _table(self, content: torch.Tensor) -> int:
        content = content.detach().contiguous()
        if content.numel() > MOST_NUMBERS:
            return self._number(("unknown", object()))
        text = content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""
        number = self._number(("table", str(content.dtype), tuple(content.shape), text))
        self._content[number] = content
        return number

    def _known(self, key: Any, graph: ModelGraph, value: int, facts: Mapping[Any, bool | int]) -> int:
        row = graph.values[value]
        if key in facts:
            return self._table(torch.full(row.shape, facts[key], dtype=row.dtype))
        return self._number(key)

    def _op(
        self,
        graph: ModelGraph,
        op: Op,
        given: list[int],
        made: dict[int, int],
        facts: Mapping[Any, bool | int],
        is_random: int,
    ) -> None:
        before = dict(zip(op.inputs, given, strict=True))
        if op.mutates:
            write = (str(op.target), tuple(given), _arguments(op))
            for value in overwritten_by(graph, op, made):
                made[value] = self._number(("written", write, made[value]))
            for place, value in enumerate(op.outputs):
                if value not in before:
                    made[value] = self._number((write, place))
            return
        for place, value in enumerate(op.outputs):
            row = graph.values[value]
            found = self._computed(op, given, place, row.shape) if place == 0 or len(op.outputs) > 1 else None
            if found is not None:
                made[value] = self._table(found)
                continue
            simple = self._simplified(graph, op, given) if len(op.outputs) == 1 else None
            if isinstance(simple, int):
                made[value] = simple
                continue
            key: Any = simple if simple is not None else (str(op.target), tuple(given), _arguments(op))
            if _is_random(op):
                key = (key, "drawn", is_random)
            made[value] = self._known((key, place), graph, value, facts)

    def _computed(self, op: Op, given: Sequence[int], place: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The numbers of a result if code alone decides them."""
        if torch.Size(shape).numel() > MOST_NUMBERS:
            return None
        made = computed(op, [self._content.get(number) for number in given])
        one = made[place] if made is not None else None
        return one if isinstance(one, torch.Tensor) and tuple(one.shape) == shape else None

    def _simplified(self, graph: ModelGraph, op: Op, given: Sequence[int]) -> Any:
        """Another way to say what an op computes: a mask that hides nothing is none, nor is adding zeros anything."""
        assert op.node is not None
        name, shape = name_of(op), graph.values[op.outputs[0]].shape
        tables = [self._content.get(number) for number in given]
        like = [graph.values[value].shape == shape and graph.values[value].dtype == graph.values[op.outputs[0]].dtype
                for value in op.inputs]  # fmt: skip
        if name == "scaled_dot_product_attention" and len(given) == 4 and tables[3] is not None:
            hidden = tables[3].logical_not() if tables[3].dtype is torch.bool else tables[3] != 0
            rows, columns = hidden.shape[-2:]
            causal = torch.ones(rows, columns, dtype=torch.bool).tril().logical_not()
            none = not bool(hidden.any())
            unshardable = tables[3].dtype is torch.bool or bool(
                (tables[3][hidden] <= torch.finfo(tables[3].dtype).min).all()
            )
            if not none and not (rows == columns and unshardable and bool((hidden == causal).all())):
                return None
            if _attention(op)["is_causal"]:
                return None
            return self._attended(graph, op, given[:3], causal=not none and rows > 1)
        if name == "scaled_dot_product_attention" and len(given) == 4 and tables[3] is None:
            return str(op.target), (*given[:3], self._narrow(given[3])), _arguments(op)
        if name == "scaled_dot_product_attention" and len(given) == 3:
            return self._attended(graph, op, given, causal=_attention(op)["is_causal"])
        if name in ("reshape", "view", "_unsafe_view", "flatten"):
            return self._repeated(graph, op, given[0]) or self._viewed(graph, op, given[0])
        if name == "dropout" and not _is_random(op):
            return given[0]
        if name == "baddbmm" and _is_zero(tables[0]) and not op.node.kwargs:
            return "aten.bmm.default", tuple(given[1:]), ("Ellipsis", "Ellipsis")
        if name in _NEUTRAL and len(given) == 2 and not op.node.kwargs:
            for one, other in ((0, 1), (1, 0)):
                table = tables[other]
                if table is not None and bool(torch.eq(table, _NEUTRAL[name]).all()):
                    return self._as_wide(graph, op, given, one)
        if name == "expand" and not like[0] and self._by_shape:
            return "spread", given[0], shape
        if name in ("masked_fill", "sub") and len(given) > 1 and like[0] and _is_zero(tables[1]):
            return given[0]
        if name == "where" and len(op.node.args) == 3 and tables[0] is not None:
            for at, chosen in ((1, bool(tables[0].all())), (2, not bool(tables[0].any()))):
                if chosen and isinstance(op.node.args[at], torch.fx.Node):
                    return self._as_wide(graph, op, given, 1 if at == 1 else -1)
        if name in ("to", "_to_copy", "clone", "contiguous", "detach", "alias", "expand") and like[0]:
            return given[0]
        seen = [graph.values[value] for value in (*op.inputs, *op.outputs)]
        asks = len(given) == 1 and seen[1].dtype is torch.bool and seen[0].dtype is not torch.bool
        if asks and seen[0].shape == seen[1].shape:
            number = op.node.args[1] if len(op.node.args) > 1 else None
            zero = isinstance(number, (int, float)) and number == 0
            if name in ("to", "_to_copy") or (name == "ne" and zero):
                return "nonzero", given[0]
            if name == "logical_not" or (name == "eq" and zero):
                return "zero", given[0]
        return None

    def _attended(self, graph: ModelGraph, op: Op, given: Sequence[int], *, causal: bool) -> Any:
        """An attention without a mask, its keys and values repeated for heads of queries that share them."""
        arguments = {**_attention(op), "is_causal": False}
        queries, keys = (graph.values[value].shape for value in op.inputs[:2])
        if arguments["enable_gqa"] and len(queries) == len(keys) == 4 and not queries[1] % keys[1]:
            times = queries[1] // keys[1]
            given = [
                given[0],
                *(self._number((("repeated", one, times), 0)) if times > 1 else one for one in given[1:]),
            ]
            arguments["enable_gqa"] = False
        return "attention", tuple(given), (*arguments.items(),), causal

    def _as_wide(self, graph: ModelGraph, op: Op, given: Sequence[int], one: int) -> Any:
        """One of the tensors that an op is given, spread as far as its result is; None if its type is another one."""
        row, made = graph.values[op.inputs[one]], graph.values[op.outputs[0]]
        if row.dtype is not made.dtype:
            return None
        return given[one] if row.shape == made.shape else ("spread", given[one], made.shape)

    def _narrow(self, number: int) -> int:
        """A mask before it was spread over rows or heads, which attention does by itself."""
        while _is_spread(key := self._keys[number][0]):
            number = key[1]
        return number

    def _viewed(self, graph: ModelGraph, op: Op, given: int) -> Any:
        """The same elements in another shape, however often it was changed; in their first one they are themselves."""
        if not self._by_shape or reads_bits(op):
            return None
        before: Any = self._keys[given][0]
        known = isinstance(before, tuple) and before[0] == "viewed"
        root, first = before[1:3] if known else (given, graph.values[op.inputs[0]].shape)
        shape = graph.values[op.outputs[0]].shape
        return root if shape == first else ("viewed", root, first, shape)

    def _repeated(self, graph: ModelGraph, op: Op, given: int) -> Any:
        """`x.unsqueeze(2).expand(…, times, …).reshape(…)` repeats every head."""
        wide = self._keys[given][0]
        single: Any = self._keys[wide[1]][0] if _is_spread(wide) else None
        if not _is_call(single, "aten.unsqueeze.default") or single[2][1:] != ("2",):
            return None
        maker = maker_of(graph, op.inputs[0])
        spread, shape = graph.values[op.inputs[0]].shape, graph.values[op.outputs[0]].shape
        if maker is None or len(spread) != 5 or graph.values[maker.inputs[0]].shape != (*spread[:2], 1, *spread[3:]):
            return None
        whole = shape == (spread[0], spread[1] * spread[2], *spread[3:])
        return ("repeated", single[1][0], spread[2]) if whole else None


def _is_zero(table: torch.Tensor | None) -> bool:
    """Whether a table is known to have nothing but zeros."""
    return table is not None and not bool(table.any())


def _is_random(op: Op) -> bool:
    """Whether an op draws random numbers, or may."""
    if not isinstance(op.target, OpOverload):
        return True
    idle = name_of(op) == "dropout" and op.node is not None and op.node.args[-1] is False
    return traits_of(op.target).random and not idle


def _is_spread(key: Any) -> bool:
    return isinstance(key, tuple) and key[0] == "spread"


def _is_call(key: Any, name: str) -> bool:
    """Whether what computes a value is an op of this name on one tensor."""
    return isinstance(key, tuple) and len(key) == 3 and key[0] == name and len(key[1]) == 1


def _attention(op: Op) -> dict[str, Any]:
    """The arguments of an attention that are no tensors."""
    given = arguments_of(op)
    return {name: given[name] for name in ("dropout_p", "is_causal", "scale", "enable_gqa")}


def _arguments(op: Op) -> tuple[str, ...]:
    return tuple(map(repr, plain(op)))
