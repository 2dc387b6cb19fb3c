"""Building a model without its weights: every parameter goes to meta the moment a module takes it.

Buffers, and whatever else the model computes while it is built, stay real: masks, index tables and frequencies often
decide later what is run. A parameter that is about to be replaced was only reserved by `torch.empty`, not written, so
the system has not given memory for it; very large floating-point tensors are made on meta at once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

LARGE_BYTES = 2**28
_FILLS = {"fill_", "zero_"} | {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")}
"""Names of calls that only fill their first argument, in `torch.nn.init`, in wrappers of it and on tensors."""
_FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn)


class SkeletonCount:
    """How many parameters were kept off memory while a `without_weights` block ran."""

    parameters = 0


@contextlib.contextmanager
def without_weights() -> Iterator[SkeletonCount]:
    """Within it, parameters of new modules are on meta. Ties, `requires_grad` and subclasses' attributes are kept."""
    count = SkeletonCount()
    replaced: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    original = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if isinstance(param, nn.Parameter) and not param.is_meta and not is_lazy(param):
            # One object under two names stays one object.
            twin = replaced.get(param)
            if twin is None:
                twin = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
                vars(twin).update(vars(param))
                replaced[param] = twin
                count.parameters += 1
            param = twin
        original(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        with _LargeOnMeta(count):
            yield count
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


class _LargeOnMeta(TorchFunctionMode):
    """Makes floating-point tensors of `LARGE_BYTES` or more on meta: one alone may be more than this machine has."""

    def __init__(self, count: SkeletonCount) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: "dict[str, Any] | None" = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        if isinstance(target, torch.Tensor) and target.is_meta and _initialises(func):
            return target
        if func in _FACTORIES and kwargs.get("device") is None and kwargs.get("out") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.is_floating_point() and made.nbytes >= LARGE_BYTES:
                self.count.parameters += 1
                return made
        return func(*args, **kwargs)


def _initialises(func: Any) -> bool:
    """Tell whether a call only fills its first argument: a meta tensor stays as it is.

    Left to itself torch imports its whole compiler, a second's work, to draw random numbers into nothing.
    """
    return getattr(func, "__name__", "") in _FILLS


def has_weights(module: nn.Module) -> bool:
    """Tell whether every parameter has values."""
    return not any(parameter.is_meta for parameter in module.parameters())


def parameter_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, tied ones once."""
    tensors: dict[int, torch.Tensor] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(tensor.nbytes for tensor in tensors.values())
