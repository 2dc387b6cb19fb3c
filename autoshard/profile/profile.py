"""Profile: memory and compute of every module, measured on a ModelGraph."""

from dataclasses import dataclass

from autoshard.capture.graph import ModelGraph
from autoshard.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleProfile:
    """One module's figures; `own` fields count what the module itself holds or runs, the others its whole subtree.

    Tied tensors are counted once, at their first name. Bytes: `activation` = allocated by its ops in forward;
    `saved` = kept for backward; `cache` = kept in state that outlives the forward; `peak` = most live activation bytes
    while it runs. `bytes_moved` = read and written by its ops.
    """

    path: str
    class_name: str
    calls: int
    parameter_bytes: int
    buffer_bytes: int
    own_parameter_bytes: int
    own_buffer_bytes: int
    activation_bytes: int
    saved_bytes: int
    cache_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    flops: int
    bytes_moved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The graph, the workload it was captured for, and per-module and whole-model figures on one device.

    `op_bytes[i]` is what op i reads and writes; `dtype` is the dtype most FLOPs run in.
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
