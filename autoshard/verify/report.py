"""What a verification found, as plain data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first result that is not equal.

    Attributes:
        during: "forward", "backward", "optimizer step" or "decode".
        module: path of the first module, in calling order, whose output differs; "" is the root.
        output: which of its outputs, or which gradient, parameter or buffer.
        max_error: largest absolute difference in it; inf if shapes, dtypes or calls differ, the run stopped there, or
            ranks that should have the same have not.
        message: what stopped the run, or what else there is to say.
    """

    during: str
    module: str
    output: str
    max_error: float
    message: str = ""

    def __str__(self) -> str:
        where = f"{self.module!r}" if self.module else "the model itself"
        what = f"{self.output} of {where}" if self.output else where
        error = f" (largest error {self.max_error:.3g})" if self.max_error < float("inf") else ""
        return f"{self.during}: {what}{error}{': ' if self.message else ''}{self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeak:
    """Most bytes live at once on one simulated device; `predicted_bytes` is None if no estimate could be made."""

    name: str
    simulated_as: str
    measured_bytes: int
    predicted_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The outcome of `verify`.

    Attributes:
        ok: every result of the applied model equals the original's, within the tolerance.
        max_error: the largest difference of all results compared; inf where one could not be compared.
        max_relative_error: the same, each as a part of the largest value of its tensor.
        first_difference: None if there is none.
        compared: what was compared, of "forward", "backward", "optimizer step", "decode".
        simulated: the plan's devices are not here and were simulated.
        peaks: per device of the plan, when simulated.
        notes: what a reader of the figures should know.
    """

    ok: bool
    max_error: float
    max_relative_error: float
    first_difference: Difference | None
    compared: tuple[str, ...]
    simulated: bool
    peaks: tuple[DevicePeak, ...] = ()
    notes: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok
