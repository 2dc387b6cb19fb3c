"""Dotted paths of modules and tensors: "layers.0.norm.weight"; the root of a model is ""."""

import inspect
from functools import lru_cache

from torch import nn
from torch.jit import ScriptModule

_REMEMBERED = 1 << 16
"""Paths of which the modules around them are remembered: planning asks for those of a model dozens of times."""


@lru_cache(_REMEMBERED)
def parent(path: str) -> str:
    """Return the path of the module that holds `path`; the root is ""."""
    return path.rpartition(".")[0]


@lru_cache(_REMEMBERED)
def above(path: str) -> tuple[str, ...]:
    """Return the modules around `path`, the innermost first: "a.b.weight" -> "a.b", "a", ""; none around the root."""
    return (parent(path), *above(parent(path))) if path else ()


def is_below(path: str, top: str) -> bool:
    """Say whether `path` is `top` or lies below it."""
    return not top or path == top or path.startswith(f"{top}.")


def join(top: str, name: str) -> str:
    """Return the full path of something below `top`; either may be ""."""
    return f"{top}.{name}" if top and name else top or name


def relative(path: str, top: str) -> str:
    """Return `path` as seen from a module that it lies below, or is: "layers.0.norm" from "layers.0" -> "norm"."""
    return path[len(top) + 1 :] if top else path


def is_container(module: nn.Module) -> bool:
    """Say whether a module only holds others, as `ModuleList` does: nobody calls it, since it has no forward."""
    return inspect.getattr_static(type(module), "forward") is nn.Module.forward


def find_scripted(model: nn.Module) -> str | None:
    """Return the path of a part that is TorchScript, whose tensors can't be exchanged from Python; None without one."""
    return next((path for path, module in model.named_modules() if isinstance(module, ScriptModule)), None)
