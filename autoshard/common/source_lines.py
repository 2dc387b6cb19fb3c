"""Which line of a model's code calls a torch function: what tells two calls of one function apart."""

import os
import sys
from typing import Any

import torch

_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PASSED = (f"{_TORCH}overrides.py", f"{_TORCH}nn{os.sep}functional.py")


def calling_line() -> str:
    """The code around the call in progress and the line in it, counted from its first: "forward+12".

    Of torch's own code, whose lines move between versions, the name only; "" if there is nothing.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_OWN) and code.co_filename not in _PASSED:
            if code.co_filename.startswith(_TORCH):
                return code.co_name
            return f"{code.co_name}+{frame.f_lineno - code.co_firstlineno}"
        frame = frame.f_back
    return ""
