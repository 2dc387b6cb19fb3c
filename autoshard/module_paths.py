"""Dotted paths of modules and tensors: "layers.0.norm.weight"; the root of a model is ""."""

from collections.abc import Iterator


def parent(path: str) -> str:
    """Return the path of the module that holds `path`; the root is ""."""
    return path.rpartition(".")[0]


def above(path: str) -> Iterator[str]:
    """Yield the modules around `path`, the innermost first: "a.b.weight" -> "a.b", "a", ""; none around the root."""
    while path:
        path = parent(path)
        yield path


def is_below(path: str, top: str) -> bool:
    """Say whether `path` is `top` or lies below it."""
    return not top or path == top or path.startswith(f"{top}.")


def join(top: str, name: str) -> str:
    """Return the full path of something below `top`; either may be ""."""
    return f"{top}.{name}" if top and name else top or name


def relative(path: str, top: str) -> str:
    """Return `path` as seen from a module that it lies below, or is: "layers.0.norm" from "layers.0" -> "norm"."""
    return path[len(top) + 1 :] if top else path
