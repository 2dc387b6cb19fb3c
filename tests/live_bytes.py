"""How many bytes of tensors live in this process, counted as simulated devices count theirs."""

import torch

from autoshard.nested import tensors_in
from autoshard.simulate import memory
from autoshard.simulate.memory import SimulatedDevice
from autoshard.torch_private import DispatchMode


class LiveBytes(DispatchMode):
    """Counts what lives of some tensors (nested) and of those that ops make inside. `peak`: the most since `reset`."""

    def __init__(self, *nested):
        super().__init__()
        self.device = SimulatedDevice(0, 1 << 60, [])
        self._count(nested)

    def __enter__(self):
        self.resize = resize = torch.UntypedStorage.resize_

        def resized(storage, nbytes):  # which no op does: fully_shard lets go of what it gathered so
            found = resize(storage, nbytes)
            entry = memory._storages.get(id(storage))
            if entry is not None:
                entry.owner._grow(storage.nbytes() - entry.nbytes)
                entry.nbytes = storage.nbytes()
            return found

        torch.UntypedStorage.resize_ = resized
        return super().__enter__()

    def __exit__(self, *error):
        torch.UntypedStorage.resize_ = self.resize
        return super().__exit__(*error)

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
