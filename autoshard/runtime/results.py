"""What modules of a cut model give: a tensor that no check saw may be a rank's own part, and is not handed out.

    recorded when the plan was made          as it is
    another one (maps of attention, say)     the same on all ranks: as it is, and from then on      else ApplyError

Ranks compare hashes, once for each place: values made by the same work on the same numbers have the same bits. Blocks
and the root are looked at; modules between them, where what one of them hands to the next is cut, can't be called by
themselves, nor can layers inside of blocks that are cut. In a pipeline, those compare that have the stage.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.common.module_paths import above, join, parent
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import tensors_in
from autoshard.plan.sharding import Cut, Results, result_of
from autoshard.runtime.collectives import ProcessRanks, Ranks
from autoshard.runtime.cut_state import CutRecord
from autoshard.runtime.rank_tensor import RankTensor

_ON_TOKENS = frozenset({"scatter", "context", "spread_tokens"})
"""Kinds of actions that only blocks with divided tokens have."""
_as_array = torch.Tensor.numpy  # another may stand there while a module of a pipeline is watched


def watch_results(
    model: nn.Module, record: CutRecord, results: Sequence[Results], *, staged: bool = False
) -> list[Any]:
    """Look at what blocks and the root give; returns handles. Raises `PlanError` for modules that the model lacks.

    `staged`: a schedule calls the layers of a stage, and nobody else can.
    """
    cuts, ranks = record.cuts, record.ranks
    modules = dict(model.named_modules(remove_duplicate=False))
    for path in (path for row in results for path in row.modules if path not in modules):
        raise PlanError(f"the plan knows what {path!r} gives, which this {type(model).__name__} does not have.")
    blocks = {block for cut in cuts for block in cut.blocks}
    running: set[int] = set()
    handles: list[Any] = []
    for row in results:
        for path in row.modules:
            if not path or path in blocks:
                handles.append(modules[path].register_forward_hook(KnownResults(set(row.tensors), ranks, path)))
            elif row.parts:
                handles.append(modules[path].register_forward_hook(partial(_refuse_alone, path, running, False)))
    if any(row.parts for row in results):
        handles += _follow([model], running)
    divided = [] if staged else _with_divided_tokens(cuts)
    around: set[int] = set()
    handles += [modules[path].register_forward_hook(partial(_refuse_alone, path, around, True)) for path in divided]
    outer = sorted({up for path in divided for up in above(path)})
    handles += _follow([modules[path] for path in outer], around)
    return handles if staged else handles + _watch_layers(modules, cuts, record.running)


def modules_with_parts(model: nn.Module, cuts: Sequence[Cut]) -> dict[str, nn.Module]:
    """The modules, by path, that are given, or give, a rank's part of a tensor: of its columns, or of its tokens."""
    blocks = {block for cut in cuts for block in cut.blocks if any(one.kind in _ON_TOKENS for one in cut.actions)}
    paths = _layers_with_parts(cuts) | set(_with_divided_tokens(cuts))
    return {
        path: module
        for path, module in model.named_modules(remove_duplicate=False)
        if path in paths or not blocks.isdisjoint(above(path))
    }


def _layers_with_parts(cuts: Sequence[Cut]) -> set[str]:
    return {join(block, path) for cut in cuts for block in cut.blocks for path in cut.with_parts}


def _watch_layers(modules: Mapping[str, nn.Module], cuts: Sequence[Cut], running: set[int]) -> list[Any]:
    """Refuse calls of cut layers that give or need parts while neither their block nor a module around it runs."""
    cut_ones = {join(block, parent(shard.name)) for cut in cuts for block in cut.blocks for shard in cut.shards}
    layers = sorted(_layers_with_parts(cuts) & cut_ones)
    blocks = {block for cut in cuts if cut.with_parts for block in cut.blocks}
    outside = {up for path in layers for up in above(path)} if "" in blocks else set()
    tops = {"", *blocks, *(up for block in blocks for up in above(block)), *outside.difference(layers)}
    hooks = [modules[path].register_forward_pre_hook(partial(_refuse_alone, path, running, False)) for path in layers]
    return hooks + _follow([modules[path] for path in sorted(tops)], running)


def _with_divided_tokens(cuts: Sequence[Cut]) -> list[str]:
    """Blocks that are given, or give, a rank's part of the tokens while the model is trained."""
    ends: dict[str, set[str]] = {"divide": set(), "join": set()}
    found: set[str] = set()
    for cut in cuts:
        kinds = {action.kind for action in cut.actions}
        for kind in kinds & ends.keys():
            ends[kind] |= set(cut.blocks)
        if kinds & _ON_TOKENS:
            found |= set(cut.blocks)
    return sorted(found - {""} - (ends["divide"] & ends["join"]))


def parts_of_tokens(cuts: Sequence[Cut]) -> dict[str, tuple[str, int, int]]:
    """Blocks that give each rank some tokens while gradients are enabled: where, along which dimension, of how many."""
    joins = {cut.blocks[0]: one for cut in cuts for one in cut.actions if one.kind == "join"}
    found: dict[str, tuple[str, int, int]] = {}
    for cut in cuts:
        join = next((joins[block] for block in cut.blocks if block in joins), None)
        if join is not None and any(action.kind == "scatter" for action in cut.actions):
            found.update((block, (join.argument, join.dim, cut.degree)) for block in cut.blocks if block not in joins)
    return found


def _follow(modules: Sequence[nn.Module], running: set[int]) -> list[Any]:
    """Keep the ids of those of some modules that run: what others in them hand to each other may be a rank's part."""
    handles = [module.register_forward_pre_hook(partial(_note, running, True)) for module in modules]
    return handles + [
        module.register_forward_hook(partial(_note, running, False), always_call=True) for module in modules
    ]


def _note(running: set[int], runs: bool, module: nn.Module, args: tuple, result: Any = None) -> None:
    """Pre-hook of such a module, and hook, also after an exception."""
    (running.add if runs else running.discard)(id(module))


def _refuse_alone(
    path: str, running: set[int], only_trained: bool, module: nn.Module, args: tuple, result: Any = None
) -> None:  # fmt: skip
    """Hook, or pre-hook, of a module that works on parts while others run: it can't be called by itself.

    `only_trained`: it gives parts while gradients are enabled. What is run again in a backward may be a part of it.
    """
    if running or torch.compiler.is_compiling() or (only_trained and not torch.is_grad_enabled()):
        return
    if torch_private.autograd_node() is None:
        raise ApplyError(
            f"{path} was called by itself, and gives each rank a part, or needs one: the rest of the model works on "
            'parts. Call the whole model, or place whole modules (strategy="balanced").'
        )


@dataclass(slots=True, eq=False)
class KnownResults:
    """Hook of a block, or of the root: refuse what a rank may have only a part of.

    `known`: what it gave when the plan was made, and what was the same on all ranks since, as `result_of` has it.
    """

    known: set[str]
    ranks: Ranks
    path: str

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        if isinstance(result, torch.Tensor) and result_of("", result.dim()) in self.known:
            return
        new = dict(self._new(result))
        if not new:
            return
        where = self.path or type(module).__name__
        if torch.compiler.is_compiling():
            raise ApplyError(
                f"{where} gives a tensor at {next(iter(new))!r} that the plan does not know. Call the model once "
                "like this before it is compiled, so that ranks can compare what they have."
            )
        with torch_private.no_modes():
            differing = _differing(list(new.values()), self.ranks)
        for (path, tensor), differs in zip(new.items(), differing, strict=True):
            if differs:
                raise ApplyError(
                    f"{where} gives a tensor of shape {list(tensor.shape)} at {path or 'its result'!r} that the "
                    "plan does not know, and each rank has a part of it, or may have: the plan was made for inputs "
                    "that do not ask for it. Plan again with inputs like these, or do not ask for it."
                )
        self.known.update(result_of(path, tensor.dim()) for path, tensor in new.items())

    def _new(self, result: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What of a result is not known yet."""
        for path, tensor in tensors_in(result):
            if result_of(path, tensor.dim()) not in self.known:
                yield path, tensor


def _differing(tensors: list[torch.Tensor], ranks: Ranks) -> list[bool]:
    """For each tensor, whether ranks have other values than the first, or it can't be told: all are one number."""
    if isinstance(ranks, ProcessRanks):
        fingerprints = ranks.exchange([_fingerprint(tensor) for tensor in tensors])
    else:
        parts = [tensor.parts if isinstance(tensor, RankTensor) else (tensor,) * ranks.size for tensor in tensors]
        fingerprints = [[_fingerprint(own) for own in of_rank] for of_rank in zip(*parts, strict=True)]
    return [len(set(found)) > 1 or found[0] is None for found in zip(*fingerprints, strict=True)]


def _fingerprint(tensor: torch.Tensor) -> str | None:
    """A hash of a tensor's values; None for one whose values are all alike: parts of a map of one token are ones."""
    values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if values.is_floating_point() and values.dim() and values.numel() and bool((values == values.flatten()[0]).all()):
        return None
    seen = f"{tuple(values.shape)} {values.dtype}".encode()
    return hashlib.sha256(seen + _as_array(values.flatten().view(torch.uint8)).tobytes()).hexdigest()
