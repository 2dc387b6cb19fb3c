"""Methods of a divided model which can't do what they say: they raise instead, or do nothing.

Those of torch fail without a reason, or end the process, since they meet parts of parameters.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from torch import nn

from autoshard.errors import ApplyError

SHARE = "share_memory"
COPIES = ("__deepcopy__", "__reduce_ex__", SHARE)
MOVES = ("to", "to_empty", "cpu", "cuda", "xpu")
_EXPERTS = "set_experts_implementation"
_HOOKS = (
    "register_forward_pre_hook", "register_forward_hook", "register_full_backward_pre_hook",
    "register_full_backward_hook", "register_backward_hook",
)  # fmt: skip
_INSTEAD = {
    **dict.fromkeys(MOVES, "Each process has its stages where they compute. Call autoshard.remove(model) first."),
    "__deepcopy__": "Build a second model and load state_dict() into it. An average of weights (EMA) can be a dict: "
    "average[name].lerp_(parameter.detach(), 0.01), for all of model.named_parameters().",
    "__reduce_ex__": "Call autoshard.save(model, directory) on all ranks.",
    SHARE: "Start every process with autoshard.load, or build the model in each of them.",
}


class _StandIn(partial):
    """Stands for a method of a model; `before`: what other code had put there for it."""

    before: Any = None


def stand_in(model: nn.Module, name: str, method: Callable[..., Any]) -> None:
    """Put a method on a model until `allow_methods`."""
    made = _StandIn(method)
    made.before = vars(model).get(name)
    vars(model)[name] = made


def refuse_methods(model: nn.Module, *names: str) -> None:
    """Let methods of a model raise `ApplyError` until `allow_methods`."""
    for name in names:
        stand_in(model, name, partial(_refuse, name))


def refuse_saving(model: Any) -> None:
    """Let the `save_pretrained` of a sharded model raise `ApplyError` unless it is given whole tensors."""
    usual = getattr(model, "save_pretrained", None)
    if usual is None:
        return

    def save(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and len(args) < 3:
            raise ApplyError(
                "save_pretrained can't write a model of whose parameters each process has a part. Call "
                "autoshard.save(model, directory) on all ranks, which writes the same files; with a Trainer in a "
                "callback (on_step_end), and give it save_strategy='no'."
            )
        return usual(*args, **kwargs)

    stand_in(model, "save_pretrained", save)


def keep_experts(model: nn.Module) -> None:
    """Let experts be computed in the way that the plan was made for, until `allow_methods` of each module.

    `generate()` of transformers sets another way for decoding, where the model is on an accelerator.
    """
    for module in model.modules():
        if hasattr(module, _EXPERTS):
            stand_in(module, _EXPERTS, _keep)


def refuse_hooks(modules: Mapping[str, nn.Module], running: Collection[int]) -> None:
    """Let hooks that are registered on modules, by path, raise `ApplyError` until `allow_methods` of each of them.

    Not while anything is `running`: the model's own code may register some, and what it gives is looked at.
    """
    for path, module in modules.items():
        for name in (name for name in _HOOKS if name not in vars(module)):
            stand_in(module, name, partial(_hook, module, name, path, running))


def _hook(module: nn.Module, name: str, path: str, running: Collection[int], *args: Any, **kwargs: Any) -> Any:
    if running:
        return getattr(type(module), name)(module, *args, **kwargs)
    raise ApplyError(
        f"a hook on {path} would get a rank's part of a tensor or of its gradient. Register it before autoshard.plan "
        'and autoshard.apply, or place whole modules (strategy="balanced").'
    )


def _keep(*args: Any, **kwargs: Any) -> None:
    """Leave everything as it is."""


def allow_methods(model: nn.Module) -> None:
    """Undo `stand_in`; what other code has put on a model since stays."""
    for name, one in list(vars(model).items()):
        if isinstance(one, _StandIn):
            del vars(model)[name]
            if one.before is not None:
                vars(model)[name] = one.before


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    what = {"__deepcopy__": "copied (deepcopy)", "__reduce_ex__": "pickled"}.get(name, f"given .{name}()")
    raise ApplyError(f"a model that is divided over processes can't be {what}. {_INSTEAD[name]}")
