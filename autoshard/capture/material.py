"""What stands in for a model's tensors while it is captured: fake ones, or copies."""

from collections.abc import Callable

import torch
from torch import nn

from autoshard.capture.fake import REAL_ELEMENTS, SMALL_FLOATS, FakeFloats
from autoshard.common.packed import is_packed, own_attributes, repacked
from autoshard.torch_private import FakeTensor

Storages = dict[int, torch.UntypedStorage]
Make = Callable[[torch.Tensor, str], torch.Tensor]
"""Makes the stand-in of one tensor; told "parameter", "buffer" or "attribute"."""


def put_stand_ins(model: nn.Module, make: Make) -> None:
    """Replace every parameter, buffer and tensor attribute below `model` by `make(tensor, kind)`.

    One tensor object gets one stand-in, so ties stay ties.
    """
    made: dict[int, torch.Tensor] = {}

    def stand_in(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = make(tensor, kind)
        return made[id(tensor)]

    for module in list(model.modules()):
        for table, kind in ((module._parameters, "parameter"), (module._buffers, "buffer")):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = stand_in(tensor, kind)  # type: ignore[assignment]
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                vars(module)[name] = stand_in(value, "attribute")


def valueless(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def fake_material(engine: FakeFloats) -> Make:
    """Fake parameters and large buffers; copies of integer, boolean and small float buffers."""
    storages: Storages = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.untyped_storage()._cdata
        fake = engine.shapes.stand_in(tensor, storages.get(key))
        storages.setdefault(key, fake.untyped_storage())
        return fake

    def make(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        floating = tensor.is_floating_point() or tensor.is_complex()
        limit = SMALL_FLOATS if floating else REAL_ELEMENTS
        if kind == "parameter" or valueless(tensor) or tensor.numel() > limit:
            if kind == "attribute" and not valueless(tensor):
                return tensor
            return _dress(repacked(tensor, stand_in), tensor)
        return _dress(copied(tensor, storages), tensor)

    return make


def real_material(*, clone: bool) -> Make:
    """Copies of everything, or its own memory if that is too large to copy."""
    storages: Storages = {}

    def make(tensor: torch.Tensor, kind: str) -> torch.Tensor:
        if kind == "parameter" and not clone:
            return _dress(tensor.data, tensor)
        return _dress(copied(tensor, storages), tensor)

    return make


def copied(tensor: torch.Tensor, storages: Storages) -> torch.Tensor:
    """A copy on the CPU with the same strides; tensors that shared memory share it again."""
    if tensor.layout is not torch.strided or type(tensor.detach()) is not torch.Tensor:
        return tensor.detach().clone()
    storage = tensor.untyped_storage()
    key = storage._cdata
    if key not in storages:
        storages[key] = storage.cpu() if storage.device.type != "cpu" else storage.clone()
    return torch.empty(0, dtype=tensor.dtype).set_(
        storages[key], tensor.storage_offset(), tensor.shape, tensor.stride()
    )


def _dress(made: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Give a stand-in what Python can see of the original: being a parameter, requiring grad, attributes."""
    if isinstance(made, FakeTensor):
        made.requires_grad_(original.requires_grad)
        if isinstance(original, nn.Parameter):
            made._is_param = True
    elif isinstance(original, nn.Parameter):
        made = nn.Parameter(made, requires_grad=original.requires_grad)
    elif original.requires_grad:
        made.requires_grad_(True)
    if is_packed(original):
        vars(made).update(own_attributes(original))
    elif not isinstance(original, FakeTensor):
        vars(made).update({name: value for name, value in vars(original).items() if name != "_is_param"})
    return made


def prepared_input(engine: FakeFloats | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """How an input goes into the run: copied, because the model may write into it; large floats without values."""
    storages: Storages = {}

    def prepare(tensor: torch.Tensor) -> torch.Tensor:
        if engine is not None and (
            valueless(tensor) or (tensor.is_floating_point() and tensor.numel() > REAL_ELEMENTS)
        ):
            made: torch.Tensor = engine.shapes.stand_in(tensor)
        elif valueless(tensor):
            made = torch.zeros(tensor.shape, dtype=tensor.dtype)
        else:
            made = copied(tensor, storages)
        return made.requires_grad_(True) if tensor.requires_grad and tensor.is_floating_point() else made

    return prepare
