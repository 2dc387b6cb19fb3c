"""What autoshard raises. Every message says what was wrong, where, and one thing that would work."""


class AutoshardError(Exception):
    """Base of all errors meant for the user: one paragraph, no traceback needed."""


class CaptureError(AutoshardError):
    """The model could not be run or recorded with the inputs given."""


class SpecError(AutoshardError, ValueError):
    """A device spec, a size, a strategy name or another argument does not make sense."""


class PlanError(AutoshardError):
    """The request can't be met: no plan fits, or a plan does not belong to this model."""


class ApplyError(AutoshardError):
    """A plan could not be applied or removed; the model is as it was before the call."""


class VerifyError(AutoshardError):
    """The applied model could not be compared with the original, or `check_first_batch` found that they differ."""


class RankError(AutoshardError):
    """The processes that share a model do not agree, or one of them is gone."""


class CheckpointError(AutoshardError):
    """A checkpoint is damaged, incomplete or not the model's, or could not be written; what was there is as it was."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or what kind of error it is: torch's own go on for many lines."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
