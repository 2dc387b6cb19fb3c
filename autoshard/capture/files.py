"""What the functions of a module file keep outside of themselves, and which other files they go on into.

    TABLE = {}                       def table(n): … TABLE[n] …          names: TABLE, CALLS
    from helper import angles        def forward(…): global CALLS …      files: that of `angles`; torch's own are not

Looking through code takes long, so what was found of a file is remembered until something else is in it.
"""

import dis
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

CACHE = type(functools.lru_cache(len))
"""The class of functions with a cache."""
_CLOSED = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "autoshard", "pytest", "_pytest"}
"""Packages in whose files nothing is looked for: what they keep is their own business."""
_STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]
_STORE_DEREF = dis.opmap["STORE_DEREF"]
ABSENT: Any = object()
"""Stands for what is not there."""
_CONSTANT = (bool, int, float, complex, str, bytes, type(None), type, ModuleType, FunctionType, type(len))
"""Classes of what nothing can be put into; a file's own name for it is another matter."""


@functools.cache
def is_open(name: str) -> bool:
    """Whether what the code of this module keeps is looked for."""
    return name.partition(".")[0] not in _CLOSED


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """What the functions of one module file keep.

    Attributes:
        table: the names of the file, its `__dict__`.
        names: those that its functions bind, or mention and find something there that can hold something.
        mentioned: the same of other modules that are mentioned, as (their `__dict__`, names).
        classes: classes mentioned.
        functions: its functions that hold something: in closures, default arguments or attributes.
        files: the tables of other files whose functions and classes are mentioned.
        stamp: what was in the table when this was found out.
    """

    table: dict[str, Any]
    names: tuple[str, ...]
    mentioned: tuple[tuple[dict[str, Any], tuple[str, ...]], ...]
    classes: tuple[type, ...]
    functions: tuple[FunctionType, ...]
    files: tuple[dict[str, Any], ...]
    stamp: list[int]


_known: dict[str, File] = {}


def file_of(table: dict[str, Any]) -> File:
    """What the functions of the file with these names keep."""
    name, stamp = str(table.get("__name__")), list(map(id, table.values()))
    known = _known.get(name)
    if known is None or known.table is not table or known.stamp != stamp:
        known = _known[name] = _read(table, stamp)
    return known


def table_of_class(kind: type) -> dict[str, Any] | None:
    """The names of the file that a class is from, if they are looked at."""
    module = sys.modules.get(kind.__module__) if is_open(kind.__module__) else None
    return None if module is None else vars(module)


def functions_in(value: Any) -> Iterator[FunctionType]:
    """The Python functions in a function, a method, a property, a function with a cache, and those they wrap."""
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):
            yield item
            todo += [content(cell) for cell in item.__closure__ or ()]
        elif isinstance(item, (staticmethod, classmethod, MethodType)):
            todo.append(item.__func__)
        elif isinstance(item, property):
            todo += [item.fget, item.fset, item.fdel]
        elif isinstance(item, (functools.partial, functools.cached_property)):
            todo.append(item.func)
        elif isinstance(item, CACHE):
            todo.append(item.__wrapped__)


def mentioned_by(value: Any) -> list[Any]:
    """What the names stand for that the functions in a value mention."""
    return [
        function.__globals__.get(name)
        for function in functions_in(value)
        for code in _codes(function.__code__)
        for name in code.co_names
    ]


def content(cell: Any) -> Any:
    """What is in a cell of a closure; `ABSENT` if nothing was put there yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _read(table: dict[str, Any], stamp: list[int]) -> File:
    own = list(_own_functions(table))
    codes = [code for function in own for code in _codes(function.__code__)]
    mentioned = {name for code in codes for name in code.co_names}
    bound = {name for code in codes for name in _bound(code)}
    classes, files = dict[int, type](), dict[int, dict[str, Any]]()
    others = []
    for name in mentioned:
        value = table.get(name)
        if isinstance(value, type):
            other = table_of_class(value)
            if other is not None:
                classes[id(value)], files[id(other)] = value, other
        elif isinstance(value, ModuleType) and is_open(value.__name__):
            other = vars(value)
            files[id(other)] = other
            others.append((other, _holding(other, mentioned)))
        for function in functions_in(value):
            if is_open(str(function.__globals__.get("__name__"))):
                files[id(function.__globals__)] = function.__globals__
    files.pop(id(table), None)
    return File(
        table=table, names=tuple({*bound, *_holding(table, mentioned)}), mentioned=tuple(others),
        classes=tuple(classes.values()), functions=tuple(filter(_holds, own)), files=tuple(files.values()),
        stamp=stamp,
    )  # fmt: skip


def _holding(table: dict[str, Any], names: set[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name in table and not isinstance(table[name], _CONSTANT))


def _holds(function: FunctionType) -> bool:
    """Whether a function has something that can change: in its closure, default arguments or attributes."""
    cells = map(content, function.__closure__ or ())
    given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    rebound = any(code.co_freevars and _STORE_DEREF in code.co_code[::2] for code in _codes(function.__code__))
    own = function.__dict__.keys() - {"__wrapped__"}
    return rebound or bool(own) or not all(isinstance(value, _CONSTANT) for value in (*cells, *given))


def _own_functions(table: dict[str, Any]) -> Iterator[FunctionType]:
    """The functions and methods that are written in a file."""
    todo: list[Any] = list(table.values())
    seen = set[int]()
    while todo:
        value = todo.pop()
        if isinstance(value, type):
            if value.__module__ == table.get("__name__") and id(value) not in seen:
                seen.add(id(value))
                todo += vars(value).values()
            continue
        for function in functions_in(value):
            if function.__globals__ is table and id(function) not in seen:
                seen.add(id(function))
                yield function


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _bound(code: CodeType) -> Iterator[str]:
    """Names of its file that code binds."""
    if _STORE_GLOBAL in code.co_code[::2]:
        yield from (op.argval for op in dis.get_instructions(code) if op.opcode == _STORE_GLOBAL)
