"""What the tables show, as plain rows: placements and modules folded by repeated block, transfers merged, bars cut."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from autoshard.capture.graph import TensorInfo
from autoshard.cluster.parse import cluster_of
from autoshard.common.module_paths import parent
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, Transfer
from autoshard.engine.pricer import price
from autoshard.plan import Plan, PlanDevice
from autoshard.profile.profile import ModuleProfile, Profile
from autoshard.report.layout import Column, Table, numbers
from autoshard.report.words import fold, runs

WHOLE = "(whole model)"
SCATTERED = 24
"""Rows of modules above which those of a class in one place are told together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRow:
    """`count` entries of a plan, `path` holds ranges of them, "layers.0-7"; `device`: also where it is kept."""

    path: str
    count: int
    class_name: str
    device: str
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`count` equal neighbours in the module tree, shown once; `module` is the first of them, with its own figures."""

    label: str
    count: int
    module: ModuleProfile
    children: "tuple[Node, ...]" = ()

    @property
    def nbytes(self) -> int:
        """Bytes of parameters and buffers of one of them."""
        return self.module.parameter_bytes + self.module.buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferRow:
    """All tensors that go from one device to another in one direction of the pass."""

    source: str
    destination: str
    backward: bool
    count: int
    nbytes: int
    seconds: float
    largest: str


def placed_rows(plan: Plan, profile: Profile) -> list[PlacedRow]:
    """Return the placements in the model's order, runs of equal numbered blocks on one device folded into one row.

    layers.0: cuda:0, layers.1: cuda:0, layers.2: cuda:1   ->   layers.0-1 (2 x) cuda:0, layers.2 cuda:1

    Where modules are offloaded, or that leaves many rows (experts of some layers, say), all of a class in one place are
    one row.
    """
    modules = {module.path: module for module in profile.modules}
    tensors = {tensor.name: tensor for tensor in profile.graph.tensors}
    order = {module.path: i for i, module in enumerate(profile.modules)}
    rows = []
    for path in sorted(plan.placements, key=lambda p: order.get(p, order.get(p.rpartition(".")[0], 0))):
        if path in modules:
            nbytes = modules[path].parameter_bytes + modules[path].buffer_bytes
            class_name = modules[path].class_name
        else:
            tensor = tensors.get(path)
            nbytes, class_name = (tensor.nbytes, tensor.kind) if tensor else (0, "")
        more = (
            " (pinned)" if path in plan.pins else f", kept on {plan.offloaded[path]}" if path in plan.offloaded else ""
        )
        device = f"{plan.placements[path]}{more}"
        rows.append(PlacedRow(path=path or WHOLE, count=1, class_name=class_name, device=device, nbytes=nbytes))

    def follows(last: PlacedRow, row: PlacedRow) -> bool:
        same = (last.device, last.class_name) == (row.device, row.class_name)
        return same and counts_up(last.path, row.path) >= 0

    found = runs(rows, follows)
    if plan.offloaded or len(found) > SCATTERED:
        groups: dict[tuple[str, str], list[PlacedRow]] = {}
        for row in rows:
            groups.setdefault((row.class_name, row.device), []).append(row)
        found = list(groups.values())
    return [
        replace(
            run[0], path=", ".join(fold([row.path for row in run])), count=len(run),
            nbytes=sum(row.nbytes for row in run),
        )
        for run in found
    ]  # fmt: skip


def counts_up(before: str, after: str) -> int:
    """Return which part of a path is one more than before, all others being equal; -1 if none is."""
    a, b = before.split("."), after.split(".")
    different = [i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y]
    if len(a) != len(b) or len(different) != 1:
        return -1
    x, y = a[different[0]], b[different[0]]
    return different[0] if x.isdecimal() and y.isdecimal() and int(y) == int(x) + 1 else -1


def module_tree(profile: Profile, look: Callable[[str], object] = lambda path: ()) -> Node:
    """Return the root with everything below it, equal neighbours under consecutive numbers folded.

    Two modules are equal if their classes, figures and `look` are, and those of everything below them.
    """
    children = _children_of(profile)
    signatures = _signatures_of(profile, children, look)

    def build(module: ModuleProfile, label: str, count: int) -> Node:
        below = _equal_runs(children.get(module.path, []), signatures)
        nodes = tuple(build(first, name, number) for first, name, number in below)
        return Node(label=label, count=count, module=module, children=nodes)

    return build(profile.modules[0], profile.modules[0].class_name, 1)


def flat(nodes: Sequence[Node], most_levels: int, level: int = 0) -> Iterator[tuple[int, Node]]:
    """Yield (level, node) of some levels of a tree, in order."""
    for node in nodes:
        yield level, node
        if level + 1 < most_levels:
            yield from flat(node.children, most_levels, level + 1)


def _children_of(profile: Profile) -> dict[str, list[ModuleProfile]]:
    """Return what is directly below every module: modules, and before them its own tensors where it has modules, too.

    model.scale, model.blocks   ->   "": scale (parameter), blocks (ModuleList)
    """
    children: dict[str, list[ModuleProfile]] = {}
    for module in profile.modules:
        if module.path:
            children.setdefault(parent(module.path), []).append(module)
    for tensor in reversed(profile.graph.tensors):
        if tensor.module in children:
            children[tensor.module].insert(0, _as_module(tensor, profile))
    return children


def _as_module(tensor: TensorInfo, profile: Profile) -> ModuleProfile:
    """A parameter or buffer as a row of the module tree; tied ones count at their first name."""
    first = next(one.name for one in profile.graph.tensors if one.storage == tensor.storage)
    sizes = {field.name: 0 for field in fields(ModuleProfile) if field.type is int}
    sizes[f"{tensor.kind}_bytes"] = tensor.nbytes if first == tensor.name else 0
    return ModuleProfile(path=tensor.name, class_name=tensor.kind, **sizes)


def _signatures_of(
    profile: Profile, children: Mapping[str, Sequence[ModuleProfile]], look: Callable[[str], object]
) -> dict[str, int]:
    """Return a number for everything in the tree, equal where class, figures, `look` and all below are."""
    signatures: dict[str, int] = {}
    known: dict[tuple[object, ...], int] = {}
    below_root = sorted((one for rows in children.values() for one in rows), key=lambda one: -one.path.count("."))
    for module in (*below_root, profile.modules[0]):
        cells = (module.class_name, module.parameter_bytes, module.buffer_bytes, module.calls, module.flops)
        below = tuple((c.path.rpartition(".")[2], signatures.get(c.path, -1)) for c in children.get(module.path, ()))
        signatures[module.path] = known.setdefault((*cells, look(module.path), below), len(known))
    return signatures


def _equal_runs(
    siblings: Sequence[ModuleProfile], signatures: Mapping[str, int]
) -> Iterator[tuple[ModuleProfile, str, int]]:
    """Yield (first module, label, how many) of equal neighbours under consecutive numbers."""

    def follows(last: ModuleProfile, module: ModuleProfile) -> bool:
        return signatures[module.path] == signatures[last.path] and counts_up(last.path, module.path) >= 0

    for run in runs(siblings, follows):
        label, last = (module.path.rpartition(".")[2] for module in (run[0], run[-1]))
        yield run[0], label if len(run) == 1 else f"{label}-{last}", len(run)


def tied_modules(profile: Profile) -> set[str]:
    """Return the modules whose own parameters are all counted elsewhere, at their first names."""
    later = {name for names in profile.graph.tied() for name in names[1:]}
    own: dict[str, list[str]] = {}
    for tensor in profile.graph.tensors:
        own.setdefault(tensor.module, []).append(tensor.name)
    return {module for module, names in own.items() if names and later.issuperset(names)}


def transfer_rows(transfers: Sequence[Transfer]) -> list[TransferRow]:
    """Return one row per pair of devices and direction of the pass, in the order of first use."""
    groups: dict[tuple[str, str, bool], list[Transfer]] = {}
    for transfer in (one for one in transfers if one.nbytes):
        groups.setdefault((transfer.source, transfer.destination, transfer.backward), []).append(transfer)
    return [
        TransferRow(
            source=source,
            destination=destination,
            backward=backward,
            count=len(group),
            nbytes=sum(t.nbytes for t in group),
            seconds=sum(t.seconds for t in group),
            largest=_route(max(group, key=lambda t: t.nbytes)),
        )
        for (source, destination, backward), group in groups.items()
    ]


def transfer_table(rows: Sequence[TransferRow]) -> Table:
    """Return what goes from device to device per pass."""
    columns = [Column(title="From"), Column(title="To"), *numbers("Tensors", "Bytes", "Time")]
    cells = [
        [
            row.source, row.destination, str(row.count), format_bytes(row.nbytes), format_seconds(row.seconds),
            f"{'backward: ' if row.backward else ''}{row.largest}",
        ] for row in rows
    ]  # fmt: skip
    columns.append(Column(title="Largest", style="bright_black", flexible=True))
    return Table(label="Transfers by link", columns=columns, rows=cells)


def _route(transfer: Transfer) -> str:
    """ "a.b.c -> a.b.d" with what both share said once: "a.b: c -> d"."""
    producer, consumer = transfer.producer or "(model)", transfer.consumer or "(model)"
    a, b = producer.split("."), consumer.split(".")
    shared = 0
    while shared < min(len(a), len(b)) - 1 and a[shared] == b[shared]:
        shared += 1
    while shared and (a[shared].isdecimal() or b[shared].isdecimal()):
        shared -= 1  # "layers.3" says more than "3"
    if not shared:
        return f"{producer} -> {consumer}"
    return f"{'.'.join(a[:shared])}: {'.'.join(a[shared:])} -> {'.'.join(b[shared:])}"


def peak_parts(profile: Profile) -> dict[str, int]:
    """Return what a model on one device holds at its fullest moment; the parts add up to the profile's peak."""
    alone = Plan.from_device_map({"": "cpu"}, profile)
    cluster = cluster_of([PlanDevice(name="cpu", memory_bytes=profile.peak_bytes or 1)])
    return price(alone, profile, cluster, lower_bound_seconds=0.0).devices[0].parts


def device_runs(devices: Sequence[DeviceEstimate]) -> list[tuple[DeviceEstimate, str]]:
    """Return (first device, label) of runs of neighbours that show the same: cuda:10, cuda:11 -> "cuda:10-11".

    Used devices are folded only where there are many, unused ones always.
    """

    def follows(last: DeviceEstimate, device: DeviceEstimate) -> bool:
        kind, _, index = device.name.partition(":")
        foldable = not device.peak_bytes or len(devices) > MANY_DEVICES
        next_one = index.isdecimal() and last.name == f"{kind}:{int(index) - 1}"
        return foldable and next_one and replace(last, name=device.name) == device

    found = runs(devices, follows)
    return [(r[0], r[0].name if len(r) == 1 else f"{r[0].name}-{r[-1].name.partition(':')[2]}") for r in found]


MANY_DEVICES = 16


def cut_bar(parts: Sequence[int], total: int, width: int) -> list[int]:
    """Return cells per part so that they fill their share of `width`, by the largest remainder; what is left is free.

    A device that is over full fills the bar.
    """
    used = sum(parts)
    whole = max(total, used, 1)
    cells_used = min(width, -(-width * used // whole)) if used else 0
    if used:
        exact = [cells_used * part / used for part in parts]
        cells = [int(value) for value in exact]
        by_remainder = sorted(range(len(parts)), key=lambda i: cells[i] - exact[i])
        for i in by_remainder[: cells_used - sum(cells)]:
            cells[i] += 1
        return cells
    return [0] * len(parts)
