"""Both runs, of the model itself and as planned, with the same random numbers: all ways to verify come here."""

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from autoshard.capture.run import own_random_numbers
from autoshard.errors import AutoshardError, VerifyError, first_line
from autoshard.runtime.dispatch import is_applied, remove
from autoshard.verify.compare import CoarsestType
from autoshard.verify.random_numbers import SameRandomNumbers
from autoshard.verify.run import RunResult, Work, rounding_of

Build = Callable[[], nn.Module]
_PASSES = "1e-5 of the largest value of a tensor in float32 (1e-12 in float64, 1e-2 in float16, 5e-2 in bfloat16)"
REORDERED = (
    "sums over devices are made in another order than in one matrix, so results are equal to rounding: what passes is "
    f"{_PASSES}"
)
CHOOSING = (
    "a model that chooses among numbers which are almost equal (topk, argmax) chooses others after rounding: what is "
    "equal for model.double(), planned anew with inputs of that type, was rounding"
)
IN_PARTS = (
    "parts of the batch take other matrix products than the whole, so results are equal to rounding: what passes is "
    f"{_PASSES}"
)
REFUSED = "nothing could be compared, as the plan refuses this call of the model: {}"
DRAWN = (
    "random numbers were taken to be the same for all rows, and nothing was dropped: parts draw other ones than the "
    "whole"
)
COARSE = (
    "the original computes in {}, so {} of the largest value of a tensor passes in tensors of every type: a smaller "
    "fault is not seen"
)


def run_both(
    whole: Callable[[], list[RunResult]], planned: Callable[[], list[RunResult]], work: Work, notes: list[str],
    devices: Sequence[torch.device],
) -> tuple[list[RunResult], list[RunResult], Work]:  # fmt: skip
    """Results of the model itself and of it as planned, and the work with the coarsest type that the model computes in.

    `devices`: those whose random numbers begin anew for the second run, and are put back.
    """
    noted = CoarsestType() if work.reordered else contextlib.nullcontext()
    with _unfused(), own_random_numbers(devices), _same_random_numbers(work, notes), noted as types:
        expected = whole()
    with _unfused(), own_random_numbers(devices), _same_random_numbers(work, notes):
        found = planned()
    if types is not None and types.dtype is not None:
        notes.append(COARSE.format(str(types.dtype).removeprefix("torch."), rounding_of(torch.empty(0), types.dtype)))
        work = replace(work, coarsest=types.dtype)
    return expected, found, work


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Inside, torch's encoder layers take no fused path, which rounds otherwise and which layers with hooks leave."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


@contextlib.contextmanager
def _same_random_numbers(work: Work, notes: list[str]) -> Iterator[None]:
    """Inside, every row draws the same random numbers where the batch is divided, and a note says so if any are."""
    if not work.divided:
        yield
        return
    with SameRandomNumbers() as random_numbers:
        yield
    if random_numbers.count and DRAWN not in notes:
        notes.append(DRAWN)


@contextlib.contextmanager
def failures_of(model: nn.Module) -> Iterator[None]:
    """Inside, whatever the original itself raises becomes a `VerifyError`."""
    try:
        yield
    except AutoshardError:
        raise
    except Exception as error:  # anything the user's forward may raise
        raise VerifyError(
            f"the original {type(model).__name__} itself fails with these inputs: {type(error).__name__}: {error}. "
            "Pass inputs that its forward takes."
        ) from error


def copies_of(model: nn.Module, *, removed: bool = False) -> Build:
    """Return what copies a model as it is now, time and again; `removed`: without what is applied to it.

    Raises `VerifyError` where it can't be copied.
    """
    left: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def copied() -> nn.Module:
        if left:  # modules with reference cycles (quantised ones have them) hold their memory until then
            gc.collect()
        try:
            made = copy.deepcopy(model)
        except Exception as error:  # whatever the model's attributes raise
            raise VerifyError(
                f"copies of the model are run, and this {type(model).__name__} can't be copied: {first_line(error)}."
            ) from error
        left.update(made.modules())
        return remove(made) if removed and is_applied(made) else made

    return copied
