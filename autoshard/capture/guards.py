"""Questions of the code that decide nothing but whether it raises an error.

    if (lengths > limit).any(): raise ValueError(…)        passes where no element is above the limit
    assert mask.all()                                      passes where all elements are true
    torch's own check of lengths <= limit                  the same, asked in a function of torch
    assert lengths.max().item() <= limit                   passes where the number that is read is at most another one
    check(count == 4, f"{count} of 4")                     the number of a text that is handed on with such a question

Where the answer is read, the frame tells which statement is running. Only a test of one question, whose branch is one
`raise` and nothing else, is a guard; whoever cannot be read is none.
"""

import ast
import inspect
import linecache
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from types import CodeType, FrameType
from typing import Any

import torch

from autoshard.capture.user_code import is_capture, is_of_torch, is_own

Position = tuple[int | None, int | None, int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """A question that is only asked to raise an error.

    Attributes:
        passes: the answer with which nothing is raised; of a number, whether small ones pass, not large ones.
        place: the lines of the user's code that were running, the innermost first.
        limit: what a number is compared with, None where an answer is read.
        is_text: a number is read for a text alone, which is handed to the call that asks.
    """

    passes: bool
    place: tuple[tuple[str, int], ...]
    limit: float | None = None
    is_text: bool = False

    def is_of(self, question: "Guard") -> bool:
        """Whether a text is handed to the call that asks this question."""
        return not question.is_text and question.place[-len(self.place) :] == self.place

    @property
    def passing(self) -> bool | float:
        """What is read where nothing is raised."""
        return self.passes if self.limit is None else -self.failing

    @property
    def failing(self) -> bool | float:
        """What is read where the error is raised; of a text, any other number."""
        if self.is_text:
            return 10**9
        if self.limit is None:
            return not self.passes
        return inf if self.passes else -inf


def asking(result: object) -> Guard | None:
    """The guard for which the `result` is being read now; None if it is read for anything else."""
    if type(result) not in (bool, int, float):
        return None
    frame = inspect.currentframe()
    passes: bool | None = None
    limit: float | None = None
    while frame is not None:
        file = frame.f_code.co_filename
        if file == torch.__file__ and "check" in frame.f_code.co_name:  # they raise an error, and do nothing else
            passes = True if type(result) is bool else None
            break
        if not is_own(file):
            if type(result) is bool:  # torch's own checks, of distributions for example, are guards as well
                passes = _guards(frame.f_code).get(_running(frame))
            elif not is_of_torch(file):
                line = _texts(frame.f_code).get(_running(frame))
                if line is not None:
                    return Guard(passes=True, place=((file, line), *_lines(frame.f_back)), is_text=True)
                passes, limit = _compared(frame)
            if passes is not None or not is_of_torch(file):
                break
        frame = frame.f_back
    return None if passes is None else Guard(passes=passes, place=_lines(frame), limit=limit)


def _lines(frame: FrameType | None) -> tuple[tuple[str, int], ...]:
    """The lines of all frames of the model that are neither torch's nor ours."""
    found = []
    while frame is not None and not is_capture(frame):
        file = frame.f_code.co_filename
        if not is_own(file) and not is_of_torch(file):
            found.append((file, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def _running(frame: FrameType) -> Position:
    """Where the instruction of a frame that runs now stands in its file."""
    positions = list(frame.f_code.co_positions())
    place = frame.f_lasti // 2
    return positions[place] if 0 <= place < len(positions) else (None, None, None, None)


def _compared(frame: FrameType) -> tuple[bool | None, float | None]:
    """Whether a small number passes where one is read to be compared, and the limit; None if it is read otherwise."""
    passes, other = _limits(frame.f_code).get(_running(frame), (None, None))
    limit: Any = other.value if isinstance(other, ast.Constant) else None
    if isinstance(other, ast.Name):
        limit = frame.f_locals.get(other.id)
    return (passes, limit) if type(limit) in (int, float) else (None, None)


@lru_cache(maxsize=256)
def _guards(code: CodeType) -> dict[Position, bool]:
    """By the positions of instructions that may ask, the answer with which a statement raises nothing."""
    return {_position(node): passes for *asked, passes in _tests(code) for node in asked}


@lru_cache(maxsize=256)
def _limits(code: CodeType) -> dict[Position, tuple[bool, ast.expr]]:
    """By the positions of calls that read a number to compare it: whether small ones pass, and the other side."""
    found: dict[Position, tuple[bool, ast.expr]] = {}
    for *_, test, passes in _tests(code):
        if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], (ast.Lt, ast.LtE, ast.Gt, ast.GtE)):
            continue
        left, right = test.left, test.comparators[0]
        for number, limit in ((left, right), (right, left)):
            if _hands_on(number):
                below = isinstance(test.ops[0], (ast.Lt, ast.LtE)) is (number is left)
                found[_position(number)] = below is passes, limit
    return found


def _hands_on(node: ast.expr) -> bool:
    """Whether an expression is `x.item()`, `int(x)` or `float(x)`: a larger number in gives no smaller one out."""
    if not isinstance(node, ast.Call) or node.keywords:
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "item" and not node.args
    return isinstance(node.func, ast.Name) and node.func.id in ("int", "float") and len(node.args) == 1


@lru_cache(maxsize=256)
def _tests(code: CodeType) -> list[tuple[Any, ...]]:
    """Of each statement that may be a guard: itself, its tests from the outermost in, and what raises nothing."""
    found: list[tuple[Any, ...]] = []
    for node in _statements(code):
        if not isinstance(node, (ast.If, ast.Assert)):
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
        found.append((*asked, passes))
    return found


@lru_cache(maxsize=256)
def _texts(code: CodeType) -> dict[Position, int]:
    """By the positions of texts that are handed to a call whose result nobody takes, the line of the call."""
    statements = (node.value for node in _statements(code) if isinstance(node, ast.Expr))
    return {
        _position(part): call.lineno
        for call in statements
        if isinstance(call, ast.Call)
        for text in (*call.args, *(item.value for item in call.keywords))
        if isinstance(text, ast.JoinedStr)
        for part in (text, *text.values)
    }


@lru_cache(maxsize=256)
def _statements(code: CodeType) -> list[ast.stmt]:
    lines = linecache.getlines(code.co_filename)
    try:
        tree = ast.parse("".join(lines)) if lines else ast.parse("")
    except SyntaxError:
        return []
    last = max((line for _, line, _, _ in code.co_positions() if line is not None), default=0)
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.stmt) and code.co_firstlineno <= node.lineno <= last
    ]


def _several(test: ast.AST) -> bool:
    """Whether a test asks several things, or keeps what it is told."""
    kinds = (ast.BoolOp, ast.NamedExpr, ast.IfExp, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)
    chained = any(isinstance(node, ast.Compare) and len(node.ops) > 1 for node in ast.walk(test))
    return chained or any(isinstance(node, kinds) for node in ast.walk(test))


def _position(node: ast.AST) -> Position:
    assert isinstance(node, (ast.expr, ast.stmt))
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
