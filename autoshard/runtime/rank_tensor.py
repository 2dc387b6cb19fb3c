"""A tensor that is one local tensor per rank, for all ranks in one process: each op runs on every rank's own.

    RankTensor  shape, strides, dtype and device of rank 0's part, autograd history: what the model's code sees
      └─ parts  one ordinary tensor per rank, on its device, no history

An ordinary tensor that meets one is read by every rank, as a copy on its device. What Python reads (`item`, `bool`, a
shape that depends on values) must be the same on all ranks. Random numbers are drawn once, by rank 0. Nothing is ever
written into an ordinary tensor: that raises.
"""

import copy
import operator
import threading
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from autoshard import torch_private
from autoshard.common.schemas import arguments_of_op, reads_shape_alone, schema_of, written_by
from autoshard.errors import ApplyError
from autoshard.nested import map_tensors
from autoshard.runtime.backward import with_backward
from autoshard.runtime.devices import fresh_copy
from autoshard.runtime.given import Given
from autoshard.torch_private import DispatchMode

aten = torch.ops.aten
_set_metadata = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_RESHAPING = {aten.resize_, aten.resize_as_, aten.set_}
"""Ops besides the tagged ones after which the tensor written to has another shape."""
NESTED = (
    "a nested tensor, which torch's encoder makes of a padded batch unless it is trained, can't be cut. Build it with "
    "enable_nested_tensor=False, or call torch.backends.mha.set_fastpath_enabled(False): results differ only in the "
    "padding."
)
OF_RANKS = "its model is cut over devices, of which each has a copy"
_DIFFERENT = "the ranks have different values where the model's code reads one. Plan with this part of it whole."


class RankTensor(torch.Tensor):
    """One tensor per rank. `parts`: their values; `devices`: where each rank lives."""

    parts: tuple[torch.Tensor, ...]
    devices: tuple[torch.device, ...]

    __torch_function__ = torch_private.not_overridden

    @staticmethod
    def __new__(cls, parts: Sequence[torch.Tensor], devices: Sequence[torch.device]) -> "RankTensor":
        first = parts[0]
        if first.is_nested:
            raise ApplyError(NESTED)
        for rank, part in enumerate(parts):
            if part.shape != first.shape or part.dtype != first.dtype:
                raise ApplyError(
                    f"rank {rank} has a tensor of shape {list(part.shape)} where rank 0 has {list(first.shape)}. All "
                    "ranks run in one process here, so their shapes must be the same: cut evenly, or start one process "
                    "per rank."
                )
        self = torch_private.wrapper(cls, first, first.device)
        self.parts = tuple(parts)
        self.devices = tuple(devices)
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return run_op(func, args, kwargs or {})

    # What torch would read from memory that this tensor, seen from C++, does not have.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{self.parts[0]!r} on rank 0 of {len(self.parts)}"

    def __format__(self, spec: str) -> str:
        return self.agreed().__format__(spec)

    def agreed(self) -> torch.Tensor:
        """Rank 0's tensor, which must be that of all ranks."""
        if not same(self.parts):
            raise ApplyError(_DIFFERENT)
        return self.parts[0]

    def _number(self) -> Any:
        """The only element. Nothing is dispatched: `torch.tensor` reads the tensors in a list with dispatch off."""
        if self.numel() != 1:
            return torch.Tensor.item(self)  # raises
        values = [part.tolist() for part in self.parts]
        while isinstance(values[0], list):
            values = [value[0] for value in values]
        if any(value != values[0] and (value == value or values[0] == values[0]) for value in values):
            raise ApplyError(_DIFFERENT)
        return values[0]

    def __bool__(self) -> bool:
        return bool(self._number())

    def __int__(self) -> int:
        return int(self._number())

    def __index__(self) -> int:
        return int(operator.index(self._number()))

    def __float__(self) -> float:
        return float(self._number())

    def __complex__(self) -> complex:
        return complex(self._number())

    def tolist(self) -> Any:
        return self.agreed().tolist()

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.agreed().numpy(force=force)

    def data_ptr(self) -> int:
        return self.parts[0].data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.parts[0].untyped_storage()

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        made = torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)
        return made.requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict) -> "RankTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol.")
        made = type(self)([copy.deepcopy(part, memo) for part in self.parts], self.devices)
        for name, value in self.__dict__.items():
            if name not in ("parts", "devices"):
                setattr(made, name, copy.deepcopy(value, memo))
        made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ApplyError("a model that is cut over devices can't be pickled. Call autoshard.save(model, directory).")

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, RankTensor):
            raise ApplyError("can't set the data of a tensor that is cut over devices. Call autoshard.remove first.")
        _set_metadata(self, value)
        self.parts = tuple(part.detach() for part in value.parts)
        self.devices = value.devices


def same(parts: Sequence[torch.Tensor]) -> bool:
    """Whether all ranks have the same values; of large tensors, a sample of 65,536 is compared.

    Nobody who counts what functions the model calls sees those of this comparison.
    """
    with torch_private.no_overrides():
        first = _sample(parts[0])
        for part in parts[1:]:
            other = _sample(part)
            other = other if other.device == first.device else fresh_copy(other, first.device)
            if not torch.equal(first, other) and not (
                first.is_floating_point() and torch.allclose(first, other, rtol=0, atol=0, equal_nan=True)
            ):
                return False
    return True


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() >> 16)]


def spread(tensor: torch.Tensor, devices: Sequence[torch.device]) -> RankTensor:
    """Give every rank a copy of an ordinary tensor; rank 0's shares its memory if it is there."""
    return _from_first(tensor.detach().to(devices[0]), devices)


def _from_first(first: torch.Tensor, devices: Sequence[torch.device]) -> RankTensor:
    return RankTensor([first, *(fresh_copy(first, device) for device in devices[1:])], devices)


def _copies(tensor: torch.Tensor, devices: Sequence[torch.device]) -> RankTensor:
    """Give every rank a copy: on its device if the tensor is on rank 0's, else where the tensor is."""
    here = tensor.device == devices[0]
    others = [fresh_copy(tensor, device if here else tensor.device) for device in devices[1:]]
    return RankTensor([tensor, *others], devices)


def give(tensor: torch.Tensor, devices: Sequence[torch.device]) -> torch.Tensor:
    """Spread an input of the model, with the way back of its gradient."""
    if isinstance(tensor, RankTensor):
        return tensor
    dual = torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None  # `with_backward` refuses it
    tracked = dual or (tensor.requires_grad and torch.is_grad_enabled())
    if not tracked:
        return spread(tensor, devices)
    source = tensor.device

    def back(gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, RankTensor):
            gradient.agreed()
        return collect(gradient, source).to(source)

    return with_backward(tensor, lambda one: _from_first(fresh_copy(one.detach(), devices[0]), devices), back)


def collect(tensor: torch.Tensor, output_device: torch.device) -> torch.Tensor:
    """Turn an output of the model into an ordinary tensor at `output_device`; what differs between ranks stays."""
    if not isinstance(tensor, RankTensor) or not same(tensor.parts):
        return tensor
    first, devices = tensor.parts[0], tensor.devices
    if tensor.requires_grad and torch.is_grad_enabled():
        first = with_backward(tensor, lambda one: one.parts[0].detach(), lambda gradient: give(gradient, devices))
    return first.to(output_device)


_running = threading.local()


def running() -> "RanksMode | None":
    """The forward on all ranks that this thread is in, None if it is in none."""
    return getattr(_running, "mode", None)


class RanksMode(DispatchMode):
    """While entered, new tensors are made on every rank, so that the model's code may write cut tensors into them.

    `output_device`: where the inputs came from, and the outputs go. `began`: the module that was called from
    outside; `given`: lists and dicts that it was given; `caches`: of functions that it calls.
    """

    def __init__(self, devices: Sequence[torch.device], output_device: torch.device, began: Any = None) -> None:
        super().__init__()
        self.devices = tuple(devices)
        self.output_device = output_device
        self.began = began
        self.given = Given((), {})
        self.caches: list[Any] = []

    def __enter__(self) -> "RanksMode":
        self.around, _running.mode = running(), self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _running.mode = self.around
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return run_op(func, args, kwargs or {}, self.devices)


class _Found:
    """What is among the arguments of an op."""

    __slots__ = ("cut", "ordinary")

    def __init__(self, args: tuple, kwargs: dict) -> None:
        self.cut: list[RankTensor] = []
        self.ordinary: list[torch.Tensor] = []
        self.look(args)
        if kwargs:
            self.look(kwargs.values())

    def look(self, values: Any) -> None:
        for value in values:
            if isinstance(value, RankTensor):
                self.cut.append(value)
            elif isinstance(value, torch.Tensor):
                self.ordinary.append(value)
            elif isinstance(value, (list, tuple)):
                self.look(value)


def run_op(func: Any, args: tuple, kwargs: dict, devices: tuple[torch.device, ...] = ()) -> Any:
    """Run one op on every rank's tensors; on ordinary ones, as it is. `devices`: of the mode, where there is one."""
    found = _Found(args, kwargs)
    if found.cut:
        devices = found.cut[0].devices
    elif found.ordinary:
        made = func(*args, **kwargs)
        return _copies(made, devices) if func is aten.lift_fresh.default else made
    elif not devices or not _makes_tensor(func):
        return func(*args, **kwargs)
    written = written_by(func, args, kwargs)
    for tensor in written:
        if not isinstance(tensor, RankTensor):
            raise ApplyError(
                f"{func} writes what is cut over devices into a tensor of shape {list(tensor.shape)} that was made "
                "outside of the model's forward: a cache, a parameter or state of an optimizer from before "
                "autoshard.apply. Make it afterwards (a cache in the first forward), or start one process per rank."
            )
    if _is_random(func, args, kwargs):
        return _random(func, args, kwargs, devices, found, written)
    places = devices
    if found.ordinary and {tensor.parts[0].device for tensor in found.cut} == {found.ordinary[0].device}:
        places = tuple(part.device for part in found.cut[0].parts)  # code may have moved them elsewhere, to the CPU
    results = [func(*_part(args, rank, places), **_part(kwargs, rank, places)) for rank in range(len(devices))]
    return _join(func, results, devices, found)


def _makes_tensor(func: Any) -> bool:
    schema = schema_of(func)
    return schema is not None and any("Tensor" in str(result.type) for result in schema.returns)


def _is_random(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an op draws random numbers this time: those that may drop only if they do."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for position, argument in enumerate(arguments_of_op(func)):
        if argument.name in ("p", "dropout_p", "dropout", "train", "training"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            if given is not None and not given:
                return False
    return True


def _part(value: Any, rank: int, devices: tuple[torch.device, ...]) -> Any:
    """The arguments of one rank."""
    if isinstance(value, RankTensor):
        return value.parts[rank]
    if isinstance(value, torch.Tensor):
        # of those elsewhere torch takes numbers; others are what a module has beside parameters and buffers
        stays = rank == 0 if value.device == devices[0] else value.dim() == 0
        return value if stays else fresh_copy(value, devices[rank])
    if isinstance(value, (list, tuple)):
        return type(value)([_part(item, rank, devices) for item in value])
    if isinstance(value, dict):
        return {key: _part(item, rank, devices) for key, item in value.items()}
    if rank and isinstance(value, torch.device) and value == devices[0]:
        return devices[rank]
    return value


def _join(func: Any, results: list, devices: tuple[torch.device, ...], found: _Found) -> Any:
    """One result from those of all ranks."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        for tensor in found.cut:
            if first is tensor.parts[0]:
                _take_over_shape(func, tensor)
                return tensor
        return _wrapped(results, devices, found)
    if isinstance(first, (list, tuple)):
        return type(first)(_join(func, list(items), devices, found) for items in zip(*results, strict=True))
    if any(result != first and not (result != result and first != first) for result in results):
        raise ApplyError(
            f"the model's code reads a value that differs between ranks ({', '.join(map(str, results))}; in {func}). "
            "Plan with this part of the model whole."
        )
    return first


def _wrapped(parts: list[torch.Tensor], devices: tuple[torch.device, ...], found: _Found) -> RankTensor:
    if torch.is_inference_mode_enabled():
        # Views of tensors made outside of inference mode track versions, as their base does.
        storage = parts[0].untyped_storage()
        for base in found.cut:
            if not base.is_inference() and base.parts[0].untyped_storage() is storage:
                with torch.inference_mode(False):
                    return RankTensor(parts, devices)
    return RankTensor(parts, devices)


def _take_over_shape(func: Any, tensor: RankTensor) -> None:
    """Let a tensor whose parts were reshaped in place say so; its history and version stay."""
    packet = getattr(func, "overloadpacket", None)
    if torch.Tag.inplace_view in func.tags or packet in _RESHAPING or any(a.is_out for a in arguments_of_op(func)):
        part = tensor.parts[0]
        same_strides = tensor.shape == part.shape and tensor.stride() == part.stride()
        if not same_strides or tensor.storage_offset() != part.storage_offset():
            _set_metadata(tensor, RankTensor(tensor.parts, tensor.devices))


def _random(
    func: Any,
    args: tuple,
    kwargs: dict,
    devices: tuple[torch.device, ...],
    found: _Found,
    written: list[torch.Tensor],
) -> Any:
    """Run an op that draws random numbers on rank 0, and give its result to the others."""
    if func is aten.native_dropout.default:
        tensor, p, train = (*args, *kwargs.values())[:3]
        return _native_dropout(tensor, p, train, devices)
    shaped_only = reads_shape_alone(func)
    for tensor in found.cut:
        if not shaped_only and not any(tensor is one for one in written) and not same(tensor.parts):
            raise ApplyError(
                f"{func} draws random numbers for values that differ between ranks. Plan with this part whole."
            )
    result = func(*_part(args, 0, devices), **_part(kwargs, 0, devices))
    for target in written:
        assert isinstance(target, RankTensor)
        for part in target.parts[1:]:
            part.copy_(target.parts[0])
    if written:
        return _join(func, [result] * len(devices), devices, found)
    return map_tensors(result, lambda tensor: _copies(tensor, devices))


def _native_dropout(tensor: RankTensor, p: float, train: bool | None, devices: tuple[torch.device, ...]) -> Any:
    """Drop the same elements on every rank: tensors that differ are cut, or about to be summed."""
    first, mask = aten.native_dropout.default(tensor.parts[0], p, train)
    masks = [mask, *(fresh_copy(mask, device) for device in devices[1:])]
    scale = 1.0 if train is False else 0.0 if p >= 1 else 1 / (1 - p)
    others = [part * kept * scale for part, kept in zip(tensor.parts[1:], masks[1:], strict=True)]
    return RankTensor([first, *others], devices), RankTensor(masks, devices)
