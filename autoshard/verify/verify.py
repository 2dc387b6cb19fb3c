"""verify: run the original, run the applied model, compare, and say where they part.

fresh model ──────────────────▶ forward, backward, step, decode ──▶ results ─┐
                                                                             ├─ compare ─▶ equal, or where not
fresh model ──apply(plan)─────▶ the same on the plan's devices ───▶ results ─┘
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.capture.capture import capture
from autoshard.capture.inputs import Call, as_call, derive_inputs
from autoshard.engine.pricer import price
from autoshard.errors import ApplyError, AutoshardError, VerifyError
from autoshard.placement import resolve_homes
from autoshard.plan import Plan, refuse_priced_alone
from autoshard.profile.measure import profile_graph
from autoshard.progress import tell
from autoshard.runtime import apply_device_map, apply_plan, is_applied, remove
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.data_parallel import replica_record
from autoshard.runtime.pipeline_record import pipeline_record
from autoshard.simulate.devices import SimulatedDevices
from autoshard.stream_cost import with_stores
from autoshard.verify.cuts import REORDERED as REORDERED_SUMS
from autoshard.verify.cuts import CoarsestType, runs_in_processes
from autoshard.verify.divided import IN_PARTS, is_divided, runs_in_parts, same_draws
from autoshard.verify.locate import locate
from autoshard.verify.processes import runs_as_mesh, verify_processes
from autoshard.verify.report import DevicePeak, Difference, Verification
from autoshard.verify.runs import Errors, Result, Work, coarsened, compare, run
from autoshard.verify.stage import Stage, cluster_here, devices_of, devices_used, fresh_models, is_here, same_start
from autoshard.workload import Workload

Build = Callable[[], nn.Module]


def verify(
    model: nn.Module,
    plan: Plan | Mapping[str, Any] | None = None,
    inputs: Any = None,
    *,
    training: bool | None = None,
    new_tokens: int | None = None,
    tolerance: float = 0.0,
) -> Verification:
    """Run the original and the applied model on the same inputs and random numbers, and compare.

    Compared are outputs, written arguments and buffers; in training also the loss, every gradient, and the parameters
    after two optimizer steps; with `new_tokens` also the tokens of a cached greedy `generate()`. On a difference the
    first module, in calling order, whose output differs is named. The devices of the plan are used if they are here,
    otherwise they are simulated, with the plan's sizes. The model is left as it was.

    `plan`: a `Plan` or a `device_map`; None for a model that is applied: it is compared with what `remove` gives.
    `inputs`: as for `plan()`. `training` and `new_tokens`: None takes the plan's workload. `tolerance`: the largest
    absolute difference that passes; 0 asks for outputs that are equal bit for bit. Where sums are made in another order
    (gradients, a plan with cuts, one that divides the batch) 1e-5 of the largest value of each tensor (in float32)
    passes besides. Under torchrun all processes call it, and each holds what it has against the model.

    Raises `VerifyError` if there is nothing to compare or the original itself fails, `PlanError` and `ApplyError` as
    `apply` does.
    """
    if plan is None and not is_applied(model):
        raise VerifyError(
            "verify needs a plan, or a model to which one is applied. Pass the plan: autoshard.verify(model, plan)."
        )
    known = Plan.from_device_map(plan) if isinstance(plan, Mapping) else plan
    if known is not None:
        refuse_priced_alone(known, "verify", 'Plan with launch="one-process" to run it on simulated devices.')
    workload = _workload(model, known, training, new_tokens)
    calls = derive_inputs(model, workload) if inputs is None else [as_call(inputs, model)]
    notes: list[str] = []
    if known is None:
        original, applied = _copies_of_applied(model)
        work = _work(original, workload, calls)
        cut, divided = cut_record(model) is not None, runs_in_parts(model)
        work = _reordered_work(work, original, applied, None, cut, divided, notes)
        return _compare(original, applied, work, tolerance, notes, None, {})
    if runs_as_mesh(known):
        with fresh_models(model, notes, workload.training) as fresh:
            original = _unapplied(fresh)
            return verify_processes(original, known, _work(original, workload, calls), tolerance, notes)
    with devices_of(known) as stage, fresh_models(model, notes, workload.training) as fresh:
        original = _unapplied(fresh)
        applied = _applied_by(original, stage.plan, as_device_map=isinstance(plan, Mapping))
        work = _work(original, workload, calls)
        cut, divided = bool(stage.plan.cuts), is_divided(stage.plan)
        home = _home(stage, model) if cut else None
        work = _reordered_work(work, original, applied, home, cut, divided, notes)
        predicted = _predicted(original(), workload, stage, work, notes) if stage.simulated is not None else {}
        return _compare(original, applied, work, tolerance, notes, stage, predicted)


def _workload(model: nn.Module, plan: Plan | None, training: bool | None, new_tokens: int | None) -> Workload:
    """Return the workload of the plan, with what the arguments say otherwise."""
    workload = plan.workload if plan is not None else Workload(assumed=True)
    if training is not None:
        workload = replace(workload, mode="training" if training else "inference")
    generates = callable(getattr(model, "generate", None))
    if new_tokens and not generates:
        raise VerifyError(
            f"{type(model).__name__} has no generate(), so there is no decode to compare; drop new_tokens."
        )
    if new_tokens is None and not generates:
        new_tokens = 0
    return workload if new_tokens is None else replace(workload, new_tokens=new_tokens)


def _work(original: Build, workload: Workload, calls: list[Call]) -> Work:
    """Return what to run: the call given, or the first of several derived ones that the model takes."""
    refused: Exception | None = None
    for args, kwargs in calls:
        work = Work(
            args=args,
            kwargs=kwargs,
            training=workload.training,
            optimizer=workload.optimizer,
            new_tokens=workload.new_tokens,
        )
        if len(calls) == 1:
            return work
        try:
            run(original(), replace(work, training=False, new_tokens=0))
        except Exception as error:  # whatever a forward raises that wants other inputs
            refused = refused or error
        else:
            return work
    raise VerifyError(f"no inputs that the config suggests fit the model; pass inputs=. {refused}") from refused


def _reordered_work(
    work: Work, original: Build, applied: Build, home: torch.device | None, cut: bool, divided: bool, notes: list[str]
) -> Work:
    """Return the work where the applied model adds in another order than the original, and note why."""
    if cut:
        notes.append(REORDERED_SUMS)
        return _cut_work(work, original, applied, home)
    if divided:
        notes.append(IN_PARTS)
        return replace(work, divided=True)
    return work


def _cut_work(work: Work, original: Build, applied: Build, home: torch.device | None) -> Work:
    """Return the work on a model that is cut, with the outputs that stay cut where a loss must leave them out."""
    work = replace(work, cut=True)
    if not work.training:
        return work
    forward, staying = replace(work, training=False, new_tokens=0), set()
    with contextlib.suppress(Exception):  # it will be seen, and told, when the models are compared
        for whole, part in zip(run(original(), forward), run(applied(), forward, home), strict=True):
            if part.parts or part.value.shape != whole.value.shape:
                staying.add(part.output.removeprefix("output").strip())
    return replace(work, staying_cut=frozenset(staying))


def _unapplied(fresh: Build) -> Build:
    """Models that `fresh` makes, without what is applied to them."""

    def clean() -> nn.Module:
        made = fresh()
        return remove(made) if is_applied(made) else made

    return clean


def _applied_by(original: Build, plan: Plan, as_device_map: bool) -> Build:
    """Models that `original` makes, with a plan applied; a device map is taken at its word, as `apply` does."""
    if as_device_map:
        return lambda: apply_device_map(original(), plan.device_map)
    return lambda: apply_plan(original(), plan)


def _copies_of_applied(model: nn.Module) -> tuple[Build, Build]:
    """Return how to copy an applied model: with the plan removed, and as it is."""
    try:
        if pipeline_record(model) is not None or replica_record(model) is not None:
            raise ApplyError("this process has a part of it only")
        remove(copy.deepcopy(model))
    except Exception as error:  # whatever copying the model's attributes raises
        raise VerifyError(
            f"{type(model).__name__} is applied and can't be copied: {error}. "
            "Call autoshard.remove(model) and verify it with the plan."
        ) from error
    return lambda: remove(copy.deepcopy(model)), lambda: copy.deepcopy(model)


def _compare(
    original: Build,
    applied: Build,
    work: Work,
    tolerance: float,
    notes: list[str],
    stage: Stage | None,
    predicted: Mapping[str, int],
) -> Verification:
    simulated = stage.simulated if stage is not None else None
    home = _home(stage, original()) if stage is not None else None
    accelerators = _accelerators(stage)
    with same_start(accelerators) as restart, _room_to_compare(simulated, work):
        tell("runs", 0, 2)
        restart()
        with same_draws(work.divided, notes), CoarsestType() if work.reordered else contextlib.nullcontext() as types:
            expected = _run_original(original, work, home if accelerators else None, notes)
        work = coarsened(work, types, notes)
        tell("runs", 1, 2)
        restart()
        before = {name: simulated.memory(name)[0] for name in simulated} if simulated is not None else {}
        measure = functools.partial(_measure, simulated) if simulated is not None else None
        with same_draws(work.divided, notes):
            found, failure, full = _run_applied(applied, work, home, measure)
        if simulated is not None:
            simulated.limit(to_size=not work.training)
        after = {name: simulated.memory(name)[1] for name in simulated} if simulated is not None else {}
        errors = compare(expected[: len(found)] if failure is not None else expected, found, tolerance, work)
        if failure is not None:
            errors = Errors(math.inf, math.inf, errors.first or failure)
        if errors.first is not None and not full and not work.divided:
            starts = (_after(restart, original), _after(restart, applied))
            first = locate(*starts, work, (home if accelerators else None, home), tolerance, errors.first)
            errors = Errors(errors.largest, errors.relative, first)
    peaks = tuple(
        DevicePeak(
            name=stage.original_names[name],
            simulated_as=name,
            measured_bytes=after[name] - before[name],
            predicted_bytes=predicted.get(name),
        )
        for name in after
        if stage is not None and name in stage.original_names
    )
    return Verification(
        ok=errors.first is None,
        max_error=errors.largest,
        max_relative_error=errors.relative,
        first_difference=errors.first,
        compared=work.compared,
        simulated=simulated is not None,
        peaks=peaks,
        notes=tuple(notes),
    )


@contextlib.contextmanager
def _room_to_compare(simulated: SimulatedDevices | None, work: Work) -> Iterator[None]:
    """Let no device be full but in the pass that is measured: gradients that are compared are more than a plan has."""
    if simulated is not None:
        simulated.limit(to_size=not work.training)
    try:
        yield
    finally:
        if simulated is not None:
            simulated.limit(to_size=True)


def _measure(simulated: SimulatedDevices) -> None:
    """Begin the pass whose peak counts, and that has to fit."""
    simulated.limit(to_size=True)
    simulated.reset_peak()


def _after(restart: Callable[[], None], build: Build) -> Build:
    """Build a model and start the random numbers anew."""

    def start() -> nn.Module:
        model = build()
        restart()
        return model

    return start


def _run_original(original: Build, work: Work, home: torch.device | None, notes: list[str]) -> list[Result]:
    """Run the original; on accelerators it is moved to one of them if it fits, since other devices round otherwise."""
    model = original()
    if home is not None:
        try:
            model.to(home)
        except torch.OutOfMemoryError:
            notes.append(f"the original does not fit on {home} and ran where it was, where kernels may round otherwise")
            del model
            model, home = original(), None
    try:
        return run(model, work, home)
    except AutoshardError:
        raise
    except Exception as error:  # anything the user's forward may raise
        raise VerifyError(
            f"the original {type(model).__name__} itself fails with these inputs: {type(error).__name__}: {error}. "
            "Pass inputs that its forward takes."
        ) from error


def _run_applied(
    applied: Build, work: Work, home: torch.device | None, measure: Callable[[], None] | None
) -> tuple[list[Result], Difference | None, bool]:
    """Run the applied model; an error of its own is a finding, not a reason to stop. The flag: a device was full."""
    model = applied()
    results: list[Result] = []
    try:
        return run(model, work, home, measure, results), None, False
    except Exception as error:  # anything that a tensor on the wrong device may make the user's forward raise
        full = isinstance(error, torch.OutOfMemoryError)
        message = str(error) if full else f"{type(error).__name__}: {error}"
        during = "decode" if results and work.new_tokens else "forward"
        return results, Difference(during=during, module="", output="", max_error=math.inf, message=message), full


def _home(stage: Stage, model: nn.Module) -> torch.device:
    """Return the device of the root, where inputs belong."""
    if runs_in_processes(stage.plan):
        name = stage.plan.devices[dist.get_rank()].name
        return torch.device(name if is_here(name) else "cpu")  # what is missing is told when the plan is applied
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tensors += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    homes = resolve_homes(stage.plan.placements, [path for path, _ in model.named_modules()], tensors).homes
    return torch.device(homes[""])


def _accelerators(stage: Stage | None) -> list[torch.device]:
    if stage is not None and runs_in_processes(stage.plan):
        names = {str(_home(stage, nn.Module()))}
    else:
        names = devices_used(stage.plan) if stage is not None else set()
    return [device for device in map(torch.device, sorted(names)) if device.type != "cpu"]


def _predicted(model: nn.Module, workload: Workload, stage: Stage, work: Work, notes: list[str]) -> dict[str, int]:
    """Return the estimated peak per device, by its name here."""
    try:
        profile = profile_graph(capture(model, work.kwargs or work.args, workload=workload), workload)
        plan, cluster = stage.plan, cluster_here(stage)
        devices = price(
            plan, profile, with_stores(cluster, plan.streamed.values()) if plan.streamed else cluster
        ).devices
    except AutoshardError as error:
        notes.append(f"no prediction to hold the measured peaks against: {error}")
        return {}
    return {device.name: device.peak_bytes for device in devices}
