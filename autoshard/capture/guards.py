"""Questions of the code that decide nothing but whether it raises an error.

    if (lengths > limit).any(): raise ValueError(…)        passes where no element is above the limit
    assert mask.all()                                      passes where all elements are true
    torch._check_tensor_all_with(…, lengths <= limit)      the same, asked by torch

Where the answer is read, the frame tells which statement is running. Only a test of one question, whose branch is one
`raise` and nothing else, is a guard; whoever cannot be read is none.
"""

import ast
import inspect
import linecache
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType

from autoshard.capture.user_code import is_of_torch, is_own
from autoshard.torch_private import CHECKS

Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A question that is only asked to raise an error.

    Attributes:
        passes: the answer with which nothing is raised.
        place: the lines of the user's code that were running, the innermost first.
    """

    passes: bool
    place: tuple[tuple[str, int], ...]


def asking() -> Guard | None:
    """The guard for which a value is being read now; None if it is read for anything else."""
    frame = inspect.currentframe()
    passes: bool | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if frame.f_code in CHECKS:
            passes = True
            break
        if not is_own(file) and not is_of_torch(file):
            passes = _passing(frame)
            break
        frame = frame.f_back
    return None if passes is None else Guard(passes=passes, place=_lines(frame))


def _lines(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    """The lines of all frames that are neither torch's nor ours."""
    found = []
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_own(file) and not is_of_torch(file):
            found.append((file, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _passing(frame: FrameType) -> bool | None:
    """The answer to the question that an instruction asks with which its statement raises nothing."""
    code = frame.f_code
    positions = list(code.co_positions())
    place = frame.f_lasti // 2
    return _guards(code).get(positions[place]) if 0 <= place < len(positions) else None


@lru_cache(maxsize=256)
def _guards(code: CodeType) -> dict[Position, bool]:
    """By the positions of instructions that may ask, the answer with which a statement raises nothing."""
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines)) if lines else ast.parse("")
    except SyntaxError:
        return {}
    found: dict[Position, bool] = {}
    last = max((line for _, line, _, _ in code.co_positions() if line is not None), default=0)
    for node in ast.walk(tree):
        if not isinstance(node, (ast.If, ast.Assert)) or not code.co_firstlineno <= node.lineno <= last:
            continue
        if isinstance(node, ast.If) and (len(node.body) != 1 or node.orelse or not isinstance(node.body[0], ast.Raise)):
            continue
        passes, test = isinstance(node, ast.Assert), node.test
        asked: list[ast.AST] = [node, test]
        while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            passes, test = not passes, test.operand
            asked.append(test)
        if not isinstance(test, (ast.Call, ast.Compare, ast.Name, ast.Attribute, ast.BinOp)) or _several(test):
            continue
        found |= dict.fromkeys(map(_position, asked), passes)
    return found


def _several(test: ast.AST) -> bool:
    """Whether a test asks several things, or keeps what it is told."""
    kinds = (ast.BoolOp, ast.NamedExpr, ast.IfExp, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)
    chained = any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in ast.walk(test))
    return chained or any(isinstance(node, kinds) for node in ast.walk(test))


def _position(node: ast.AST) -> Position:
    assert isinstance(node, (ast.expr, ast.stmt))
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
