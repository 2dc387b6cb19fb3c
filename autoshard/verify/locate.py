"""Find the first module whose output differs: both models run again with every module's output noted."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard.verify.report import Difference
from autoshard.verify.runs import Result, Work, compare, results_of, run


def locate(
    original: Callable[[], nn.Module],
    applied: Callable[[], nn.Module],
    work: Work,
    homes: tuple[torch.device | None, torch.device | None],
    tolerance: float,
    seen: Difference,
) -> Difference:
    """Return the first difference between module outputs, or where the applied model stops; `seen` if neither shows.

    `homes`: where the inputs of the two runs go. `seen`: the difference that was found without looking inside.
    """
    if seen.during in ("backward", "optimizer step"):
        return seen
    model = original()
    with _Recorder(model) as expected:
        run(model, work, homes[0])
    del model
    model = applied()
    with _Recorder(model) as found:
        try:
            run(model, work, homes[1])
        except Exception as error:  # the one seen before
            where = found.open[-1] if found.open else ""
            reason = f"{type(error).__name__}: {error}"
            stopped = Difference(during=seen.during, module=where, output="", max_error=math.inf, message=reason)
            pairs = _comparable(expected.results[: len(found.results)], found.results, work.cut)
            return compare(*pairs, tolerance, work).first or stopped
    return compare(*_comparable(expected.results, found.results, work.cut), tolerance, work).first or seen


def _comparable(expected: list[Result], found: list[Result], cut: bool) -> tuple[list[Result], list[Result]]:
    """Leave out what ranks have parts of: inside of a cut that is as it should be."""
    pairs = enumerate(zip(expected, found, strict=False)) if cut else ()
    parts = {index for index, (whole, part) in pairs if whole.value.shape != part.value.shape}
    return _without(expected, parts), _without(found, parts)


def _without(results: list[Result], left_out: set[int]) -> list[Result]:
    return [result for index, result in enumerate(results) if index not in left_out]


class _Recorder:
    """Notes the output of every module call, in the order in which the calls end; `open` are those not ended."""

    def __init__(self, model: nn.Module) -> None:
        self.results: list[Result] = []
        self.open: list[str] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._enter(path)))
            self._handles.append(module.register_forward_hook(self._leave(path)))

    def __enter__(self) -> "_Recorder":
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, path: str) -> Any:
        return lambda module, args: self.open.append(path)

    def _leave(self, path: str) -> Any:
        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            while self.open and self.open.pop() != path:  # calls that ended in an exception that was caught
                continue
            self.results += results_of("forward", path, "output", output)

        return leave
