"""What a recorded run writes in place that several copies or calls would each write: inputs, and parameters."""

from autoshard.capture.graph import ModelGraph, name_of


def changed_inputs(graph: ModelGraph) -> tuple[str, ...]:
    """In words, what first writes each input tensor that the run writes, in containers and objects and by views too.

    mul_ in layers.0 changes input x in place
    """
    names: dict[int, str] = {}  # by storage: inputs that share one are changed together
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder" and node.meta.get("kind") == "input":
            names.setdefault(graph.values[node.meta["value"]].storage, _named(node.meta["name"]))
    found: dict[str, str] = {}
    for op in graph.ops:
        for value in op.mutates:
            name = names.get(graph.values[value].storage)
            if name is not None and name not in found:
                module = graph.calls[op.call].path or "the model itself"
                found[name] = f"{name_of(op)} in {module} changes {name} in place"
    return tuple(found.values())


def changed_parameters(graph: ModelGraph) -> str:
    """In words, what first writes into a parameter, or replaces the data of any tensor; "" where nothing does.

    mul_ in the model itself writes into teacher.weight
    """
    names = {one.storage: one.name for one in graph.tensors if one.kind == "parameter"}
    for op in graph.ops:
        for name in (names[s] for value in op.mutates if (s := graph.values[value].storage) in names):
            return f"{name_of(op)} in {graph.calls[op.call].path or 'the model itself'} writes into {name}"
    return f"{graph.exchanged[0]} replaces the data of a tensor" if graph.exchanged else ""


def _named(path: str) -> str:
    """The name of an input for people; `path` is where it is in (args, kwargs)."""
    place, _, name = path.partition(".")
    if place == "inside_an_object":
        return "a tensor inside an object that is an input"
    return f"input {name}" if place == "1" else f"positional input {name}"
