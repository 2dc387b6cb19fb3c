"""What comes from outside of a cut model: modules that share its parameters, nested tensors, what is added later."""

import gc
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as registration

from autoshard.common.collector import all_listed
from autoshard.common.module_paths import join, parent
from autoshard.common.own_tensors import tables
from autoshard.errors import ApplyError
from autoshard.runtime.dtensors import is_sharded
from autoshard.runtime.rank_tensor import NESTED
from autoshard.torch_private import is_fully_sharded


def check_not_shared(model: nn.Module, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> None:
    """Raise `ApplyError` if a module outside of `model` has one of its tensors that are to be cut, by name."""
    held = _held_elsewhere(model, tensors, names)
    if not held:
        return
    with all_listed():
        found = _sharing(model, held)
        if found:
            gc.collect()  # it may be gone but for a cycle
            found = _sharing(model, held)
    if found:
        name, other = found
        raise ApplyError(
            f"{name} is also a parameter of a {other} that is not part of this {type(model).__name__}: it would have a "
            "part of it, and a part of its gradient. Apply to the module that holds both, or untie them."
        )


def _held_elsewhere(model: nn.Module, tensors: Mapping[str, torch.Tensor], names: Collection[str]) -> dict[int, str]:
    """Names of tensors, by id, that something holds besides the modules of `model` and the dict `tensors`.

    Most models are cut before that is so: only then all objects of the process have to be looked through.
    """
    alone = {"": torch.empty(0)}
    usual = sys.getrefcount(alone[""])
    # shallow copies of a module share its tables
    distinct = {id(table): table for module in model.modules() for table in tables(module)}.values()
    slots = Counter(id(tensor) for table in distinct for tensor in table.values())
    times = Counter(id(tensor) for tensor in tensors.values())
    return {
        id(tensors[name]): name
        for name in names
        if sys.getrefcount(tensors[name]) > usual - 1 + slots[id(tensors[name])] + times[id(tensors[name])]
    }


def _sharing(model: nn.Module, names: Mapping[int, str]) -> tuple[str, str] | None:
    """The name of a tensor that a module outside of `model` has, and the class of that."""
    inside = list(model.modules())
    # shallow copies of a module share its tables
    known = {id(one) for module in inside for one in (module, *tables(module))}
    everything = gc.get_objects()
    kinds = {kind for kind in set(map(type, everything)) if issubclass(kind, nn.Module)}
    for other in everything:
        if type(other) in kinds and id(other) not in known:
            for tensor in (one for table in tables(other) if id(table) not in known for one in table.values()):
                if id(tensor) in names:
                    return names[id(tensor)], type(other).__name__
    return None


def refuse_changes(model: nn.Module, cut: Collection[str] = ()) -> list[Any]:
    """Refuse what other code puts into a divided model where ranks would go on without it, or each with its own.

    `cut`: names of parameters of which each rank has a part. To modules that have such, nothing is added: a
    parametrization (`spectral_norm`), a mask of `prune` or an adapter around it would be computed of that part. New
    parameters, and modules that have such, in the place of others would be whole there, and fully_shard would go on
    with the old ones. What else wraps a module, or is loaded, is let through. Returns handles.
    """
    root = weakref.ref(model)
    owners = weakref.WeakSet(model.get_submodule(path) for path in map(parent, cut))
    paths = weakref.WeakKeyDictionary({one: path for path, one in model.named_modules()})

    def check(module: nn.Module, name: str, added: Any) -> None:
        model = root()
        if model is None or module not in paths:
            return
        old, where = getattr(module, name, None), join(paths[module], name)
        if (module in owners and not hasattr(module, name)) or (old in owners and _holds_more(added, old)):
            wrong = (
                f"no adapter can be put around {where}"
                if old is not None
                else f"{name} can't be added to {paths[module]}"
            )
            raise ApplyError(
                f"{wrong}, whose parameters are cut over devices: it would be computed of one rank's part. Change the "
                "model before autoshard.apply, or call autoshard.remove first."
            )
        # in modules that assign in a way of their own fully_shard does so, too: `Used.check_replaced` looks at those
        by_torch = type(module).__setattr__ is not nn.Module.__setattr__ and is_fully_sharded(model)
        if not (by_torch and isinstance(added, nn.Parameter)) and _loses(model, old, added, cut):
            raise ApplyError(
                f"{where} can't be replaced while parameters of the model are divided: ranks would go on with the old "
                "ones, or each with its own. Call autoshard.remove(model), replace it then, and apply the plan again. "
                "For other values alone call model.load_state_dict(…)."
            )

    return [
        registration.register_module_module_registration_hook(check),
        registration.register_module_parameter_registration_hook(check),
    ]


def _holds_more(added: Any, old: Any) -> bool:
    """Whether a module has another in it, and parameters beside those of that."""
    inside = isinstance(old, nn.Module) and isinstance(added, nn.Module) and any(one is old for one in added.modules())
    return inside and bool(_parameters_of(added) - _parameters_of(old))


def _loses(model: nn.Module, old: Any, added: Any, cut: Collection[str]) -> bool:
    """Whether a divided model would lose parameters by what comes in the place of a parameter or module."""
    gone = _parameters_of(old) - _parameters_of(added)
    if added is None or not gone:
        return False
    own = _parameters_of(model)
    parts = {id(one) for key, one in model.named_parameters(remove_duplicate=False) if key in cut}
    if isinstance(added, nn.Module):
        return bool(_parameters_of(added) - own) and (is_fully_sharded(model) or not gone.isdisjoint(parts))
    if is_fully_sharded(model) and (not is_sharded(added) or id(added) in own):
        return True
    return not gone.isdisjoint(parts) and added.shape != old.shape


def _parameters_of(value: Any) -> set[int]:
    """The ids of a parameter, or of those of a module; none of anything else."""
    if isinstance(value, nn.Module):
        return set(map(id, value.parameters()))
    return {id(value)} if isinstance(value, nn.Parameter) else set()


def sharded_inside(model: nn.Module) -> nn.Module | None:
    """A module of a model for which `fully_shard` was called, None if it was for none."""
    from torch.distributed.fsdp import FSDPModule

    called = bool(FSDPModule.__subclasses__())  # else nobody looks through the modules, which takes time
    return next(filter(is_fully_sharded, model.modules()), None) if called else None


def refuse_nested(module: nn.Module, args: tuple) -> None:
    """Pre-hook of a block: a layer that is cut has no sizes for nested tensors."""
    if any(isinstance(value, torch.Tensor) and value.is_nested for value in args):
        raise ApplyError(f"{type(module).__name__} is cut: {NESTED}")
