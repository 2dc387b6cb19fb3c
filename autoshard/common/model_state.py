"""What a model holds is noted before a run, and put back after it where it changed.

    module ─▶ attributes, lists, dicts, sets, objects, tensors in them        the same objects in the same places
       ├─ hooks ─▶ closures                                                   outputs.append(…) is undone
       └─ class ─▶ its attributes, and what its methods mention               TABLE["a"] is what it was

What nobody finds in this way (slots, what functions of other files mention) is left alone: if a tensor without values
is kept there, the capture is refused.
"""

import contextvars
import functools
import gc
import sys
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from operator import is_not
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from autoshard.torch_private import no_modes, uncompiled

Made = TypeVar("Made")
_CLOSED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "autoshard", "pytest", "_pytest"}
"""Packages whose objects keep what is their own business."""
_CACHE = type(functools.lru_cache(len))
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_HOLDERS = (dict, list, set, deque, *_WEAK, _CACHE)
_PLAIN = (torch.Tensor, nn.Parameter)
_ABSENT: Any = object()


class ModelState:
    """What a model and its arguments hold, as it is when this is made."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        self._seen: set[int] = set()
        self._kinds: dict[Any, Callable[[Any], Iterable[Any]] | None] = {}
        self._found: list[Any] = []  # objects that were seen: they keep their addresses
        self._dicts: list[tuple[Any, dict[Any, Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._names: list[tuple[dict[str, Any], dict[str, Any]]] = []  # of files
        self._cells: list[tuple[CellType, Any]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._caches: list[tuple[Any, int]] = []
        self._generators: list[tuple[torch.Generator, torch.Tensor]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, bool]] = []
        self._dtype = torch.get_default_dtype()
        with no_modes():
            self._walk([model, given])

    # ---- before

    def _walk(self, todo: list[Any]) -> None:
        kinds, seen = self._kinds, self._seen
        while todo:
            item = todo.pop()
            kind = type(item)
            if kind not in kinds:
                kinds[kind] = self._look(kind)
                todo += self._class(kind)
            look = kinds[kind]
            if look is not None and id(item) not in seen:
                seen.add(id(item))
                self._found.append(item)
                todo += [part for part in look(item) if kinds.get(type(part), _ABSENT) is not None]

    def _look(self, kind: Any) -> Callable[[Any], Iterable[Any]] | None:
        """How to look into objects of a class; None where nobody does."""
        looks: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
            (torch.Tensor, self._tensor),
            (dict, self._dict),
            ((list, set, deque), self._list),
            ((tuple, frozenset), tuple),
            (FunctionType, self._function),
            (MethodType, lambda item: (item.__self__, item.__func__)),
            (functools.partial, lambda item: (item.func, item.args, item.keywords)),
            (CellType, self._cell),
            (_CACHE, self._cache),
            (torch.Generator, self._generator),
        )
        look = next((look for bases, look in looks if issubclass(kind, bases)), None)
        if issubclass(kind, (type, torch.Tensor)) or not (issubclass(kind, (nn.Module, *_WEAK)) or _is_open(kind)):
            return look
        return lambda item: [*(look(item) if look else ()), _own(item)]

    def _tensor(self, item: torch.Tensor) -> list[Any]:
        plain = type(item) in _PLAIN and item.layout is torch.strided and not item.is_nested
        grad = item.grad if item.is_leaf else None
        self._tensors.append((item, item.data if plain else None, grad, item.requires_grad))
        return [grad, vars(item) or None]

    def _dict(self, item: Any) -> Iterable[Any]:
        contents = dict(dict.items(item))
        self._dicts.append((item, contents))
        return contents.values()

    def _list(self, item: Any) -> list[Any]:
        contents = list(_base(item).__iter__(item))
        self._lists.append((item, contents))
        return contents

    def _function(self, item: FunctionType) -> list[Any]:
        """What a function can change: its closure, default arguments, names of its file and what is behind these."""
        found = [*(item.__closure__ or ()), *(item.__defaults__ or ()), item.__kwdefaults__]
        table = item.__globals__
        if _is_of_users(item):
            named = {name: table.get(name, _ABSENT) for name in item.__code__.co_names}
            self._names.append((table, named))
            for value in named.values():
                kind: Any = type(value)
                near = isinstance(value, FunctionType) and (
                    value.__globals__ is table or (hasattr(value, "__wrapped__") and _is_of_users(value))
                )  # what decorates a function, perhaps with a cache, is often in another file
                if near or _holds(kind):
                    found.append(value)
        return found

    def _cell(self, item: CellType) -> tuple:
        value = _content(item)
        self._cells.append((item, value))
        return (value,)

    def _cache(self, item: Any) -> tuple:
        """A cache that has tensors begins empty, so that all runs compute them, whatever the user ran before."""
        forget_tensors([item])
        self._caches.append((item, item.cache_info().misses))
        return ()

    def _generator(self, item: torch.Generator) -> tuple:
        self._generators.append((item, item.get_state()))
        return ()

    def _class(self, kind: Any) -> list[Any]:
        """The attributes of a class of users and of those behind it."""
        found: list[Any] = []
        for base in kind.__mro__:
            if _is_open(base) and id(base) not in self._seen:
                self._seen.add(id(base))
                names = _attributes_of(base)
                self._classes.append((base, names))
                found += names.values()
                methods = [getattr(one, "__func__", one) for one in vars(base).values()]  # of static and class methods
                found += [one for one in methods if isinstance(one, (FunctionType, _CACHE))]
        return found

    # ---- after

    def put_back(self) -> None:
        """Put back what changed, except what was written into the memory of tensors."""
        with no_modes(), torch.no_grad():
            for item, contents in self._dicts:
                if not _same(dict.values(item), contents.values()) or not _same(dict.keys(item), contents.keys()):
                    _refill(item, contents)
            for item, before in self._lists:
                base = _base(item)
                if not _same(list(base.__iter__(item)), before):
                    base.clear(item)
                    base.update(item, before) if base is set else base.extend(item, before)
            for table, named in self._names:
                for name, value in named.items():
                    if table.get(name, _ABSENT) is not value:
                        table.pop(name) if value is _ABSENT else table.update({name: value})
            for cell, value in self._cells:
                if _content(cell) is not value:
                    cell.cell_contents = value
            for kind, names in self._classes:
                _put_back_class(kind, names)
            for cache, misses in self._caches:
                if cache.cache_info().misses != misses:
                    cache.cache_clear()
            for generator, state in self._generators:
                generator.set_state(state)
            for tensor, alias, grad, requires_grad in self._tensors:
                if alias is not None and not _same_memory(tensor, alias):
                    tensor.data = alias
                if tensor.is_leaf and tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.is_leaf and tensor.grad is not grad:
                    tensor.grad = grad
        torch.set_default_dtype(self._dtype)
        self.let_go()

    def let_go(self) -> None:
        """Leave no cycle of references: functions of `_kinds` hold this, and this all it found."""
        self._kinds.clear()


def undisturbed(model: nn.Module, given: Any, run: Callable[[], Made]) -> Made:
    """Return `run()`, after which what a model and its arguments hold is as it was, and context variables are.

    What is compiled runs as it is written: torch would compile a recording, with all that records.
    """
    state = ModelState(model, given)
    try:
        with uncompiled():
            return contextvars.copy_context().run(run)
    finally:
        state.put_back()


def empty_caches(model: nn.Module) -> list[Any]:
    """Empty the caches of functions that a model calls of tensors, and return all of them.

    A model that was moved would be given those of the devices where it was.
    """
    state = ModelState(model, None)
    state.let_go()
    return [cache for cache, _ in state._caches]


def forget_tensors(caches: Iterable[Any]) -> None:
    """Empty the caches that have tensors."""
    for cache in caches:
        if _have_tensors(gc.get_referents(cache)):
            cache.cache_clear()


@functools.cache
def _is_open(kind: Any) -> bool:
    """Whether objects of a class are looked into: a class of users, not of torch or the standard library."""
    return kind.__module__.partition(".")[0] not in _CLOSED


@functools.cache
def _holds(kind: Any) -> bool:
    """Whether objects of a class, to which functions refer by a name, are looked into."""
    return issubclass(kind, _HOLDERS) or _is_open(kind)


def _is_of_users(function: FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).partition(".")[0] not in _CLOSED


def _own(item: Any) -> dict[str, Any] | None:
    try:
        return object.__getattribute__(item, "__dict__")
    except AttributeError:  # it has slots only
        return None


def _have_tensors(items: Iterable[Any], depth: int = 3) -> bool:
    """Whether there are tensors among what a cache has: its entries, perhaps in a dict, and tuples or lists of them."""
    for item in items:
        parts = item.values() if type(item) is dict else item if type(item) in (list, tuple) else ()
        if isinstance(item, torch.Tensor) or (depth and _have_tensors(parts, depth - 1)):
            return True
    return False


def _base(item: Any) -> Any:
    return next(base for base in (list, set, deque) if isinstance(item, base))


def _same(found: Any, noted: Any) -> bool:
    """Whether the same objects are there in the same order."""
    return len(found) == len(noted) and not any(map(is_not, found, noted))


def _refill(item: Any, contents: dict[Any, Any]) -> None:
    """Put the contents of a dict back; what did not change is there at any moment, unless the order is another."""
    base = OrderedDict if isinstance(item, OrderedDict) else dict
    for key in [key for key in dict.keys(item) if key not in contents]:
        base.__delitem__(item, key)
    for key, value in contents.items():
        if dict.get(item, key, _ABSENT) is not value:
            base.__setitem__(item, key, value)
    if not _same(dict.keys(item), contents.keys()):
        base.clear(item)
        base.update(item, contents)


def _attributes_of(kind: type) -> dict[str, Any]:
    """Attributes of a class that are neither its methods nor Python's own."""
    code = (FunctionType, staticmethod, classmethod, property)
    return {
        name: value for name, value in vars(kind).items()
        if not name.startswith("__") and not isinstance(value, code) and not hasattr(type(value), "__get__")
    }  # fmt: skip


def _put_back_class(kind: type, names: dict[str, Any]) -> None:
    found = _attributes_of(kind)
    for name in found.keys() - names.keys():
        type.__delattr__(kind, name)
    for name, value in names.items():
        if found.get(name, _ABSENT) is not value:
            type.__setattr__(kind, name, value)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was put there yet
        return _ABSENT


def _same_memory(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    if tensor.shape != alias.shape or tensor.stride() != alias.stride() or tensor.dtype != alias.dtype:
        return False
    same = tensor.untyped_storage() is alias.untyped_storage()
    return bool(same and tensor.storage_offset() == alias.storage_offset())
