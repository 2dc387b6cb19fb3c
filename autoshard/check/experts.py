"""Find the experts that ranks can divide: modules that are given rows, choices and weights (`runtime.experts`).

    experts(rows [T, width], choices [T, k], weights [T, k])  ->  [T, width]

Which modules are called like that a recorded run tells. How their experts lie in their parameters is tried, and every
layout is compared: the whole module with random values on random rows, against one with the experts of each rank, each
given the choices that fall on them, one by one. Among them are rows that all choose one expert, which a capacity would
drop, and large and small ones. That samples don't meet was checked before, as for all replicas.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.graph import ModelGraph
from autoshard.common.module_paths import is_below, join
from autoshard.errors import PlanError, first_line
from autoshard.nested import tensors_in
from autoshard.plan.sharding import Action, Cut, Scale, Shard, even_shares
from autoshard.profile.experts import Dispatched, dispatched
from autoshard.runtime.experts import choices_of, single_choices
from autoshard.runtime.scales import find_scales, set_scales
from autoshard.runtime.slices import find_cut_tensors, slice_of

_LARGE_ELEMENTS = 1 << 25
"""Of modules with more elements than this, some of the experts are compared."""
_FEW = 4
_DRAWS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RUNS = ((40, 1.0, False), (7, 30.0, False), (7, 1e-2, False), (12, 1.0, True))
"""Rows, how large they are, and whether all choose the same experts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where experts are in the parameters of a module.

    Attributes:
        experts: how many there are. places: (parameter, elements of its first dimension per expert) of all together, or
        members: the parameters of each, where they are modules of their own.
        scales: (module, attribute) of their number.
    """

    experts: int
    places: tuple[tuple[str, int], ...] = ()
    members: tuple[tuple[tuple[str, int], ...], ...] = ()
    scales: tuple[tuple[str, str], ...] = ()

    def cuts(self, blocks: tuple[str, ...], shares: tuple[int, ...], asked: Dispatched) -> list[Cut]:
        """The cuts of modules with this layout over ranks that have so many experts each."""
        star = "" if self.members else "*"
        action = Action(kind="dispatch", module="", argument=" ".join(asked.paths), axis=f"{star}{self.experts}")
        shards = tuple(Shard(name=n, dim=0, axis=f"*{self.experts}x{size}") for n, size in self.places)
        scales = tuple(Scale(module=m, attribute=a, value=self.experts, local=shares) for m, a in self.scales)
        first = Cut(
            blocks=blocks, size=self.experts, shares=shares, shards=shards, actions=(action,), scales=scales,
            training=True, title="experts",
        )  # fmt: skip
        found, begin = [first], 0
        for rank, share in enumerate(shares):
            own = [place for member in self.members[begin : begin + share] for place in member]
            begin += share
            shards = tuple(Shard(name=name, dim=0, axis=f"*1x{size}") for name, size in own)
            if shards:
                alone = tuple(int(other == rank) for other in range(len(shares)))
                found.append(Cut(blocks=blocks, size=1, shares=alone, shards=shards, training=True, title="experts"))
        return found


def find_experts(model: nn.Module, graph: ModelGraph, degree: int) -> tuple[Cut, ...]:
    """Return the cuts that divide the experts of a model over so many ranks.

    `graph`: a forward of the model, captured with `composite=True`. Raises `PlanError` where it has none that can be.
    """
    modules = dict(model.named_modules())
    groups: dict[object, tuple[nn.Module, Dispatched, list[str]]] = {}
    for path, asked in dispatched(graph).items():
        groups.setdefault((_kind(modules[path]), asked), (modules[path], asked, []))[2].append(path)
    found: list[Cut] = []
    reasons: list[str] = []
    for module, asked, paths in groups.values():
        layout, reason = _layout(module, asked, degree)
        if layout is None:
            reasons.append(f"{paths[0]} ({reason})")
            continue
        found += layout.cuts(tuple(paths), even_shares(layout.experts, degree), asked)
    if not found:
        tried = f": {'; '.join(reasons)}" if reasons else ", as no module is given rows, choices and weights"
        raise PlanError(
            f"the experts of this model can't be divided over {degree} ranks, as ep={degree} says{tried}. Plan with "
            "--mesh of dp, fsdp, tp and pp only."
        )
    return tuple(found)


def _kind(module: nn.Module) -> str:
    """What two modules have in common that compute alike: types, sizes and plain attributes."""
    parts = []
    for path, part in module.named_modules():
        plain = {n: v for n, v in vars(part).items() if isinstance(v, (bool, int, float, str)) and n != "training"}
        sizes = [(name, tuple(one.shape), one.dtype) for name, one in part.named_parameters(recurse=False)]
        parts.append((path, type(part), sorted(plain.items()), sizes))
    return repr(parts)


def _layout(module: nn.Module, asked: Dispatched, degree: int) -> tuple[_Layout | None, str]:
    """The first layout with which the experts of each rank give what the whole module does, or why none does."""
    reason = ""
    for layout in _layouts(module):
        if asked.masks and layout.experts != asked.masks:
            continue
        if layout.experts < degree:
            reason = reason or f"it has {layout.experts} experts"
            continue
        try:
            difference = _compare(module, layout, asked, degree)
        except Exception as error:
            skips = ", and no rows come for the others, which its loop should skip" if layout.members else ""
            difference = f"it does not run where a rank has some of its experts{skips}: {first_line(error)}"
        if not difference:
            return layout, ""
        reason = reason or difference
    return None, reason or "its parameters are not those of experts"


def _layouts(module: nn.Module) -> Iterator[_Layout]:
    """Layouts that the parameters of a module may have, by their names and shapes."""
    sizes = {name: tuple(one.shape) for name, one in module.named_parameters(remove_duplicate=False)}
    if () in sizes.values() or len(list(module.parameters())) < len(sizes):
        return
    holders = [(path, part) for path, part in module.named_modules() if path.count(".") < 1]
    for path, part in holders:
        paths = [join(path, name) for name, _ in part.named_children()]
        members = [tuple((n, shape[0]) for n, shape in sizes.items() if is_below(n, one)) for one in paths]
        alike = {
            tuple((n.removeprefix(one), sizes[n]) for n, _ in own)
            for one, own in zip(paths, members, strict=True)
            if own
        }
        members = [own for own in members if own]
        if (
            isinstance(part, nn.ModuleList | nn.ModuleDict)
            and len(members) > 1
            and len(alike) == 1
            and sum(map(len, members)) == len(sizes)
        ):
            yield _Layout(experts=len(members), members=tuple(members))
    numbers = [(p, n, v) for p, part in module.named_modules() for n, v in vars(part).items() if type(v) is int]
    first = {shape[0] for shape in sizes.values()}
    for experts in dict.fromkeys([*(first if len(first) == 1 else ()), *sorted(value for _, _, value in numbers)]):
        if experts > 1 and not any(size % experts for size in first):
            places = tuple((name, shape[0] // experts) for name, shape in sizes.items())
            scales = tuple((path, name) for path, name, value in numbers if value == experts)
            yield _Layout(experts=experts, places=places, scales=scales)
            if scales:
                yield _Layout(experts=experts, places=places)


def _compare(module: nn.Module, layout: _Layout, asked: Dispatched, degree: int) -> str:
    """What differs between a module and the parts of it that ranks have; "" if nothing does."""
    many = sum(one.numel() for one in module.parameters()) > _LARGE_ELEMENTS
    few = min(layout.experts, _FEW) if many and not layout.members else layout.experts
    generator = torch.Generator().manual_seed(0)
    whole = _part(module, layout, (few, layout.experts - few), 0, asked, lambda one: _random(one, generator))
    layout = _Layout(experts=few, places=layout.places, members=layout.members, scales=layout.scales if few > 1 else ())
    shares = even_shares(few, min(degree, few))
    parts = [_part(whole, layout, shares, rank, asked, lambda one: one) for rank in range(len(shares))]
    ends = torch.tensor(shares).cumsum(0)
    before = {name: one.clone() for name, one in whole.state_dict().items()}
    with torch.no_grad():
        for count, scale, same in _RUNS:
            rows = scale * torch.randn(count, asked.width, generator=generator)
            choice = torch.rand(count, few, generator=generator).argsort(dim=1)[:, : min(asked.each, few)]
            choice = choice[:1].expand(count, -1) if same else choice
            chosen = nn.functional.one_hot(choice, few) if asked.masks else choice
            weights = torch.rand(choice.shape, generator=generator)
            random = torch.get_rng_state()
            expected = _call(whole, asked, rows.clone(), chosen.clone(), weights.clone())
            if not torch.equal(random, torch.get_rng_state()):
                return "it draws random numbers"
            every = choices_of(chosen, weights)
            total = torch.zeros(count, asked.width)
            # Choices of other ranks come in between, and each rank has some of its own only.
            for some in torch.randperm(len(every[0]), generator=generator).chunk(2):
                row, expert, weight = (one[some] for one in every)
                owner = torch.bucketize(expert, ends, right=True)
                for rank, part in enumerate(parts):
                    own = owner == rank
                    if own.any() or layout.members:
                        number = expert[own] - (0 if layout.members else int(ends[rank]) - shares[rank])
                        choice = single_choices(chosen, number, few if layout.members else shares[rank])
                        made = _call(part, asked, rows[row[own]], choice, weight[own].unsqueeze(1))
                        total.index_add_(0, row[own], made.reshape(-1, asked.width))
            error = float((expected.reshape(total.shape) - total).abs().max())
            if not error <= 1e-4 * float(expected.abs().max()):
                return "what it makes of a row is not the sum of what each choice makes of it"
    if any(not torch.equal(one, before[name]) for name, one in whole.state_dict().items()):
        return "it changes its own tensors"
    return ""


def _part(
    module: nn.Module, layout: _Layout, shares: tuple[int, ...], rank: int, asked: Dispatched, make: Any
) -> nn.Module:
    """A copy of a module with the experts of a rank; `make` gives values to a tensor of the shape of each part."""
    cuts = layout.cuts(("",), shares, asked) if len(layout.members) != shares[0] else []
    known = find_cut_tensors(module, cuts)
    memo: dict[int, Any] = {}
    for name, one in module.named_parameters():
        own = one.detach() if name not in known else slice_of(one.detach(), known[name], rank)
        memo[id(one)] = nn.Parameter(make(own).float(), requires_grad=False)
    made = copy.deepcopy(module, memo)
    set_scales(made, find_scales(made, cuts), rank, [])
    for part in made.modules():
        part.train(not isinstance(part, _DRAWS))
    return made


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values of a matrix that keeps the size of what it multiplies, about."""
    values = torch.randn(like.shape, generator=generator)
    return values * max(1, like.numel() // max(1, like.shape[0])) ** -0.5 if like.dim() > 1 else values


def _call(module: nn.Module, asked: Dispatched, *given: torch.Tensor) -> torch.Tensor:
    """Call a module with rows, choices and weights where it was given them; raises what it raises."""
    named = dict(zip(asked.paths, given, strict=True))
    places = {int(path[2:]): one for path, one in named.items() if path.startswith("0.")}
    kept = [one.clone() for one in given]
    result = module(
        *(places[at] for at in range(len(places))), **{p[2:]: t for p, t in named.items() if p.startswith("1.")}
    )
    if any(not torch.equal(*pair) for pair in zip(given, kept, strict=True)):
        raise PlanError("it writes into what it is given")
    return next(tensor for _, tensor in tensors_in(result))
