"""Put stand-ins in place of a model's parameters and buffers for the time of a capture, and put everything back after.

The capture must leave no trace: attributes, lists and dicts on modules, registered tensors, hooks and training flags
are noted before and restored after, whatever the forward did to them; so are attributes of objects on modules.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard.nested import attributes_of

Make = Callable[[torch.Tensor, str], torch.Tensor]
"""Makes the stand-in of one tensor; told "parameter", "buffer" or "attribute"."""
_PLAIN = (dict, list, set, OrderedDict, defaultdict, deque)
_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def stand_ins(model: nn.Module, make: Make) -> Iterator[None]:
    """Replace every parameter, buffer and tensor attribute below `model` by `make(tensor, kind)`; undo all on leaving.

    One tensor object gets one stand-in, so ties stay ties.
    """
    modules = list(model.modules())
    before = [_note(module) for module in modules]
    helpers = {id(value): value for module in modules for value in vars(module).values() if attributes_of(value)}
    held = [(vars(helper), dict(vars(helper))) for helper in helpers.values()]
    made: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor, kind)
        return made[id(tensor)]

    try:
        for module in modules:
            for table, kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
                for name, tensor in table.items():
                    if tensor is not None:
                        table[name] = stand_in(tensor, kind)  # type: ignore[assignment]
            for name, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor):
                    vars(module)[name] = stand_in(value, "attribute")
        yield
    finally:
        for module, (attributes, contents) in zip(modules, before, strict=True):
            vars(module).clear()
            vars(module).update(attributes)
            for container, content in contents:
                _refill(container, content)
        for attributes, content in held:
            _refill(attributes, content)


def _note(module: nn.Module) -> tuple[dict[str, Any], list[tuple[Any, Any]]]:
    """The attributes of a module, and the contents of the plain containers among them, and of torch's own tables."""
    attributes = dict(vars(module))
    contents = [(value, value.copy()) for name, value in attributes.items() if type(value) in _PLAIN or name in _TABLES]
    return attributes, contents


def _refill(container: Any, content: Any) -> None:
    if not container and not content:  # most tables of most modules
        return
    if type(container) is type(content) and _same(container, content):
        return
    container.clear()
    container.extend(content) if isinstance(container, (list, deque)) else container.update(content)


def _same(container: Any, content: Any) -> bool:
    """Whether a container still holds the very same objects in the same order."""
    if len(container) != len(content):
        return False
    if isinstance(container, dict):
        return all(a is c and b is d for (a, b), (c, d) in zip(container.items(), content.items(), strict=True))
    if isinstance(container, set):
        return container == content
    return all(a is b for a, b in zip(container, content, strict=True))
