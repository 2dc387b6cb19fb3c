"""The numbers: a model on a whole batch against the same model on parts of it, outputs, gradients and buffers.

What is divided here is divided, and put together, by the code that does so when a plan runs. Random values
in double precision, where the model can be brought to it: what rows add to each other differs by the size of the values
themselves, and not in the tenth digit.
"""

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.batching import BatchAxis, BatchOutput, with_rows
from autoshard.capture.user_code import place
from autoshard.errors import PlanError
from autoshard.prove.differences import difference
from autoshard.prove.draws import steady_draws
from autoshard.prove.rows import NotRun
from autoshard.runtime.chunks import PLAIN, Part, split
from autoshard.runtime.left_behind import new_tensors
from autoshard.runtime.merging import merge, of_rows

NOISE = 1e-6
"""The same relative to the largest gradient of all, for those that are zero but for rounding."""


class Mixed(Exception):
    """The parts together do not give what the whole gives; the message says what differs, or what the parts raised."""


def left_by_parts(place: str, model: nn.Module) -> Mixed:
    """The error for a tensor that a forward leaves in an attribute; `place`: "path.attribute" and the path inside."""
    module = max((path for path, _ in model.named_modules() if place.startswith(f"{path}.")), key=len, default="")
    return Mixed(
        f"{place.removeprefix(f'{module}.')} in {module or 'the model itself'} is set by every forward, and each part "
        "of the batch would set its own. Return it from the forward, beside the output or in the loss, or make it a "
        "buffer"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A copy of a model with random values, and how its floats are stored.

    `training`: whether it is run with a backward. `most_elements`: no tensor has more, if sizes are those of the
    recorded run.
    """

    model: nn.Module
    dtype: torch.dtype
    training: bool
    most_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run gave: its nested output, buffers that it wrote with what was in them then, and how often it drew.

    `left`: the tensors that it put into attributes of modules.
    """

    output: Any
    written: Mapping[str, torch.Tensor]
    draws: int
    left: Mapping[str, torch.Tensor]


def run(trial: Trial, args: tuple, kwargs: dict[str, Any]) -> Result:
    """Run the model once, with the buffers, and with random numbers, as at first. Raises what the model raises."""
    model = trial.model
    there = list(new_tensors(model, ()).values())
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    random.seed(0)
    torch.manual_seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)
    cast = _cast(trial.dtype)
    args, kwargs = nested.map_tensors((args, kwargs), cast)
    draws = steady_draws(trial.most_elements, trial.dtype)
    with torch.set_grad_enabled(trial.training), draws as drawn:
        output = model(*args, **kwargs)
    written = {}
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in before and not _identical(buffer, before[name]):
                written[name] = buffer.detach().clone()
                buffer.copy_(before[name])
    return Result(output=output, written=written, draws=drawn.count, left=new_tensors(model, there))


def _any(how: BatchOutput) -> bool:
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A call of a model, and into parts of how many rows it is divided.

    `labels`: inputs that a loss may be weighted by, and what in them does not count. `permits`: whether an output may
    be made of those of parts in a way, by what ops do. `believed`: the user says that rows are independent: shapes must
    go together, and numbers only choose between ways that shapes allow.
    """

    trial: Trial
    batch: BatchAxis
    args: tuple
    kwargs: dict[str, Any]
    rows: tuple[int, ...]
    labels: Mapping[str, int] = field(default_factory=dict)
    permits: Callable[[BatchOutput], bool] = _any
    believed: bool = False

    def parts(self, outputs: Sequence[BatchOutput] = ()) -> list[Part]:
        """The calls of the parts, with what counts in each for outputs that are weighted by it."""
        batch = replace(self.batch, outputs=tuple(outputs))
        return split(batch, self.trial.model, self.args, self.kwargs, self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What agreed: for each output the way in which it is made of those of parts.

    `written`: buffers that are written, by the whole and by the parts alike; `draws`: whether random numbers were.
    """

    ways: dict[str, BatchOutput]
    written: tuple[str, ...]
    draws: bool


def check_parts(division: Division) -> Checked:
    """Run a call whole and in parts, and compare. Raises `NotRun` or `Mixed`."""
    trial = division.trial
    try:
        whole = run(trial, division.args, division.kwargs)
        earlier = whole
        if whole.left:  # what the second call puts there, all of them do
            whole = run(trial, division.args, division.kwargs)
    except Exception as error:
        raise NotRun(_in_short(error)) from error
    _check_again(earlier, whole)
    results = []
    for part in division.parts():
        try:
            results.append(run(trial, part.args, part.kwargs))
        except Exception as error:
            what = f"a part of {part.rows} of {sum(division.rows)} rows can't be run"
            raise Mixed(f"{what}: {_in_short(error)}") from error
    outputs = [result.output for result in results]
    _refuse_without_numbers(whole.output)
    found = find_outputs(whole.output, outputs, division)
    _refuse_left(trial.model, whole, results)
    written = _check_written(whole, results, division.believed)
    if trial.training and not division.believed:
        ways = tuple(found.values())
        merged = merge(replace(division.batch, outputs=ways), outputs, division.parts(ways))
        with steady_draws(trial.most_elements, trial.dtype):  # a backward may run modules again
            _check_gradients(trial.model, whole.output, merged)
    return Checked(ways=found, written=tuple(written), draws=whole.draws > 0)


def _check_again(first: Result, second: Result) -> None:
    """Refuse a model whose next call depends on what this one leaves in attributes: parts would follow one another."""
    for (path, wanted), (_, found) in zip(
        nested.tensors_in(first.output), nested.tensors_in(second.output), strict=False
    ):
        if difference(wanted, found):
            places = ", ".join(sorted(second.left)[:4])
            raise Mixed(f"{path or 'its output'} is another in a second call, by what the first one leaves in {places}")


def _refuse_left(model: nn.Module, whole: Result, results: Sequence[Result]) -> None:
    """Refuse a forward that leaves in attributes of modules what parts would each make of their own rows."""
    for name, tensor in whole.left.items():
        for result in results:
            own = result.left.get(name)
            same = own is not None and own.shape == tensor.shape and not difference(tensor, own)
            if tensor.requires_grad or not same:
                raise left_by_parts(name, model)


def _refuse_without_numbers(output: Any) -> None:
    """Where nothing is finite nothing can be compared. Raises `NotRun`."""
    for path, tensor in nested.tensors_in(output):
        if tensor.is_floating_point() and tensor.numel() and not tensor.isfinite().any():
            raise NotRun(f"{path or 'the output'} has no finite number in it")


def find_outputs(whole: Any, outputs: Sequence[Any], division: Division) -> dict[str, BatchOutput]:
    """How every tensor of an output is made from those of the parts. Raises `Mixed` for one that can't be."""
    tensors = dict(nested.tensors_in(whole))
    pieces = [dict(nested.tensors_in(output)) for output in outputs]
    if others := [path for piece in pieces for path in sorted(set(piece) ^ set(tensors))]:
        raise Mixed(f"the output {others[0]} is not there for every number of rows")
    _check_plain(whole, outputs)
    return {
        path: find_output(path, tensor, [piece[path] for piece in pieces], division) for path, tensor in tensors.items()
    }


def _check_plain(whole: Any, outputs: Sequence[Any]) -> None:
    """What is no tensor must be there in all parts as in the whole, and no number. Raises `Mixed`."""
    for output in outputs:
        leaves, others = dict(nested.leaves_in(whole)), dict(nested.leaves_in(output))
        if leaves.keys() != others.keys():
            raise Mixed(f"the output {min(leaves.keys() ^ others.keys())} is not there for every number of rows")
        for path, leaf in leaves.items():
            shared = leaf is others[path] and not isinstance(leaf, PLAIN)
            what = "" if shared else of_rows(leaf)
            if what or (isinstance(leaf, PLAIN) and leaf != others[path]):
                name = f"the output {path}" if path else "its output"
                raise Mixed(f"{name} is {what or f'{leaf!r}, and another value in parts'}")


def find_output(path: str, whole: torch.Tensor, pieces: list[torch.Tensor], division: Division) -> BatchOutput:
    """The first permitted way in which one tensor is made of those of the parts. Raises `Mixed` if there is none."""
    shapes = {sum(division.rows): whole.shape}
    shapes |= {rows: piece.shape for rows, piece in zip(division.rows, pieces, strict=True)}
    floating = whole.is_floating_point() or whole.is_complex()
    possible = ways(path, shapes, floating, division.batch, division.labels)
    for how in possible:
        if division.permits(how) and _is_made(whole, pieces, how, division):
            return how
    if division.believed and (likely := by_shape(possible)) is not None:
        return likely
    name = path or "its output"
    if not all(map(division.permits, possible)):
        raise Mixed(f"{name} is not made of what parts give as its ops would")
    if all(piece.shape == whole.shape for piece in pieces):
        raise Mixed(f"{name} is neither a sum nor a mean of what parts give")
    sizes = ", ".join(str(list(piece.shape)) for piece in pieces)
    raise Mixed(f"{name} {list(whole.shape)} is not made of what parts give ({sizes})")


def _is_made(whole: torch.Tensor, pieces: list[torch.Tensor], how: BatchOutput, division: Division) -> bool:
    """Whether the parts put together in a way are the whole."""
    batch = replace(division.batch, outputs=(how,))
    try:
        made = merge(batch, [{how.path: piece} for piece in pieces], division.parts((how,)))
    except PlanError:
        return False
    return not difference(whole, made[how.path])


def by_shape(possible: Sequence[BatchOutput]) -> BatchOutput | None:
    """The likeliest of the ways that shapes allow: one after the other, or the mean."""
    return next((way for how in ("cat", "mean", "weighted") for way in possible if way.how == how), None)


def ways(
    path: str, shapes: Mapping[int, Sequence[int]], floating: bool, batch: BatchAxis, labels: Mapping[str, int]
) -> list[BatchOutput]:
    """Ways to make an output that its shapes allow, by how many rows it is of, the likeliest first."""
    hints = {(one.path, one.dim, with_rows(one.axis, 1)) for one in batch.outputs}
    allowed = _allowed(path, shapes, floating, labels)
    return sorted(allowed, key=lambda way: (path, way.dim, with_rows(way.axis, 1)) not in hints)


def _allowed(
    path: str, shapes: Mapping[int, Sequence[int]], floating: bool, labels: Mapping[str, int]
) -> Iterator[BatchOutput]:
    first, *others = shapes.items()
    if all(tuple(shape) == tuple(first[1]) for _, shape in others):
        yield BatchOutput(path=path, how="same")
        yield BatchOutput(path=path, how="sum")
        if floating:
            yield BatchOutput(path=path, how="mean")
            for weights, ignored in labels.items():
                for skipped in (0, 1):
                    yield BatchOutput(path=path, how="weighted", weights=weights, ignored=ignored, skipped=skipped)
    rows, whole = first
    for dim, size in enumerate(whole):
        beside = [*whole[:dim], *whole[dim + 1 :]]
        if size % rows == 0 and all(
            len(shape) == len(whole) and shape[dim] * rows == size * own and [*shape[:dim], *shape[dim + 1 :]] == beside
            for own, shape in others
        ):
            each = size // rows
            for major in (major for major in range(1, each + 1) if each % major == 0):
                axis = f"{major}x*{rows}x{each // major}".removeprefix("1x").removesuffix("x1")
                yield BatchOutput(path=path, how="cat", dim=dim, axis=axis)


def _check_written(whole: Result, results: Sequence[Result], believed: bool) -> list[str]:
    for name, value in whole.written.items():
        for result in results:
            if name not in result.written or (not believed and difference(value, result.written[name])):
                raise Mixed(f"the buffer {name} is written, and parts write something else into it")
    return list(whole.written)


def _check_gradients(model: nn.Module, whole: Any, merged: Any) -> None:
    weights = _weights(whole)
    try:
        wanted = _gradients(model, whole, weights)
    except RuntimeError as error:  # a model that writes what its backward needs can't be trained
        raise NotRun(f"its backward fails: {_in_short(error)}") from error
    try:
        found = _gradients(model, merged, weights)
    except RuntimeError as error:  # it keeps something with a history from one forward to the next, say
        raise Mixed(f"the backward of parts fails: {_in_short(error)}") from error
    if set(wanted) != set(found):
        raise Mixed(f"{min(set(wanted) ^ set(found))} has a gradient in one way only")
    largest = max((float(value.abs().max()) for value in wanted.values() if value.numel()), default=0.0)
    for name, value in wanted.items():
        if difference(value, found[name], NOISE * largest):
            raise Mixed(f"the gradient of {name} is not the sum of those of parts")


def _roots(output: Any) -> dict[str, torch.Tensor]:
    return {path: t for path, t in nested.tensors_in(output) if t.requires_grad and not t.is_complex()}


def _weights(output: Any) -> dict[str, torch.Tensor]:
    """Random gradients of the outputs."""
    generator = torch.Generator().manual_seed(1)
    return {path: torch.randn(t.shape, generator=generator, dtype=t.dtype) for path, t in _roots(output).items()}


def _gradients(model: nn.Module, output: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gradients of the parameters from those of the outputs; sparse ones are filled up."""
    roots = {path: tensor for path, tensor in _roots(output).items() if path in weights}
    named = {id(p): (name, p) for name, p in model.named_parameters() if p.requires_grad}
    if not roots or not named:
        return {}
    torch.autograd.backward(list(roots.values()), [weights[path] for path in roots])  # reentrant checkpoints ask for it
    found = {
        name: p.grad.to_dense() if p.grad.is_sparse else p.grad for name, p in named.values() if p.grad is not None
    }
    for _, parameter in named.values():
        parameter.grad = None
    return found


def _identical(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether nothing was written. A buffer of another shape than before can't be put back, and is left alone."""
    return left.shape != right.shape or bool(((left == right) | (left.isnan() & right.isnan())).all())


def _cast(dtype: torch.dtype) -> Any:
    """Tensors of a run's own, which it may write."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.detach().to(kind, copy=True).requires_grad_(tensor.requires_grad)

    return own


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200].rstrip('.')} (at {place(error)})"
