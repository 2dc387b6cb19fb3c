"""What a model's code can reach stays as it was while copies of the model are run."""

import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from autoshard.capture.state import as_it_was
from autoshard.errors import PlanError

Made = TypeVar("Made")


def untouched(model: nn.Module, given: Any, run: Callable[[], Made]) -> Made:
    """Return `run()`, which may run copies of a model; what its code can reach is as it was after.

    Raises PlanError if a tensor that copies share with the model was written in place.
    """
    with as_it_was(model, given) as state:
        made = contextvars.copy_context().run(run)
        written = state.overwritten()
    if written:
        names = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
        name = names.get(id(written[0]), f"a tensor of shape {tuple(written[0].shape)} that it holds")
        raise PlanError(
            f"{type(model).__name__} writes into {name} in place, which copies of the model share with it, so "
            "planning has changed it. Keep it in a buffer of the model, and load the model anew."
        )
    return made
