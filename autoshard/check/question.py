"""What is asked about a batch: a model, and how it is called."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard.axes.walk import AxisWalk
from autoshard.capture.capture import Call
from autoshard.capture.graph import ModelGraph
from autoshard.plan.workload import Workload
from autoshard.runtime.chunks import caller_like

INDEPENDENT = "If its rows are independent all the same, assume_independent_rows=True divides it unchecked"
FOR_EACH = (
    "If each replica shall do that with its own samples, as with DDP, assume_independent_rows=True plans it unchecked"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model and how it is called.

    `given`: the arguments as they are handed over; `paths`: for each tensor in them, where it is in `bound`, which are
    the arguments by the names of the forward's parameters.
    `for_replicas`: each runs the model as it is with samples of its own, and outputs are not put together.
    """

    model: nn.Module
    given: Call
    paths: tuple[tuple[str, ...], ...]
    bound: dict[str, Any]
    graph: ModelGraph
    walk: AxisWalk
    workload: Workload
    for_replicas: bool = False

    @property
    def advice(self) -> str:
        """What a user may say where samples are mixed, or may be."""
        return FOR_EACH if self.for_replicas else INDEPENDENT

    def call(self, bound: Mapping[str, Any]) -> Call:
        """Arguments as they are given to the model."""
        return caller_like(self.model, *self.given)(bound)
