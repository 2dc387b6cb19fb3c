"""What planning in one process is asked for, and what is known of the model: what several strategies need, once."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import limited_to
from autoshard.errors import CaptureError, PlanError
from autoshard.runtime.collectives import count_processes

if TYPE_CHECKING:
    from autoshard.axes.groups import AxisGroups
    from autoshard.capture.graph import ModelGraph
    from autoshard.engine.pricer import Pricer
    from autoshard.plan.batching import BatchAxis
    from autoshard.profile.profile import Profile
    from autoshard.strategies.column_parallel import CheckCuts


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for, and what is known about the model.

    Attributes:
        max_memory, pins: as people write them; `cluster` is without the limits.
        in_memory: names of parameters that can't be kept on disk.
        tp_plan: what to cut, as Transformers writes it; None: what pays.
        assume_independent_rows: take the user's word that rows of the batch don't mix.
        processes: how many of torch.distributed run, 0 if all devices are used from one.
        stages: paths of modules in each stage of a pipeline: only what lies inside of a block is cut then.
        divides_tokens: between cuts, divide tokens over the ranks where that is sound.
    """

    model: nn.Module
    inputs: Any
    profile: "Profile"
    cluster: Cluster
    objective: str = "latency"
    max_memory: Mapping[Any, Any] | None = None
    pins: Mapping[str, Any] | None = None
    in_memory: Collection[str] = ()
    num_microbatches: int | None = None
    schedule: str | None = None
    tp_plan: Mapping[str, str] | None = None
    assume_independent_rows: bool = False
    processes: int = field(default_factory=count_processes)
    stages: Sequence[Sequence[str]] = ()
    divides_tokens: bool = False

    @property
    def limits(self) -> Mapping[Any, Any]:
        """Most memory of devices: what was told, else what is not kept free."""
        return {**self.cluster.kept_free(), **(self.max_memory or {})}

    @cached_property
    def limited(self) -> Cluster:
        """The cluster with the memory that may be used."""
        return limited_to(self.cluster, self.limits)

    @property
    def batch(self) -> "BatchAxis":
        """How the batch is divided. Raises `PlanError` if its rows don't stay apart."""
        return dataclasses.replace(self._found[0], assumed=self.assume_independent_rows)

    def check_parts(self, parts: Iterable[int]) -> None:
        """Raise `PlanError` if the model does something else for as many rows as these parts have."""
        self._found[1](parts)

    @cached_property
    def _found(self) -> "tuple[BatchAxis, Callable[[Iterable[int]], None]]":
        from autoshard.check.batch import find_batch

        return find_batch(
            self.model, self.inputs, self.profile.workload, self.composite,
            assume_independent_rows=self.assume_independent_rows,
        )  # fmt: skip

    @property
    def has_rows(self) -> bool:
        """Whether there is something to divide: one row can't be."""
        values = self.profile.graph.values
        return any(values[value].shape[0] > 1 for value in self.profile.graph.inputs if values[value].shape)

    @property
    def composite(self) -> "ModelGraph":
        """A forward with composite ops, which the axis analysis walks. Raises `PlanError` if there is none."""
        if isinstance(self._recorded, str):
            raise PlanError(self._recorded)
        return self._recorded

    @cached_property
    def _recorded(self) -> "ModelGraph | str":
        """The graph, or why there is none: as words, since an error keeps the tensors of its frames alive."""
        from autoshard.capture.capture import capture as record

        forward = dataclasses.replace(self.profile.workload, mode="inference", new_tokens=0)
        try:
            return record(self.model, self._given, workload=forward, composite=True)
        except CaptureError as error:  # though it could be measured: other strategies may do
            return str(error)

    @cached_property
    def _given(self) -> Any:
        """The inputs; where none were given, those of the profile, which have labels in training."""
        if self.inputs is not None or not self.profile.workload.training:
            return self.inputs
        from autoshard.check.rank import call_of

        return call_of(self.model, None, self.profile.workload, self.profile.graph)[1]

    @cached_property
    def groups(self) -> "AxisGroups":
        """What can be cut over devices."""
        from autoshard.axes.groups import find_groups

        return find_groups(self.composite)

    @cached_property
    def price(self) -> "Pricer":
        """What prices plans: once, though a strategy and the comparison ask for it."""
        from autoshard.engine.pricer import Pricer

        return Pricer(self.profile, self.limited)

    def cut_checks(self) -> "CheckCuts":
        """What checks cuts on the model, by following its ranks op by op."""
        from autoshard.check.cuts import check_cuts

        forward = dataclasses.replace(self.profile.workload, mode="inference", new_tokens=0)
        check = check_cuts(self.model, self._given, forward, self.composite, self.groups)
        return _inside_blocks(check) if self.stages else check


def _inside_blocks(check: "CheckCuts") -> "CheckCuts":
    """What refuses to cut what no block has, and leaves the rest to `check`."""
    from autoshard.plan.sharding import Refusal

    def checked(groups: Any, shares: Any) -> Any:
        inside = ["" not in group.blocks for group in groups]
        found = iter(check(*([one for one, yes in zip(row, inside, strict=True) if yes] for row in (groups, shares))))
        return [next(found) if yes else Refusal(reason="it is in no block of a stage") for yes in inside]

    return checked
