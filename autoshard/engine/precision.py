"""Precision by name: bytes per element of what training and inference keep."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from autoshard.errors import SpecError
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """Bytes per element of what training keeps and sends.

    `parameters`: of what is kept, less than one where they are quantised (scales included); `compute`: of what kernels
    read, also of activations and of gathered parameters; `master`: of a second copy of the parameters for the
    optimizer, 0 without; `moments`: of each moment, of which the optimizer has so many `states`; `keeps_frozen`:
    parameters of 16 bits that are not trained stay as they are, since no optimizer adds small updates to them.
    """

    parameters: float = 4
    compute: int = 2
    gradients: int = 4
    reduce: int = 4
    master: int = 0
    moments: float = 4
    states: int = 2
    keeps_frozen: bool = False

    @property
    def optimizer_bytes(self) -> float:
        """Bytes per parameter that only the optimizer reads."""
        return self.master + self.states * self.moments


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        # Parameters, gradients and moments in float32; computed and gathered in bfloat16, as FSDP2's policy has it.
        "mixed": Precision(parameters=4, compute=2, gradients=4, reduce=4, moments=4, keeps_frozen=True),
        # All in 16 bits: half of the bytes, and updates below one part in 256 of a weight are lost.
        "pure": Precision(parameters=2, compute=2, gradients=2, reduce=2, moments=2),
        # 16-bit parameters with a float32 copy for the optimizer, as Megatron and DeepSpeed keep them.
        "master": Precision(parameters=2, compute=2, gradients=4, reduce=4, master=4, moments=4),
        "full": Precision(parameters=4, compute=4, gradients=4, reduce=4, moments=4),
    }
)
DOUBLE = Precision(parameters=8, compute=8, gradients=8, reduce=8, moments=8)
STORED_BYTES: Mapping[str, float] = MappingProxyType(
    # Quantised weights with the scales of their groups: one of 2 bytes for 64 values of 4 bits, one for 128 of 8 bits.
    {"int8": 1 + 2 / 128, "fp8": 1.0, "int4": 0.5 + 2 / 64, "4bit": 0.5 + 2 / 64, "nf4": 0.5 + 2 / 64}
)

FEWER_BITS: Mapping[str, str] = MappingProxyType({"int8": "8-bit", "int4": "4-bit"})
"""Of weights, by dtype, in words: what is offered where a model has no room."""
COMPUTED_BYTES: Mapping[str, int] = MappingProxyType({"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8})


def training_precision(name: str, dtype: str, optimizer: str = "adamw") -> tuple[str, Precision]:
    """The precision of a name; "auto" is "mixed" for models of 16 bits and "full" for others, which leaves 64 bits.

    Raises `SpecError` for another name.
    """
    if name in ("", "auto"):
        name = "mixed" if dtype in ("bfloat16", "float16") else "full"
    if name not in PRECISIONS:
        raise SpecError(f"unknown precision {name!r}: use auto, {', '.join(PRECISIONS)}.")
    precision = DOUBLE if name == "full" and dtype == "float64" else PRECISIONS[name]
    return name, replace(precision, states=OPTIMIZER_STATE_TENSORS[optimizer])


def inference_precision(dtype: str) -> Precision:
    """Bytes of weights and of what is computed for a dtype such as "bfloat16", "int8" or "int4".

    Raises `SpecError` for another.
    """
    if dtype in STORED_BYTES:
        return Precision(parameters=STORED_BYTES[dtype], compute=2, gradients=0, reduce=0, moments=0)
    if dtype not in COMPUTED_BYTES:
        raise SpecError(f"unknown dtype {dtype!r}: use auto, {', '.join((*COMPUTED_BYTES, *STORED_BYTES))}.")
    itemsize = COMPUTED_BYTES[dtype]
    return Precision(parameters=itemsize, compute=itemsize, gradients=0, reduce=0, moments=0)
