"""Refuse optimizers that may look at whole matrices where each rank has a part of them: norms, factors, directions."""

import inspect
from collections.abc import Collection

from torch import optim
from torch.optim import Optimizer

from autoshard.errors import ApplyError

_EACH = (
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
)  # fmt: skip
"""Optimizers whose steps treat each number of a parameter by itself, and so do classes that inherit those steps."""


def check_elementwise(optimizer: Optimizer, cut: Collection[int]) -> None:
    """Raise `ApplyError` for an optimizer of cut parameters, by id, that is not known to treat each number by itself.

    One that does can say so: `optimizer.elementwise = True`.
    """
    if not any(id(one) in cut for group in optimizer.param_groups for one in group["params"]):
        return
    own, known = inspect.unwrap(type(optimizer).step), {inspect.unwrap(kind.step) for kind in _EACH}
    if own not in known and not getattr(optimizer, "elementwise", False):
        raise ApplyError(
            f"{type(optimizer).__name__} is not known to treat each number of a parameter by itself, and each rank has "
            "a part of those that are cut. Use one of torch.optim that does (AdamW, SGD), set optimizer.elementwise = "
            "True if this one does, or take a plan without cuts."
        )
