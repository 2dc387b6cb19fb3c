"""`autoshard.schedule` over processes: every rank calls step with the same batch and runs its stages of each part.

split the batch  ──▶  record a part, once per shape  ──▶  torch's schedule runs the stages  ──▶  sum what is shared
                                                                                            ──▶  merge (last rank)
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError, PlanError, SpecError
from autoshard.nested import map_tensors
from autoshard.pipelines.engine import Engine
from autoshard.pipelines.prepare import Prepared, check_readings, input_tensors, prepare, shape_key
from autoshard.pipelines.shared import Aside, Sum, adopt_held, find_sums
from autoshard.runtime.agreement import Mark, agree
from autoshard.runtime.chunks import Part, merge, part_weights, split, split_rows
from autoshard.runtime.pipeline_record import pipeline_record

Loss = Callable[[Any, Any], torch.Tensor]


class RankSchedule:
    """Trains and evaluates a model whose stages are on several processes; all of them call the same methods."""

    def __init__(self, model: nn.Module, loss: Loss | None = None, *, reduction: Any = "mean") -> None:
        record = pipeline_record(model)
        if record is None:
            raise ApplyError("no pipeline over processes is applied to this model. Call autoshard.apply first.")
        if record.plan.batch is None:
            raise PlanError("the plan does not say how the batch is divided. Make it with strategy='pipeline'.")
        if reduction not in ("mean", "sum") and not callable(reduction):
            raise SpecError(f"unknown reduction {reduction!r}: use 'mean', 'sum' or a function of the target.")
        self._model, self._record, self._loss, self._reduction = weakref.ref(model), record, loss, reduction
        self._engines: dict[tuple, tuple[Prepared, Engine]] = {}
        self._sums: list[Sum] | None = None

    def step(self, *args: Any, target: Any = None, losses: list | None = None, **kwargs: Any) -> Any:
        """Run forward and backward on a batch; gradients add up in `.grad` as those of the whole batch.

        All ranks give the same batch. Returns the output of the model on the rank of the last stage, None on others;
        there `losses` gets one value per part. Raises `PlanError` for a batch that can't be divided, `RankError` if a
        rank is gone.
        """
        return self._run(True, args, kwargs, target, losses)

    def eval(self, *args: Any, target: Any = None, losses: list | None = None, **kwargs: Any) -> Any:
        """Run the forward alone, without gradients; otherwise as `step`."""
        with torch.no_grad():
            return self._run(False, args, kwargs, target, losses)

    def _run(self, train: bool, args: tuple, kwargs: dict[str, Any], target: Any, losses: list | None) -> Any:
        model, record = self._model(), self._record
        if model is None or pipeline_record(model) is not record:
            raise ApplyError("the plan of this schedule is no longer applied. Make a schedule after autoshard.apply.")
        batch = record.plan.batch
        assert batch is not None
        parts = split(batch, model, args, kwargs, record.plan.num_microbatches)
        if len({part.rows for part in parts}) > 1:
            rows = sum(part.rows for part in parts)
            raise PlanError(
                f"a batch of {rows} rows can't be divided into {len(parts)} equal parts, which a pipeline over "
                f"processes needs. Give a multiple of {len(parts)} rows, or drop the last incomplete batch."
            )
        prepared, engine = self._ready(model, parts, train)
        for index, part in enumerate(parts):
            check_readings(prepared, part, index, record.device)
        finish = _Finish(self._loss, prepared, parts, target, self._weights(parts, target), train, batch)
        inputs = [input_tensors(part, record.device) for part in parts]
        aside = Aside(self._sums or ()) if train else None
        try:
            engine.run(inputs, finish)
        except BaseException:
            if aside is not None:
                aside.put_back()
            raise
        if aside is not None:
            aside.add_up()
        if not engine.has_last:
            return None
        if losses is not None:
            losses.clear()
            losses.extend(finish.losses)
        return merge(batch, finish.outputs, parts)

    def _ready(self, model: nn.Module, parts: Sequence[Part], train: bool) -> tuple[Prepared, Engine]:
        """The programs and the schedule for parts of this shape; made by all ranks together the first time."""
        key = (*shape_key(parts[0], model), train)
        if key not in self._engines:
            error: Exception | None = None
            made: tuple[Prepared, Engine] | None = None
            try:
                prepared = prepare(model, self._record, parts[0], grad=train)
                made = prepared, Engine(model, self._record, prepared, train=train)
            except Exception as found:
                error = found
            agree(self._record.across, Mark(), error)
            assert made is not None
            adopt_held(model, self._record, made[0].held)
            self._sums = find_sums(model, self._record)
            self._engines[key] = made
        return self._engines[key]

    def _weights(self, parts: Sequence[Part], target: Any) -> list[float]:
        """What the loss of each part is multiplied with, so that they add up to that of the batch."""
        batch = self._record.plan.batch
        assert batch is not None
        if self._loss is None:
            how = next((one for one in batch.outputs if one.path == "loss"), None)
            how = how or next((one for one in batch.outputs if one.how in ("mean", "sum", "weighted")), None)
            return [0.0] * len(parts) if how is None else part_weights(how, parts)
        if self._reduction == "sum":
            return [1.0] * len(parts)
        if self._reduction == "mean":
            sizes = [float(part.rows) for part in parts]
        else:
            sizes = [float(self._reduction(piece)) for piece in split_rows(target, parts, "target")]
        return [size / (sum(sizes) or 1.0) for size in sizes]


class _Finish:
    """What the last stage does with the outputs of the model: the loss of a part, and keeping them for the merge."""

    def __init__(
        self, loss: Loss | None, prepared: Prepared, parts: Sequence[Part], target: Any, weights: list[float],
        train: bool, batch: Any,
    ) -> None:  # fmt: skip
        self.loss, self.prepared, self.weights, self.train = loss, prepared, weights, train
        self.targets = [None] * len(parts) if target is None else split_rows(target, parts, "target")
        self.outputs: list[Any] = [None] * len(parts)
        self.losses: list[torch.Tensor] = [torch.empty(0)] * len(parts)
        self.own = "loss" if any(one.path == "loss" for one in batch.outputs) else ""

    def __call__(self, number: int, made: tuple[torch.Tensor, ...]) -> torch.Tensor:
        output = self.prepared.output(made)
        # cloned, since it may be (a view of) a buffer that the next step receives into
        self.outputs[number] = map_tensors(output, lambda tensor: tensor.detach().clone())
        loss = self._loss_of(output, number)
        if loss is None:
            return made[0].new_zeros(1, dtype=torch.float32)
        self.losses[number] = loss.detach().clone()
        return (loss * self.weights[number]).reshape(1)

    def _loss_of(self, output: Any, number: int) -> torch.Tensor | None:
        if self.loss is not None:
            if not self.train and self.targets[number] is None:
                return None
            return self.loss(output, self.targets[number])
        found = output if isinstance(output, torch.Tensor) else _named(output, "loss")
        if isinstance(found, torch.Tensor) and found.numel() == 1:
            return found
        if self.train:
            raise SpecError(
                "this model returns no loss: give it what it computes one from (labels), or call "
                "autoshard.schedule(model, loss)."
            )
        return None


def _named(output: Any, name: str) -> Any:
    return output.get(name) if isinstance(output, dict) else getattr(output, name, None)
