"""Refuse optimizers that look at whole matrices where each rank has a part of them: norms, factors, orthogonal steps.

Nothing is known of any optimizer: the same one takes two steps on small tensors, once on whole ones and once on their
halves. Where every number goes its own way the results are the same.
"""

import copy
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.errors import ApplyError

_HALF = 2
_tried: "weakref.WeakKeyDictionary[Optimizer, tuple[int, ...]]" = weakref.WeakKeyDictionary()
_trying: list[Optimizer] = []


def was_tried(optimizer: Optimizer) -> bool:
    """Whether an optimizer, with as many parameters as it has now, is known to pass, or one is being tried."""
    return bool(_trying) or _tried.get(optimizer) == _sizes(optimizer)


def _sizes(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(len(group["params"]) for group in optimizer.param_groups)


def check_elementwise(optimizer: Optimizer, cut: dict[int, int], closure: bool) -> None:
    """Raise `ApplyError` for an optimizer whose steps on parts are not parts of its steps. See `was_tried`.

    `cut`: id of a parameter -> dimension that is cut; `closure`: whether its steps are given one. What can't be tried,
    and what draws random numbers, passes.
    """
    if not any(id(one) in cut for group in optimizer.param_groups for one in group["params"]):
        return
    _tried[optimizer] = _sizes(optimizer)
    _trying.append(optimizer)
    try:
        whole, again = (_stepped(optimizer, cut, closure, None, seed) for seed in (0, 1))
        if not _alike(whole, again):
            return
        halves = [_stepped(optimizer, cut, closure, half, 0) for half in range(2)]
    except Exception:
        return
    finally:
        _trying.clear()
    dims = [cut.get(id(one)) for group in optimizer.param_groups for one in group["params"]]
    joined = [a if dim is None else torch.cat([a, b], dim) for dim, a, b in zip(dims, *halves, strict=True)]
    if not _alike(whole, joined):
        del _tried[optimizer]  # its next step is refused as well
        raise ApplyError(
            f"{type(optimizer).__name__} looks at more than one number of a parameter at a time, and each rank has a "
            "part of those that are cut: it would train otherwise than without a plan. Use an optimizer that treats "
            "each number by itself (AdamW, SGD), or a plan without cuts."
        )


def _alike(ones: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True) for a, b in zip(ones, others, strict=True))


def _stepped(
    optimizer: Optimizer, cut: dict[int, int], closure: bool, half: int | None, seed: int
) -> list[torch.Tensor]:
    """Parameters after two steps of a copy that has small ones, whole or halves where they are cut."""
    generator = torch.Generator().manual_seed(0)
    made, memo = [], dict[int, Any]()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            dim = cut.get(id(parameter))
            shape = [2 * _HALF if at == dim else 3 for at in range(parameter.dim())]
            values = [torch.randn(shape, generator=generator) for _ in range(2)]
            if dim is not None and half is not None:
                values = [value.narrow(dim, half * _HALF, _HALF).clone() for value in values]
            small = nn.Parameter(values[0], requires_grad=parameter.requires_grad)
            small.grad = values[1] if parameter.requires_grad else None
            memo[id(parameter)] = small
            made.append(small)
    memo[id(optimizer.state)] = defaultdict(dict)
    own = vars(optimizer)
    memo |= {id(value): type(value)() for name, value in own.items() if "hook" in name and isinstance(value, dict)}
    trial = type(optimizer).__new__(type(optimizer))
    # a scheduler may have put its own `step` into the object, which is that of the very optimizer
    vars(trial).update({name: copy.deepcopy(value, memo) for name, value in own.items() if name != "step"})
    given: list[Any] = [lambda: torch.zeros(())] if closure else []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for _ in range(2):
            type(optimizer).step(trial, *given)
    return [one.detach() for one in made]
