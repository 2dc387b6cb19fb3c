"""Lines of code that are neither torch's nor ours: where something of the user's happened."""

import inspect
import pathlib
import traceback

import torch

import autoshard.errors

_OWN = str(pathlib.Path(autoshard.errors.__file__).parent)
_TORCH = str(pathlib.Path(torch.__file__).parent)
_PYTHON = str(pathlib.Path(inspect.__file__).parent / "concurrent")

_CAPTURE = str(pathlib.Path(__file__).parent / "run.py")
_SKIPPED = (_OWN, _TORCH, _PYTHON, "<")

NOWHERE = "no line of the model's code: in its call, in backward or in torch itself"


def place(error: BaseException) -> str:
    """file:line of the innermost frame of an error that is neither torch's nor ours: the user's own code."""
    where = NOWHERE
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((_OWN, _TORCH, "<")):
            where = f"{file}:{line}"
    return where


def is_own(file: str) -> bool:
    """Whether a file is one of ours."""
    return file.startswith((_OWN, "<"))


def is_of_torch(file: str) -> bool:
    """Whether a file is one of torch's."""
    return file.startswith(_TORCH)


def calling_line() -> str:
    """file:line of the user's code that is running now."""
    file, line, _ = calling_code()
    return f"{file}:{line}" if file else "an unknown line"


def calling_code() -> tuple[str, int, str]:
    """(file, line, function) of the user's code that is running now; ("", 0, "") if there is none.

    What called for the capture of a model that is torch's own is no code of the model.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _CAPTURE and frame.f_code.co_name == "_run_model":
            break
        if not file.startswith(_SKIPPED):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""
