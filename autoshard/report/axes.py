"""What can be cut over devices, in words made of parameter paths and sizes, once for blocks that are alike."""

import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.profile.profile import Profile
from autoshard.report.layout import INDENT, print_left_off, print_section, print_sentences
from autoshard.report.terminal import print_heading
from autoshard.sizes import format_bytes

VERSION = 1
MOST_BLOCKED = 24
_NUMBERS = re.compile(r"(?<![^.])\d+(?![^.])")


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
        groups = sorted((g for g in found.groups if g.blocks == region.paths), key=lambda g: (-g.nbytes, g.index))
        size = _matrix_bytes(profile, found, region.paths[0])
        if not size:
            continue
        rows: list[AxisRow] = []
        taken: set[int] = set()
        for group in groups:
            instead = not taken.isdisjoint(group.conflicts)
            if not instead:
                taken.add(group.index)
            path = f"{region.paths[0]}." if region.paths[0] else ""
            cut = [(s.name, s.dim, ndims.get(path + s.name, 1), _is_part(s.axis)) for s in group.shards]
            outer = min(_outer(shard.axis) for shard in group.shards)
            rows.append(
                AxisRow(
                    slices=f"{group.size} slices" + (f" in each of {outer}" if outer > 1 else ""),
                    members=_after("", *members(cut)),
                    cost=f"{100 * group.nbytes / size:.0f} % of the bytes; {_collectives(group)}",
                    instead=instead,
                    group=group,
                )
            )
        label = fold_paths(region.paths) if region.paths != ("",) else "outside of repeated blocks"
        blocks.append(BlockRows(label=label, count=len(region.paths), matrix_bytes=size, rows=tuple(rows)))
    return blocks


def blocked_rows(profile: Profile, found: AxisGroups) -> list[tuple[str, str]]:
    """What can't be cut, and what stands against it; first the matrices of which nothing can be cut.

    Dimensions after the second (the window of a convolution) are named only where nothing else can be cut.
    """
    ndims = {tensor.name: len(tensor.shape) for tensor in profile.graph.tensors}
    owner = {region.paths[0]: region.paths for region in found.regions}
    cut = {f"{group.blocks[0]}.{s.name}".removeprefix(".") for group in found.groups for s in group.shards}
    reasons: dict[tuple[bool, str, str], list[tuple[str, int, int, bool]]] = {}
    for row in found.blocked:
        if row.dim > 1 and row.name in cut:
            continue
        block = max((path for path in owner if not path or row.name.startswith(f"{path}.")), key=len, default="")
        inside = row.name[len(block) + 1 :] if block else row.name
        reasons.setdefault((row.name in cut, block, row.reason), []).append((inside, row.dim, ndims[row.name], False))
    lines = []
    for (elsewhere, block, reason), cuts in sorted(reasons.items(), key=lambda item: item[0][0]):
        label = fold_paths(owner.get(block, (block,))) if block else ""
        what = _after(label, *members(cuts))
        if block:
            reason = reason.replace(f"{block}.", f"{label}.")
        lines.append((what if elsewhere else f"{what} (whole on every device)", reason))
    return lines


def print_axes(
    console: Console, profile: Profile, found: AxisGroups, *, title: str = "", notes: Iterable[str] = ()
) -> None:
    """Print what can be cut, block by block, and what can't, with the op and the module that are against it."""
    print_heading(console, title, profile)
    for block in axis_rows(profile, found):
        many = f"{block.count} x, " if block.count > 1 else ""
        each = " each" if block.count > 1 else ""
        print_section(console, block.label, f"{many}{format_bytes(block.matrix_bytes)} of matrices{each}")
        for row in block.rows:
            _print_item(console, f"{'or ' if row.instead else ''}{row.slices}: {row.members}", row.cost)
        if not block.rows:
            console.print(Text(f"{INDENT}nothing can be cut", style="bright_black"), soft_wrap=True)
    blocked = blocked_rows(profile, found)
    if blocked:
        print_section(console, "Can't be cut")
        for what, reason in blocked[:MOST_BLOCKED]:
            _print_item(console, what, reason)
        print_left_off(console, len(blocked) - MOST_BLOCKED, "reasons", "--json lists all")
    print_sentences(console, "Notes", [*profile.graph.notes, *notes])


def axes_document(profile: Profile, found: AxisGroups, *, title: str = "", notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return the groups and what is blocked as plain data; names are relative to the blocks."""
    words = {
        row.group.index: f"{row.slices}: {row.members}" for block in axis_rows(profile, found) for row in block.rows
    }
    return {
        "format": "autoshard axes report",
        "version": VERSION,
        "model": {"title": title, "class": profile.modules[0].class_name, "fingerprint": profile.graph.fingerprint},
        "blocks": [
            {"paths": list(region.paths), "matrix_bytes": _matrix_bytes(profile, found, region.paths[0])}
            for region in found.regions
        ],
        "groups": [
            {
                "index": group.index,
                "text": words.get(group.index, ""),
                "blocks": list(group.blocks),
                "size": group.size,
                "shards": [asdict(shard) for shard in group.shards],
                "actions": [asdict(action) for action in group.actions],
                "summed": list(group.summed),
                "nbytes": group.nbytes,
                "flops": group.flops,
                "all_reduces": group.reductions,
                "all_gathers": group.gathers,
                "reduced_bytes": group.reduced_bytes,
                "gathered_bytes": group.gathered_bytes,
                "conflicts": list(group.conflicts),
            }
            for group in found.groups
        ],
        "blocked": [{"name": row.name, "dim": row.dim, "reason": row.reason} for row in found.blocked],
        "notes": [*profile.graph.notes, *notes],
    }


def members(cut: Sequence[tuple[str, int, int, bool]]) -> tuple[str, str]:
    """Say in which module which dimensions are cut: (parameter, dimension, how many it has, whether only a part of it).

    Vectors go with the matrices beside them and are named only where there are none.
    """
    if any(ndim > 1 for _, _, ndim, _ in cut):
        cut = [row for row in cut if row[2] > 1]
    named: dict[str, list[str]] = {}
    for name, dim, ndim, part in cut:
        word = {0: "rows", 1: "columns"}[dim] if ndim == 2 else "entries" if ndim < 2 else f"dimension {dim}"
        label = name.removesuffix(".weight")
        named.setdefault(f"a part of the {word} of" if part else word, []).append(label)
    labels = [label for found in named.values() for label in found]
    above = labels[0].split(".")[:-1]
    for label in labels:
        parts = label.split(".")[:-1]
        while parts[: len(above)] != above:
            above.pop()
    prefix = "".join(f"{part}." for part in above)
    texts = []
    for word, found in named.items():
        folded = ", ".join(fold([label.removeprefix(prefix) for label in found]))
        texts.append(f"{word} {folded}" if word.startswith("a part") else f"{folded} {word}")
    return prefix[:-1], "; ".join(texts)


def _after(block: str, module: str, text: str) -> str:
    where = ".".join(part for part in (block, module) if part)
    return f"{where}: {text}" if where else text


def fold_paths(paths: Sequence[str]) -> str:
    """ "layers.0", "layers.1", "layers.2"   ->   "layers.0-2"; the first few of what can't be folded."""
    found = fold(paths)
    return ", ".join(found) if len(found) < 4 else f"{', '.join(found[:3])} and {len(found) - 3} more"


def fold(paths: Sequence[str]) -> list[str]:
    """Join paths that differ in one number only; the order of the first of each is kept."""
    made = list(dict.fromkeys(paths))
    most = max((len(_NUMBERS.findall(path)) for path in made), default=0)
    for position in reversed(range(most)):
        groups: dict[tuple[str, str] | str, list[int]] = {}
        for path in made:
            numbers = list(_NUMBERS.finditer(path))
            if position < len(numbers):
                at = numbers[position]
                groups.setdefault((path[: at.start()], path[at.end() :]), []).append(int(at[0]))
            else:
                groups[path] = []
        made = [key if isinstance(key, str) else f"{key[0]}{_runs(found)}{key[1]}" for key, found in groups.items()]
    return made


def _runs(numbers: list[int]) -> str:
    """0, 1, 2, 5 -> "{0-2,5}"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return texts[0] if len(texts) == 1 else f"{{{','.join(texts)}}}"


def _collectives(group: AxisGroup) -> str:
    parts = []
    for count, name, nbytes in (
        (group.reductions, "all-reduce", group.reduced_bytes), (group.gathers, "all-gather", group.gathered_bytes),
    ):  # fmt: skip
        if count == 1:
            parts.append(f"one {name} of {format_bytes(nbytes)}")
        elif count:
            parts.append(f"{count} {name}s, {format_bytes(nbytes)} in all")
    return " and ".join(parts) or "nothing to send"


def _outer(axis: str) -> int:
    """How many times the slices follow one another along an axis: 8 for "8x*4x64"."""
    before = re.match(r"(\d+)x\*", axis)
    return int(before[1]) if before else 1


def _is_part(axis: str) -> bool:
    """Whether an axis has a part that every rank keeps."""
    return any("*" not in part for part in re.split(r"[|]", axis)) if "|" in axis else False


def _matrix_bytes(profile: Profile, found: AxisGroups, path: str) -> int:
    """Bytes of the matrices of a block; of the block "", of what is in no other."""
    others = tuple(f"{other}." for region in found.regions for other in region.paths if other)
    sizes: dict[int, int] = {}
    for tensor in profile.graph.tensors:
        inside = tensor.name.startswith(f"{path}.") if path else not tensor.name.startswith(others)
        if inside and tensor.kind == "parameter" and len(tensor.shape) > 1:
            sizes.setdefault(tensor.storage, tensor.nbytes)
    return sum(sizes.values())


def _print_item(console: Console, text: str, remark: str) -> None:
    width = max(console.width - 2 * len(INDENT), 20)
    for i, line in enumerate(textwrap.wrap(text, width, break_long_words=False)):
        console.print(Text(f"{INDENT * (1 if i == 0 else 2)}{line}"), soft_wrap=True)
    for line in textwrap.wrap(remark, width, break_long_words=False):
        console.print(Text(f"{INDENT * 2}{line}", style="bright_black"), soft_wrap=True)
