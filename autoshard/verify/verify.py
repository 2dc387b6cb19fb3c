"""verify: run the original, run the applied model, compare, and say where they part.

fresh model ──────────────────▶ forward, backward, step, decode ──▶ results ─┐
                                                                             ├─ compare ─▶ equal, or where not
fresh model ──apply(plan)─────▶ the same on the plan's devices ───▶ results ─┘
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture import calls_of, capture
from autoshard.capture.inputs import Call
from autoshard.common.progress import tell
from autoshard.engine.offloaded import with_stores
from autoshard.engine.pricer import price
from autoshard.errors import ApplyError, AutoshardError, PlanError, VerifyError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.data_parallel import replica_record
from autoshard.runtime.dispatch import apply_device_map, apply_plan, is_applied
from autoshard.runtime.launched import check_launched
from autoshard.runtime.pipeline_record import pipeline_record
from autoshard.simulate.devices import SimulatedDevices
from autoshard.verify.compare import Errors, compare, verification
from autoshard.verify.first_batch import division_of
from autoshard.verify.locate import locate
from autoshard.verify.processes import runs_as_mesh, verify_processes
from autoshard.verify.report import DevicePeak, Difference, Verification
from autoshard.verify.run import RunResult, Work, run
from autoshard.verify.runner import CHOOSING, IN_PARTS, REFUSED, REORDERED, Build, copies_of, failures_of, run_both
from autoshard.verify.stage import RunDevices, accelerators_of, device_of, devices_of, is_divided


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
    after an optimizer step; with `new_tokens` also the tokens of a cached greedy `generate()`. On a difference the
    first module, in calling order, whose output differs is named. The devices of the plan are used if they are here,
    otherwise they are simulated, with the plan's sizes. The model is left as it was.

    `plan`: a `Plan` or a `device_map`; None for a model that is applied: it is compared with what `remove` gives.
    `inputs`: as for `plan()`. `training` and `new_tokens`: None takes the plan's workload. `tolerance`: the largest
    absolute difference that passes; 0 asks for outputs that are equal bit for bit. Where sums are made in another order
    (gradients, a plan with cuts, one that divides the batch) 1e-5 of the largest value of each tensor (in float32)
    passes besides. Under torchrun all processes call it, and each holds what it has against the model.

    Raises `VerifyError` if there is nothing to compare, the original itself fails, or the plan refuses such a call;
    `PlanError` and `ApplyError` as `apply` does.
    """
    if plan is None and not is_applied(model):
        raise VerifyError(
            "verify needs a plan, or a model to which one is applied. Pass the plan: autoshard.verify(model, plan)."
        )
    known = Plan.from_device_map(plan) if isinstance(plan, Mapping) else plan
    if known is not None and known.launch == "processes":
        check_launched(known)
    workload = _workload(model, known, training, new_tokens)
    calls = calls_of(model, inputs, workload)
    notes: list[str] = []
    if pipeline_record(model) is not None or replica_record(model) is not None:
        raise VerifyError(
            f"{type(model).__name__} is applied over processes, and this one has a part of it only. "
            "Call autoshard.remove(model) and verify it with the plan."
        )
    original = copies_of(model, removed=True)
    if known is None:
        work = _work(original, workload, calls, cut_record(model) is not None, division_of(model) is not None)
        return _compare(original, copies_of(model), work, tolerance, notes, None, None, {})
    if runs_as_mesh(known):
        return verify_processes(original, known, _work(original, workload, calls), tolerance, notes)
    with devices_of(known) as stage:
        work = _work(original, workload, calls, bool(stage.plan.cuts), is_divided(stage.plan))
        predicted = _predicted(original, workload, stage, work, notes)

        def planned() -> nn.Module:
            if isinstance(plan, Mapping):  # taken at its word, as `apply` does
                return apply_device_map(original(), stage.plan.device_map)
            return apply_plan(original(), stage.plan)

        return _compare(original, planned, work, tolerance, notes, stage, device_of(stage, model), predicted)


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


def _work(original: Build, workload: Workload, calls: list[Call], cut: bool = False, divided: bool = False) -> Work:
    """Return what to run: the call given, or the first of several derived ones that the model takes."""
    refused: Exception | None = None
    for args, kwargs in calls:
        work = Work(
            args=args, kwargs=kwargs, training=workload.training, optimizer=workload.optimizer,
            new_tokens=workload.new_tokens, cut=cut, divided=divided and not cut,
        )  # fmt: skip
        if len(calls) == 1:
            return work
        try:
            run(original(), Work(args=args, kwargs=kwargs))
        except Exception as error:  # whatever a forward raises that wants other inputs
            refused = refused or error
        else:
            return work
    raise VerifyError(f"no inputs that the config suggests fit the model; pass inputs=. {refused}") from refused


def _compare(
    original: Build,
    applied: Build,
    work: Work,
    tolerance: float,
    notes: list[str],
    stage: RunDevices | None,
    input_device: torch.device | None,
    predicted: Mapping[str, int],
) -> Verification:
    """Run both and say what differs. `input_device`: where inputs belong; `predicted`: peaks of simulated devices."""
    accelerators = accelerators_of(stage) if stage is not None else []
    input_devices = input_device if accelerators else None, input_device
    if work.reordered:
        notes.append(REORDERED if work.cut else IN_PARTS)
    if work.cut and work.training:
        work = replace(work, staying_cut=_staying_cut(original, applied, work, input_device, accelerators))
    run_applied = _Applied(applied, work, input_device, stage.simulated if stage is not None else None)
    with run_applied.room_to_compare():
        tell("runs", 0, 2)
        expected, found, work = run_both(
            lambda: _run_original(original, work, input_devices[0], notes), run_applied, work, notes, accelerators
        )
        failure = run_applied.failure
        errors = compare(expected if failure is None else expected[: len(found)], found, tolerance, work)
        if failure is not None:
            errors = Errors(math.inf, math.inf, errors.first or failure)
        elif errors.first is not None and work.reordered and errors.largest < math.inf:
            notes.append(CHOOSING)
        if errors.first is not None and not run_applied.full and not work.divided:
            errors.first = locate(original, applied, work, input_devices, accelerators, tolerance, errors.first)
    names = stage.original_names if stage is not None else {}
    return verification(
        errors, work, notes, simulated=stage is not None and stage.simulated is not None,
        peaks=tuple(
            DevicePeak(
                name=names[name], simulated_as=name, measured_bytes=nbytes, predicted_bytes=predicted.get(name)
            )
            for name, nbytes in run_applied.peaks.items() if name in names
        ),
    )  # fmt: skip


def _staying_cut(
    original: Build, applied: Build, work: Work, input_device: torch.device | None, devices: Sequence[torch.device]
) -> frozenset[str]:  # fmt: skip
    """Paths of the outputs that stay cut, which a loss must leave out."""
    work, staying = replace(work, training=False, new_tokens=0), set()
    with contextlib.suppress(Exception):  # it will be seen, and told, when the models are compared
        expected, found, _ = run_both(
            lambda: run(original(), work), lambda: run(applied(), work, input_device), work, [], devices
        )
        for whole, part in zip(expected, found, strict=True):
            if part.parts or part.value.shape != whole.value.shape:
                staying.add(part.output.removeprefix("output").strip())
    return frozenset(staying)


@dataclass(slots=True)
class _Applied:
    """Runs the applied model; an error of its own is a finding, not a reason to stop.

    Attributes:
        failure: where it stopped, None if it did not; `full`: because a device was full.
        peaks: bytes that simulated devices had at most in the pass that is measured.
    """

    build: Build
    work: Work
    input_device: torch.device | None
    simulated: SimulatedDevices | None
    failure: Difference | None = None
    full: bool = False
    peaks: dict[str, int] = field(default_factory=dict)

    def __call__(self) -> list[RunResult]:
        tell("runs", 1, 2)
        simulated, results = self.simulated, list[RunResult]()
        before = {name: simulated.memory(name)[0] for name in simulated} if simulated is not None else {}
        model = self.build()
        try:
            run(model, self.work, self.input_device, None if simulated is None else self._measure, results)
        except (PlanError, ApplyError) as error:
            raise VerifyError(REFUSED.format(error)) from error
        except Exception as error:  # anything that a tensor on the wrong device may make the user's forward raise
            self.full = isinstance(error, torch.OutOfMemoryError)
            message = str(error) if self.full else f"{type(error).__name__}: {error}"
            during = "decode" if results and self.work.new_tokens else "forward"
            self.failure = Difference(during=during, module="", output="", max_error=math.inf, message=message)
        if simulated is not None:
            simulated.limit(to_size=not self.work.training)
            self.peaks = {name: simulated.memory(name)[1] - nbytes for name, nbytes in before.items()}
        return results

    def _measure(self) -> None:
        """Begin the pass whose peak counts, and that has to fit."""
        assert self.simulated is not None
        self.simulated.limit(to_size=True)
        self.simulated.reset_peak()

    @contextlib.contextmanager
    def room_to_compare(self) -> Iterator[None]:
        """Let no device be full but in the pass that is measured: gradients that are compared are no part of a plan."""
        if self.simulated is None:
            yield
            return
        self.simulated.limit(to_size=not self.work.training)
        try:
            yield
        finally:
            self.simulated.limit(to_size=True)


def _run_original(original: Build, work: Work, input_device: torch.device | None, notes: list[str]) -> list[RunResult]:
    """Run the original; on accelerators it is moved to one of them if it fits, since other devices round otherwise."""
    model = original()
    if input_device is not None:
        try:
            model.to(input_device)
        except torch.OutOfMemoryError:
            notes.append(
                f"the original does not fit on {input_device} and ran where it was, where kernels may round otherwise"
            )
            del model
            model, input_device = original(), None
    with failures_of(model):
        return run(model, work, input_device)


def _predicted(original: Build, workload: Workload, stage: RunDevices, work: Work, notes: list[str]) -> dict[str, int]:
    """Return the estimated peak per simulated device, by its name here."""
    if stage.simulated is None:
        return {}
    plan, cluster = stage.plan, stage.simulated.cluster
    try:
        profile = profile_graph(capture(original(), work.kwargs or work.args, workload=workload), workload)
        cluster = with_stores(cluster, plan.offloaded.values()) if plan.offloaded else cluster
        return {device.name: device.peak_bytes for device in price(plan, profile, cluster).devices}
    except AutoshardError as error:
        notes.append(f"no prediction to hold the measured peaks against: {error}")
        return {}
