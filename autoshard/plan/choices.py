"""Types of the arguments that the public calls share, and the check of those that are names."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args

import torch

from autoshard.common.sizes import shown
from autoshard.errors import SpecError

Strategy = Literal[
    "auto", "sequential", "balanced", "balanced_low_0", "column-parallel", "pipeline", "data-parallel", "hybrid",
    "ddp", "fsdp",
]  # fmt: skip
STRATEGY_WORDS = {
    "tp": "column-parallel", "tensor-parallel": "column-parallel", "tensor": "column-parallel", "pp": "pipeline",
    "zero3": "fsdp", "fsdp2": "fsdp", "dp": "data-parallel",
}  # fmt: skip
"""Words that people type -> strategies."""
Objective = Literal["latency", "throughput", "memory"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Launch = Literal["one-process", "processes"]
Recompute = Literal["none", "selective", "full"]
WeightDtype = Literal["auto", "bfloat16", "float16", "float32", "float64", "int8", "fp8", "int4", "4bit", "nf4"]
PrecisionName = Literal["auto", "mixed", "pure", "master", "full"]
Optimizer = Literal["none", "sgd", "momentum", "adam", "adamw"]

DeviceName = str | int | torch.device
"""Such as "cuda:0", 0 or torch.device("cuda", 0)."""
Size = str | int
"""Such as "24GiB", or bytes."""
Inputs = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Callable[[], Any]
"""Of a model: one tensor, positional arguments, keyword arguments, or a function that returns one of these."""
DeviceMap = Mapping[str, DeviceName]
"""Module path -> device, as Transformers and Accelerate write it."""


def check_choices(*, strategy: Any = "auto", objective: Any = "latency", schedule: Any = None) -> None:
    """Raise `SpecError` for a strategy, an objective or a schedule that does not exist; `schedule` may be None."""
    _check("strategy", strategy, get_args(Strategy))
    _check("objective", objective, get_args(Objective))
    if schedule is not None:
        _check("schedule", schedule, get_args(ScheduleName))


def strategy_named(name: Any) -> Any:
    """The strategy that a word means: "tp" is "column-parallel"."""
    return STRATEGY_WORDS.get(name.lower(), name) if isinstance(name, str) else name


def _check(what: str, name: Any, known: Sequence[str]) -> None:
    if name not in known:
        raise SpecError(f"unknown {what} {shown(name)}: use one of {', '.join(known)}.{did_you_mean(name, known)}")


def did_you_mean(name: Any, known: Sequence[str]) -> str:
    """Return " Did you mean …?" with the nearest of the known names; nothing if none is near."""
    near = get_close_matches(str(name)[:100].lower(), known, n=1)
    return f" Did you mean {near[0]}?" if near else ""
