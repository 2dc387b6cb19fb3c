"""Random numbers that do not depend on how many rows there are: every row draws the same, in every run the same.

Whether rows mix can't be seen where each run draws other numbers, nor where everything is rounded to few digits.
Nothing is dropped, and what a model computes in types that it names (`.to(torch.bfloat16)`, autocast inside of its
forward) it computes in that of the trial.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autoshard.nested import leaves_in
from autoshard.torch_private import DispatchMode

aten = torch.ops.aten
_DROPOUTS = {aten.native_dropout.default}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_BITS = {aten.view.dtype}
"""Ops with a type that says how bits are read."""
_STATEFUL = {"seed", "get_state", "set_state"}
PATIENCE = 10_000
"""After so many draws numbers are drawn as ever: code may draw until it finds another one."""


@contextmanager
def steady_draws(most_elements: int = sys.maxsize, dtype: torch.dtype | None = None) -> Iterator["SteadyDraws"]:
    """Inside, what torch and NumPy's global generator draw depends on the shape of a row only.

    An op that makes a tensor with more than `most_elements` raises `TooLargeError`. `dtype`: the type of what is cast
    to, or made in, any floating-point type.
    """
    draws = SteadyDraws(most_elements, dtype)
    numpy = sys.modules.get("numpy")
    replaced: dict[str, Any] = {}
    if numpy is not None:
        generator = numpy.random.mtrand._rand
        for name in set(numpy.random.__all__) - _STATEFUL:
            function = getattr(numpy.random, name)
            if getattr(function, "__self__", None) is generator:
                replaced[name] = function
                setattr(numpy.random, name, _steady(function, generator, draws))
    try:
        with draws:
            yield draws
    finally:
        for name, function in replaced.items():
            setattr(numpy.random, name, function)  # type: ignore[union-attr]


def _steady(function: Callable, generator: Any, draws: "SteadyDraws") -> Callable:
    """A function of NumPy's that draws the same in every call."""

    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        draws.count += 1
        if draws.count < PATIENCE:
            generator.seed(0)
        return function(*args, **kwargs)

    return drawn


class TooLargeError(Exception):
    """A model computes sizes from its numbers, and with random ones makes tensors that nothing has room for."""


class SteadyDraws(DispatchMode):
    """Answers ops that draw random numbers; `count` is how many did. `types`: what is computed in another type."""

    def __init__(self, most_elements: int = sys.maxsize, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.count, self.most_elements = 0, most_elements
        self.types: dict[torch.dtype, torch.dtype] = {}
        if dtype is not None:
            own = dict.fromkeys(_FLOATS, dtype) | dict.fromkeys(_COMPLEX, dtype.to_complex())
            self.types = {one: other for one, other in own.items() if one != other}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not self.types or func in _BITS:
            return self._answered(func, args, kwargs)
        args = tuple(self._typed(value) for value in args)
        made = self._answered(func, args, {name: self._typed(value) for name, value in kwargs.items()})
        if isinstance(made, torch.Tensor) and made.dtype in self.types and _makes(func, args):
            return made.to(self.types[made.dtype])
        return made

    def _typed(self, value: Any) -> Any:
        return self.types.get(value, value) if isinstance(value, torch.dtype) else value

    def _answered(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        if torch.Tag.nondeterministic_seeded not in func.tags:
            made = func(*args, **kwargs)
            if isinstance(made, torch.Tensor) and made.numel() > self.most_elements:
                raise TooLargeError(
                    f"its sizes depend on what it computes: with random weights {func} makes a tensor of shape "
                    f"{list(made.shape)}"
                )
            return made
        if self.count >= PATIENCE:
            return func(*args, **kwargs)
        device = _device_of((args, kwargs))
        _seed(device)  # not by how many draws there were: experts that are not needed draw none
        before = _state_of(device)
        made = func(*args, **kwargs)
        if torch.equal(_state_of(device), before):
            return made
        self.count += 1
        if func in _DROPOUTS:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if not isinstance(made, torch.Tensor) or not made.is_floating_point():
            return made
        return made.copy_(self._row(func._schema.name.split("::")[1], made, args, kwargs))

    def _row(self, name: str, made: torch.Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What stands in every row: numbers along the last dimension, one number where that is all there is."""
        shape = made.shape[-1:] if made.dim() > 1 else ()
        generator = torch.Generator().manual_seed(0)
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator).clamp(1e-6, 1 - 1e-6)
        if "bernoulli" in name:
            p = args[1] if len(args) > 1 else kwargs.get("p", 0.5 if name.endswith("_") else args[0])
            return torch.ones_like(made) * (torch.as_tensor(p, dtype=made.dtype) > 0)
        if "exponential" in name:
            return (-uniform.log()).to(made.dtype)
        if "normal" in name or "randn" in name:
            return (torch.erfinv(2 * uniform - 1) * math.sqrt(2)).to(made.dtype)
        return uniform.to(made.dtype)


def _makes(func: Any, args: tuple) -> bool:
    """Whether an op makes a tensor of no other one: a factory, or what turns numbers of Python's into a tensor."""
    return func is aten.lift_fresh.default or not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_in(args))


def _device_of(value: Any) -> torch.device:
    """Where an op draws."""
    named = [leaf for _, leaf in leaves_in(value) if isinstance(leaf, (torch.Tensor, torch.device))]
    devices = [leaf.device if isinstance(leaf, torch.Tensor) else leaf for leaf in named]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _seed(device: torch.device) -> None:
    """Begin the numbers of a device anew. `torch.manual_seed` notes a stack trace for devices that are not in use."""
    if device.type in ("cpu", "meta"):
        torch.default_generator.manual_seed(0)
    else:
        torch.get_device_module(device).manual_seed(0)


def _state_of(device: torch.device) -> torch.Tensor:
    """Where the generator of a device is."""
    return (
        torch.get_rng_state()
        if device.type in ("cpu", "meta")
        else torch.get_device_module(device).get_rng_state(device)
    )
