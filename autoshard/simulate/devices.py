"""`simulate`: the context in which `cpu:0`, `cpu:1`, … are devices of their own."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import active_cluster, parse_devices
from autoshard.errors import SpecError
from autoshard.simulate.memory import SimulatedDevice
from autoshard.simulate.tensor import SimulatedTensor, all_ours, become, run_op, with_ordinary_items
from autoshard.torch_private import DispatchMode, FakeTensor

MAX_SIMULATED = 128  # torch keeps the index of a device in 8 bits, one of them the sign

_NEVER_FULL = 1 << 62


class SimulatedDevices(list[str]):
    """The names of the simulated devices, a plain list of them, with the counters behind them."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.names)
        self.cluster = cluster
        self._devices: list[SimulatedDevice] = []
        self._devices.extend(
            SimulatedDevice(index, device.budget_bytes, self._devices) for index, device in enumerate(cluster.devices)
        )

    def memory(self, name: str) -> tuple[int, int]:
        """Return (live, peak) bytes of one device."""
        device = self._device(name)
        return device.live_bytes, device.peak_bytes

    def reset_peak(self) -> None:
        """Start measuring peaks anew, from what is live now."""
        for device in self._devices:
            device.peak_bytes = device.live_bytes

    def limit(self, to_size: bool) -> None:
        """Let devices be full at their sizes, or never."""
        for device, known in zip(self._devices, self.cluster.devices, strict=True):
            device.limit_bytes = known.budget_bytes if to_size else _NEVER_FULL

    def _device(self, name: str) -> SimulatedDevice:
        if name not in self:
            raise SpecError(f"{name!r} is not simulated; simulated are {', '.join(self)}.")
        return self._devices[self.index(name)]


class _SimulationMode(DispatchMode):
    """Sees what subclass dispatch can't: ops that make tensors, and ordinary tensors moved to a simulated device."""

    def __init__(self, devices: list[SimulatedDevice]) -> None:
        super().__init__()
        self.devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(issubclass(kind, FakeTensor) for kind in types):  # shapes only, on no device
            return func(*args, **(kwargs or {}))
        if not all_ours(types):
            return NotImplemented
        return run_op(func, args, kwargs or {}, self.devices, self)


_active: ContextVar[SimulatedDevices | None] = ContextVar("simulated_devices", default=None)


def active_devices() -> SimulatedDevices | None:
    """Return the devices of the innermost `simulate` this code runs in, None outside of any."""
    return _active.get()


@contextlib.contextmanager
def simulate(spec: Any) -> Iterator[SimulatedDevices]:
    """Simulate the devices of a spec, a cluster or a list of them, as cpu:0, cpu:1, … in that order.

    Inside, these names are used as real ones: in factories, `.to`, hooks, plans. Every op computes real values, equal
    bit for bit to the ordinary CPU's; an op that mixes devices raises RuntimeError; a device that is full raises
    `SimulatedOutOfMemoryError`. "cpu" without an index stays the ordinary CPU, of any size. Random numbers come from
    the CPU's generator. Tensors may leave the context and keep their device; only factories don't know it any more.
    Raises `SpecError` for a spec that makes no sense.
    """
    cluster = parse_devices(spec, simulated=True)
    if len(cluster.devices) > MAX_SIMULATED:
        raise SpecError(f"{len(cluster.devices)} devices can't be simulated, at most {MAX_SIMULATED} can.")
    devices = SimulatedDevices(cluster)
    mode = _SimulationMode(devices._devices)
    tokens = _active.set(devices), active_cluster.set(cluster)
    try:
        with mode, _patched():
            yield devices
    finally:
        _active.reset(tokens[0])
        active_cluster.reset(tokens[1])


@contextlib.contextmanager
def _patched() -> Iterator[None]:
    """Replace the few functions that lose the index of a device, or the identity of a tensor, without dispatching.

    A function mode would see all of them, but its mere presence switches off fused paths (nn's encoder
    layers look for it), and results would no longer be those of the plain CPU.
    """
    with torch.device("cpu"):
        torch.empty(0)  # torch notes which functions take a device once, on first use: let it note the real ones
    wrappers: list[tuple[Any, str, Callable]] = [
        (torch, "tensor", _keep_index),
        (torch, "as_tensor", _keep_index),
        (torch, "asarray", _keep_index),
        (torch.Tensor, "data", _settable_data),
    ]
    originals = [getattr(place, name) for place, name, _ in wrappers]
    own = [name in vars(place) for place, name, _ in wrappers]
    for (place, name, wrapper), original in zip(wrappers, originals, strict=True):
        setattr(place, name, wrapper(original))
    try:
        yield
    finally:
        for (place, name, _), original, owned in zip(wrappers, originals, own, strict=True):
            if owned:
                setattr(place, name, original)
            else:
                delattr(place, name)


def _keep_index(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap torch.tensor and its like, which copy to `device` behind the dispatcher, so that the copy is dispatched."""

    def make_and_move(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if isinstance(data, torch.Tensor):
            return make(data, *args, device=device, **kwargs)
        data = with_ordinary_items(data)
        # Not torch.get_default_device(), which calls torch.tensor where the default has no index.
        target = torch.empty(0).device if device is None else torch.device(device)
        if target.type != "cpu" or target.index is None:
            return make(data, *args, device=device, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = make(data, *args, device="cpu", **kwargs).to(target)
        return made.requires_grad_() if requires_grad else made

    return make_and_move


def _settable_data(original: Any) -> property:
    """Wrap the property `Tensor.data`, so that `.data = ` a simulated tensor makes the object one."""

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if isinstance(value, SimulatedTensor):
            become(tensor, value)
        else:
            original.__set__(tensor, value)

    return property(original.__get__, set_data)
