"""What a model's code can reach is noted before a run, and written back after it where it changed.

    module ─▶ attributes, lists, dicts, sets, objects, tensors in them        the same objects in the same places
       ├─ hooks ─▶ closures, default arguments                                outputs.append(…) is undone
       └─ class ─▶ its file ─▶ what functions there mention ─▶ other files    TABLE["a"] is what it was

Files of torch and of the standard library are left out. What another thread changes meanwhile is taken back, too.
Contents are read by the methods of the plain types: some mappings import a file for whatever they are asked for.
"""

import contextvars
import functools
import gc
import logging
import queue
import random
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import is_not
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from autoshard.capture.files import ABSENT, CACHE, content, file_of, is_open, mentioned_by, table_of_class
from autoshard.capture.used_up import ONWARD, has_run_on, place_of
from autoshard.progress import watcher
from autoshard.torch_private import no_modes, set_version

_LEAVES = (
    int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size, ModuleType, type(len)
)  # fmt: skip
"""Classes in whose objects there is nothing to look for."""
_SIMPLE = (
    nn.Module, SimpleNamespace, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet, queue.Queue
)  # fmt: skip
"""Classes of torch and the standard library whose objects have attributes that are looked at."""
_CODE = (FunctionType, staticmethod, classmethod, property, MemberDescriptorType)
_PLAIN = (torch.Tensor, nn.Parameter)
_DEPTH = 4
"""Caches of functions are looked into so deep: entries, tuples in them, lists and dicts in those."""
_Look = Callable[[Any], Iterable[Any]]
"""Notes the contents of one object, and returns them."""


class Reachable:
    """What code can reach, as it is when this is made."""

    def __init__(self, model: nn.Module, given: Any) -> None:
        self._seen = set[int]()
        self._looks: dict[type, _Look | None] = dict.fromkeys(_LEAVES)
        self._files: dict[int, dict[str, Any]] = {}  # the names of files with classes and functions that were met
        # What was found, with its contents; everything that has an address in `_seen` is held by one of these.
        self._found: list[Any] = []
        self._met = set[type]()
        self._dicts: list[tuple[Any, tuple, tuple]] = []
        self._empty: list[Any] = []
        self._others: list[tuple[Any, list[Any]]] = []
        self._names: list[tuple[dict[str, Any], tuple[str, ...], list[Any]]] = []  # of files
        self._classes: list[tuple[type, int, tuple[str, ...], list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._slots: list[tuple[Any, MemberDescriptorType, Any]] = []
        self._caches: list[tuple[Any, int]] = []
        self._generators: list[tuple[Callable[[Any], Any], Any]] = []
        self._onward: list[tuple[Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor | None, int, torch.Tensor | None, bool]] = []
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._written: dict[int, torch.UntypedStorage] = {}  # copies of memory, from before it was written
        self._settings = [(put, get()) for get, put in _SETTINGS]
        with no_modes():
            self._walk([model, given])
            self._leave_alone(watcher())
            self._look_into_files()

    # ---- before

    def _walk(self, todo: list[Any]) -> None:
        looks, seen = self._looks, self._seen
        while todo:
            item = todo.pop()
            kind = type(item)
            look = looks.get(kind, ABSENT)
            if look is ABSENT:
                look = looks[kind] = self._look_for(kind)
                todo += self._class(kind)
            if look is not None and id(item) not in seen:
                seen.add(id(item))
                self._found.append(item)
                if parts := look(item):
                    todo += [part for part in parts if looks.get(type(part), ABSENT) is not None]

    def _leave_alone(self, function: Any) -> None:
        """What a function of the user's notes that is called during the run, of how far it has come, stays noted."""
        notes: tuple[list, ...] = (
            self._dicts, self._empty, self._others, self._names, self._cells, self._slots, self._caches,
            self._generators, self._tensors,
        )  # fmt: skip
        sizes = list(map(len, notes))
        files = dict(self._files)
        self._walk([function, *mentioned_by(function)])
        for note, size in zip(notes, sizes, strict=True):
            del note[size:]
        self._files = files

    def _look_for(self, kind: type) -> _Look | None:
        """How to look into objects of a class; None where nobody does."""
        name, has_attributes = _way(kind)
        look = getattr(self, name) if name else None
        return partial(self._object, look) if has_attributes else look

    def _object(self, look: _Look | None, item: Any) -> list[Any]:
        """An object: its attributes and slots, and its contents if it is a container too."""
        found = list(look(item)) if look is not None else []
        with suppress(AttributeError):  # it has slots only
            found.append(object.__getattribute__(item, "__dict__"))
        for slot in _slots_of(type(item)):
            value = _in_slot(item, slot)
            self._slots.append((item, slot, value))
            found.append(value)
        return found

    def _dict(self, item: Any) -> tuple:
        if not dict.__len__(item):
            self._empty.append(item)
            return ()
        base = _plain_type(item)
        values = tuple(base.values(item))
        self._dicts.append((item, tuple(base.keys(item)), values))
        return values

    def _other(self, item: Any) -> list[Any]:
        contents = list(_plain_type(item).__iter__(item))
        self._others.append((item, contents))
        return contents

    def _parts(self, item: Any) -> tuple:
        if isinstance(item, MethodType):
            return item.__self__, item.__func__
        if isinstance(item, (staticmethod, classmethod)):
            return (item.__func__,)
        if isinstance(item, property):
            return item.fget, item.fset
        if isinstance(item, functools.cached_property):
            return (item.func,)
        if isinstance(item, threading.local):
            return (item.__dict__,)
        if isinstance(item, contextvars.ContextVar):
            return (item.get(None),)
        if isinstance(item, partial):
            return item.func, item.args, item.keywords, item.__dict__
        return (item(),) if isinstance(item, weakref.ref) else tuple(item)

    def _function(self, item: FunctionType) -> list[Any]:
        self._file(item.__globals__)
        return [*(item.__closure__ or ()), *(item.__defaults__ or ()), item.__kwdefaults__, item.__dict__]

    def _cell(self, item: CellType) -> tuple:
        value = content(item)
        self._cells.append((item, value))
        return (value,)

    def _cache(self, item: Any) -> tuple:
        self._caches.append((item, item.cache_info().misses))
        return ()

    def _generator(self, item: Any) -> tuple:
        is_torch = isinstance(item, torch.Generator)
        self._generators.append((item.set_state, item.get_state()) if is_torch else (item.setstate, item.getstate()))
        return ()

    def _goes_on(self, item: Any) -> tuple:
        self._onward.append((item, place_of(item)))
        return ()

    def _logger(self, item: logging.Logger) -> tuple:
        self._generators.append((item.setLevel, item.level))
        return item.handlers, item.filters

    def _tensor(self, item: torch.Tensor) -> tuple:
        plain = type(item) in _PLAIN and item.layout is torch.strided and not item.is_nested
        alias = item.data if plain else None
        grad = item.grad if item.is_leaf else None
        self._tensors.append((item, alias, _version(item), grad, item.requires_grad))
        if alias is not None:
            storage = alias.untyped_storage()
            self._memory[storage._cdata] = storage
        return grad, vars(item)

    def _class(self, item: type) -> list[Any]:
        """The attributes of a class of users and of those behind it."""
        found = []
        for base in item.__mro__:
            table = table_of_class(base)
            if table is not None and base not in self._met:
                self._met.add(base)
                self._file(table)
                count, names = _attributes_of(base)
                values = list(map(vars(base).__getitem__, names))
                self._classes.append((base, count, names, values))
                found += values
        return found

    def _note_names(self, table: dict[str, Any], names: tuple[str, ...]) -> list[Any]:
        values = [table.get(name, ABSENT) for name in names]
        self._names.append((table, names, values))
        return values

    def _file(self, table: dict[str, Any]) -> None:
        if is_open(str(table.get("__name__"))):
            self._files[id(table)] = table

    def _look_into_files(self) -> None:
        """What the files of the model's own classes and functions mention, and what others of their packages do."""
        near = list(self._files.values())
        found: list[Any] = []
        for file in map(file_of, near):
            found += [*self._note_names(file.table, file.names), *file.classes, *file.functions]
            for other, names in file.mentioned:
                found += self._note_names(other, names)
        self._walk(found)
        done = set(map(id, near))
        packages = set(map(_package, near))
        todo = [*(other for table in near for other in file_of(table).files), *self._files.values()]
        found = []
        while todo:
            table = todo.pop()
            if id(table) not in done:
                done.add(id(table))
                file = file_of(table)
                values = self._note_names(table, file.names)
                found += [value for value in values if not isinstance(value, (type, FunctionType))]
                todo += [other for other in file.files if _package(other) in packages]
        for kind in [*self._looks, FunctionType, MethodType, type]:
            if issubclass(kind, (FunctionType, MethodType, type)):
                self._looks[kind] = None  # tables of functions, hundreds of which are never called
        self._walk(found)

    # ---- during

    def about_to_write(self, tensor: torch.Tensor) -> None:
        """An op of the run writes into a tensor: what was there before is kept."""
        if type(tensor) in _PLAIN:
            storage = tensor.untyped_storage()
            if storage._cdata in self._memory and storage._cdata not in self._written:
                self._written[storage._cdata] = storage.clone()

    # ---- after

    def put_back(self) -> None:
        """Write back what changed."""
        with no_modes(), torch.no_grad():
            for item in self._empty:
                if dict.__len__(item):
                    _plain_type(item).clear(item)
            for item, keys, values in self._dicts:
                base = _plain_type(item)
                if not _same(base.values(item), values) or not _same(base.keys(item), keys):
                    _refill(item, keys, values)
            for item, contents in self._others:
                base = _plain_type(item)
                if not _same(list(base.__iter__(item)), contents):
                    base.clear(item)
                    base.update(item, contents) if base is set else base.extend(item, contents)
            for table, names, noted in self._names:
                for name, value in zip(names, noted, strict=True):
                    if table.get(name, ABSENT) is not value:
                        _put(partial(table.__setitem__, name), partial(table.__delitem__, name), value)
            for kind, count, names, noted in self._classes:
                _put_back_class(kind, count, names, noted)
            for cell, value in self._cells:
                if content(cell) is not value:
                    _put(partial(setattr, cell, "cell_contents"), partial(delattr, cell, "cell_contents"), value)
            for item, slot, value in self._slots:
                if _in_slot(item, slot) is not value:
                    _put(partial(slot.__set__, item), partial(slot.__delete__, item), value)
            for cache, misses in self._caches:
                if cache.cache_info().misses != misses and _has_tensors(cache):
                    cache.cache_clear()
            for put, state in self._generators:
                put(state)
            self._put_back_tensors()
        for put, value in self._settings:
            put(value)
        self._looks.clear()  # they hold this, and this all it found

    def overwritten(self) -> list[torch.Tensor]:
        """Tensors that were written in place by what nobody told of."""
        return [
            item
            for item, alias, version, _, _ in self._tensors
            if _version(item) != version and (alias is None or alias.untyped_storage()._cdata not in self._written)
        ]

    def used_up(self) -> list[Any]:
        """What has run on and can't be set back."""
        return [item for item, place in self._onward if has_run_on(item, place)]

    def _put_back_tensors(self) -> None:
        for key, before in self._written.items():
            self._memory[key].copy_(before)
        for item, alias, version, grad, requires_grad in self._tensors:
            if alias is not None and not _same_memory(item, alias):
                item.data = alias
            if item.requires_grad != requires_grad and item.is_leaf:
                item.requires_grad_(requires_grad)
            if item.is_leaf and item.grad is not grad:
                item.grad = grad
            if _version(item) != version:
                set_version(item, version)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
)


def _plain_type(item: Any) -> Any:
    """The class of plain containers that an object is of."""
    kind = type(item)
    if kind is dict or kind is OrderedDict or kind is list:  # nearly all
        return kind
    return next(plain for plain in (OrderedDict, dict, list, set, deque) if isinstance(item, plain))


def _same(found: Any, noted: Any) -> bool:
    """Whether the same objects are there in the same order."""
    return len(found) == len(noted) and not any(map(is_not, found, noted))


def _refill(item: Any, keys: tuple, values: tuple) -> None:
    """Put the contents of a dict back, without a moment at which unchanged ones are not there, unless moved."""
    base = _plain_type(item)
    before = dict(zip(keys, values, strict=True))
    for key in [key for key in base.keys(item) if key not in before]:
        base.__delitem__(item, key)
    for key, value in before.items():
        if base.get(item, key, ABSENT) is not value:
            base.__setitem__(item, key, value)
    if not _same(list(base.keys(item)), keys):
        base.clear(item)
        for key, value in before.items():
            base.__setitem__(item, key, value)


def _put_back_class(kind: type, count: int, names: tuple[str, ...], values: list[Any]) -> None:
    """Put back the attributes of a class, which had `count` in all; those with these names had these values."""
    table = vars(kind)
    if len(table) == count and not any(map(is_not, [table.get(name, ABSENT) for name in names], values)):
        return
    _, found = _attributes_of(kind)
    for name in set(found).difference(names):
        type.__delattr__(kind, name)
    for name, value in zip(names, values, strict=True):
        if table.get(name, ABSENT) is not value:
            type.__setattr__(kind, name, value)


def _put(put: Callable[[Any], None], delete: Callable[[], None], value: Any) -> None:
    if value is ABSENT:
        delete()
    else:
        put(value)


_Names = tuple[int, tuple[str, ...]]
_known_ways = weakref.WeakKeyDictionary[type, tuple[str, bool]]()
_known_attributes = weakref.WeakKeyDictionary[type, _Names]()
_WAYS: tuple[tuple[Any, str], ...] = (
    (torch.Tensor, "_tensor"),
    (dict, "_dict"),
    ((list, set, deque), "_other"),
    (FunctionType, "_function"),
    (type, "_class"),
    (CACHE, "_cache"),
    (CellType, "_cell"),
    ((torch.Generator, random.Random), "_generator"),
    (ONWARD, "_goes_on"),
    (logging.Logger, "_logger"),
    ((tuple, frozenset, MethodType, staticmethod, classmethod, property, partial), "_parts"),
    ((functools.cached_property, weakref.ref, threading.local, contextvars.ContextVar), "_parts"),
)


def _way(kind: type) -> tuple[str, bool]:
    """The method that looks into objects of a class, "" for none, and whether they have attributes of users."""
    known = _known_ways.get(kind)
    if known is None:
        name = next((name for bases, name in _WAYS if issubclass(kind, bases)), "")
        users = is_open(kind.__module__) or (not name and issubclass(kind, _SIMPLE))
        known = _known_ways[kind] = name, users and name not in ("_tensor", "_class")
    return known


def _attributes_of(kind: type) -> _Names:
    """How many attributes a class has, and the names of those that are no functions and not Python's own."""
    known, table = _known_attributes.get(kind), vars(kind)
    if known is None or known[0] != len(table):
        names = [name for name, value in table.items() if not isinstance(value, _CODE) and not name.startswith("__")]
        known = _known_attributes[kind] = len(table), tuple(names)
    return known


def _slots_of(kind: type) -> Iterator[MemberDescriptorType]:
    for base in kind.__mro__:
        if "__slots__" in vars(base):
            yield from (value for value in vars(base).values() if isinstance(value, MemberDescriptorType))


def _in_slot(item: Any, slot: MemberDescriptorType) -> Any:
    try:
        return slot.__get__(item)
    except AttributeError:  # nothing was put there yet
        return ABSENT


def _has_tensors(cache: Any) -> bool:
    """Whether one of the results in a function's cache is a tensor, or a tuple, list or dict with one."""
    level, seen = [cache], set[int]()
    for _ in range(_DEPTH):
        level = [item for item in gc.get_referents(*level) if id(item) not in seen and _may_be_entry(item)]
        if any(isinstance(item, torch.Tensor) for item in level):
            return True
        seen.update(map(id, level))
    return False


def _may_be_entry(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, tuple, list, dict)) or type(item).__name__ == "_lru_list_elem"


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same_memory(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    if tensor.shape != alias.shape or tensor.stride() != alias.stride() or tensor.dtype != alias.dtype:
        return False
    same = tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
    return bool(same and tensor.storage_offset() == alias.storage_offset())


def _package(table: dict[str, Any]) -> str:
    return str(table.get("__name__")).partition(".")[0]
