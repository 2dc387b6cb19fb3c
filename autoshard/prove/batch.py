"""Prove that the batch of a model can be divided."""

from typing import Any

from torch import nn

from autoshard.batching import BatchAxis
from autoshard.errors import PlanError
from autoshard.workload import Workload


def find_batch_axis(model: nn.Module, inputs: Any, workload: Workload) -> BatchAxis:
    """Find the batch among the inputs and prove it parallel. Raises `PlanError` naming what mixes its rows."""
    raise PlanError("not there yet.")
