"""The `tp_plan` dict of Transformers: module path -> style, "*" for the numbers of layers. Written here, and read.

colwise            weight [out, in] cut along out             the inputs of the next module are cut
colwise_gather_output                                         the parts are put together behind it
rowwise            cut along in                               summed behind it
packed_colwise     out is two equal parts, each cut
embedding_rowwise  rows of a table                            summed behind it
embedding_colwise  columns of a table                         put together behind it
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.common.module_paths import above, join, parent
from autoshard.errors import PlanError
from autoshard.plan.sharding import LOSSES, Cut, Shard, Whole

COLUMNS = frozenset({"colwise", "colwise_rep", "colwise_gather_output", "packed_colwise"})
ROWS = frozenset({"rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise"})
TABLES = {"embedding_rowwise": 0, "embedding_colwise": 1}
UNCUT = frozenset({"all_reduce", "local_params", "mla_kv_a_proj", "moe_identity_expert", "moe_tp_experts", "replicate",
                   "replicated_with_grad_allreduce", "sequence_parallel"})  # fmt: skip
"""Styles that cut no parameter: how its runtime passes tensors on, which ours works out for itself."""


def cut_dim(style: str, dims: int) -> int | None:
    """Return the dimension of a parameter with `dims` dimensions that a style cuts, None if it cuts none.

    Of a stack of matrices (`dims` 3) it is that of each matrix. Raises `PlanError` for an unknown style.
    """
    if style in TABLES:
        return TABLES[style]
    if style in COLUMNS:
        return max(dims - 2, 0)
    if style in ROWS:
        return dims - 1 if dims > 1 else None
    if style in UNCUT:
        return None
    known = ", ".join(sorted({*COLUMNS, *ROWS, *TABLES, *UNCUT}))
    raise PlanError(f"the tp_plan has the style {style!r}, which is not known here. Known are {known}.")


def pattern_of(path: str) -> str:
    """A module path with its numbers replaced: "layers.3.mlp" -> "layers.*.mlp"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", path)


def matches(pattern: str, path: str) -> bool:
    """Whether a key of a tp_plan is for a module or parameter path."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), path) is not None


def write_tp_plan(cuts: Sequence[Cut], left_whole: Sequence[Whole]) -> dict[str, str]:
    """Say the cuts of a plan as a `tp_plan`. Raises `PlanError`, naming the block, where they can't be said in it."""
    if not cuts:
        raise PlanError(
            "this plan cuts no parameters, so it has no tp_plan. "
            'Plan with strategy="column-parallel", or use plan.device_map.'
        )
    styles: dict[str, str] = {}
    paths: set[str] = set()
    for cut in cuts:
        for path, style in _styles(cut).items():
            for block in cut.blocks:
                whole = join(block, path)
                pattern = pattern_of(whole)
                if styles.setdefault(pattern, style) != style:
                    raise _unsayable(cut, f"{pattern} is {styles[pattern]} in one layer and {style} in another")
                paths.add(whole)
    for row in left_whole:
        for name in (join(block, name) for block in row.blocks for name in row.names):
            pattern = pattern_of(parent(name))
            if pattern in styles and parent(name) not in paths:
                raise PlanError(
                    f"this plan can't be said as a tp_plan: {pattern} is cut in some layers, and {parent(name)} is "
                    "left whole. Use autoshard.apply(model, plan)."
                )
    return styles


def _styles(cut: Cut) -> dict[str, str]:
    """Module path within the block -> style, of one cut. Logits that its loss reads in parts are gathered there."""
    said = (action for action in cut.actions if action.kind not in LOSSES)
    cut = replace(cut, actions=tuple(replace(one, kind="gather") if one.kind == "spread" else one for one in said))
    if len(set(cut.shares)) > 1:
        raise _unsayable(cut, f"its shares differ ({', '.join(map(str, cut.shares))}), and a tp_plan cuts evenly")
    if cut.scales:
        scale = cut.scales[0]
        raise _unsayable(cut, f"{scale.attribute} of {scale.module or 'the block'} must be smaller on each rank")
    found: dict[str, str] = {}
    for shard in cut.shards:
        module, _, name = shard.name.rpartition(".")
        style = _style(cut, shard, module)
        if style is None:
            raise _unsayable(cut, f"{shard.name} is cut along dimension {shard.dim} as {shard.axis}")
        if name != "bias" and found.setdefault(module, style) != style:
            raise _unsayable(cut, f"parameters of {module} are cut in two ways")
    kinds = {"reduce", "gather", "lookup", "copy_to"}
    for action in cut.actions:
        if action.kind not in kinds or (action.kind != "copy_to" and action.module not in found):
            raise _unsayable(cut, f"it takes a {action.kind} at {action.module or 'the block'}")
    return found


def _style(cut: Cut, shard: Shard, module: str) -> str | None:
    """The style that cuts a tensor in this way, None if there is none."""
    here = [action for action in cut.actions if action.module == module]
    kinds = {action.kind for action in here}
    if any(action.function not in ("", "linear", "embedding") for action in here):
        return None
    halves = re.fullmatch(r"\((\*\d+(?:x\d+)*)\|(\*\d+(?:x\d+)*)\)", shard.axis)
    if halves and halves[1] == halves[2] and shard.dim == 0 and not kinds & {"reduce", "gather", "lookup"}:
        return "packed_colwise"
    if not re.fullmatch(r"\*\d+(?:x\d+)*", shard.axis):  # a rank's part must be one piece
        return None
    if shard.name.endswith("bias"):
        return "colwise" if shard.dim == 0 else None
    looked_up = any(action.function == "embedding" for action in here)
    if "lookup" in kinds:
        return "embedding_rowwise" if shard.dim == 0 else None
    if "reduce" in kinds:
        return "rowwise" if shard.dim == 1 else None
    if "gather" in kinds and (looked_up or shard.dim == 1):
        return "embedding_colwise" if shard.dim == 1 else None
    if shard.dim != 0:
        return None
    gathered = [action.dim for action in here if action.kind == "gather"]
    if 1 in gathered:  # the channels of a convolution, for which there is no style
        return None
    return "colwise_gather_output" if gathered else "colwise"


def _unsayable(cut: Cut, why: str) -> PlanError:
    where = cut.blocks[0] or "the model itself"
    return PlanError(
        f"this plan can't be said as a tp_plan: in {where}, {why}. Use autoshard.apply(model, plan), which can do more."
    )


def wanted_dims(tp_plan: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Return parameter name -> the dimension that a `tp_plan` cuts. `shapes`: of all parameters and buffers.

    Raises `PlanError` for keys that no module or parameter has, and for styles that are not known.
    """
    wanted: dict[str, int] = {}
    for key, style in tp_plan.items():
        if not isinstance(key, str) or not isinstance(style, str):
            raise PlanError(f"a tp_plan is a dict such as {{'layers.*.mlp.up': 'colwise'}}, found {key!r}: {style!r}.")
        names = [name for name in shapes if matches(key, name) or matches(key, parent(name))]
        within = [name for name in shapes if any(matches(key, path) for path in (name, *filter(None, above(name))))]
        if not within:
            raise PlanError(f"the tp_plan names {key!r}, and no module or parameter of this model matches it.")
        for name in names:
            dim = cut_dim(style, len(shapes[name]))
            if dim is not None and not (len(shapes[name]) == 1 and style in TABLES):
                wanted[name] = dim
        if not names:
            cut_dim(style, 2)  # a style that is not known
    return wanted
