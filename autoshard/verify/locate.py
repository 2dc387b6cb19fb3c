"""Find the first module whose output differs: both models run again with every module's output noted."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.verify.compare import compare, stopped
from autoshard.verify.report import Difference
from autoshard.verify.run import RunResult, Work, results_of, run
from autoshard.verify.runner import Build, run_both


def locate(
    original: Build, applied: Build, work: Work, input_devices: tuple[torch.device | None, torch.device | None],
    devices: Sequence[torch.device], tolerance: float, seen: Difference,
) -> Difference:  # fmt: skip
    """Return the first difference between module outputs, or where the applied model stops; `seen` if neither shows.

    `input_devices`: where the inputs of the two runs go. `seen`: the difference that was found without looking inside.
    """
    if seen.during in ("backward", "optimizer step"):
        return seen
    end: list[Difference] = []

    def whole() -> list[RunResult]:
        with _Recorder(original()) as recorder:
            run(recorder.model, work, input_devices[0])
        return recorder.results

    def planned() -> list[RunResult]:
        with _Recorder(applied()) as recorder:
            try:
                run(recorder.model, work, input_devices[1])
            except Exception as error:  # the one seen before
                where = recorder.open[-1] if recorder.open else ""
                end.append(stopped(seen.during, f"{type(error).__name__}: {error}", where).first or seen)
        return recorder.results

    expected, found, _ = run_both(whole, planned, work, [], devices)
    if end:
        expected = expected[: len(found)]
    if work.cut:  # inside of a cut, ranks have parts: that is as it should be
        parts = {at for at, (one, other) in enumerate(zip(expected, found, strict=False))
                 if one.value.shape != other.value.shape}  # fmt: skip
        expected, found = ([row for at, row in enumerate(rows) if at not in parts] for rows in (expected, found))
    return compare(expected, found, tolerance, work).first or (end[0] if end else seen)


class _Recorder:
    """Notes the output of every module call, in the order in which the calls end; `open` are those not ended."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.results: list[RunResult] = []
        self.open: list[str] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(nn.Module.register_forward_pre_hook(module, self._enter(path)))
            self._handles.append(nn.Module.register_forward_hook(module, self._leave(path)))

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
