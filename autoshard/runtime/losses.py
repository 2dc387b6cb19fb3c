"""The loss of a batch from the losses of its parts: which factor each has, and whether that is true of a function.

loss = sum over parts of factor x loss of the part         "mean": rows / all rows      "sum": 1
                                                           a callable: its value for the part's target / their sum
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any, Literal

import torch

from autoshard.errors import PlanError, SpecError
from autoshard.nested import map_tensors, replace_at, tensors_in
from autoshard.plan.batching import BatchAxis
from autoshard.runtime.chunks import BatchPart, piece_of
from autoshard.runtime.merging import merge, part_weights

Loss = Callable[..., torch.Tensor]
Reduction = Literal["mean", "sum"] | Callable[[Any], Any]
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-4}


def check_arguments(loss: Loss | None, reduction: Reduction) -> None:
    """Raise `SpecError` for a loss or a reduction that makes no sense."""
    if loss is not None and not callable(loss):
        raise SpecError(f"loss is a function of the output and the target, got {type(loss).__name__}.")
    if not callable(reduction) and reduction not in ("mean", "sum"):
        raise SpecError(
            f'reduction is "mean", "sum" or a function that weighs a part by its target, got {reduction!r}.'
        )


def factors_of(reduction: Reduction, rows: Sequence[int], targets: Sequence[Any]) -> list[float]:
    """What the loss of each part is multiplied with, for a loss function that reduces so."""
    if reduction == "sum":
        return [1.0] * len(rows)
    if callable(reduction):
        sizes = [float(reduction(target)) for target in targets]
    else:
        sizes = [float(count) for count in rows]
    if not any(sizes):
        sizes = [1.0] * len(rows)
    return [size / sum(sizes) for size in sizes]


def loss_path(scalars: Sequence[str]) -> str:
    """The path of the loss among those of the numbers in an output: what is called so, else the only one.

    Raises `PlanError`.
    """
    named = [path for path in scalars if path.rpartition(".")[2] == "loss"]
    if len(named or scalars) != 1:
        what = "several" if scalars else "no"
        raise PlanError(
            f"the output of the model has {what} scalars to differentiate, so none is known to be its loss. Give the "
            "model labels, or pass a function: autoshard.schedule(model, loss)."
        )
    return (named or scalars)[0]


def own_loss(output: Any) -> torch.Tensor:
    """The loss in an output. Raises `PlanError` where it is not known."""
    found = {path: tensor for path, tensor in tensors_in(output) if tensor.requires_grad and tensor.dim() == 0}
    return found[loss_path(list(found))]


def own_factors(batch: BatchAxis, path: str, parts: Sequence[BatchPart]) -> list[float]:
    """What the model's own loss of each part is multiplied with. Raises `PlanError` where the plan doesn't know it."""
    how = next((one for one in batch.outputs if one.path == path), None)
    if how is None or how.how == "cat":
        raise PlanError(
            f"the plan does not know how the losses of parts of the batch make up the output {path!r}. Plan with "
            "inputs= that have labels, so that the model computes its loss."
        )
    return part_weights(replace(how, how="mean") if how.how == "same" else how, parts)


def sample(batch: BatchAxis, output: Any, part: BatchPart, step: int) -> Any:
    """The output of a part for one of its rows, another one in every step."""
    return _row(batch, output, part, step % part.rows)


def row_losses(
    batch: BatchAxis, loss: Loss, output: Any, target: Any, part: BatchPart, whole: torch.Tensor
) -> list[torch.Tensor]:
    """The loss of every row of a part by itself; `whole` is that of the part. Raises `SpecError` as `call_loss`."""
    if part.rows == 1:
        return [whole.detach()]
    with torch.no_grad():
        wanted = _target_rows(target, part)
        return [call_loss(loss, _row(batch, output, part, row), one) for row, one in enumerate(wanted)]


def check_reduction(
    batch: BatchAxis, loss: Loss, reduction: Reduction, samples: Sequence[Any], targets: Sequence[Any],
    parts: Sequence[BatchPart], step: int, whole: Sequence[torch.Tensor], rows: Sequence[Sequence[torch.Tensor]],
) -> None:  # fmt: skip
    """Raise `PlanError` unless a loss function reduces as was said: all rows of each part, and one row of each part.

    A mean over labels that are not ignored is no mean over rows, and a contrastive loss is no sum over parts; their
    gradients would be wrong without a sign of it. `samples`: see `sample`; `whole`: the loss of each part; `rows`: that
    of each of its rows. Raises `SpecError` where the function returns no number for the samples, as it is called
    without gradients here.
    """
    by_row = [_target_rows(target, part) for target, part in zip(targets, parts, strict=True)]
    for value, terms, wanted in zip(whole, rows, by_row, strict=True):
        _check_sum(reduction, value, terms, wanted)
    chosen = [step % part.rows for part in parts]
    wanted = [one[row] for one, row in zip(by_row, chosen, strict=True)]
    singles = [replace(part, rows=1, labels=dict.fromkeys(part.labels, 1)) for part in parts]
    with torch.no_grad():
        together = call_loss(loss, merge(batch, samples, singles), _joined(wanted))
    _check_sum(reduction, together, [one[row] for one, row in zip(rows, chosen, strict=True)], wanted)


def _check_sum(
    reduction: Reduction, together: torch.Tensor, values: Sequence[torch.Tensor], targets: list[Any]
) -> None:
    """Raise `PlanError` unless the loss of rows together is made of their losses one by one as was said."""
    with torch.no_grad():
        factors = factors_of(reduction, [1] * len(values), targets)
    terms = [float(value) * factor for value, factor in zip(values, factors, strict=True) if factor]
    found, expected = float(together), sum(terms)
    close = _CLOSE.get(together.dtype, 2e-2) * max(map(abs, terms), default=0.0)
    if isfinite(found) and not abs(found - expected) <= close:  # not where rows have no label at all
        said = f"what reduction={reduction!r} makes of" if not callable(reduction) else "the weighted mean of"
        raise PlanError(
            f"the loss of {len(values)} rows together is {found:.6g}, and {said} their losses one by one is "
            f"{expected:.6g}: this loss function does not reduce so, and gradients would be wrong. Pass "
            "reduction=lambda target: … that gives the weight of a part (how many labels of it count), "
            "or let the model compute its loss."
        )


def call_loss(loss: Loss, output: Any, target: Any) -> torch.Tensor:
    """The loss of one part, on the device of its output. Raises `SpecError` unless it is one number."""
    value = loss(output) if target is None else loss(output, target)
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        where = "" if torch.is_grad_enabled() else ", called without gradients,"
        raise SpecError(f"the loss function{where} returned {what}; it should return one number, a tensor.")
    return value


def check_differentiable(value: torch.Tensor) -> None:
    """Raise `SpecError` for a loss of which no gradients come."""
    if not value.requires_grad:
        raise SpecError(
            "the loss has no gradients: the loss function returned a number that does not depend on the output of the "
            "model (.detach(), .item(), torch.no_grad()), or no parameter of the model requires grad."
        )


def _row(batch: BatchAxis, output: Any, part: BatchPart, row: int) -> Any:
    """The output of a part for one of its rows; what is not divided by rows is left as it is."""
    known = {one.path: one for one in batch.outputs}
    made = output
    for path, tensor in tensors_in(output):
        how = known.get(path)
        if how is not None and how.how == "cat":
            made = replace_at(made, path, piece_of(tensor, how, (row, 1, part.rows - row - 1), 1))
    return made


def _target_rows(target: Any, part: BatchPart) -> list[Any]:
    def pick(tensor: torch.Tensor, row: int) -> torch.Tensor:
        several = tensor.shape[0] // part.rows
        return tensor.narrow(0, row * several, several)

    return [map_tensors(target, partial(pick, row=row)) for row in range(part.rows)]


def _joined(targets: list[Any]) -> Any:
    made = targets[0]
    columns = zip(*([tensor for _, tensor in tensors_in(target)] for target in targets), strict=True)
    for (path, _), column in zip(tensors_in(targets[0]), columns, strict=True):
        made = replace_at(made, path, torch.cat(column))
    return made
