"""Refuse optimizers that may look at whole matrices where each rank has a part of them: norms, factors, directions."""

import inspect
from collections.abc import Mapping

import torch
from torch import optim
from torch.optim import Optimizer

from autoshard.errors import ApplyError

_EACH = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Optimizers whose steps treat each number of a parameter by itself, and so do classes that inherit those steps."""


def check_elementwise(optimizer: Optimizer, cut: Mapping[int, str]) -> None:
    """Raise `ApplyError` for an optimizer of cut parameters that is not known to treat each number by itself, or that
    has state of whole ones; `cut`: their names by id.

    One that does can say so: `optimizer.elementwise = True`.
    """
    own_parameters = [one for group in optimizer.param_groups for one in group["params"] if id(one) in cut]
    if not own_parameters:
        return
    own, known = inspect.unwrap(type(optimizer).step), {inspect.unwrap(kind.step) for kind in _EACH}
    if own not in known and not getattr(optimizer, "elementwise", False):
        raise ApplyError(
            f"{type(optimizer).__name__} is not known to treat each number of a parameter by itself, and each rank has "
            "a part of those that are cut. Use one of torch.optim that does (AdamW, SGD), set optimizer.elementwise = "
            "True if this one does, or take a plan without cuts."
        )
    for one in own_parameters if own in known else ():
        state = [value for value in optimizer.state.get(one, {}).values() if isinstance(value, torch.Tensor)]
        if any(value.dim() and (value.shape != one.shape or type(value) is not type(one.data)) for value in state):
            raise ApplyError(
                f"{type(optimizer).__name__} has state of the whole {cut[id(one)]}, of which each rank has a part: it "
                "took steps before autoshard.apply, or was given a state of then. Make it afterwards, and read its "
                "state by autoshard.load_checkpoint."
            )
