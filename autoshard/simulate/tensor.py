"""A tensor that says it is on `cpu:1` and computes on an ordinary CPU tensor inside.

    SimulatedTensor  device cpu:1, shape, strides, autograd history, version counter: what torch and the user see
      └─ plain       an ordinary tensor, no history: where the values are

Every op on one is run on the plain tensors, so results are bit for bit those of the plain CPU. An op that mixes devices
raises, as it would on GPUs, except in copies, for 0-dim ordinary CPU tensors, and for the arguments in `CPU_ARGUMENTS`.
Nothing here may outlive the call that holds a tensor (a closure that calls itself would, until the next garbage
collection), or devices would seem fuller than they are.
"""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch
from torch import nn

from autoshard import torch_private
from autoshard.simulate.memory import SimulatedDevice
from autoshard.simulate.traits import OpTraits, traits_of

set_metadata = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""(tensor, other): give a tensor the shape and strides of another, keep its history; what `.data =` does in C++."""


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device; `plain` holds the values, `owner` is the device that pays for them."""

    plain: torch.Tensor
    owner: SimulatedDevice

    # Module code that looks for overridden tensors (fused encoder layers do) must see an ordinary one.
    __torch_function__ = torch_private.not_overridden

    @staticmethod
    def __new__(cls, plain: torch.Tensor, owner: SimulatedDevice) -> "SimulatedTensor":
        self = torch_private.wrapper(cls, plain, owner.device)
        self.plain = plain
        self.owner = owner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if not all_ours(types):
            return NotImplemented
        return run_op(func, args, kwargs or {}, None, None)

    # What torch would read from memory that this tensor, seen from C++, does not have.

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        grad = ", requires_grad=True" if self.requires_grad and self.grad_fn is None else ""
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else grad
        return f"{repr(self.plain)[:-1]}, device='{self.device}'{grad})"

    def __format__(self, spec: str) -> str:
        return self.plain.__format__(spec)

    def tolist(self) -> Any:
        return self.plain.tolist()

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.plain.numpy(force=force)

    def data_ptr(self) -> int:
        return self.plain.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.plain.untyped_storage()

    def new(self, *args: Any, **kwargs: Any) -> "SimulatedTensor":
        return wrap(self.plain.new(*args, **kwargs), self.owner)

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        plain = torch.tensor(data, dtype=dtype or self.dtype, device="cpu")
        device = self.device if device is None else torch.device(device)
        made = plain if device.index is None else wrap(plain, self.owner.peers[device.index])
        return made.requires_grad_(requires_grad)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_with_readable_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_with_readable_lists(index), value)

    def __deepcopy__(self, memo: dict) -> "SimulatedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol.")
        made = wrap(copy.deepcopy(self.plain, memo), self.owner)
        for name, value in self.__dict__.items():
            if name not in ("plain", "owner"):
                setattr(made, name, copy.deepcopy(value, memo))
        made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain.__reduce_ex__(protocol)  # saved as an ordinary tensor: simulated devices end with the process

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, SimulatedTensor):
            become(self, value)
            return
        set_metadata(self, value)
        self.plain, self.owner = value.plain.detach(), value.owner  # same storage, a shape of its own


def with_ordinary_items(data: Any) -> Any:
    """Replace simulated scalars in nested lists by ordinary ones: torch reads them from memory."""
    if isinstance(data, SimulatedTensor):
        return data.plain
    if isinstance(data, (list, tuple)):
        return [with_ordinary_items(item) for item in data]
    return data


def _with_readable_lists(index: Any) -> Any:
    """An index of which the lists have ordinary items; tensors in it stay on their devices."""
    if not isinstance(index, tuple):
        return index
    return tuple(with_ordinary_items(item) if isinstance(item, (list, tuple)) else item for item in index)


def all_ours(types: Any) -> bool:
    """Whether no wrapper of another kind is among the types of an op's arguments.

    One that is may have simulated tensors inside: it takes the op apart, and the ops on these come here.
    """
    for kind in types:
        if kind is not SimulatedTensor and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return False
    return True


def become(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Do `tensor.data = value` where one is simulated and the other is not: the object stays and changes its type.

    Its gradient moves along. A backward graph that still holds it raises RuntimeError when it is run.
    """
    grad = tensor.grad
    tensor.grad = None
    fresh = value.detach()
    fresh = nn.Parameter(fresh, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fresh
    fresh.requires_grad_(tensor.requires_grad)
    for name, attribute in tensor.__dict__.items():
        if name not in ("plain", "owner"):
            fresh.__dict__[name] = attribute
    torch_private.swap_contents(tensor, fresh)
    if grad is not None:
        tensor.grad = grad.detach().to(value.device)


def wrap(plain: torch.Tensor, owner: SimulatedDevice) -> SimulatedTensor:
    """Put an ordinary tensor on a simulated device: count its storage there, once, and share it (no copy)."""
    if plain.layout != torch.strided:
        raise NotImplementedError(f"simulated devices hold dense tensors only, got layout {plain.layout}.")
    owner.count(plain)
    return SimulatedTensor(plain, owner)


# ---- ops


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
    traits = traits_of(func)
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
        plain_kwargs["device"] = torch.device("cpu")
        owner = find_device(asked, devices or found.owner.peers)  # type: ignore[union-attr]
    result = func(*plain_args, **plain_kwargs)
    if traits.rowwise and traits.written:  # torch counts these writes in the kernel, for the plain tensors alone
        torch.autograd.graph.increment_version(one for one in args[0] if not one.is_inference())
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
    with mode or nullcontext():
        return torch_private.run_composite(func, args, kwargs)


def _writes_plain(traits: OpTraits, args: tuple) -> bool:
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


def _wrap_results(result: Any, owner: SimulatedDevice | None, found: _Arguments, traits: OpTraits) -> Any:
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
        storage = result.untyped_storage()
        for base in found.originals.values():
            if not base.is_inference() and base.untyped_storage() is storage:
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
    """Run an op on lists, row by row: as on GPUs, lists may span devices where no row does (moving averages do)."""
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
