"""Values of annotated types from JSON: nothing is guessed, converted or dropped."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


class Misread(ValueError):
    """What a field should be, and what was found."""

    def __init__(self, name: str, wanted: str, found: Any) -> None:
        text = repr(found)
        super().__init__(f"{name} should be {wanted}, found {text if len(text) <= 60 else text[:57] + '...'}")


def expect(good: bool, name: str, wanted: str, found: Any) -> None:
    """Raise `Misread` with what a field should be, unless it is."""
    if not good:
        raise Misread(name, wanted, found)


def read_as(kind: Any, data: Any, name: str) -> Any:
    """Build a value of a type from JSON: strings, numbers, booleans, literals, lists, objects, dataclasses, or None.

    Fields of a dataclass that have a default may be missing. Raises `Misread` for anything else.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, UnionType):
        kinds = [one for one in inner if one is not type(None)]
        if data is None and len(kinds) < len(inner):
            return None
        if len(kinds) == 1:
            return read_as(kinds[0], data, name)
        for one in kinds:
            with suppress(Misread):
                return read_as(one, data, name)
        raise Misread(name, " or ".join(NAMES[one] for one in kinds), data)
    if origin is tuple:
        expect(isinstance(data, Sequence) and not isinstance(data, str), name, "a list", data)
        return tuple(read_as(inner[0], item, f"{name}[{index}]") for index, item in enumerate(data))
    if origin is Literal:
        expect(isinstance(data, str) and data in inner, name, f"one of {', '.join(inner)}", data)
        return data
    if origin in (Mapping, dict):
        expect(isinstance(data, Mapping), name, "an object", data)
        return {key: read_as(inner[1], value, f"{name} of {key!r}") for key, value in data.items()}
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return kind(**read_fields(kind, data, name))
    expect(isinstance(data, (int, float) if kind is float else kind), name, NAMES[kind], data)
    expect(isinstance(data, bool) == (kind is bool), name, NAMES[kind], data)
    return data


def read_fields(kind: type, data: Any, name: str, *, some: bool = False) -> dict[str, Any]:
    """Read the fields that an object has of a dataclass, as `read_as`; `some`: any of them may be missing."""
    known = {field.name: field for field in fields(kind)}
    needed = [
        key for key, field in known.items()
        if field.default is MISSING and field.default_factory is MISSING and not some
    ]  # fmt: skip
    expect(isinstance(data, Mapping), name, "an object", data)
    lacking = [key for key in needed if key not in data]
    expect(not lacking, name, f"an object with {', '.join(needed)}", f"one without {', '.join(lacking)}")
    unknown = sorted(map(str, set(data) - set(known)))
    expect(not unknown, name, f"an object with {', '.join(known)} only", unknown)
    types = get_type_hints(kind)
    return {key: read_as(types[key], value, f"{name}.{key}" if name else key) for key, value in data.items()}
