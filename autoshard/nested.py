"""Tensors inside nested arguments and outputs: one walk, used by capture, runtime and verify alike."""

import dataclasses
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

_LEAVES = frozenset({int, float, bool, str, bytes, type(None), torch.dtype, torch.device})
"""Classes of values in which there is nothing to look for."""


def tensors_in(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) for the tensors in nested tuples, lists, dicts and dataclasses; other objects are opaque."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif type(value) in _LEAVES:
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from tensors_in(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{path}.{index}" if path else str(index))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            item = _field(value, field.name)
            yield from tensors_in(item, f"{path}.{field.name}" if path else field.name)


def _field(value: Any, name: str) -> Any:
    """A field of a dataclass as it is kept: a class may raise an error where its attributes are looked up."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return getattr(value, name, None)


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that `tensors_in` finds, in the same order, without their paths: several times as fast."""
    found: list[torch.Tensor] = []
    _gather(value, found)
    return found


def _gather(value: Any, found: list[torch.Tensor]) -> None:
    if type(value) in _LEAVES:
        return
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        for item in value.values():
            _gather(item, found)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _gather(item, found)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _gather(_field(value, field.name), found)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with every tensor replaced by `change(tensor)`.

    Types are kept (named tuples, dict subclasses, dataclasses). Where nothing changes the very same object comes back,
    so callers that rely on identity (a dict filled by inner layers) keep it. Opaque objects are passed through.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        changed = {key: map_tensors(item, change) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        if type(value) is dict:
            return changed
        return _rebuild_mapping(value, changed)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _field(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = {name: map_tensors(item, change) for name, item in fields.items()}
        if all(changed[name] is item for name, item in fields.items()):
            return value
        return dataclasses.replace(value, **changed)
    return value


def leaves_in(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for everything in nested values that is no container: tensors, numbers, opaque objects."""
    children = _children(value)
    if children is None:
        yield path, value
        return
    for key, item in children:
        yield from leaves_in(item, f"{path}.{key}" if path else str(key))


def leaves_within(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """As `leaves_in`, and also those in the attributes of other objects (a cache), each object once."""
    seen: set[int] = set()

    def walk(item: Any, place: str) -> Iterator[tuple[str, Any]]:
        for found, leaf in leaves_in(item, place):
            yield found, leaf
            if not isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                for name, own in attributes_of(leaf).items():
                    yield from walk(own, f"{found}.{name}" if found else name)

    yield from walk(value, path)


def tensors_within(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """As `tensors_in`, and also those that other objects hold as attributes (a cache), each object once."""
    return ((found, leaf) for found, leaf in leaves_within(value, path) if isinstance(leaf, torch.Tensor))


def sealed_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path, object) for opaque objects whose tensors nobody can replace: in slots, sets and deques."""
    for path, leaf in leaves_in(value):
        if not isinstance(leaf, torch.Tensor) and next(tensors_within(leaf), None) is None and _holds_tensor(leaf, 3):
            yield path, leaf


def _holds_tensor(value: Any, depth: int) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if type(value) in _LEAVES or isinstance(value, torch.nn.Module) or callable(value) or not depth:
        return False
    if isinstance(value, (set, frozenset, deque, list, tuple)):
        return any(_holds_tensor(item, depth - 1) for item in value)
    if isinstance(value, dict):
        return any(_holds_tensor(item, depth - 1) for item in value.values())
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
    return any(_holds_tensor(getattr(value, name, None), depth - 1) for name in (*slots, *attributes_of(value)))


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an opaque object that may hold tensors: none of modules, classes and functions."""
    if isinstance(value, torch.nn.Module) or callable(value):
        return {}
    return getattr(value, "__dict__", {})


def join_leaves(values: list[Any], join: Callable[[str, list[Any]], Any], path: str = "") -> Any:
    """Make one nested value of several that are nested alike: each leaf is `join(path, leaves)`.

    Types are kept as by `map_tensors`. Raises ValueError where they are not nested alike.
    """
    first, *others = values
    children = _children(first)
    kinds = {type(value) for value in values}
    if len(kinds) > 1:
        raise ValueError(f"{path or 'one'} is a {' or a '.join(sorted(kind.__name__ for kind in kinds))}")
    if children is None:
        return join(path, values)
    columns = [[item for _, item in children]]
    for other in others:
        items = _children(other) or []
        if [key for key, _ in items] != [key for key, _ in children]:
            raise ValueError(f"{path or 'one'} has {len(children)} items or {len(items)}, or others")
        columns.append([item for _, item in items])
    joined = {
        key: join_leaves(list(row), join, f"{path}.{key}" if path else str(key))
        for (key, _), row in zip(children, zip(*columns, strict=True), strict=True)
    }
    if isinstance(first, dict):
        return joined if type(first) is dict else _rebuild_mapping(first, joined)
    if isinstance(first, (list, tuple)):
        items = list(joined.values())
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return dataclasses.replace(first, **joined)


def _children(value: Any) -> list[tuple[Any, Any]] | None:
    """The (key, item) pairs of a container, None for a leaf."""
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, _field(value, field.name)) for field in dataclasses.fields(value) if field.init]
    return None


def tensor_at(value: Any, path: str) -> torch.Tensor | None:
    """Return the tensor at a path, as `tensors_in` gives it, None if there is none."""
    found = item_at(value, path)
    return found if isinstance(found, torch.Tensor) else None


def item_at(value: Any, path: str) -> Any:
    """Return what is at a path, as `leaves_in` gives it, None if there is nothing."""
    if not path:
        return value
    key, item = _step(value, path)
    return None if key is None else item_at(item, path[len(str(key)) + 1 :])


def replace_at(value: Any, path: str, by: Any) -> Any:
    """Return `value` with what is at a path, which must be there, replaced; containers on the way are copied."""
    if not path:
        return by
    key, item = _step(value, path)
    item = replace_at(item, path[len(str(key)) + 1 :], by)
    if isinstance(value, dict):
        changed = {**value, key: item}
        return changed if type(value) is dict else _rebuild_mapping(value, changed)
    if isinstance(value, (list, tuple)):
        items = [item if at == key else other for at, other in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return dataclasses.replace(value, **{key: item})


def _step(value: Any, path: str) -> tuple[Any, Any]:
    """The (key, item) of a container that a path leads to first, (None, None) if there is none."""
    if isinstance(value, dict):
        for key, item in value.items():
            if path == str(key) or path.startswith(f"{key}."):  # a key may have dots
                return key, item
        return None, None
    first = path.partition(".")[0]
    if isinstance(value, (list, tuple)):
        inside = first.isdecimal() and int(first) < len(value)
        return (int(first), value[int(first)]) if inside else (None, None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return (first, getattr(value, first, None)) if first in names else (None, None)
    return None, None


def _rebuild_mapping(value: dict, changed: dict) -> Any:
    """Rebuild a dict subclass (OrderedDict, an output dataclass that is also a dict) around changed items."""
    if dataclasses.is_dataclass(value):
        made = type(value)(**changed)
        if isinstance(made, OrderedDict) and list(made) != list(changed):  # a field may have been set later
            for key in changed:
                made.move_to_end(key)
        return made
    copy = value.copy()
    copy.update(changed)
    return copy
