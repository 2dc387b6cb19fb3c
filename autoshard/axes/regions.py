"""Regions: parts of a model that are analysed on their own, each once for all its repetitions.

A region is an outermost element of a repeated container (a list, sequence or dict of modules) with at least two
matrices; all that lies outside of such elements is one more region. What one region hands to another gets fresh axes
there, so that what blocks an axis outside does not leak in. Ops that scale a parameter where it is belong to none, nor
do losses that compare logits with labels, nor what chooses tokens between calls of the model: a head may be cut over
its classes, and what it makes is whole behind it.
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

from autoshard.axes.given import plain
from autoshard.axes.rules import is_pointwise
from autoshard.capture.graph import Call, ModelGraph, name_of
from autoshard.common.module_paths import above, is_below, parent, relative

CLASS_LOSS = "cross_entropy_loss"
OUTSIDE = ""
"""The path of the region that is made of everything outside of repeated elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One part of a model: the module at `path`, the indices of its ops in order, and the other paths with the same.

    `each`: the ops of every one of `paths`, in the same order.
    """

    path: str
    ops: tuple[int, ...]
    paths: tuple[str, ...]
    each: tuple[tuple[int, ...], ...] = ()


def find_regions(graph: ModelGraph) -> tuple[Region, ...]:
    """Divide the forward ops of a graph into regions; equal ones appear once, with all their paths."""
    return _isomorphic(graph, _owners(graph, _elements(graph)))


def outside_ops(graph: ModelGraph, *, losses: bool = False) -> list[int]:
    """The ops of the region outside of all repeated elements; with `losses`, those of `loss_ops` there as well."""
    owner, apart = _owners(graph, _elements(graph)), scaled_ops(graph) | (set() if losses else loss_ops(graph))
    return [op.index for op in graph.ops if not op.backward and owner[op.call] == OUTSIDE and op.index not in apart]


def leaf_regions(graph: ModelGraph, touched: Container[str] = ()) -> tuple[Region, ...]:
    """As `find_regions`, with the modules of `leaf_modules` as elements.

    Equal ones count as one only where their paths differ in places of lists alone: one attention's queries, but not its
    keys with them, since each may be cut in another way. `touched`: those that can also be cut together with others;
    the rest is apart from them.
    """
    numbered = _numbered(graph)
    return _isomorphic(
        graph, _owners(graph, leaf_modules(graph)), lambda path: (_place(path, numbered), path in touched)
    )[1:]


def shared_tensors(graph: ModelGraph, regions: Sequence[Region]) -> frozenset[int]:
    """Values of parameters and buffers that unlike parts read, otherwise than to scale them where they are.

    `regions` as from `find_regions` or `leaf_regions`. What is tied between the blocks of one region, by the same name
    in each, is cut in all of them alike.
    """
    place = {path: index for index, region in enumerate(regions) for path in region.paths}
    owner = _owners(graph, set(place) - {OUTSIDE})
    names = tensor_names(graph)
    readers: dict[int, set[str]] = {}
    scaled = scaled_ops(graph)
    for op in graph.ops:
        for value in names.keys() & set(op.inputs):
            if op.index not in scaled:
                readers.setdefault(value, set()).add(owner[op.call])

    def is_shared(value: int, paths: set[str]) -> bool:
        isomorphic = {
            (place.get(path), *sorted(relative(name, path) for name in names[value] if is_below(name, path)))
            for path in paths
        }
        return len(isomorphic) > 1

    return frozenset(value for value, paths in readers.items() if len(paths) > 1 and is_shared(value, paths))


def tensor_names(graph: ModelGraph) -> dict[int, list[str]]:
    """By value, the names of the parameter or buffer that it is."""
    found: dict[int, list[str]] = {}
    for tensor in graph.tensors:
        found.setdefault(tensor.value, []).append(tensor.name)
    return found


def scaled_ops(graph: ModelGraph) -> set[int]:
    """Ops that write into one parameter or buffer, element by element: whoever has a part of it does so to the part."""
    tensors = {tensor.value for tensor in graph.tensors}
    return {
        op.index
        for op in graph.ops
        if len(op.inputs) == 1 and op.inputs == op.mutates == op.outputs and is_pointwise(op.target)
        and op.inputs[0] in tensors
    }  # fmt: skip


def loss_ops(graph: ModelGraph) -> set[int]:
    """Losses of classes, and the ops that do nothing but bring logits to them: copies, views, functions of each."""
    found: set[int] = set()
    logits: set[int] = set()
    for op in graph.ops:
        if name_of(op) != CLASS_LOSS or op.backward:
            continue
        found.add(op.index)
        logits.add(op.inputs[0])
        at = graph.values[op.inputs[0]].op
        while at >= 0 and len(graph.ops[at].inputs) == 1 and not graph.ops[at].mutates:
            found.add(at)
            logits.update(graph.ops[at].inputs)
            at = graph.values[graph.ops[at].inputs[0]].op
    given_back = {op.index for op in graph.ops if op.inputs == op.outputs and not op.mutates and logits & {*op.inputs}}
    return found | given_back


def _choosing_ops(graph: ModelGraph) -> set[int]:
    """Ops of `generate` between the calls of the model: they choose tokens from logits, which are whole there."""
    if all(name != "decode" for name, _, _ in graph.phases):
        return set()
    calls = [graph.calls[op.call] for op in graph.ops]
    return {op.index for op, call in zip(graph.ops, calls, strict=True) if not call.begin <= op.index < call.end}


def _owners(graph: ModelGraph, elements: set[str]) -> list[str]:
    """For every call the element that it runs in."""
    known: dict[str, str] = {}
    for call in graph.calls:
        if call.path not in known:
            known[call.path] = element_of(call.path, elements)
    return [known[call.path] for call in graph.calls]


def element_of(path: str, elements: Collection[str]) -> str:
    """The element that a module, or a tensor, is in."""
    return next((one for one in (path, *above(path)) if one in elements), OUTSIDE)


def _isomorphic(
    graph: ModelGraph, owner: list[str], kind: Callable[[str], object] = lambda path: None
) -> tuple[Region, ...]:
    """The regions of an ownership, equal ones of one kind once; what is outside comes first."""
    ops: dict[str, list[int]] = {OUTSIDE: []}
    apart = scaled_ops(graph) | loss_ops(graph) | _choosing_ops(graph)
    for op in graph.ops:
        if not op.backward and op.index not in apart:
            ops.setdefault(owner[op.call], []).append(op.index)
    first = _first_calls(graph)
    names = tensor_names(graph)
    isomorphic: dict[object, list[str]] = {}
    places = _places(graph, owner)
    for path, indices in ops.items():
        key = (kind(path), _signature(graph, path, indices, first[path], names), places.get(path)) if path else OUTSIDE
        isomorphic.setdefault(key, []).append(path)
    return tuple(
        Region(
            path=paths[0], ops=tuple(ops[paths[0]]), paths=tuple(paths), each=tuple(tuple(ops[path]) for path in paths)
        )
        for paths in isomorphic.values()
    )


def _places(graph: ModelGraph, owner: Sequence[str]) -> dict[str, tuple[object, ...]]:
    """For every element the calls of modules and torch functions in it, by which a cut finds what it has to act on."""
    found: dict[str, list[object]] = {}
    for call in graph.calls:
        path = owner[call.index]
        if path:
            row = relative(call.path, path), call.end - call.begin, call.input_paths, call.output_paths
            found.setdefault(path, []).append(row)
    for site in graph.sites:
        path = owner[site.call]
        if path:
            where = relative(graph.calls[site.call].path, path), site.function, site.occurrence, site.end - site.begin
            names = tuple(name for name, _ in site.inputs), tuple(name for name, _ in site.outputs)
            found.setdefault(path, []).append((where, names))
    return {path: tuple(rows) for path, rows in found.items()}


def _numbered(graph: ModelGraph) -> set[str]:
    """Modules in lists and sequences."""
    return {path for module in graph.modules if module.numbered for path in (module.path, *module.aliases)}


def _place(path: str, numbered: set[str]) -> str:
    """A path with a star for every place in a list: "layers.*.mlp.up"."""
    steps = [one for one in (path, *above(path)) if one]
    return ".".join("*" if one in numbered else one.rpartition(".")[2] for one in reversed(steps))


def _elements(graph: ModelGraph) -> set[str]:
    """Outermost elements of repeated containers, where each has two matrices or more.

    For one that is never called itself, as a list of blocks in a list of stages, its parts stand.
    """
    children: dict[str, list[str]] = {}
    numbered = _numbered(graph)
    for module in graph.modules:
        if module.path:
            children.setdefault(parent(module.path), []).append(module.path)
    matrices: dict[str, int] = {}
    for tensor in graph.tensors:
        if tensor.kind == "parameter" and len(tensor.shape) > 1:
            for path in (tensor.module, *above(tensor.module)):
                matrices[path] = matrices.get(path, 0) + 1
    called = {call.path for call in graph.calls}
    found: set[str] = set()
    for module in graph.modules:  # parents come before their children
        below = children.get(module.path, [])
        if len(below) < 2 or (module.callable and not numbered.issuperset(below)):
            continue
        heavy = [path for path in below if matrices.get(path, 0) > 1]
        if len(heavy) > 1 and not found.intersection((module.path, *above(module.path))):
            found.update(part for path in heavy for part in _called_parts(path, children, matrices, called))
    return found


def _called_parts(
    path: str, children: Mapping[str, Sequence[str]], matrices: Mapping[str, int], called: Container[str]
) -> list[str]:
    """The outermost modules that are called in an element; itself, if they have not all of its matrices."""
    if path in called:
        return [path]
    heavy = [part for part in children.get(path, ()) if matrices.get(part, 0) > 1]
    if not heavy or sum(matrices[part] for part in heavy) != matrices[path]:
        return [path]
    return [part for one in heavy for part in _called_parts(one, children, matrices, called)]


def leaf_modules(graph: ModelGraph) -> set[str]:
    """Modules that have parameters of their own and no children with any."""
    having = {tensor.module for tensor in graph.tensors if tensor.kind == "parameter"}
    return having - {path for module in having for path in above(module)} - {OUTSIDE}


def _first_calls(graph: ModelGraph) -> dict[str, Call]:
    """For every module the first call of it or of anything below it."""
    found: dict[str, Call] = {}
    for call in graph.calls:
        for path in (call.path, *above(call.path)):
            found.setdefault(path, call)
    return found


def _signature(
    graph: ModelGraph, path: str, indices: list[int], first: Call, names: Mapping[int, Sequence[str]]
) -> object:
    """What two regions share if one analysis serves both: ops, arguments, shapes and how they are connected.

    `first`: the first call in it; `names`: value -> names of parameters and buffers.
    """
    numbers: dict[int, object] = {}
    rows: list[object] = []
    inside = set(indices)

    def number(value: int) -> object:
        if value not in numbers:
            seen = graph.values[value]
            own = [relative(name, path) for name in names.get(value, ()) if is_below(name, path)]
            named = (own[-1], value in graph.outputs) if own else ()
            numbers[value] = named or (len(numbers), seen.shape, seen.dtype, seen.op in inside)
        return numbers[value]

    for index in indices:
        op = graph.ops[index]
        call = graph.calls[op.call]
        rows.append((
            op.target, call.path.removeprefix(path), tuple(map(number, op.inputs)), tuple(map(number, op.outputs)),
            repr(plain(op)),
        ))  # fmt: skip
    rows.append(tuple(numbers.get(value) for value in (*first.inputs, *first.outputs)))
    return tuple(rows)
