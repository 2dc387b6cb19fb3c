"""Runs functions on cut tensors, to see whether the rules of their ops told the truth."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autoshard.axes.axis import Axis, Factor, covers, describe, factors_of, times
from autoshard.axes.rules import RULES, Contraction
from autoshard.axes.walk import AxisWalk
from autoshard.capture.graph import Op
from autoshard.capture.traits import tensors_of, traits_of
from autoshard.plan.sharding import even_shares, kept
from autoshard.torch_private import run_composite

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class _Recorder(TorchDispatchMode):
    """Writes down the ops that run, as capture does."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = torch.fx.Graph()
        self.tensors: list[torch.Tensor] = []
        self.ops: list[Op] = []
        self.constants: set[int] = set()

    def index(self, tensor: torch.Tensor) -> int:
        """The value that a tensor is; all are kept, so that none is mistaken for another."""
        found = [i for i, known in enumerate(self.tensors) if known is tensor]
        if not found:
            self.tensors.append(tensor)
        return found[0] if found else len(self.tensors) - 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if traits_of(func).in_parts:
            with self:
                return run_composite(func, args, kwargs)
        known = len(self.tensors)
        inputs = tuple(map(self.index, tensors_of(args, kwargs)))
        self.constants.update(range(known, len(self.tensors)))
        result = func(*args, **kwargs)
        outputs = tuple(map(self.index, tensors_of((result,), {})))
        if not outputs and not isinstance(result, bool):  # torch's own question, or a check of what it was given
            return result
        node = self.graph.call_function(func, self._nodes(args), {k: self._nodes([v])[0] for k, v in kwargs.items()})
        self.ops.append(
            Op(index=len(self.ops), target=func, call=0, inputs=inputs, outputs=outputs, node=node),
        )
        return result

    def _nodes(self, args: Any) -> tuple:
        return tuple(
            self._node(item) if isinstance(item, torch.Tensor)
            else list(self._nodes(item)) if isinstance(item, (list, tuple))
            else item
            for item in args
        )  # fmt: skip

    def _node(self, tensor: torch.Tensor) -> torch.fx.Node:
        node = self.graph.placeholder("tensor")
        if self.index(tensor) in self.constants:
            node.meta.update(kind="constant", content=tensor)
        return node


class Trial:
    """One function, the tensors it is run on, and what the rules say about it.

    `out`: shapes of the results; handed to the function as `out=` where it is given, whole or as a rank has them.
    `table`: the rules.
    """

    def __init__(
        self, function: Callable, *inputs: torch.Tensor, out: list[tuple[int, ...]] | None = None, table: Any = RULES
    ) -> None:
        self.function, self.inputs, self.out = function, inputs, out
        recorder = _Recorder()
        given = [tensor.clone() for tensor in inputs]
        values = [recorder.index(tensor) for tensor in given]
        with torch.inference_mode(), recorder:
            self.results = self._run(given, out)
        self.ops = recorder.ops
        self.made = [recorder.index(tensor) for tensor in self.results]
        rows = [SimpleNamespace(shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in recorder.tensors]
        graph: Any = SimpleNamespace(values=rows, calls=[SimpleNamespace(path="trial")])
        self.walk = AxisWalk(graph, table=table)
        self.given = values
        for op in self.ops:
            self.walk.run(op)
        for value in (*self.given, *self.made):
            self.walk.of(value)
        self.walk.resolve_all()

    def _run(self, inputs: list[torch.Tensor], out: list[tuple[int, ...]] | None) -> list[torch.Tensor]:
        found = self.function(*inputs, out=out) if out is not None else self.function(*inputs)
        return [found] if isinstance(found, torch.Tensor) else list(found)

    # ---- what is claimed

    def can_be_cut(self, factor: Factor) -> bool:
        """As `groups` decides for one block."""
        sums = [contraction.axis for contraction in self.walk.contractions if factor in factors_of(contraction.axis)]
        return (
            factor.size > 1
            and not factor.unshardable
            and all(covers(axis, factor) for axis in sums)
            and not any(sum(times(axis, factor) for axis in axes) > 1 for axes in self.walk.axes.values())
        )

    def factors_of(self) -> list[Factor]:
        """What can be cut, in order of appearance."""
        axes = [axis for value in (*self.given, *self.made) for axis in self.walk.axes[value]]
        return [
            factor
            for factor in dict.fromkeys(factor for axis in axes for factor in factors_of(axis))
            if self.can_be_cut(factor)
        ]

    def claim(self) -> str:
        """The axes as in `einsum`: a letter for what can be cut, else a dot; "(ab)" product, "[a|b]" one by one."""
        names = {factor: LETTERS[index] for index, factor in enumerate(self.factors_of())}

        def text(axis: Axis) -> str:
            parts = [
                names.get(factor, ".") if isinstance(factor, Factor) else f"[{'|'.join(map(text, factor.segments))}]"
                for factor in axis
            ]
            return f"({''.join(parts)})" if len(parts) > 1 else "".join(parts) or "1"

        given, made = (
            ",".join("".join(map(text, self.walk.axes[value])) for value in values)
            for values in (self.given, self.made)
        )
        return f"{given}->{made}"

    # ---- what is true

    def check(self) -> None:
        """Cut every leaf that can be cut in several ways, run every rank, and compare with the whole."""
        for factor in self.factors_of():
            for shares in ways(factor.size):
                self._check(factor, shares)

    def _check(self, factor: Factor, shares: tuple[int, ...]) -> None:
        sums = [contraction for contraction in self.walk.contractions if factor in factors_of(contraction.axis)]
        assert len(sums) < 2, "a trial has one sum at its end at most"
        what = f"{self.claim()}: {factor!r} of it over {shares}"
        total: list[torch.Tensor] = []
        for rank in range(len(shares)):
            shapes = self.out and [
                tuple(len(indices) for indices in self._kept(value, factor, shares, rank)) for value in self.made
            ]
            found = self._local(factor, shares, rank, sums, shapes)
            if sums:
                assert set(self.ops[sums[0].op].outputs) == set(self.made), "a trial has its sum at its end"
                weight = shares[rank] / factor.size if sums[0].mean else 1
                found = [part * weight for part in found]
                total = [left + right for left, right in zip(total, found, strict=True)] if total else found
                continue
            for value, whole, part in zip(self.made, self.results, found, strict=True):
                for dim in self.walk.cut_dims(value, factor):
                    whole = whole.index_select(dim, self._kept(value, factor, shares, rank)[dim])
                same(part, whole, f"{what}, rank {rank}")
        if sums:
            for value, whole, part in zip(self.made, self.results, total, strict=True):
                assert not self.walk.cut_dims(value, factor)
                same(part + self._addend(sums[0], whole), whole, what)

    def _local(
        self, factor: Factor, shares: tuple[int, ...], rank: int, sums: list[Contraction], shapes: Any
    ) -> list[torch.Tensor]:
        """What a rank makes of its part; what is added once is left out."""
        local = []
        for value, tensor in zip(self.given, self.inputs, strict=True):
            for dim in self.walk.cut_dims(value, factor):
                tensor = tensor.index_select(dim, self._kept(value, factor, shares, rank)[dim])
            local.append(torch.zeros_like(tensor) if sums and value == sums[0].addend else tensor.clone())
        if not sums or not sums[0].lookup:
            return self._run(local, shapes)
        table = self.given[0]
        (rows,) = (self._kept(table, factor, shares, rank)[dim] for dim in self.walk.cut_dims(table, factor))
        where = (self.inputs[1].unsqueeze(-1) == rows).int()
        local[1] = where.argmax(-1)
        return [part * where.sum(-1).unsqueeze(-1) for part in self._run(local, shapes)]

    def _addend(self, contraction: Contraction, whole: torch.Tensor) -> torch.Tensor:
        """What the runtime adds after the sum: see `runtime.actions`."""
        if contraction.addend < 0:
            return torch.zeros(())
        addend = self.inputs[self.given.index(contraction.addend)]
        node = self.ops[contraction.op].node
        assert node is not None
        if "conv" in str(node.target):
            addend = addend.view(-1, *[1] * (whole.dim() - 2))
        return addend * node.kwargs.get("beta", 1)  # type: ignore[operator]

    def _kept(self, value: int, factor: Factor, shares: tuple[int, ...], rank: int) -> list[torch.Tensor]:
        axes = self.walk.axes[value]
        return [torch.from_numpy(kept(describe(axis, factor), shares, rank).copy()) for axis in axes]


def ways(size: int) -> Iterator[tuple[int, ...]]:
    """Even and uneven shares of an axis."""
    yield even_shares(size, 2)
    if size > 2:
        yield size - 1, 1
        yield even_shares(size, 3)


def same(left: torch.Tensor, right: torch.Tensor, what: str) -> None:
    precision = 1e-5 if left.dtype == torch.float32 else 1e-9
    torch.testing.assert_close(
        left, right.to(left.dtype), rtol=precision, atol=precision, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )
