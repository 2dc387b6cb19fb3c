"""A tensor that says it is on `cpu:1` and computes on an ordinary CPU tensor inside.

    SimulatedTensor  device cpu:1, shape, strides, autograd history, version counter: what torch and the user see
      └─ plain       an ordinary tensor, no history: where the values are

Every op on one is run on the plain tensors, so results are bit for bit those of the plain CPU. An op that mixes devices
raises, as it would on GPUs (`ops.py`).
"""

import copy
from typing import Any

import numpy
import torch
from torch import nn

from autoshard import torch_private
from autoshard.simulate.memory import SimulatedDevice

set_metadata = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""(tensor, other): give a tensor the shape and strides of another, keep its history; what `.data =` does in C++."""


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device; `plain` holds the values, `owner` is the device that pays for them."""

    plain: torch.Tensor
    owner: SimulatedDevice

    # Module code that looks for overridden tensors (fused encoder layers do) must see an ordinary one.
    __torch_function__ = torch_private.not_overridden  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, owner: SimulatedDevice) -> "SimulatedTensor":
        keys = torch_private.conj_and_neg_keys(plain) if plain.is_conj() or plain.is_neg() else None
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            plain.shape,
            plain.stride(),
            plain.storage_offset(),
            dtype=plain.dtype,
            device=owner.device,
            _extra_dispatch_keys=keys,
        )
        self.plain = plain
        self.owner = owner
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        from autoshard.simulate.ops import run_op  # it needs this class

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

    def _typed_storage(self) -> torch.TypedStorage:
        return self.plain._typed_storage()

    def new(self, *args: Any, **kwargs: Any) -> "SimulatedTensor":
        return wrap(self.plain.new(*args, **kwargs), self.owner)

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> torch.Tensor:
        plain = torch.tensor(data, dtype=dtype or self.dtype, device="cpu")
        device = self.device if device is None else torch.device(device)
        made = plain if device.index is None else wrap(plain, self.owner.peers[device.index])
        return made.requires_grad_(requires_grad)

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
