"""How many bytes of tensors live in this process, counted as simulated devices count theirs."""

import torch

from autoshard.nested import tensors_in
from autoshard.simulate.memory import SimulatedDevice
from autoshard.torch_private import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts what lives of some tensors (nested) and of those that ops make inside. `peak`: the most since `reset`."""

    def __init__(self, *nested):
        super().__init__()
        self.device = SimulatedDevice(0, 1 << 60, [])
        self._count(nested)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        self._count(output)
        return output

    def _count(self, nested):
        for _, tensor in tensors_in(nested):
            tensor = getattr(tensor, "_local_tensor", tensor)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.untyped_storage().device.type == "cpu":
                self.device.count(tensor)

    @property
    def peak(self):
        return self.device.peak_bytes

    def reset(self):
        self.device.peak_bytes = self.device.live_bytes
