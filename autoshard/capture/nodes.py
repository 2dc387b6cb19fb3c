"""The autograd graph of a recorded backward pass: which nodes ran, and what each sent to which.

    y = x @ w, z = y + y.relu()      edges, in torch's order          recorded backward
    AddBackward                      ──▶ Mm, ──▶ Relu                 g ──▶ Mm waits with g, g ──▶ Relu
    ReluBackward                     ──▶ Mm                           h = relu'(g) ──▶ Mm: op 7 is the sum g + h
    MmBackward                       ──▶ AccumulateGrad of w, …       gets the sum

A node runs when everything that feeds it has run, the one made last first (torch/csrc/autograd/engine.cpp). A hook on
every node tells when it begins and with which gradients. Sums are made by the engine after the node that sent the later
part (input_buffer.cpp), so they are the ops at its end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.capture.graph import GradEdge, GradNode, Op
from autoshard.torch_private import engine_runs, is_write_to_view, node_sequence

Key = int
"""A node during the run: its sequence number, or -1 - value for the node that fills the `.grad` of a leaf."""


@dataclass(slots=True)
class _Row:
    """A node in one run of the engine, in the making."""

    key: Key
    run: int
    after: bool  # made after its op
    edges: list[tuple[Key, int] | None]
    begin: int = -1  # it never ran
    end: int = -1
    incoming: tuple[int, ...] = ()
    sent: list[tuple[int, int]] = field(default_factory=list)  # per edge: (value, op of the sum it became a term of)


@dataclass(slots=True)
class _Run:
    """One run of the engine. `running` is the node that runs now, in `order` of their beginning."""

    index: int
    rows: dict[Key, _Row] = field(default_factory=dict)
    running: _Row | None = None


class NodeLog:
    """Watches runs of the engine and writes down nodes. Holds numbers only: nodes live as long as they would."""

    def __init__(self, find: Callable[[torch.Tensor], int | None], now: Callable[[], int]) -> None:
        self.find, self.now = find, now
        self.order: list[_Row] = []
        self._runs: list[_Run] = []
        self._count = 0
        self._handles: dict[Key, Any] = {}

    def key_of(self, node: Any) -> Key | None:
        """The key of a node; None for one that fills the `.grad` of a tensor that was never seen."""
        if type(node).__name__ != "AccumulateGrad":
            return node_sequence(node)
        value = self.find(node.variable)
        return None if value is None else -1 - value

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch every run of the engine that begins inside."""
        try:
            with engine_runs(self._begin_run, self._end_run):
                yield
        finally:
            for handle in self._handles.values():
                handle.remove()

    def _begin_run(self, outputs: Sequence[Any]) -> None:
        run = _Run(index=self._count)
        self._count += 1
        self._runs.append(run)
        todo = []
        for output in outputs:
            edge = torch.autograd.graph.get_gradient_edge(output) if isinstance(output, torch.Tensor) else output
            todo.append((self.key_of(edge.node), edge.node))
        while todo:
            key, node = todo.pop()
            if key is None or key in run.rows:
                continue
            row = run.rows[key] = _Row(key=key, run=run.index, after=is_write_to_view(node), edges=[])
            if key not in self._handles:
                self._handles[key] = node.register_prehook(lambda grads, key=key: self._begin(key, grads))
            for following, slot in node.next_functions:
                target = None if following is None else self.key_of(following)
                row.edges.append(None if target is None else (target, slot))
                todo.append((target, following))

    def _begin(self, key: Key, gradients: Sequence[torch.Tensor | None]) -> None:
        run = self._runs[-1] if self._runs else None
        row = run.rows.get(key) if run is not None else None
        if run is None or row is None:
            return
        self._end_running(run)
        row.begin = self.now()
        row.incoming = tuple(
            -1 if gradient is None or (value := self.find(gradient)) is None else value for gradient in gradients
        )
        run.running = row
        self.order.append(row)

    def _end_running(self, run: _Run) -> None:
        if run.running is not None:
            run.running.end = self.now()

    def _end_run(self) -> None:
        self._end_running(self._runs.pop())

    # ---- what was sent along every edge

    def nodes(
        self, ops: Sequence[Op], made_by: Sequence[int], made_at: Callable[[Key, bool], range],
        made_in: Callable[[Key, int], int], histories: "Histories",
    ) -> tuple[GradNode, ...]:  # fmt: skip
        """The nodes that ran, in order.

        `made_by`: value -> op that made it. `made_at`: number of a node, whether it was made after its op -> the
        forward ops it stands for. `made_in`: number of a node, first of these ops -> the module call it was made in.
        """
        number = {(row.run, row.key): index for index, row in enumerate(self.order)}
        for row in self.order:
            row.sent = [(-1, -1)] * len(row.edges)
        parts: dict[tuple[int, Key, int], list[tuple[int, int]]] = {}  # (run, node, slot) -> (sender, its edge)
        for index, row in enumerate(self.order):
            for position, edge in enumerate(row.edges):
                if edge is not None:
                    parts.setdefault((row.run, *edge), []).append((index, position))
        for (run, key, slot), senders in parts.items():
            target = number.get((run, key))
            incoming = self.order[target].incoming if target is not None else ()
            if slot < len(incoming) and incoming[slot] >= 0:
                self._match(incoming[slot], senders, ops, made_by)
        found = []
        for row in self.order:
            sums = [op for _, op in row.sent if op >= 0]
            made = range(-1, -1) if row.key < 0 else made_at(row.key, row.after)
            readers = histories.readers(made)
            found.append(
                GradNode(
                    made=made.start,
                    call=made_in(row.key, made.start) if row.key >= 0 else -1,
                    leaf=-1 - row.key if row.key < 0 else -1,
                    run=row.run,
                    begin=row.begin,
                    end=min(sums, default=row.end),
                    incoming=row.incoming,
                    edges=tuple(
                        GradEdge(
                            node=number[row.run, edge[0]], slot=edge[1], value=value, sum=op,
                            reader=readers.get(edge, (-1, -1))[0], read=readers.get(edge, (-1, -1))[1],
                        )
                        for edge, (value, op) in zip(row.edges, row.sent, strict=True)
                        if edge is not None and value >= 0 and (row.run, edge[0]) in number
                    ),
                )
            )  # fmt: skip
        return tuple(found)

    def _match(self, incoming: int, senders: list[tuple[int, int]], ops: Sequence[Op], made_by: Sequence[int]) -> None:
        """Take the sum that a node got apart: its last term came from the last sender that sent anything, and so on."""
        value = incoming
        for position in range(len(senders) - 1, -1, -1):
            sender, edge = senders[position]
            row, op = self.order[sender], made_by[value]
            made_here = row.begin <= op < row.end
            if position and made_here and _is_sum(ops[op]):
                value, term = ops[op].inputs
                row.sent[edge] = term, op
            elif not position or made_here or value in row.incoming:
                row.sent[edge] = value, -1
                return


class Histories:
    """Where the gradient of every input of a forward op goes, to find the op and the input behind an edge."""

    def __init__(self) -> None:
        self._of_op: dict[int, list[tuple[int, Key, int]]] = {}  # op -> (value, where its gradient goes)

    def note(self, op: int, value: int, tensor: torch.Tensor) -> None:
        """Note that a forward op reads a tensor that requires grad."""
        node = tensor.grad_fn
        key, slot = (-1 - value, 0) if node is None else (node_sequence(node), tensor.output_nr)
        self._of_op.setdefault(op, []).append((value, key, slot))

    def readers(self, ops: range) -> dict[tuple[Key, int], tuple[int, int]]:
        """Node and slot -> (op, value): the first of these ops that read a value whose gradient goes there."""
        found: dict[tuple[Key, int], tuple[int, int]] = {}
        for op in ops:
            for value, key, slot in self._of_op.get(op, ()):
                found.setdefault((key, slot), (op, value))
        return found


def _is_sum(op: Op) -> bool:
    schema = getattr(op.target, "_schema", None)
    return schema is not None and schema.name in ("aten::add", "aten::add_") and len(op.inputs) == 2
