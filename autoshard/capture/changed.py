"""Inputs that a recorded run writes in place: the caller sees that of one device, and not of several copies."""

from dataclasses import dataclass

from autoshard.capture.graph import ModelGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedInput:
    """An input tensor that the run writes, and what writes it first: the module path ("" for the root) and the op."""

    name: str
    module: str
    op: str

    def __str__(self) -> str:
        return f"{self.op} in {self.module or 'the model itself'} changes {self.name} in place"


def changed_inputs(graph: ModelGraph) -> tuple[ChangedInput, ...]:
    """Input tensors, those in containers and inside of objects too, that an op of the run writes, also by a view."""
    names: dict[int, str] = {}  # by storage: inputs that share one are changed together
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder" and node.meta.get("kind") == "input":
            names.setdefault(graph.values[node.meta["value"]].storage, _named(node.meta["name"]))
    found: dict[str, ChangedInput] = {}
    for op in graph.ops:
        for value in op.mutates:
            name = names.get(graph.values[value].storage)
            if name is not None and name not in found:
                kind = getattr(op.target, "overloadpacket", op.target)
                found[name] = ChangedInput(name=name, module=graph.calls[op.call].path, op=kind.__name__)
    return tuple(found.values())


def _named(path: str) -> str:
    """The name of an input for people; `path` is where it is in (args, kwargs)."""
    place, _, name = path.partition(".")
    if place == "inside_an_object":
        return "a tensor inside an object that is an input"
    return f"input {name}" if place == "1" else f"positional input {name}"
