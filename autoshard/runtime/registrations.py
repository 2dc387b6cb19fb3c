"""Notice that modules or parameters were added to an applied model, so that it looks for them before it runs next.

torch calls a hook at every registration in the process. Models register modules as they run (a slice of a module list
is a new list), so only registrations in modules of an applied tree count. The hooks are in place while there is one.
"""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module


class Tree:
    """The modules of one applied model, by identity; `changed` once something was registered in one of them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.changed = False
        self.members = {id(module) for module in modules}
        _trees.append(weakref.ref(self, _forget))
        if not _handles:
            _handles.append(torch_module.register_module_module_registration_hook(_note))
            _handles.append(torch_module.register_module_parameter_registration_hook(_note))


_trees: "list[weakref.ref[Tree]]" = []
_handles: list[Any] = []


def _note(module: nn.Module, name: str, registered: Any) -> None:
    for reference in _trees:
        tree = reference()
        if tree is not None and id(module) in tree.members:
            tree.changed = True


def _forget(reference: "weakref.ref[Tree]") -> None:
    """Take the hooks off with the last applied model."""
    _trees.remove(reference)
    if not _trees:
        while _handles:
            _handles.pop().remove()
