"""The stages of a rank under a schedule of torch, and the sums of gradients that several ranks share."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autoshard.errors import SpecError
from autoshard.pipelines.prepare import Prepared, Spec
from autoshard.pipelines.stage import Finisher, StageModule
from autoshard.runtime.collectives import lost
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.sharded_stages import layers_of, let_go

SCHEDULES = {
    "none": "ScheduleGPipe",
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}
"""Names of schedules in plans -> the classes of torch.distributed.pipelining that run them."""


class PipelineEngine:
    """Runs this rank's stages for parts of one shape. `has_last`: the last stage is among them."""

    def __init__(self, model: nn.Module, record: PipelineRecord, prepared: Prepared, *, training: bool) -> None:
        self.model, self.record, self.training = model, record, training
        count = len(record.plan.stages)
        self.has_last = count - 1 in record.stages
        tensors = named_tensors(model)
        self.modules: list[StageModule] = []
        stages = []
        for number in record.stages:
            own = {
                id(tensors[name]): tensors[name]
                for name, holders in prepared.stage_parameters.items()
                if number in holders and isinstance(tensors[name], nn.Parameter)
            }
            module = StageModule(
                list(own.values()),  # type: ignore[arg-type]
                recompute=record.plan.stages[number].recompute and not record.plan.layers,
                split=training and record.plan.schedule == "zero-bubble",
                engines=layers_of(model, record, number) if record.used is not None else (),
                earlier=[tensors[name] for name, holders in prepared.stage_parameters.items() if min(holders) < number],
            )
            self.modules.append(module)
            stages.append(_stage_of(module, number, count, record, prepared, training))
        self.schedule = _schedule_of(stages, record, training)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this rank's stages, each once."""
        return list(dict.fromkeys(parameter for module in self.modules for parameter in module.parameters()))

    def run(self, prepared_parts: Sequence[Prepared], inputs: list[tuple[torch.Tensor, ...]], finish: Finisher) -> None:
        """Run all parts, each the way it goes. Raises `RankError` if a rank is gone."""
        for number, module in zip(self.record.stages, self.modules, strict=True):
            module.programs = [prepared.programs[number] for prepared in prepared_parts]
            module.inputs = inputs
        if self.has_last:
            self.modules[-1].finish = finish
        numbers = torch.arange(len(inputs))
        self.record.silent, done = True, False
        try:
            if self.training:
                self.schedule.step(part=numbers, target=numbers)
            else:
                self.schedule.eval(part=numbers, target=numbers)
            if self.record.used is not None:
                self.record.used.order(self.model, (), None)
                if self.training:
                    self.record.used.scalars.average()
            done = True
        except RuntimeError as error:
            raise _explained(self.record, error) from error
        finally:
            self.record.silent = False
            if self.record.used is not None:
                let_go(self.model, failed=not done)
            for module in self.modules:
                module.programs, module.inputs, module.finish = [], [], None


def _stage_of(
    module: StageModule, number: int, count: int, record: PipelineRecord, prepared: Prepared, training: bool
) -> Any:
    from autoshard.pipelines.torch_stage import TorchStage  # torch's pipelining takes long to import

    received = () if number == 0 else _blank(prepared.traffic[number - 1], training)
    sent = _blank([*prepared.traffic, ((torch.Size([1]), torch.float32),)][number], training)
    return TorchStage(
        module, number, count, record.device, input_args=received, output_args=sent, group=record.across.group
    )


def _blank(specs: tuple[Spec, ...], training: bool) -> tuple[torch.Tensor, ...]:
    """Tensors without memory for what goes over a boundary; floats may need gradients."""
    return tuple(
        torch.empty(shape, dtype=dtype, device="meta").requires_grad_(
            training and (dtype.is_floating_point or dtype.is_complex)
        )
        for shape, dtype in specs
    )


def _schedule_of(stages: list[Any], record: PipelineRecord, training: bool) -> Any:
    from torch.distributed import pipelining

    plan = record.plan
    name = plan.schedule
    if name not in SCHEDULES:
        raise SpecError(f"unknown schedule {name!r} in the plan: use one of {', '.join(SCHEDULES)}.")
    if len(stages) > 1 and name in ("none", "gpipe", "1f1b"):
        name = "interleaved"
    if not training and len(stages) == 1:
        name = "gpipe"
    kind = getattr(pipelining, SCHEDULES[name])
    single = SCHEDULES[name] in ("ScheduleGPipe", "Schedule1F1B")
    try:
        return kind(
            stages[0] if single else stages,
            plan.num_microbatches,
            loss_fn=(lambda loss, part: loss) if training or not single else None,  # the last stage has computed it
            scale_grads=False,
        )
    except ValueError as error:
        raise SpecError(f"the schedule {plan.schedule!r} can't be run: {' '.join(str(error).split())}") from None


def _explained(record: PipelineRecord, error: RuntimeError) -> Exception:
    """What went wrong: an error of the model's own, or a rank that is gone."""
    cause: BaseException | None = error
    while cause is not None:
        if cause.__class__ is not RuntimeError and isinstance(cause, Exception):
            return cause
        cause = cause.__cause__
    return lost(record.across, error)
