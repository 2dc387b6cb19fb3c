"""What runs around the forward of a module: `module.forward` is an `Around` until it is taken off.

    call of the module ── hooks of the user ── Around ── layer ── layer ── the forward as it was

What a layer sets up it takes down in a `finally`, so that neither an error nor Ctrl-C leaves anything behind, for which
torch would call no hooks. Hooks of the user are around whole calls.
"""

import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from autoshard.errors import ApplyError

Layer = Callable[..., Any]
"""Called with the module, the forward inside of it, and the arguments of the call; returns the result of the call."""


NOT_EXPORTABLE = (
    "torch.export can't record a model that autoshard has placed: it would record the placement. Call "
    "autoshard.remove(model), and export it then."
)


class NotExportable(ApplyError, AttributeError):
    """Whoever asks whether a forward has this attribute is told that it has not."""


class Around:
    """Stands in for the forward of a module, to which it refers weakly; copies and pickles of a module have their own.

    Attributes:
        own: what the module had as an attribute `forward` before, None if it has that of its class.
        layers: the outermost first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.own: Any = vars(module).get("forward")
        self.layers: list[Layer] = []

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The forward as it was: whoever asks for the signature is told that of this one."""
        module = self.module()
        return self.own or types.MethodType(type(module).forward, module)  # type: ignore[union-attr]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, forward = self.module(), self.__wrapped__
        if args and args[0] is module:  # bound to the module once more, as Accelerate does when it unwraps a model
            args = args[1:]
        for layer in reversed(self.layers[1:]):
            forward = partial(layer, module, forward)
        return self.layers[0](module, forward, *args, **kwargs) if self.layers else forward(*args, **kwargs)

    @property
    def __code__(self) -> types.CodeType:
        raise NotExportable(NOT_EXPORTABLE)  # torch.export asks for it

    def __reduce__(self) -> tuple:
        return Around, (self.module(),), {"own": self.own, "layers": self.layers}


def surround(module: nn.Module, layer: Layer) -> None:
    """Put a layer around the forward of a module, inside of those that are there."""
    around = _around(module)
    if around is None:
        around = vars(module)["forward"] = Around(module)
    around.layers.append(layer)


def layers_of(module: nn.Module) -> list[Layer]:
    """What is around the forward of a module, the outermost first."""
    around = _around(module)
    return [] if around is None else around.layers


def take_off(model: nn.Module) -> None:
    """Give all modules of a model the forward that they had."""
    for module in model.modules():
        around = _around(module)
        if around is not None:
            around.layers = []
            if vars(module)["forward"] is around:  # else somebody has wrapped it, and finds an empty one from now on
                del vars(module)["forward"]
                vars(module).update({} if around.own is None else {"forward": around.own})


def _around(module: nn.Module) -> Around | None:
    forward = vars(module).get("forward")
    while forward is not None and not isinstance(forward, Around):
        forward = getattr(forward, "__wrapped__", None)
    return forward
