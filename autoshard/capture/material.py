"""What stands in for a model's tensors while it is captured: fake ones, or copies."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn

from autoshard.capture.fake import REAL_ELEMENTS, SMALL_FLOATS, FakeFloats, ValueEngine
from autoshard.common.own_tensors import own_tensors, put_tensor
from autoshard.common.packed import PARAMETER_MARKS, is_packed, own_attributes, repacked
from autoshard.torch_private import FakeTensor

Storages = dict[torch.UntypedStorage, torch.UntypedStorage]
"""The copies of storages; the originals are kept, for the object of a later one could be at the same address."""
Kind = Literal["parameter", "buffer", "attribute", "input"]
Make = Callable[[torch.Tensor, Kind], torch.Tensor]
"""Makes the placeholder of one tensor."""


def put_placeholders(model: nn.Module, make: Make) -> None:
    """Replace every parameter, buffer and tensor attribute below `model` by `make(tensor, kind)`.

    One tensor object gets one placeholder, so ties stay ties.
    """
    made: dict[int, torch.Tensor] = {}

    def placeholder(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor, kind)
        return made[id(tensor)]

    for module in list(model.modules()):
        for name, tensor, kind in list(own_tensors(module)):
            put_tensor(module, name, placeholder(tensor, kind), kind)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                vars(module)[name] = placeholder(value, "attribute")


def valueless(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def placeholders(engine: ValueEngine) -> Make:
    """What makes placeholders for the tensors of a model, or for its inputs, in one run; shared memory is shared again.

    On shapes: fake parameters, large buffers and large inputs of floats; copies of all others. With values: copies of
    everything, or a parameter's own memory if the engine is told so.
    """
    storages: Storages = {}

    def faked(tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(engine, FakeFloats)
        storage = tensor.untyped_storage()
        fake = engine.shapes.placeholder(tensor, storages.get(storage))
        storages.setdefault(storage, fake.untyped_storage())
        return fake

    def make(tensor: torch.Tensor, kind: Kind) -> torch.Tensor:
        if isinstance(engine, FakeFloats):
            if _keeps_values(tensor, kind):
                made = copied(tensor, storages)
            elif kind == "attribute" and not valueless(tensor):
                return tensor
            else:
                made = repacked(tensor, faked)
        elif kind == "input" and valueless(tensor):
            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
        else:
            made = tensor.data if kind == "parameter" and not engine.clone else copied(tensor, storages)
        if kind == "input":
            return made.requires_grad_(True) if tensor.requires_grad and tensor.is_floating_point() else made
        return _dress(made, tensor)

    return make


def _keeps_values(tensor: torch.Tensor, kind: Kind) -> bool:
    """Whether a run on shapes knows the values of a tensor."""
    if kind == "parameter" or valueless(tensor):
        return False
    if kind == "input":
        return not tensor.is_floating_point() or tensor.numel() <= REAL_ELEMENTS
    floating = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (SMALL_FLOATS if floating else REAL_ELEMENTS)


def copied(tensor: torch.Tensor, storages: Storages) -> torch.Tensor:
    """A copy on the CPU with the same strides; tensors that shared memory share it again."""
    if tensor.layout is not torch.strided or type(tensor.detach()) is not torch.Tensor:
        return tensor.detach().clone()
    storage = tensor.untyped_storage()
    if storage not in storages:
        storages[storage] = storage.cpu() if storage.device.type != "cpu" else storage.clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storages[storage], tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _dress(made: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Give a placeholder what Python can see of the original: being a parameter, requiring grad, attributes."""
    if isinstance(made, FakeTensor):
        made.requires_grad_(original.requires_grad)
        if isinstance(original, nn.Parameter):
            vars(made).update(PARAMETER_MARKS)
    elif isinstance(original, nn.Parameter):
        made = nn.Parameter(made, requires_grad=original.requires_grad)
    elif original.requires_grad:
        made.requires_grad_(True)
    if is_packed(original):
        vars(made).update(own_attributes(original))
    elif not isinstance(original, FakeTensor):
        vars(made).update({name: value for name, value in vars(original).items() if name not in PARAMETER_MARKS})
    return made
