"""Profile: memory and compute of every module, measured on a ModelGraph."""

from dataclasses import dataclass, field
from typing import Any

from autoshard.capture.graph import ModelGraph
from autoshard.common.sizes import format_bytes
from autoshard.plan.notebook import as_html
from autoshard.plan.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module's figures, those of its whole subtree.

    Tied tensors are counted once, at their first name. Bytes: `activation` = allocated by its ops in forward;
    `saved` = kept for backward; `cache` = kept in state that outlives the forward; `peak` = most live activation bytes
    while it runs. `bytes_moved` = read and written by its ops.
    """

    path: str
    class_name: str
    calls: int
    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    saved_bytes: int
    cache_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    flops: int
    bytes_moved: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Profile:
    """The graph, the workload it was captured for, and per-module and whole-model figures on one device.

    `op_bytes[i]` is what op i reads and writes; `dtype` is the dtype most FLOPs run in. `source`: the model and its
    inputs, so that other runs of it can be recorded. `further`: how often the recorded step of a generation is made in
    the whole answer, see `answer.py`; None where the run is priced as it was recorded.
    """

    graph: ModelGraph
    workload: Workload
    modules: tuple[ModuleProfile, ...]
    op_bytes: tuple[int, ...]
    op_dtypes: tuple[str, ...]
    dtype: str
    parameter_bytes: int
    buffer_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    cache_bytes: int
    activation_peak_bytes: int
    peak_bytes: int
    flops: int
    bytes_moved: int
    further: int | None = None
    source: tuple[Any, Any] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        weights, peak = format_bytes(self.parameter_bytes + self.buffer_bytes), format_bytes(self.peak_bytes)
        name = self.modules[0].class_name
        return f"<Profile: {name}, {weights} of weights, {peak} at the peak, {len(self.modules)} modules>"

    def _repr_html_(self) -> str:
        """Show the profile in a notebook: totals, and the modules of the first levels."""
        totals = {
            "weights": self.parameter_bytes + self.buffer_bytes,
            "gradients": self.gradient_bytes,
            "optimizer state": self.optimizer_bytes,
            "at the fullest moment, with activations": self.peak_bytes,
        }
        lines = [f"{self.modules[0].class_name}, mostly {self.dtype}"]
        lines += [f"  {name}  {format_bytes(nbytes)}" for name, nbytes in totals.items() if nbytes]
        for one in self.modules:
            if one.path.count(".") < 2:
                weights = format_bytes(one.parameter_bytes + one.buffer_bytes)
                figures = (
                    f"{weights} of weights, {format_bytes(one.peak_bytes)} at the peak, {one.flops / 1e9:,.3g} GFLOP"
                )
                lines.append(f"{one.path or '(whole model)'}  {one.class_name}  {figures}")
        return as_html("\n".join(lines))
