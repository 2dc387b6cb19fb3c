"""Inputs that a recorded run writes in place: the caller sees that of one device, and not of several copies."""

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


def _named(path: str) -> str:
    """The name of an input for people; `path` is where it is in (args, kwargs)."""
    place, _, name = path.partition(".")
    if place == "inside_an_object":
        return "a tensor inside an object that is an input"
    return f"input {name}" if place == "1" else f"positional input {name}"
