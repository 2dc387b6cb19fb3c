"""Cuts in a plan file: read strictly, so that a damaged file is refused and not carried out; and what stays whole."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from autoshard.common.module_paths import join
from autoshard.errors import PlanError
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import Cut, Results

LONGEST_DIMENSION = 2**27
"""An axis of a damaged plan must not make the runtime list billions of indices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Parameters that every rank has whole, in each of `blocks` alike (`names` are relative to them), and why."""

    blocks: tuple[str, ...]
    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why something that could be cut by its axes is not."""

    reason: str


def read_cuts(data: Any, ranks: int) -> tuple[Cut, ...]:
    """Check and build the cuts of a plan for so many ranks. Raises `PlanError`."""
    cuts: tuple[Cut, ...] = _read(tuple[Cut, ...], data, "cuts")
    seen: set[str] = set()
    for index, cut in enumerate(cuts):
        where = f"cuts[{index}]"
        expect(len(set(cut.blocks)) == len(cut.blocks) > 0, f"{where}.blocks", "different module paths", cut.blocks)
        expect(cut.size > 1, f"{where}.size", "more than one slice", cut.size)
        good = len(cut.shares) == ranks and all(share > 0 for share in cut.shares) and sum(cut.shares) == cut.size
        expect(good, f"{where}.shares", f"{ranks} positive shares of {cut.size} slices", cut.shares)
        tokens = any(action.kind in ("divide", "collect", "join") for action in cut.actions)
        expect(len(cut.shards) > 0 or tokens, f"{where}.shards", "what is cut", cut.shards)
        names = [join(block, shard.name) for block in cut.blocks for shard in cut.shards]
        twice = sorted(seen.intersection(names)) or sorted({name for name in names if names.count(name) > 1})
        expect(not twice, f"{where}.shards", "tensors that nothing else cuts", twice[:1])
        seen.update(names)
        for shard in cut.shards:
            expect(shard.dim >= 0, f"{where}.shards", "a dimension from 0", shard.dim)
        for text in [shard.axis for shard in cut.shards] + [action.axis for action in cut.actions if action.axis]:
            expect(is_axis(text, cut.size), f"{where}.axis", f"an axis with *{cut.size} in it", text)
        for scale in cut.scales:
            expect(len(scale.local) == ranks, f"{where}.scales", f"{ranks} numbers", scale.local)
    return cuts


def read_whole(data: Any) -> tuple[Whole, ...]:
    """Check and build what a plan leaves whole. Raises `PlanError`."""
    return _read(tuple[Whole, ...], data, "whole")


def read_results(data: Any, cuts: Sequence[Cut]) -> tuple[Results, ...]:
    """Check and build what modules gave when a plan with these cuts was made. Raises `PlanError`."""
    results: tuple[Results, ...] = _read(tuple[Results, ...], data, "results")
    for part in [part for row in results for part in row.parts]:
        expect(part.dim >= 0, "results.parts", "a dimension from 0", part.dim)
        expect(0 <= part.cut < len(cuts), "results.parts", "one of the cuts", part.cut)
        size = cuts[part.cut].size
        expect(is_axis(part.axis, size), "results.parts", f"an axis with *{size} in it", part.axis)
    return results


def read_mesh(data: Any, kind: type, devices: int) -> Any:
    """Check and build the mesh of a plan, a `kind`, over so many devices; None for none. Raises `PlanError`."""
    if data is None:
        return None
    if isinstance(data, Mapping) and "data" in data:  # as version 1 of the format had it
        old = dict(data)
        sharded = old.pop("sharded", False)
        names = {"data": "fsdp" if sharded else "dp", "pipeline": "pp", "tensor": "tp"}
        data = {names.get(key, key): value for key, value in old.items()}
    mesh = _read(kind, data, "mesh")
    sizes = tuple(mesh.degrees.values())
    expect(min(sizes) >= 1 and mesh.size == devices, "mesh", f"degrees with a product of {devices}", sizes)
    good = len(mesh.shares) in (0, mesh.data) and all(share > 0 for share in mesh.shares)
    expect(good, "mesh.shares", f"{mesh.data} positive numbers", mesh.shares)
    return mesh


_LEFT = ("attributes", "kept", "tracked", "cached")


def read_batch(data: Any) -> BatchAxis | None:
    """Check and build how the batch of a plan is divided; None for none. Raises `PlanError`."""
    if data is None:
        return None
    if isinstance(data, Mapping):  # earlier plans also list what forwards leave in attributes of modules
        expect(not data.get("attributes"), "batch.attributes", "none: plan again", data.get("attributes"))
        data = {name: value for name, value in data.items() if name not in _LEFT}
    batch: BatchAxis = _read(BatchAxis, data, "batch")
    expect(batch.size >= 1, "batch.size", "a number of rows", batch.size)
    expect(len(batch.inputs) > 0, "batch.inputs", "what is divided", batch.inputs)
    texts = [one.axis for one in batch.inputs] + [one.axis for one in batch.outputs if one.how == "cat"]
    for text in texts:
        expect(is_axis(text, batch.size), "batch.axis", f"an axis with *{batch.size} in it", text)
    dims = [one.dim for one in batch.inputs] + [one.dim for one in batch.outputs]
    expect(min(dims) >= 0, "batch.dim", "a dimension from 0", min(dims))
    return batch


def read_stages(
    data: Any, kind: type, placements: Mapping[str, str], pipeline: int, sharded: bool = False
) -> tuple[Any, ...]:
    """Check and build the stages of a plan, each a `kind`; together they have what is placed. Raises `PlanError`.

    `sharded`: they are modules that are gathered as one, and what lies outside of them is not among them.
    """
    stages = _read(tuple[kind, ...], data, "stages")  # type: ignore[valid-type]
    if not stages:
        return ()
    paths = [path for stage in stages for path in stage.paths]
    expect(len(set(paths)) == len(paths), "stages", "different paths", paths)
    if sharded and pipeline == 1:
        return tuple(stages)
    expect(set(paths) == set(placements), "stages", "the paths of the placements", sorted(set(paths) ^ set(placements)))
    expect(len(stages) % pipeline == 0, "stages", f"a multiple of {pipeline} stages", len(stages))
    return tuple(stages)


def is_axis(text: str, size: int) -> bool:
    """Whether a text describes an axis (see `sharding`) that has factors *size, and at most one in every product."""
    tokens = re.findall(r"\d+|[*x()|]", text)
    if "".join(tokens) != text or tokens.count("*") == 0 or tokens.count("(") > 100:
        return False
    tokens.reverse()
    try:
        stars, length = _product(tokens, size)
        return stars == 1 and not tokens and length <= LONGEST_DIMENSION
    except (ValueError, IndexError):
        return False


def _product(tokens: list[str], size: int) -> tuple[int, int]:
    """Read a product: how many of its factors have a star in them, and its length. Raises ValueError for two stars."""
    stars, length = 0, 1
    while True:
        token = tokens.pop()
        if token == "(":
            parts = [_product(tokens, size)]
            while tokens[-1] == "|":
                tokens.pop()
                parts.append(_product(tokens, size))
            if tokens.pop() != ")":
                raise ValueError
            stars += any(starred for starred, _ in parts)
            length *= sum(part for _, part in parts)
        else:
            number = int(tokens.pop() if token == "*" else token)
            if number < 1 or (token == "*" and number != size):
                raise ValueError
            stars += token == "*"
            length *= number
        if stars > 1:
            raise ValueError
        if not tokens or tokens[-1] != "x":
            return stars, length
        tokens.pop()


def expect(good: bool, name: str, wanted: str, found: Any) -> None:
    """Raise `PlanError` with what a field of a plan file should be, unless it is."""
    if not good:
        text = repr(found)
        text = text if len(text) <= 60 else text[:57] + "..."
        raise PlanError(f"this plan is damaged: {name} should be {wanted}, found {text}. Make the plan again.")


def _read(kind: Any, data: Any, name: str) -> Any:
    """Build a value of an annotated type from JSON. Fields that have a default may be missing; nothing is converted."""
    if get_origin(kind) is tuple:
        expect(isinstance(data, Sequence) and not isinstance(data, str), name, "a list", data)
        return tuple(_read(get_args(kind)[0], item, f"{name}[{index}]") for index, item in enumerate(data))
    if get_origin(kind) is Literal:
        expect(isinstance(data, str) and data in get_args(kind), name, f"one of {', '.join(get_args(kind))}", data)
        return data
    if is_dataclass(kind):
        assert isinstance(kind, type) and not isinstance(kind, UnionType)
        expect(isinstance(data, Mapping), name, "an object", data)
        known = {field.name: field for field in fields(kind)}
        missing = [key for key, field in known.items() if field.default is MISSING and key not in data]
        expect(not missing, name, f"an object with {', '.join(known)}", data)
        expect(set(data) <= set(known), name, f"an object with {', '.join(known)} only", sorted(set(data) - set(known)))
        types = get_type_hints(kind)
        return kind(**{key: _read(types[key], value, f"{name}.{key}") for key, value in data.items()})
    wanted = {str: "a string", int: "an integer", bool: "true or false"}[kind]
    expect(isinstance(data, kind) and isinstance(data, bool) == (kind is bool), name, wanted, data)
    return data
