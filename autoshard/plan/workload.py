"""What the model is going to be used for: every figure of a plan is valid for one workload."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from autoshard.errors import SpecError
from autoshard.plan.choices import Optimizer

Mode = Literal["inference", "training"]
OPTIMIZER_STATE_TENSORS = {"none": 0, "sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of the parameter's own shape and dtype that each optimizer keeps per trainable parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The use a plan is valid for.

    Attributes:
        batch_size: sequences (or images, or rows) per forward, of all replicas; None: as in the inputs given.
        sequence_length: tokens per sequence; None: as in the inputs given.
        new_tokens: tokens generated after the prompt; 0 plans the forward alone.
        mode: "inference" or "training" (forward, backward and optimizer step).
        optimizer: a key of `OPTIMIZER_STATE_TENSORS`; read in training only.
        dtype: "auto" keeps the model's own; otherwise a torch dtype name such as "bfloat16".
        assumed: the user gave no workload, so this one is printed as an assumption.
    """

    batch_size: int | None = None
    sequence_length: int | None = None
    new_tokens: int = 0
    mode: Mode = "inference"
    optimizer: Optimizer = "adamw"
    dtype: str = "auto"
    assumed: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "sequence_length", "new_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, type(None))):
                raise SpecError(f"{name} must be a whole number, got {value!r}.")
        if self.new_tokens is None:
            raise SpecError("new_tokens must be a whole number, got None; 0 plans the forward alone.")
        for name in ("batch_size", "sequence_length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise SpecError(f"{name} must be at least 1, got {value}.")
        if self.new_tokens < 0:
            raise SpecError(f"new_tokens must not be negative, got {self.new_tokens}.")
        if self.mode not in ("inference", "training"):
            raise SpecError(f"mode must be 'inference' or 'training', got {self.mode!r}.")
        if self.optimizer not in OPTIMIZER_STATE_TENSORS:
            raise SpecError(f"unknown optimizer {self.optimizer!r}: use one of {', '.join(OPTIMIZER_STATE_TENSORS)}.")

    @property
    def training(self) -> bool:
        return self.mode == "training"

    @property
    def generates(self) -> bool:
        return self.new_tokens > 0 and not self.training

    @property
    def unit(self) -> str:
        """What its seconds and memory are of, for people."""
        return "a step" if self.training else "an answer" if self.new_tokens else "a pass"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Workload":
        try:
            return cls(**data)
        except TypeError as error:
            raise SpecError(f"not a workload: {error}.") from None
