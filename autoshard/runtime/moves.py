"""Move parameters and buffers between devices, or exchange their values: the same objects afterwards, all or none.

embed.weight  ┐ one storage     ┌ embed.weight   moved together, so that a tie stays a tie
head.weight   ┘ on cpu    ──▶   └ head.weight    on cuda:0
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.common.packed import is_packed, own_attributes, stored_tensors
from autoshard.errors import ApplyError, first_line
from autoshard.runtime.devices import copy_tensor
from autoshard.runtime.rank_tensor import RankTensor

_ORDINARY = (torch.Tensor, nn.Parameter)
Undo = Callable[[], None]


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer under each of its names: parameters first, both in registration order."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors.update(model.named_buffers(remove_duplicate=False))
    return tensors


def check_filled(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ApplyError` for a tensor without values."""
    for name, tensor in tensors.items():
        if tensor.is_meta or isinstance(tensor, torch_private.FakeTensor):
            raise ApplyError(
                f"{name} has no data: it is on the meta device. autoshard.load(path, plan=plan, model=…) fills and "
                "divides such a model; or load the weights before, for example with model.to_empty(device='cpu') and "
                "model.load_state_dict(…)."
            )


SMALL_BUFFER = 1 << 16
"""Elements up to which a buffer has values in a copy without weights, and on every rank: code decides by such."""


def on_meta(model: nn.Module) -> nn.Module:
    """Copy a model with its parameters and buffers on meta, but for small buffers."""
    memo: dict[int, Any] = {}
    for tensor in named_tensors(model).values():
        if is_packed(tensor):  # its class decides which ops run: shared, since nothing cuts it
            memo[id(tensor)] = tensor
        elif not tensor.is_meta and (isinstance(tensor, nn.Parameter) or tensor.numel() > SMALL_BUFFER):
            made = tensor.detach().to("meta")
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copied(model, memo)


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy of a model. Each module has a dozen empty tables, for which Python would need most of the time."""
    memo = {} if memo is None else memo
    for module in model.modules():
        for table in vars(module).values():
            if type(table) is OrderedDict and not table:
                memo[id(table)] = OrderedDict()
    return copy.deepcopy(model, memo)


def tied_groups(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Group names whose tensors share storage; names without a partner are groups of one."""
    groups: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(memory_of(tensor), []).append(name)
    return [tuple(names) for names in groups.values()]


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are views of one memory."""
    return memory_of(one) == memory_of(other)


def memory_of(tensor: torch.Tensor) -> object:
    """What is equal for views of one memory."""
    tensor = stored_tensors(tensor)[0]
    if tensor.layout is not torch.strided or tensor.untyped_storage().nbytes() == 0:
        return id(tensor)
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr() or storage  # no address on meta


def move_tensors(tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device]) -> Undo:
    """Move each named tensor, with its gradient, to its device; tied names go where the first of them goes.

    Returns a function that puts everything back. If a move fails, what has moved is put back at once and `ApplyError`
    is raised. The old memory is held until the returned function is dropped.
    """
    log: list[Undo] = []
    moving = ""

    def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
        nonlocal moving
        moving = name
        return tensor if tensor.device == devices[name] else copy_tensor(tensor, devices[name])

    try:
        replace_all(tensors, moved, log)
    except BaseException as error:  # also an interrupt: half a move must never stay
        revert(log)
        if not isinstance(error, Exception):
            raise
        target, reason = devices.get(moving), first_line(error).rstrip(".") + "."
        full = isinstance(error, torch.OutOfMemoryError)
        remedy = f" Place less on {target}, or free memory there." if full else ""
        raise ApplyError(f"could not move {moving} to {target}: {reason} Nothing was moved.{remedy}") from error
    return partial(revert, log)


def revert(log: list[Undo]) -> None:
    """Undo what was done, the last thing first."""
    while log:
        log.pop()()


def replace_all(
    tensors: Mapping[str, torch.Tensor], change: Callable[[str, torch.Tensor], torch.Tensor], log: list[Undo]
) -> None:
    """Give each tensor what `change` makes of it, tied ones together; `log` takes what undoes it, last things first.

    Raises `ApplyError` for a buffer that can't be exchanged now; nothing is changed then.
    """
    for name, tensor in tensors.items():
        if not tensor.is_leaf and torch_private.is_held(tensor):
            raise ApplyError(
                f"{name} was written by a forward whose graph is still there, so it can't be exchanged. Run the "
                "backward of that forward, or call detach_() on the buffer."
            )
    # Values that are made in inference mode could never be trained.
    in_inference = torch.is_inference_mode_enabled() and any(one.is_inference() for one in tensors.values())
    with torch.inference_mode(in_inference), torch.no_grad():
        for names in memory_groups(tensors):
            group = list({id(tensors[name]): tensors[name] for name in names}.values())
            old = [tensor.detach() for tensor in group]
            grads = [tensor.grad if tensor.is_leaf else None for tensor in group]
            new = _changed(names[0], old, change)
            for tensor, before, data, grad in zip(group, old, new, grads, strict=True):
                if data is not before:
                    log.append(partial(_set, tensor, before, grad))
                    _set(tensor, data, None if grad is None else change(names[0], grad.detach()))


def _changed(
    name: str, tensors: list[torch.Tensor], change: Callable[[str, torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Change tensors that share memory, so that the changed ones do."""
    first = tensors[0]
    if all(geometry(tensor) == geometry(first) for tensor in tensors):
        data = change(name, first)
        return tensors if data is first else [data] * len(tensors)
    whole = first.as_strided((first.untyped_storage().nbytes() // first.element_size(),), (1,), 0)
    data = change(name, whole)
    if data is whole:
        return tensors
    return [data.view(one.dtype).as_strided(one.shape, one.stride(), one.storage_offset()) for one in tensors]


def memory_groups(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Group names whose tensors share memory; parts of one tensor that have no element in common go their own ways.

    Libraries load a fused matrix and take it apart into views: of q, k and v each is cut as if the others were not.
    """
    groups: list[tuple[str, ...]] = []
    for names in tied_groups(tensors):
        views: dict[tuple, list[str]] = {}
        for name in names if len(names) > 1 and not is_packed(tensors[names[0]]) else ():
            views.setdefault(geometry(tensors[name]), []).append(name)
        apart = all(_are_apart(tensors[a[0]], tensors[b[0]]) for a, b in itertools.combinations(views.values(), 2))
        groups += [tuple(view) for view in views.values()] if apart and views else [names]
    return groups


def _are_apart(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two views of one memory with the same strides are known to have no element in common.

    Both are seen as boxes: what is left of an offset after the larger strides says where a box begins in a dimension.
    """
    if left.stride() != right.stride() or left.dtype != right.dtype or 0 in left.stride():
        return False
    apart, outer = False, 0
    mine, theirs = int(left.storage_offset()), int(right.storage_offset())
    for step, dim in sorted(zip(left.stride(), range(left.dim()), strict=True), reverse=True):
        (begin, mine), (other, theirs) = divmod(mine, step), divmod(theirs, step)
        end, other_end = begin + left.shape[dim], other + right.shape[dim]
        if outer and max(end, other_end) * step > outer:  # it goes on in the next row: no box
            return False
        apart, outer = apart or end <= other or other_end <= begin, step
    return apart


def geometry(tensor: torch.Tensor) -> tuple:
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _set(tensor: torch.Tensor, data: torch.Tensor, grad: torch.Tensor | None) -> None:
    """Exchange the values of a tensor: the object, its names and its ties stay."""
    if tensor.is_leaf:
        tensor.grad = None  # torch insists that a gradient is on its parameter's device at every moment
    if tensor.requires_grad and torch_private.is_held(tensor):
        swap(tensor, data)
    else:
        set_data(tensor, data)
    if grad is not None and grad.is_meta == data.is_meta:
        tensor.grad = grad


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Do `tensor.data = data` also where the types of the two, or their devices, differ."""
    faces = any(is_packed(one) or isinstance(one, RankTensor) for one in (tensor, data))
    same_kind = tensor.device == data.device and not faces  # `.data = ` leaves what is behind a face there
    ordinary = type(data) is torch.Tensor and type(tensor) in _ORDINARY and tensor.is_meta == data.is_meta
    if same_kind or ordinary:
        torch.clear_autocast_cache()  # it holds what the tensor was, in another dtype
        try:
            tensor.data = data
        except RuntimeError:
            if same_kind:
                raise
            swap(tensor, data)  # tensors of accelerators that extend torch (npu, say) are of another type
    else:
        swap(tensor, data)


def swap(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Turn `tensor` into another type of tensor (a simulated one, say) without changing which object it is."""
    extra = own_attributes(tensor)
    fresh = nn.Parameter(data, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else data.detach()
    torch_private.swap_contents(tensor, fresh)
    vars(tensor).update(extra)
