"""A tensor that says it is on `cpu:1` and computes on an ordinary CPU tensor inside.

    SimulatedTensor  device cpu:1, shape, strides, autograd history, version counter: what torch and the user see
      └─ inner       an ordinary tensor, no history: where the values are

Every op on one is run on the inner tensors, so results are bit for bit those of the plain CPU. An op that mixes devices
raises, as it would on GPUs (`ops.py`).
"""

import copy
from typing import Any

import numpy
import torch

from autoshard import torch_private
from autoshard.simulate.memory import SimulatedDevice

class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated device; `inner` holds the values, `owner` is the device that pays for them."""

    inner: torch.Tensor
    owner: SimulatedDevice

    # Module code that looks for overridden tensors (fused encoder layers do) must see an ordinary one.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: torch.Tensor, owner: SimulatedDevice) -> "SimulatedTensor":
        keys = torch_private.conj_and_neg_keys(inner) if inner.is_conj() or inner.is_neg() else None
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            inner.stride(),
            inner.storage_offset(),
            dtype=inner.dtype,
            device=owner.device,
            _extra_dispatch_keys=keys,
        )
        self.inner = inner
        self.owner = owner
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        from autoshard.simulate.ops import run_op  # it needs this class

        return run_op(func, args, kwargs or {}, None, None)

    # What torch would read from memory that this tensor, seen from C++, does not have.

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        grad = ", requires_grad=True" if self.requires_grad and self.grad_fn is None else ""
        grad = f", grad_fn=<{type(self.grad_fn).__name__}>" if self.grad_fn is not None else grad
        return f"{repr(self.inner)[:-1]}, device='{self.device}'{grad})"

    def __format__(self, spec: str) -> str:
        return self.inner.__format__(spec)

    def tolist(self) -> Any:
        return self.inner.tolist()

    def numpy(self, *, force: bool = False) -> numpy.ndarray:
        if self.requires_grad and not force:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        return self.inner.numpy(force=force)

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def _typed_storage(self) -> torch.TypedStorage:
        return self.inner._typed_storage()

    def new(self, *args: Any, **kwargs: Any) -> "SimulatedTensor":
        return wrap(self.inner.new(*args, **kwargs), self.owner)

    def new_tensor(self, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> torch.Tensor:
        plain = torch.tensor(data, dtype=dtype or self.dtype, device="cpu")
        device = self.device if device is None else torch.device(device)
        made = plain if device.index is None else wrap(plain, self.owner.peers[device.index])
        return made.requires_grad_(requires_grad)

    def __deepcopy__(self, memo: dict) -> "SimulatedTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol.")
        made = wrap(copy.deepcopy(self.inner, memo), self.owner)
        for name, value in self.__dict__.items():
            if name not in ("inner", "owner"):
                setattr(made, name, copy.deepcopy(value, memo))
        made.requires_grad_(self.requires_grad)
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.inner.__reduce_ex__(protocol)  # saved as an ordinary tensor: simulated devices end with the process

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, SimulatedTensor):
            raise RuntimeError(
                f"can't set .data of a tensor on simulated device {self.device} to one on {value.device}: "
                "the object would change its type. Use torch.utils.swap_tensors."
            )
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.inner, self.owner = value.inner, value.owner


def wrap(inner: torch.Tensor, owner: SimulatedDevice) -> SimulatedTensor:
    """Put an ordinary tensor on a simulated device: count its storage there, once, and share it (no copy)."""
    if inner.layout != torch.strided:
        raise NotImplementedError(f"simulated devices hold dense tensors only, got layout {inner.layout}.")
    owner.count(inner)
    return SimulatedTensor(inner, owner)
