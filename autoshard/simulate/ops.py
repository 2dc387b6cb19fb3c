"""Run one op on simulated devices: check that its tensors are together, compute inside, wrap what comes out.

As on GPUs, tensors of two devices in one op are an error, except in copies, for 0-dim ordinary CPU tensors, and for the
arguments in `CPU_ARGUMENTS`. Nothing here may outlive the call that holds a tensor (a closure that calls itself would,
until the next garbage collection), or devices would seem fuller than they are.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from autoshard import torch_private
from autoshard.simulate.memory import SimulatedDevice
from autoshard.simulate.tensor import SimulatedTensor, set_metadata, wrap

aten = torch.ops.aten
CPU = torch.device("cpu")

MIXING = {aten.copy_, aten.copy, aten._to_copy, aten._foreach_copy_, aten.set_}
"""Ops whose arguments may be on different devices: they are how tensors travel."""

CPU_ARGUMENTS: dict[Any, tuple[int, ...]] = {
    aten.index: (1,),
    aten._unsafe_index: (1,),
    aten.index_put: (1,),
    aten.index_put_: (1,),
    aten._index_put_impl_: (1,),
    aten._unsafe_index_put: (1,),
    aten._pack_padded_sequence: (1,),
    aten._pack_padded_sequence_backward: (2,),
    aten._ctc_loss: (2, 3),
    aten._ctc_loss_backward: (3, 4),
}
"""Positions where GPUs take (or insist on) ordinary CPU tensors of any size."""

CPU_RESULTS: dict[Any, tuple[int, ...]] = {aten._pack_padded_sequence: (1,)}
"""Results that GPUs leave on the CPU."""

RESHAPING = {aten.resize_, aten.resize_as_, aten.set_}
"""Ops besides the tagged ones after which the tensor written to has another shape or storage."""


@dataclass(frozen=True, slots=True)
class _Traits:
    """What has to be known of an op before it runs; looked up once per op."""

    composite: bool
    mixing: bool
    rowwise: bool  # takes lists whose i-th tensors belong together
    reshapes: bool
    written: tuple[int, ...]
    cpu_arguments: tuple[int, ...]
    cpu_results: tuple[int, ...]


_traits: dict[Any, _Traits] = {}


def _find_traits(func: Any) -> _Traits:
    schema = getattr(func, "_schema", None)
    packet = getattr(func, "overloadpacket", None)
    arguments = schema.arguments if schema is not None else []
    has_out = any(argument.is_out for argument in arguments)
    traits = _Traits(
        composite=isinstance(func, torch_private.OpOverload) and torch_private.is_composite(func),
        mixing=packet in MIXING,
        rowwise=str(packet).startswith("aten._foreach_"),
        reshapes=has_out or packet in RESHAPING or torch.Tag.inplace_view in getattr(func, "tags", ()),
        written=tuple(
            position
            for position, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
        ),
        cpu_arguments=CPU_ARGUMENTS.get(packet, ()),
        cpu_results=CPU_RESULTS.get(packet, ()),
    )
    _traits[func] = traits
    return traits


class _Arguments:
    """The tensors found in one call's arguments while they were unwrapped."""

    __slots__ = ("nested", "ordinary", "originals", "other", "owner")

    def __init__(self) -> None:
        self.owner: SimulatedDevice | None = None  # of the first simulated tensor
        self.other: SimulatedDevice | None = None  # a second device
        self.ordinary = False  # an ordinary tensor with dimensions
        self.nested = False  # a nested one
        self.originals: dict[int, torch.Tensor] = {}  # id of the tensor the kernel sees -> tensor the caller gave

    def unwrap(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._unwrap_tensor(value)
        if isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, torch.Tensor):
                    return [self.unwrap(item) for item in value]
        return value

    def _unwrap_tensor(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, SimulatedTensor):
            plain, owner = value.plain, value.owner
            if self.owner is None:
                self.owner = owner
            elif owner is not self.owner and owner.device != self.owner.device:
                self.other = owner
            self.originals[id(plain)] = value
            return plain
        if value.is_nested:
            self.nested = True
            self.owner = self.owner or getattr(value, "simulated_owner", None)
        elif value.dim():
            self.ordinary = True
        self.originals[id(value)] = value
        return value


def run_op(
    func: Any,
    args: tuple,
    kwargs: dict,
    devices: list[SimulatedDevice] | None,
    mode: AbstractContextManager | None,
) -> Any:
    """Run one op as torch dispatches it.

    `devices` are the simulated devices that a `device=` argument may name, `mode` the dispatch mode that called; both
    None outside of `simulate`. Raises RuntimeError if tensors of several devices meet.
    """
    traits = _traits.get(func) or _find_traits(func)
    found = _Arguments()
    plain_args = []
    for position, value in enumerate(args):
        if position in traits.cpu_arguments:
            before = found.ordinary
            plain_args.append(found.unwrap(value))
            found.ordinary = before
        else:
            plain_args.append(found.unwrap(value))
    plain_kwargs = {name: found.unwrap(value) for name, value in kwargs.items()} if kwargs else kwargs
    asked = kwargs.get("device")
    if found.owner is None and (asked is None or asked.index is None):
        if traits.composite and devices is not None and any(type(value) is torch.device for value in args):
            return _decompose(func, args, kwargs, mode)
        return func(*args, **kwargs)
    if traits.composite and not found.nested:
        return _decompose(func, args, kwargs, mode)
    if not traits.mixing and found.owner is not None:
        if traits.rowwise and (found.other is not None or found.ordinary):
            return _run_rows(func, args, kwargs, devices, mode)
        if found.other is not None or found.ordinary or _writes_plain(traits, args):
            raise _mixed(func, found)
    owner = found.owner
    if asked is not None:
        plain_kwargs["device"] = CPU
        owner = find_device(asked, devices or found.owner.peers)  # type: ignore[union-attr]
    result = func(*plain_args, **plain_kwargs)
    return _wrap_results(result, owner, found, traits)


def find_device(device: torch.device, devices: list[SimulatedDevice]) -> SimulatedDevice | None:
    """Return the device that is simulated under a name, None for the plain CPU; raise as CUDA does if there is none."""
    if device.type != "cpu" or device.index is None:
        return None
    if device.index >= len(devices):
        names = ", ".join(one.name for one in devices)
        raise RuntimeError(f"invalid device ordinal: {device} asked for, simulated are {names}.")
    return devices[device.index]


def _decompose(func: Any, args: tuple, kwargs: dict, mode: AbstractContextManager | None) -> Any:
    """Take a composite op apart, so that its temporaries are counted.

    Under `torch.inference_mode` torch hands these over whole; elsewhere it has taken them apart itself.
    """
    if mode is None:
        return torch_private.run_composite(func, args, kwargs)
    with mode:
        return torch_private.run_composite(func, args, kwargs)


def _writes_plain(traits: _Traits, args: tuple) -> bool:
    """Whether an ordinary tensor would be written with simulated ones."""
    return any(
        position < len(args)
        and isinstance(args[position], torch.Tensor)
        and not isinstance(args[position], SimulatedTensor)
        for position in traits.written
    )


def _mixed(func: Any, found: _Arguments) -> RuntimeError:
    assert found.owner is not None
    other = found.other.name if found.other is not None else "cpu"
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"{found.owner.name} and {other}! (in {func.name()})"
    )


def _wrap_results(result: Any, owner: SimulatedDevice | None, found: _Arguments, traits: _Traits) -> Any:
    if isinstance(result, torch.Tensor):
        original = found.originals.get(id(result))
        if original is None:
            return result if owner is None else _wrap_new(result, owner, found)
        if traits.reshapes and isinstance(original, SimulatedTensor):
            _take_over_shape(original)
        return original
    if isinstance(result, (list, tuple)) and result:
        items = [
            item if position in traits.cpu_results else _wrap_results(item, owner, found, traits)
            for position, item in enumerate(result)
        ]
        return type(result)(items)
    return result


def _wrap_new(result: torch.Tensor, owner: SimulatedDevice, found: _Arguments) -> torch.Tensor:
    """Wrap what a kernel made: a new tensor, or a view of an argument."""
    if result.is_nested:
        # Ragged tensors have no shape that a wrapper could show; fused encoder layers use them between two ops.
        owner.count(result)
        result.simulated_owner = owner  # type: ignore[attr-defined]
        return result
    if torch.is_inference_mode_enabled():
        # Views of tensors made outside of inference mode track versions, as their base does.
        storage = result.untyped_storage()._cdata
        for base in found.originals.values():
            if not base.is_inference() and base.untyped_storage()._cdata == storage:
                with torch.inference_mode(False):
                    return wrap(result, owner)
    return wrap(result, owner)


def _take_over_shape(tensor: SimulatedTensor) -> None:
    """Let a tensor whose plain tensor was reshaped in place say so; its autograd history and version stay."""
    plain = tensor.plain
    tensor.owner.count(plain)
    same = tensor.shape == plain.shape and tensor.stride() == plain.stride()
    if not same or tensor.storage_offset() != plain.storage_offset():
        set_metadata(tensor, SimulatedTensor(plain, tensor.owner))


def _run_rows(
    func: Any, args: tuple, kwargs: dict, devices: list[SimulatedDevice] | None, mode: AbstractContextManager | None
) -> Any:
    """Run an op on lists, row by row: lists may span devices as long as each row does not."""
    length = max(len(value) for value in args if isinstance(value, (list, tuple)))
    rows = []
    for row in range(length):
        row_args = tuple(
            [value[row]] if isinstance(value, (list, tuple)) and len(value) == length else value for value in args
        )
        rows.append(_run_one_row(func, row_args, kwargs, devices, mode))
    return None if rows[0] is None else [item for result in rows for item in result]


def _run_one_row(
    func: Any, args: tuple, kwargs: dict, devices: list[SimulatedDevice] | None, mode: AbstractContextManager | None
) -> Any:
    found = _Arguments()
    for value in args:
        found.unwrap(value)
    if found.owner is not None and (found.other is not None or found.ordinary):
        raise _mixed(func, found)
    return run_op(func, args, kwargs, devices, mode)
