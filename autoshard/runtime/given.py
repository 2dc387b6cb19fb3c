"""What a forward was given where it runs in parts or on several ranks: what it changes there, its caller would not see.

divided batch   parts of a tensor, new lists and dicts around them       each part changes its own
cut model       a copy on every rank                                     the caller's stays as it was
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from autoshard.errors import ApplyError


class Given:
    """Arguments as a forward got them. Tensors made in inference mode count no writes, so they are not looked at."""

    def __init__(self, values: Any, tensors: bool = True) -> None:
        self.containers: list[tuple[str, Any, list[Any]]] = []
        self.versions: list[tuple[str, torch.Tensor, int]] = []
        for path, value in _walk(values):
            if not isinstance(value, torch.Tensor):
                self.containers.append((path, value, _items(value)))
            elif tensors and not value.is_inference():
                self.versions.append((path, value, value._version))

    def check(self, name: str, why: str) -> None:
        """Raise `ApplyError` if something was changed since. `name`: of the model; `why`: nobody sees it."""
        changed = next((path for path, tensor, version in self.versions if tensor._version != version), None)
        if changed is None:
            changed = next((path for path, value, items in self.containers if not _are(_items(value), items)), None)
        if changed is not None:
            refuse(name, changed, why)


def refuse(name: str, path: str, why: str) -> None:
    """Raise the `ApplyError` for a forward that changes an argument; `path` is in (args, kwargs)."""
    place, _, inner = path.partition(".")
    what = f"positional argument {inner}" if place == "0" else f"argument {inner}"
    raise ApplyError(
        f"the forward of {name} changes its {what} in place, and {why}. Let it change a copy, or place whole modules "
        '(strategy="balanced").'
    )


def _walk(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, what is there) for tensors and the containers around them."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    if isinstance(value, dict):
        children = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        children = [(str(index), item) for index, item in enumerate(value)]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        children = [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    else:
        return
    if path.count(".") and not isinstance(value, tuple):  # not the arguments themselves, which are the call's own
        yield path, value
    for key, item in children:
        yield from _walk(item, f"{path}.{key}" if path else key)


def _items(value: Any) -> list[Any]:
    """The keys and values in a container, one after the other."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    return list(value) if isinstance(value, list) else list(vars(value).values())


def _are(items: list[Any], others: list[Any]) -> bool:
    return len(items) == len(others) and all(one is other for one, other in zip(items, others, strict=True))
