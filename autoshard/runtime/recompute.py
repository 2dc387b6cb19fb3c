"""Stages whose activations are not kept: their modules run a second time in backward.

This is torch's activation checkpointing around the forward of each module. Random numbers are drawn again as they
were, and lists, dicts and objects (caches) that a forward changes are given to it again as they were.
"""

import copy
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autoshard import torch_private
from autoshard.common.module_paths import is_container
from autoshard.nested import attributes_of
from autoshard.plan import Plan
from autoshard.runtime.around import layers_of, surround
from autoshard.runtime.chunks import PLAIN


def recomputed_layers(plan: Plan) -> list[str]:
    """Paths of the layers that run twice, in a plan for processes or one device: all but those that keep everything."""
    if plan.recompute not in ("selective", "full"):
        return []
    stages = [plan.layers_of(stage) for stage in plan.stages] if plan.layers and plan.stages else [plan.gathered]
    return [path for own in stages for path in own[: max(0, len(own) - plan.kept_layers)]]


def recomputed_in(plan: Plan, model: nn.Module) -> tuple[str, ...]:
    """Paths of the modules that run twice: those of the stages that say so; of a list of modules, each in it."""
    if plan.launch:
        return tuple(recomputed_layers(plan))
    modules = dict(model.named_modules())
    found: list[str] = []
    waiting = [path for stage in reversed(plan.stages) if stage.recompute for path in reversed(stage.paths)]
    while waiting:
        path = waiting.pop()
        module = modules.get(path)
        if module is None:
            continue  # a parameter, or another name of a shared module
        if not is_container(module):
            found.append(path)
        else:
            waiting += [f"{path}.{name}".lstrip(".") for name, _ in reversed(list(module.named_children()))]
    return tuple(found)


def hook_recompute(modules: Mapping[str, nn.Module], paths: Sequence[str], selective: bool = False) -> None:
    """Let modules run again in backward, inside of what moves their arguments. `selective`: what is costly is kept."""
    for path in paths:
        surround(modules[path], Recompute(selective))


def runs_again(module: nn.Module) -> bool:
    """Whether this very module is computed again, in backward."""
    if torch_private.autograd_node() is None:
        return False
    return any(isinstance(layer, Recompute) and bool(layer.local.again) for layer in layers_of(module))


class _RunningAgain(threading.local):
    """Per thread: whether a module runs again now."""

    def __init__(self) -> None:
        self.again = 0


class Recompute:
    """Around the forward of a module: what autograd saves in it is computed again when backward needs it."""

    __slots__ = ("local", "selective")

    def __init__(self, selective: bool = False) -> None:
        self.local = _RunningAgain()
        self.selective = selective

    def __reduce__(self) -> tuple:  # a copy or a saved model starts without calls
        return Recompute, (self.selective,)

    def __call__(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or self.local.again:
            return forward(*args, **kwargs)
        count, names, first = len(args), tuple(kwargs), [(args, kwargs)]

        def run(*values: Any) -> Any:
            if first:
                own, named = first.pop()
                return forward(*own, **named)
            values = _copied(values, {})  # a backward may come a second time
            return module(*values[:count], **dict(zip(names, values[count:], strict=True)))

        # Not the arguments themselves: in a cache is more by then. Torch looks for devices in positional ones only.
        values = _copied((*args, *kwargs.values()), {})
        return checkpoint(run, *values, use_reentrant=False, context_fn=self.contexts)

    def contexts(self) -> tuple[Any, Any]:
        """What torch enters around the forward, and around the run in backward."""
        if not self.selective:
            return nullcontext(), self
        first, again = create_selective_checkpoint_contexts(_KeepCostly())
        return first, _both(self, again)

    def __enter__(self) -> None:
        """The module runs again, in backward: nothing is to be saved for a third time."""
        self.local.again += 1

    def __exit__(self, *error: object) -> None:
        self.local.again -= 1


@contextmanager
def _both(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


class _KeepCostly:
    """What of a module's results is kept: attention, and every second matrix product; the rest is computed again.

    The engine counts the memory and the seconds of selective recomputation like this.
    """

    def __init__(self) -> None:
        self.products = {False: 0, True: 0}  # of the forward, and of the run in backward

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op.__name__.startswith("_scaled_dot_product"):  # the kernels of attention
            return CheckpointPolicy.MUST_SAVE
        if op in _PRODUCTS:
            self.products[context.is_recompute] += 1
            if self.products[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _copied(given: Any, seen: dict[int, Any]) -> Any:
    """The same tensors in lists, dicts and objects of their own; what is there twice stays the same thing twice."""
    if type(given) is tuple:
        return tuple(_copied(item, seen) for item in given)
    if id(given) in seen:
        return seen[id(given)]
    if type(given) in (list, dict, OrderedDict, defaultdict):
        seen[id(given)] = made = given.copy()
        for key in range(len(made)) if type(made) is list else list(made):
            made[key] = _copied(made[key], seen)
        return made
    own = {} if isinstance(given, (torch.Tensor, *PLAIN)) else attributes_of(given)
    if not own:
        return given
    try:
        seen[id(given)] = made = copy.copy(given)
    except Exception:  # whatever refuses to be copied: it is given again as it is
        seen[id(given)] = given
        return given
    if made is not given:
        vars(made).update({name: _copied(value, seen) for name, value in own.items()})
    return made
