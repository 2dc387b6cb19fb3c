"""Simulated devices: real values, real memory accounting, real device-mismatch errors, no GPU.

with simulate("2x24GiB,1x12GiB") as devices:       # ["cpu:0", "cpu:1", "cpu:2"]
    x = torch.ones(3, device="cpu:1")
    x + torch.ones(3, device="cpu:2")              # RuntimeError: … found at least two devices, cpu:1 and cpu:2!
    devices.memory("cpu:1")                        # (live, peak) bytes
"""

from autoshard.simulate.devices import SimulatedDevices, active_devices, simulate
from autoshard.simulate.memory import SimulatedOutOfMemoryError
from autoshard.simulate.tensor import SimulatedTensor

__all__ = ["SimulatedDevices", "SimulatedOutOfMemoryError", "SimulatedTensor", "active_devices", "simulate"]
