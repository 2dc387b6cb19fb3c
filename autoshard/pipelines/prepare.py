"""From a part of the batch to the programs of a rank's stages: record the forward, divide it, write the code.

Done once for each shape of the parts, on every rank alike: a forward that is only recorded needs no weights, so every
rank finds the same stages without asking the others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.call_log import Ref, ValueGuard
from autoshard.capture.capture import record_forward
from autoshard.capture.fake import EVEN_ORDER, FINITE
from autoshard.capture.stages import divide
from autoshard.common.module_paths import is_below
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import leaves_in, tensors_in
from autoshard.pipelines.programs import Program, fill_refs, find_traffic, same_value, write_program, write_value_guards
from autoshard.pipelines.steps import RecordedCall, find_steps, is_inside
from autoshard.runtime.chunks import BatchPart
from autoshard.runtime.losses import loss_path
from autoshard.runtime.pipeline_record import PipelineRecord, written_down
from autoshard.torch_private import backward_hooks

Spec = tuple[torch.Size, torch.dtype]
MOST_WAYS = 16
"""Different ways through a forward that are recorded for parts of one shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What runs on one rank for parts of one shape.

    Attributes:
        programs: stage -> its program, for the stages of this rank.
        stage_parameters: name of a parameter or buffer -> the stages that read it, or its own.
        traffic: per boundary between stages, shape and dtype of what goes over it.
        output: puts the tensors of the last stage into what the model returns; `scalars`: paths of numbers in it.
        value_guards: what was read out of tensors while the forward was recorded; `read` makes these tensors.
    """

    programs: Mapping[int, Program]
    stage_parameters: Mapping[str, tuple[int, ...]]
    traffic: tuple[tuple[Spec, ...], ...]
    output: Callable[[tuple[torch.Tensor, ...]], Any]
    scalars: tuple[str, ...]
    value_guards: tuple[ValueGuard, ...]
    read: Program

    @property
    def loss(self) -> str:
        """The path of the loss in the output. Raises `PlanError` where it is not known."""
        return loss_path(self.scalars)


def shape_key(part: BatchPart, model: nn.Module, record: PipelineRecord) -> tuple:
    """What the recorded forward depends on besides the values of tensors; equal for parts that run the same way."""
    seen: dict[int, int] = {}  # one tensor given twice is one value
    leaves = [
        (path, leaf.shape, leaf.dtype, seen.setdefault(id(leaf), len(seen)))
        if isinstance(leaf, torch.Tensor)
        else (path, type(leaf), leaf)
        for path, leaf in leaves_in((part.args, part.kwargs))
    ]
    autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")
    modules, dtypes = list(model.modules()), tuple(parameter.dtype for parameter in model.parameters())
    around = tuple(written_down(model.get_submodule(path)) for path in record.around)
    return *leaves, autocast, tuple(module.training for module in modules), dtypes, around


def input_tensors(part: BatchPart, device: torch.device) -> tuple[torch.Tensor, ...]:
    """The input tensors of a part, as programs want them."""
    return tuple(tensor.to(device) for _, tensor in tensors_in((part.args, part.kwargs)))


def prepare(model: nn.Module, record: PipelineRecord, part: BatchPart, *, grad: bool) -> Prepared:
    """Record the forward on a part and write the programs of this rank.

    Raises `CaptureError` if it does not run, `PlanError` if it can't be run in these stages.
    """
    for path, tensor in tensors_in((part.args, part.kwargs)):
        if tensor.requires_grad and grad:
            raise PlanError(
                f"the input {path} requires a gradient, and gradients of inputs don't come back out of a pipeline over "
                "processes. Give it detached, or make it a parameter of the model."
            )
    whole: nn.Module = record.extras.get("skeleton", model)  # a model that is cut has other shapes
    for own, other in zip(whole.modules(), model.modules(), strict=True):
        own.training = other.training
    record.silent = True
    try:
        graph, call_log = record_forward(whole, part.args, part.kwargs, grad=grad)
    finally:
        record.silent = False
    if call_log.drew:
        raise PlanError(
            f"the forward of {type(model).__name__} draws random numbers of Python's or NumPy's generator, so what it "
            "runs may differ each time: it can't be divided into stages. Draw with torch, inside of a module."
        )
    staged = divide(graph, [stage.paths for stage in record.plan.stages])
    found = find_steps(graph, call_log, staged)
    _check_assumptions(found)
    _check_cuts(found, record)
    apart = _taken_apart(found)
    _check_apart(apart, model, record, grad)
    record.around = tuple(dict.fromkeys((*record.around, *apart)))
    traffic = find_traffic(found, len(record.plan.stages))
    read, value_guards = write_value_guards(found, model, record.device)
    template = call_log.calls[0].output
    specs = [(torch.Size(value.shape), value.dtype) for value in graph.values]
    refs = [(path, graph.values[leaf.value]) for path, leaf in leaves_in(template) if isinstance(leaf, Ref)]
    return Prepared(
        programs={stage: write_program(found, stage, traffic, model, record.device) for stage in record.stages},
        stage_parameters=staged.stage_parameters,
        traffic=tuple(tuple(specs[value] for value in boundary) for boundary in traffic),
        output=lambda tensors: fill_refs(template, dict(zip(graph.outputs, tensors, strict=True))),
        scalars=tuple(path for path, value in refs if value.shape == () and value.dtype.is_floating_point),
        value_guards=tuple(value_guards),
        read=read,
    )


def goes_this_way(prepared: Prepared, part: BatchPart, device: torch.device) -> bool:
    """Whether Python would read the same out of the tensors of a part as when this was recorded.

    A mask without padding is left out, one with padding is not: such parts go two ways.
    """
    if not prepared.value_guards:
        return True
    with torch.no_grad():
        made = prepared.read.run((), input_tensors(part, device))
    tensors = dict(zip(prepared.read.sent, made, strict=True))
    return all(same_value(one.result, one.function(*fill_refs(one.args, tensors))) for one in prepared.value_guards)


def check_alike(known: Sequence[Prepared], new: Prepared) -> None:
    """Raise `ApplyError` if parts that go a new way can't be in one batch with those that go the others."""
    if not known:
        return
    if len(known) >= MOST_WAYS:
        raise ApplyError(
            f"the forward goes more than {MOST_WAYS} different ways, depending on the values of its inputs, so it "
            "can't be run in stages. Use a plan without a pipeline."
        )
    if (known[0].traffic, known[0].stage_parameters) != (new.traffic, new.stage_parameters):
        raise ApplyError(
            "the forward goes different ways for different parts of a batch, between which stages exchange different "
            "tensors. Use a plan without a pipeline."
        )


def _check_assumptions(found: RecordedCall) -> None:
    """Refuse what was recorded with invented values outside of the calls that are taken whole.

    Of an order, or a check for infinities, only what is read matters, and that is checked where it is read.
    """
    for guard in found.call_log.value_guards:
        if guard.assumed and not guard.assumed.startswith((EVEN_ORDER, FINITE)) and not is_inside(guard, found):
            raise PlanError(
                f"the forward decides by values that it computes: {guard.assumed}. What decides so has to be inside "
                "of a module that runs on one stage; use a plan without a pipeline."
            )


def _taken_apart(found: RecordedCall) -> list[str]:
    """The modules whose ops and calls stages run one by one, and never themselves."""
    whole = {step.call.row for step in found.steps if step.call is not None and step.call.function is None}
    apart: dict[str, None] = {}
    for call in found.graph.calls:
        if call.index in whole or call.parent in whole:
            whole.add(call.index)
        else:
            apart[call.path] = None
    return list(apart)


def _check_apart(apart: Sequence[str], model: nn.Module, record: PipelineRecord, grad: bool) -> None:
    """Raise `PlanError` for what modules that are not called by stages would do, and a recording does not have."""
    applied = record.extras.get("applied", {})
    for path in apart:
        module, name = model.get_submodule(path), path or f"the {type(model).__name__}"
        what = ""
        if grad and backward_hooks(module, except_of="autoshard"):
            what = f"{name} has a backward hook"
        elif path in applied and applied[path] != written_down(module):
            what = f"a hook, a number or the forward of {name} was changed after autoshard.apply"
        if what:
            raise PlanError(
                f"{what}, and stages run what it calls, not itself: it is in several stages, or shares more with its "
                "caller than its arguments and results (a cache: use_cache=False). Change it before autoshard.apply; "
                "backward hooks belong to modules inside of it, or to a plan without a pipeline."
            )


def _check_cuts(found: RecordedCall, record: PipelineRecord) -> None:
    """Refuse blocks that are not called whole and have to be.

    The shapes inside of cut ones are those of the whole model here; the parameters of layers are gathered, and their
    activations computed again, by their calls.
    """
    called = [step.call.path for step in found.steps if step.call is not None and step.call.function is None]
    plan = record.plan
    wanted = {block: ("is cut over ranks", "cuts") for cut in plan.cuts for block in cut.blocks}
    if record.used is not None or plan.recompute != "none":
        wanted |= dict.fromkeys(plan.layers, ("is gathered, or computed again, as one", "fsdp and recomputation"))
    for block, (why, without) in wanted.items():
        if not any(is_below(block, path) for path in called):
            raise PlanError(
                f"{block} {why}, and its stage can't call it as one: it shares more with its caller than "
                f"its arguments and results (a cache: use_cache=False), or is a list. Plan without {without}."
            )
