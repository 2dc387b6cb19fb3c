"""`autoshard.schedule` over processes: every rank calls step with the same batch and runs its stages of each part.

split the batch  ──▶  record a part, once per shape  ──▶  torch's schedule runs the stages  ──▶  sum what is shared
                                                                                            ──▶  merge (last rank)
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.nested import tensors_in
from autoshard.pipelines.engine import PipelineEngine
from autoshard.pipelines.finish import Finish
from autoshard.pipelines.prepare import Prepared, check_alike, goes_this_way, input_tensors, prepare, shape_key
from autoshard.pipelines.shared import SavedGradients, Sum, adopt_stage_parameters, find_sums
from autoshard.plan.batching import BatchAxis
from autoshard.runtime.agreement import RankState, agree, agree_in_step, hear, summary_of
from autoshard.runtime.chunks import BatchPart, split, split_rows
from autoshard.runtime.clipping import check_scaled, note_norms, refuse_scaled_losses, scaled_by, watch_staged_norms
from autoshard.runtime.losses import Loss, Reduction, check_arguments, factors_of, own_factors
from autoshard.runtime.outsiders import sharded_inside
from autoshard.runtime.pipeline_record import PipelineRecord, pipeline_record, stages_of
from autoshard.runtime.sharded_stages import lowered


class RankSchedule:
    """Steps of a model whose stages are on several processes, all of which call the same; see `autoshard.schedule`."""

    def __init__(self, model: nn.Module, loss: Loss | None = None, reduction: Reduction = "mean") -> None:
        check_arguments(loss, reduction)
        record = pipeline_record(model)
        if record is None:
            raise ApplyError("no pipeline over processes is applied to this model. Call autoshard.apply first.")
        if record.plan.workload.generates:
            raise ApplyError("this plan is for answers: call the model, or its generate(), on all ranks, as it is.")
        self._model, self._record = weakref.ref(model), record
        self.loss, self.reduction = loss, reduction
        self._engines: dict[tuple, tuple[list[Prepared], PipelineEngine]] = {}
        self._sums: list[Sum] = []
        self._steps = 0

    def step(
        self, *args: Any, target: Any = None, losses: list | None = None, return_outputs: bool = True, **kwargs: Any
    ) -> Any:
        """Run forward and backward on a batch, which adds to `.grad` what one call and `loss.backward()` would.

        All ranks of a replica give the same batch. `target`: divided along its first dimension and given to the loss
        function with the output. Returns the outputs put together on the rank of the last stage, None on others, and
        everywhere with `return_outputs=False`, when none is kept; there `losses`, a list, gets the loss of each
        micro-batch. A step that raises leaves gradients as they were. Raises `PlanError` for a batch that can't be
        divided and for a loss that does not reduce as was said, `ApplyError` for values that would make the forward run
        otherwise, `RankError` if a rank is gone.
        """
        return self._run(args, kwargs, target, losses, return_outputs, training=True)

    def eval(
        self, *args: Any, target: Any = None, losses: list | None = None, return_outputs: bool = True, **kwargs: Any
    ) -> Any:
        """Run the forwards only, without gradients; arguments and result as of `step`."""
        with torch.no_grad():
            return self._run(args, kwargs, target, losses, return_outputs, training=False)

    def _run(
        self, args: tuple, kwargs: dict[str, Any], target: Any, losses: list | None, returned: bool, training: bool
    ) -> Any:
        model, record = self._applied(), self._record
        batch, count = record.plan.batch, record.plan.num_microbatches
        parts: list[BatchPart] = []
        targets: list[Any] = []
        problem: Exception | None = None
        try:
            _check_values(args, kwargs)
            if training:
                refuse_scaled_losses()
            args, kwargs = lowered((args, kwargs), record.plan)
            if batch is not None:
                parts = split(batch, model, args, kwargs, count)
                _check_equal(parts)
                targets = [None] * len(parts) if target is None else split_rows(target, parts, "target")
            elif training or count > 1:
                raise PlanError('the plan does not say how the batch is divided. Plan with strategy="pipeline".')
            else:
                parts, targets = [BatchPart(args=args, kwargs=kwargs, rows=1, labels={})], [target]
        except Exception as found:
            problem = found
        prepared_parts, engine = self._ready(model, parts, targets, training, problem)
        factors = self._factors(prepared_parts[0], batch, parts, targets, training)
        finish = Finish(
            loss=self.loss, batch=batch, parts=parts, targets=targets, prepared_parts=prepared_parts, factors=factors,
            training=training,
            wants_losses=losses is not None, wants_outputs=returned, number=self._steps,
        )  # fmt: skip
        inputs = [input_tensors(part, record.device) for part in parts]
        if training:
            output = self._train(engine, prepared_parts, inputs, finish)
        else:
            engine.run(prepared_parts, inputs, finish)
            output = finish.output() if engine.has_last else None
        if losses is not None and engine.has_last:
            losses.extend(finish.losses)
        return output

    def _applied(self) -> nn.Module:
        model = self._model()
        if model is None or pipeline_record(model) is not self._record:
            raise ApplyError("the plan of this schedule is no longer applied. Make a schedule after autoshard.apply.")
        return model

    def _train(self, engine: PipelineEngine, prepared_parts: list[Prepared], inputs: list, finish: Finish) -> Any:
        """Run all forwards and backwards, and sum gradients over those who share parameters; returns the output."""
        model = self._applied()
        watch_staged_norms(model, self._record)  # a copy of the model is not known yet
        if self._record.used is not None:
            self._record.used.accumulate()
        saved_gradients = SavedGradients(engine.parameters, self._sums)
        try:
            engine.run(prepared_parts, inputs, finish)
            output, error = None, None
            try:
                if engine.has_last:  # while the other ranks are in their last backwards
                    finish.check(self.reduction)
                    output = finish.output()
            except Exception as found:
                error = found
            agree_in_step(self._record.across, error, self._record.device)
            saved_gradients.add_up()
        except BaseException:
            saved_gradients.put_back()
            raise
        self._steps += 1
        note_norms(model, self._record, self._steps)
        return output

    def _ready(
        self, model: nn.Module, parts: Sequence[BatchPart], targets: list, training: bool, error: Exception | None
    ) -> tuple[list[Prepared], PipelineEngine]:
        """The way that each part goes, and the schedule for parts of this shape; `error`: why this rank can't go on.

        What is new is recorded, by all ranks together: they look at the same values.
        """
        record = self._record
        known: list[Prepared] = []
        engine: PipelineEngine | None = None
        prepared_parts: list[Prepared] = []
        fresh = 0
        try:
            if error is not None:
                raise error
            _check_nothing_new(model, record)
            key = (*shape_key(parts[0], model, record), training)
            known, engine = self._engines.get(key, ([], None))
            fresh = len(known)
            for part in parts:
                prepared = next((one for one in known if goes_this_way(one, part, record.device)), None)
                if prepared is None:
                    prepared = prepare(model, record, part, grad=training)
                    check_alike(known, prepared)
                    known.append(prepared)
                prepared_parts.append(prepared)
            engine = engine or PipelineEngine(model, record, known[0], training=training)
        except Exception as found:
            error = found
        try:
            given = summary_of([tensor for part in parts for _, tensor in tensors_in((part.args, part.kwargs))])
            aims = [tensor for _, tensor in tensors_in(targets)]
            new = len(known) > fresh or error is not None
            across = record.control or record.across
            heard = hear(across, given, summary_of(aims) if aims else None, new, scaled_by(record))
        except RankError as lost:
            raise (error or lost) from lost
        check_scaled(heard.values)
        if heard.news:
            agree(record.across, RankState(inputs=str(given[0])), error)
        if heard.problem:
            raise RankError(heard.problem)
        if heard.news:
            adopt_stage_parameters(model, record, known[0].stage_parameters)
            self._sums = find_sums(model, record)
            key = (*shape_key(parts[0], model, record), training)  # again: a forward may count its calls
        assert engine is not None
        self._engines[key] = known, engine
        return prepared_parts, engine

    def _factors(
        self, prepared: Prepared, batch: BatchAxis | None, parts: Sequence[BatchPart], targets: list, training: bool
    ) -> list[float]:
        """What the loss of each part is multiplied with, so that they add up to that of the whole batch."""
        if not training or batch is None:
            return [1.0] * len(parts)
        if self.loss is not None:
            factors = factors_of(self.reduction, [part.rows for part in parts], targets)
            total = sum(map(float, map(self.reduction, targets))) if callable(self.reduction) else 0.0
            kind = "sum" if self.reduction == "sum" else "mean"
        else:
            path = prepared.loss
            factors = own_factors(batch, path, parts)
            how = next(one for one in batch.outputs if one.path == path)
            total = float(sum(part.labels[how.weights] for part in parts)) if how.how == "weighted" else 0.0
            kind = how.how
        replicas = self._record.replicas
        averaged = 1 if self._record.used is None or replicas is None else replicas.size  # by fully_shard
        if replicas is None or kind == "sum":
            return [factor * averaged for factor in factors]
        total = total or float(sum(part.rows for part in parts))
        every = float(replicas.all_reduce(torch.tensor([total], dtype=torch.float64, device=self._record.device)))
        return [factor * averaged * total / every for factor in factors]


def _check_nothing_new(model: nn.Module, record: PipelineRecord) -> None:
    """Raise `ApplyError` for parameters that were added or replaced after apply, and for layers that were sharded."""
    if record.used is None and (found := sharded_inside(model)) is not None:
        raise ApplyError(
            f"fully_shard was called for a {type(found).__name__} of a model whose stages are on several processes. "
            "Use the model as apply returned it, and plan with a mesh of fsdp and pp."
        )
    marked = stages_of(model)
    assert marked is not None
    marked.check_replaced(model)


def _check_values(args: tuple, kwargs: dict[str, Any]) -> None:
    for path, tensor in tensors_in((args, kwargs)):
        if tensor.is_meta:
            raise ApplyError(
                f"the input {path} has no values: it is on meta, where parameters of other stages are. Don't use the "
                "device of a parameter for inputs."
            )


def _check_equal(parts: Sequence[BatchPart]) -> None:
    if len({part.rows for part in parts}) > 1:
        raise PlanError(
            f"a batch of {sum(part.rows for part in parts)} rows can't be divided into {len(parts)} equal parts, which "
            f"a pipeline over processes needs. Give a multiple of {len(parts)} rows (drop_last=True of a data loader)."
        )
