"""Everything that depends on the type of a device: does it exist, how is it copied to, which one is current."""

import warnings
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from autoshard.common.packed import is_packed, repacked, stored_tensors
from autoshard.errors import ApplyError, first_line
from autoshard.runtime.backward import with_backward
from autoshard.runtime.layout import gapped_strides

CPU = torch.device("cpu")
META = torch.device("meta")
_CHECK_BYTES = 1 << 20
_copies_well: dict[tuple[torch.device, torch.device], bool] = {}  # pairs checked in this process
_staged: set[tuple[torch.device, torch.device]] = set()  # pairs whose direct copies are wrong


def resolve_device(name: str) -> torch.device:
    """Return the device that torch means by a name; raise `ApplyError` if this machine does not have it.

    Plain CPU tensors can't carry an index, so "cpu:1" is the CPU, unless devices are simulated.
    """
    if name == "disk":
        raise ApplyError(
            "the plan puts modules on 'disk', where nothing can be computed, and does not say where it is. Have it "
            "planned: autoshard.load(directory, {'cpu': '16GiB', 'disk': '200GiB'}), with the accelerators before them."
        )
    try:
        device = torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:  # torch raises all, by backend
        reason = first_line(error).rstrip(".")
        raise ApplyError(
            f"the plan puts modules on {name!r}, which can't be used here ({reason}). "
            f"Make a plan for devices that are here: {', '.join(_present())}; or run inside `autoshard.simulate`."
        ) from None
    if device.type == "meta":
        raise ApplyError("the plan puts modules on 'meta', where nothing can run. Plan for real devices instead.")
    return device


def _present() -> list[str]:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    return ["cpu", *(f"{accelerator.type}:{index}" for index in range(torch.accelerator.device_count()))]


def is_accelerator(device: torch.device) -> bool:
    """Whether kernels on the device run asynchronously and need it to be the current one."""
    return device.type not in ("cpu", "meta")


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, an accelerator is the current one of its type; of others there is none."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else nullcontext()


def make_current(device: torch.device) -> None:
    """Let this thread compute on a device from now on: collectives of NCCL, of torch itself too, use the current one.

    The one place where it is set for a process of its own; before any collective.
    """
    if is_accelerator(device) and device.index is not None:
        torch.accelerator.set_device_index(device.index)


def copy_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; differentiable. Expanded dimensions are copied once and expanded again.

    Copies are ordered after what is queued on the source's current stream and before what is queued later on either
    device: torch's own copies see to that.
    """
    if is_packed(tensor):
        return repacked(tensor, lambda stored: copy_tensor(stored, device))
    if tensor.layout is not torch.strided or tensor.numel() < 2 or tensor.is_contiguous():
        return _copy(tensor, device, None)
    if 0 not in tensor.stride():
        return _copy(tensor, device, copy_strides(tensor))
    distinct = tensor
    for dim, (stride, size) in enumerate(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride == 0 and size > 1:
            distinct = distinct.narrow(dim, 0, 1)
    return _copy(distinct, device, copy_strides(distinct)).expand(tensor.shape)


_arrivals: dict[torch.device, torch.cuda.Stream] = {}  # per device, the stream on which what is sent to it arrives


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy an activation to a device, as `copy_tensor`, without waiting for what that device has still to compute.

    torch copies between two GPUs when the current streams of both have come so far. The next micro-batch would arrive
    only after the one before is done there. So the stream that has to be ready is one on which nothing is computed;
    what is computed from now on waits for it, and the source's stream still goes on after the copy.
    """
    if device.type != "cuda" or tensor.device.type != "cuda" or device == tensor.device:
        return copy_tensor(tensor, device)
    if tensor.requires_grad and torch.is_grad_enabled():
        source = tensor.device
        return with_backward(tensor, lambda one: send(one.detach(), device), lambda gradient: send(gradient, source))
    arrivals = _arrivals.get(device) or _arrivals.setdefault(device, torch.cuda.Stream(device))
    with torch.cuda.stream(arrivals):
        copy = copy_tensor(tensor, device)
    computing = torch.cuda.current_stream(device)
    computing.wait_stream(arrivals)
    for part in stored_tensors(copy):  # or its memory could be given away while it is still read
        part.record_stream(computing)
    return copy


def fresh_copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values to a device, or on it: memory of its own, through the host where direct copies come out changed."""
    if (tensor.device, device) in _staged:
        tensor = tensor.to(CPU)
    return tensor.to(device, copy=True)


def goes_through_host(source: torch.device, destination: torch.device) -> bool:
    """Whether `check_copies` found direct copies between two devices to be wrong."""
    return (source, destination) in _staged


def copy_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    return gapped_strides(tuple(tensor.shape), tensor.stride(), tensor.element_size())


def _copy(tensor: torch.Tensor, device: torch.device, strides: tuple[int, ...] | None) -> torch.Tensor:
    source = tensor.device
    if (source, device) in _staged:
        tensor = tensor.to(CPU)
        source = CPU
    # Never asynchronous towards the host, which would read before the data is there; nor from pinned memory, which the
    # host may overwrite before the copy has run (pageable memory is staged before the call returns).
    ahead = is_accelerator(device) and (is_accelerator(source) or not tensor.is_pinned())
    if strides is None:
        return tensor.to(device, non_blocking=ahead)
    copy = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=device)
    return copy.copy_(tensor, non_blocking=ahead)


def check_copies(devices: Iterable[torch.device]) -> None:
    """Copy random bytes between every two accelerators, once per process, both ways, and compare.

    Some machines corrupt direct copies between devices without any error. Such a pair is copied through the host from
    then on, with a warning. Raises `ApplyError` if copies through the host come out wrong too.
    """
    used = list(dict.fromkeys(device for device in devices if is_accelerator(device)))
    for source in used:
        if (source, CPU) not in _copies_well and not _arrives(source, CPU):
            raise ApplyError(f"copies between the CPU and {source} come out changed. Leave {source} out of the plan.")
        _copies_well[source, CPU] = True
    for source in used:
        for target in used:
            if source == target or (source, target) in _copies_well:
                continue
            _copies_well[source, target] = _arrives(source, target)
            if not _copies_well[source, target]:
                _staged.add((source, target))
                warnings.warn(
                    f"autoshard: direct copies from {source} to {target} come out changed on this machine; they now go "
                    "through the host, which is slower. Check the peer-to-peer setting of the driver or the board.",
                    RuntimeWarning,
                    stacklevel=3,
                )


def _arrives(source: torch.device, target: torch.device) -> bool:
    """Whether random bytes survive the way from `source` to `target`; the comparison itself runs on the host."""
    generator = torch.Generator().manual_seed(0)
    sent = torch.randint(0, 256, (_CHECK_BYTES,), dtype=torch.uint8, generator=generator)
    there = sent.to(source)
    received = there.to(target, non_blocking=is_accelerator(target))
    return torch.equal(received.to(CPU), sent)
