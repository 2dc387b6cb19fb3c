"""What can be cut over devices, in words made of parameter paths and sizes, once for blocks that are alike."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.regions import OUTSIDE
from autoshard.common.module_paths import is_below, join, relative
from autoshard.common.sizes import format_bytes
from autoshard.plan.batching import BatchAxis
from autoshard.profile.profile import Profile
from autoshard.report.layout import INDENT, print_item, print_left_off, print_section, print_sentences
from autoshard.report.terminal import print_heading
from autoshard.report.words import after, fold_paths, is_part, members, outer

VERSION = 1
MOST_BLOCKED = 24
GROUP_FIELDS = (
    *("index", "blocks", "size", "summed", "nbytes", "flops"),
    *("reduced_bytes", "gathered_bytes", "added_bytes", "conflicts"),
)
"""Of a group, in a document as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRow:
    """One group in words; `instead` if it shares a tensor with a group above it, so that only one can be cut."""

    slices: str
    members: str
    cost: str
    instead: bool
    group: AxisGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """The groups of one block and its repetitions, the largest first; `matrix_bytes` are of one of them."""

    label: str
    count: int
    matrix_bytes: int
    rows: tuple[AxisRow, ...]


def axis_rows(profile: Profile, found: AxisGroups) -> list[BlockRows]:
    """Put the groups of a model into words, block by block."""
    ndims = {tensor.name: len(tensor.shape) for tensor in profile.graph.tensors}
    blocks = []
    for region in found.regions:
        size = _matrix_bytes(profile, found, region.paths[0])
        if not size:
            continue
        rows: list[AxisRow] = []
        taken: set[int] = set()
        for group in _groups_of(found, region.paths):
            instead = not taken.isdisjoint(group.conflicts)
            if not instead:
                taken.add(group.index)
            slices, words = _in_words(group, ndims, relative(group.blocks[0], region.paths[0]))
            cost = f"{_share(profile, group, size):.0%} of the bytes; {_collectives(group)}"
            rows.append(AxisRow(slices=slices, members=words, cost=cost, instead=instead, group=group))
        label = fold_paths(region.paths) if region.paths != ("",) else "outside of repeated blocks"
        blocks.append(BlockRows(label=label, count=len(region.paths), matrix_bytes=size, rows=tuple(rows)))
    return blocks


def _share(profile: Profile, group: AxisGroup, matrix_bytes: int) -> float:
    """Part of the bytes of a block that a group cuts, tied tensors once."""
    names = {join(group.blocks[0], shard.name) for shard in group.shards}
    cut = {t.storage: t.nbytes for t in profile.graph.tensors if t.name in names and len(t.shape) > 1}
    return sum(cut.values()) / matrix_bytes


def _groups_of(found: AxisGroups, blocks: tuple[str, ...]) -> list[AxisGroup]:
    """The groups of a block, the largest first, then those of single modules in it that no other group cuts."""
    own = sorted((g for g in found.groups if g.blocks == blocks), key=lambda g: (-g.nbytes, g.index))
    if blocks == (OUTSIDE,):
        return own
    cut = {f"{blocks[0]}.{shard.name}" for group in own for shard in group.shards}
    alone = [
        group
        for group in found.groups
        if group.blocks[0].startswith(f"{blocks[0]}.")
        and not any(f"{group.blocks[0]}.{shard.name}" in cut for shard in group.shards)
    ]
    return own + alone


def _in_words(group: AxisGroup, ndims: Mapping[str, int], below: str = "") -> tuple[str, str]:
    """How many slices a group has, and what is cut; `below`: where its block lies in the one that is spoken of."""
    block = f"{group.blocks[0]}." if group.blocks[0] else ""
    cut = [(shard.name, shard.dim, ndims.get(block + shard.name, 1), is_part(shard.axis)) for shard in group.shards]
    times = min(outer(shard.axis) for shard in group.shards)
    return f"{group.size} slices" + (f" in each of {times}" if times > 1 else ""), after(below, *members(cut))


def unshardable_rows(profile: Profile, found: AxisGroups) -> list[tuple[str, str]]:
    """What can't be cut, and what stands against it; first the matrices of which nothing can be cut.

    Dimensions after the second (the window of a convolution) are named only where nothing else can be cut.
    """
    ndims = {tensor.name: len(tensor.shape) for tensor in profile.graph.tensors}
    owner = {region.paths[0]: region.paths for region in found.regions}
    cut = {join(group.blocks[0], s.name) for group in found.groups for s in group.shards}
    reasons: dict[tuple[bool, str, str], list[tuple[str, int, int, bool]]] = {}
    for row in found.unshardable:
        if row.dim > 1 and row.name in cut:
            continue
        block = max((path for path in owner if is_below(row.name, path)), key=len, default="")
        inside = relative(row.name, block)
        reasons.setdefault((row.name in cut, block, row.reason), []).append((inside, row.dim, ndims[row.name], False))
    lines = []
    for (elsewhere, block, reason), cuts in sorted(reasons.items(), key=lambda item: item[0][0]):
        label = fold_paths(owner.get(block, (block,))) if block else ""
        what = after(label, *members(cuts))
        if block:
            reason = reason.replace(f"{block}.", f"{label}.")
        lines.append((what if elsewhere else f"{what} (whole on every device)", reason))
    return lines


def batch_in_words(batch: BatchAxis) -> str:
    """What of the inputs is divided with the batch, and how outputs are made of those of its parts."""
    words = {"cat": "put together", "sum": "added up", "mean": "averaged", "same": "the same in all parts"}
    inputs = [item.path + (f" (dimension {item.dim})" if item.dim else "") for item in batch.inputs]
    made: dict[str, list[str]] = {}
    for one in batch.outputs:
        how = f"weighted by {one.weights}" if one.how == "weighted" else words[one.how]
        made.setdefault(how, []).append(one.path or "the output")
    outputs = "; ".join(f"{', '.join(paths[:4])}{', …' if len(paths) > 4 else ''} {how}" for how, paths in made.items())
    return f"{batch.size} rows of {', '.join(inputs)} can be divided: {outputs}"


def print_axes(
    console: Console, profile: Profile, found: AxisGroups, *,
    batch: BatchAxis | str = "", title: str = "", notes: Iterable[str] = (),
) -> None:  # fmt: skip
    """Print what can be cut, block by block, and what can't, with the op and the module that are against it.

    `batch`: how the batch can be divided, or why it can't.
    """
    print_heading(console, title, profile)
    if batch:
        print_section(console, "The batch")
        print_item(console, *((batch, "") if isinstance(batch, str) else (batch_in_words(batch), batch.proof)))
    for block in axis_rows(profile, found):
        many = f"{block.count} x, " if block.count > 1 else ""
        each = " each" if block.count > 1 else ""
        print_section(console, block.label, f"{many}{format_bytes(block.matrix_bytes)} of matrices{each}")
        for row in block.rows:
            print_item(console, f"{'or ' if row.instead else ''}{row.slices}: {row.members}", row.cost)
        if not block.rows:
            console.print(Text(f"{INDENT}nothing can be cut", style="bright_black"), soft_wrap=True)
    unshardable = unshardable_rows(profile, found)
    if unshardable:
        print_section(console, "Can't be cut")
        for what, reason in unshardable[:MOST_BLOCKED]:
            print_item(console, what, reason)
        print_left_off(console, len(unshardable) - MOST_BLOCKED, "reasons", "--json lists all")
    print_sentences(console, "Notes", [*profile.graph.notes, *notes])


def axes_document(
    profile: Profile, found: AxisGroups, *, batch: BatchAxis | str = "", title: str = "", notes: Iterable[str] = ()
) -> dict[str, Any]:
    """Return groups and what can't be cut as plain data; names are relative to blocks. `batch`: as for `print_axes`."""
    ndims = {tensor.name: len(tensor.shape) for tensor in profile.graph.tensors}
    return {
        "format": "autoshard axes report",
        "version": VERSION,
        "model": {"title": title, "class": profile.modules[0].class_name, "fingerprint": profile.graph.fingerprint},
        "batch": {"refused": batch} if isinstance(batch, str) else asdict(batch),
        "blocks": [
            {"paths": list(region.paths), "matrix_bytes": _matrix_bytes(profile, found, region.paths[0])}
            for region in found.regions
        ],
        "groups": [
            {
                **{name: getattr(group, name) for name in GROUP_FIELDS},
                "text": ": ".join(_in_words(group, ndims)),
                "shards": [asdict(shard) for shard in group.shards],
                "actions": [asdict(action) for action in group.actions],
                "all_reduces": group.reductions,
                "all_gathers": group.gathers,
            }
            for group in found.groups
        ],
        "blocked": [asdict(row) for row in found.unshardable],
        "notes": [*profile.graph.notes, *notes],
    }


def _collectives(group: AxisGroup) -> str:
    parts = []
    added = sum(action.gathered for action in group.actions)
    for count, name, nbytes in (
        (group.reductions, "all-reduce", group.reduced_bytes),
        (group.gathers - added, "all-gather", group.gathered_bytes),
        (added, "gathered sum", group.added_bytes),
    ):
        if count == 1:
            parts.append(f"one {name} of {format_bytes(nbytes)}")
        elif count:
            parts.append(f"{count} {name}s, {format_bytes(nbytes)} in all")
    return " and ".join(parts) or "nothing to send"


def _matrix_bytes(profile: Profile, found: AxisGroups, path: str) -> int:
    """Bytes of the matrices of a block; of the block "", of what is in no other."""
    others = tuple(f"{other}." for region in found.regions for other in region.paths if other)
    sizes: dict[int, int] = {}
    for tensor in profile.graph.tensors:
        inside = tensor.name.startswith(f"{path}.") if path else not tensor.name.startswith(others)
        if inside and tensor.kind == "parameter" and len(tensor.shape) > 1:
            sizes.setdefault(tensor.storage, tensor.nbytes)
    return sum(sizes.values())
