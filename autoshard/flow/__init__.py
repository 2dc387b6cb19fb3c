"""What a recorded run does under a placement: on which device every op runs, what is copied, what is live when."""

from autoshard.flow.data import HOST_NAME, INPUTS, OUTPUTS, Buffers, Copy, Flow
from autoshard.flow.objects import producer_of
from autoshard.flow.walk import flow

__all__ = ["HOST_NAME", "INPUTS", "OUTPUTS", "Buffers", "Copy", "Flow", "flow", "producer_of"]
