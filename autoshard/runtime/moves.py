"""Move parameters and buffers between devices: the same objects afterwards, all of them or none.

embed.weight  ┐ one storage     ┌ embed.weight   moved together, so that a tie stays a tie
head.weight   ┘ on cpu    ──▶   └ head.weight    on cuda:0
"""

from collections.abc import Callable, Mapping

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError, first_line
from autoshard.packed import is_packed, own_attributes, stored_tensors
from autoshard.runtime.devices import copy_tensor

_ORDINARY = (torch.Tensor, nn.Parameter)
Undo = Callable[[], None]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under each of its names: parameters first, both in registration order."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def tied_groups(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Group names whose tensors share storage; names without a partner are groups of one."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(_storage_key(tensor), []).append(name)
    return [tuple(names) for names in groups.values()]


def _storage_key(tensor: torch.Tensor) -> object:
    tensor = stored_tensors(tensor)[0]
    if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
        return id(tensor)
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr() or storage._cdata  # without data (on meta) it is the object that tells


def move_tensors(tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]) -> Undo:
    """Move each named tensor, with its gradient, to its device; tied names go where the first of them goes.

    Returns a function that puts everything back. If a move fails, what has moved is put back at once and `ApplyError`
    is raised. The old memory is held until the returned function is dropped.
    """
    log: list[Undo] = []

    def undo() -> None:
        while log:
            log.pop()()

    for names in tied_groups(tensors):
        target = devices[names[0]]
        objects = list({id(tensors[name]): tensors[name] for name in names}.values())
        try:
            with torch.no_grad():
                _move_group(objects, target, log)
        except BaseException as error:  # also an interrupt: half a move must never stay
            undo()
            if not isinstance(error, Exception):
                raise
            reason = first_line(error)
            raise ApplyError(
                f"could not move {names[0]} to {target}: {reason} Nothing was moved. "
                f"Place less on {target}, or free memory there."
                if isinstance(error, torch.OutOfMemoryError)
                else f"could not move {names[0]} to {target}: {reason}. Nothing was moved."
            ) from error
    return undo


def _move_group(parts: list[torch.Tensor], target: torch.device, log: list[Undo]) -> None:
    """Move tensors that share one storage; views of it are views of the moved one afterwards."""
    first = parts[0]
    if first.device == target:
        return
    if len(parts) == 1 or is_packed(first):
        moved = copy_tensor(first.detach(), target)
        for part in parts:
            _replace(part, moved.detach(), log)
        return
    whole = first.detach().as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    moved = copy_tensor(whole, target)
    for part in parts:
        _replace(part, moved.view(part.dtype).as_strided(part.shape, part.stride(), part.storage_offset()), log)


def _replace(tensor: torch.Tensor, data: torch.Tensor, log: list[Undo]) -> None:
    """Give `tensor` the memory of `data`, keeping the object and its attributes; its gradient goes with it."""
    grad = tensor.grad if tensor.is_leaf else None
    old, old_grad = tensor.detach(), None if grad is None else grad.detach()
    new_grad = None if grad is None or data.is_meta else copy_tensor(grad.detach(), data.device)
    log.append(lambda: _set_memory(tensor, old, grad, old_grad))
    _set_memory(tensor, data, grad, new_grad)


def _set_memory(
    tensor: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None, grad_data: torch.Tensor | None
) -> None:
    if grad is None or grad_data is None:
        set_data(tensor, data)
        return
    tensor.grad = None  # torch insists that a gradient is on its parameter's device at every moment
    set_data(tensor, data)
    set_data(grad, grad_data)
    tensor.grad = grad


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Do `tensor.data = data` also where the types of the two, or their devices, differ."""
    same_kind = tensor.device == data.device and not is_packed(tensor)  # `.data = ` leaves what is behind a face there
    ordinary = type(data) is torch.Tensor and type(tensor) in _ORDINARY and tensor.is_meta == data.is_meta
    if same_kind or ordinary:
        torch.clear_autocast_cache()  # it holds what the tensor was, in another dtype
        tensor.data = data
    else:
        swap(tensor, data)


def swap(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Turn `tensor` into another type of tensor (a simulated one, say) without changing which object it is."""
    extra = own_attributes(tensor)
    fresh = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data.detach()
    torch_private.swap_contents(tensor, fresh)
    vars(tensor).update(extra)
