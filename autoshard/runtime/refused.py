"""Methods of a model that is divided over processes which can't do what they say: they raise instead.

Those of torch fail without a reason, or end the process, since they meet parts of parameters.
"""

from functools import partial
from typing import Any

from torch import nn

from autoshard.errors import ApplyError

SHARE = "share_memory"
COPIES = ("__deepcopy__", "__reduce_ex__", SHARE)
_INSTEAD = {
    "__deepcopy__": "Build a second model and load state_dict() into it. An average of weights (EMA) can be a dict: "
    "average[name].lerp_(parameter.detach(), 0.01), for all of model.named_parameters().",
    "__reduce_ex__": "Call autoshard.save(model, directory) on all ranks.",
    SHARE: "Start every process with autoshard.load, or build the model in each of them.",
}


def refuse_methods(model: nn.Module, *names: str) -> None:
    """Let methods of a model raise `ApplyError` until `allow_methods`."""
    for name in names:
        vars(model)[name] = partial(_refuse, name)


def allow_methods(model: nn.Module) -> None:
    """Undo `refuse_methods`, and what stands for methods of replicas."""
    for name in (*COPIES, "no_sync", "zero_grad"):
        vars(model).pop(name, None)


def _refuse(name: str, *args: Any, **kwargs: Any) -> None:
    what = {"__deepcopy__": "copied (deepcopy)", "__reduce_ex__": "pickled"}.get(name, f"given .{name}()")
    raise ApplyError(f"a model that is divided over processes can't be {what}. {_INSTEAD[name]}")
