"""verify where every process of torchrun is a stage, a replica, or both: each holds what it has against the model.

    every rank   the model itself, whole     ──▶ outputs, loss, gradients, parameters after a step
    rank 3       its stages, on its rows     ──▶ of these what it has              compared there
    every rank   the first difference of any rank

Replicas get the rows that they have in training. Their gradients are held against the mean of the gradients that the
model itself has on the rows of each: that is what DistributedDataParallel promises, also where labels are unequal.
A plan that was made elsewhere is run in the precision of the model itself, so that rounding hides nothing.
"""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture import calls_of
from autoshard.check.batch import find_batch_axis
from autoshard.errors import ApplyError, PlanError, VerifyError
from autoshard.nested import tensors_in
from autoshard.pipelines.schedule import RankSchedule
from autoshard.plan import Plan
from autoshard.plan.batching import ASSUMED, BatchAxis
from autoshard.plan.sharding import even_shares
from autoshard.runtime.chunks import split
from autoshard.runtime.collectives import ProcessRanks, count_processes
from autoshard.runtime.dispatch import apply_plan, own_place
from autoshard.runtime.losses import own_loss
from autoshard.runtime.pipeline_record import pipeline_record
from autoshard.verify.compare import Errors, compare, stopped, verification
from autoshard.verify.report import Difference, Verification
from autoshard.verify.run import RunResult, Work, after_backward, loss_of, optimizer_of, results_of, run
from autoshard.verify.runner import CHOOSING, IN_PARTS, REFUSED, Build, failures_of, run_both

OWN_PRECISION = "the plan trains in another precision; what is compared is computed in that of the model itself"


def runs_as_mesh(plan: Plan | None) -> bool:
    """Whether processes run that have parts of a model, or of its batch, under a plan."""
    mesh = plan.mesh if plan is not None else None
    if plan is None or mesh is None or count_processes() < 2:
        return False
    return plan.launch == "processes" or mesh.pp * mesh.data > 1


def verify_processes(original: Build, plan: Plan, work: Work, tolerance: float, notes: list[str]) -> Verification:
    """Compare on every rank and tell all of them the same; all call it. `original`: makes the model."""
    notes.append(IN_PARTS)
    batch = plan.batch
    if plan.launch:
        batch = _batch_of(original(), plan, work)
    if work.new_tokens and plan.mesh is not None and plan.mesh.pp > 1 and not plan.workload.generates:
        raise VerifyError("this plan is for no answers: pass new_tokens=0, or plan with new_tokens.")
    if batch is None and not plan.launch:
        raise VerifyError("the plan does not say how its batch is divided. Plan again.")
    ranks = ProcessRanks.of()
    device, problem = own_place(plan, ranks, None)  # before anything is exchanged
    if problem is not None:
        raise problem
    assert device is not None
    work = _on_own_rows(original(), plan, batch, replace(work, divided=True, cut=bool(plan.cuts)), ranks.rank)
    failed: list[Errors] = []
    refused: list[Exception] = []

    def whole() -> list[RunResult]:
        model = original()
        with failures_of(model):
            return list(_original(model, plan, batch, work, ranks, device))

    def planned() -> list[RunResult]:
        model = apply_plan(original(), plan)
        try:
            return list(_applied(model, batch, work))
        except (PlanError, ApplyError) as error:
            refused.append(error)
            return []
        except Exception as error:  # what stops a run is a finding
            failed.append(stopped("forward", f"{type(error).__name__}: {error}"))
            return []

    expected, found, work = run_both(whole, planned, work, notes, [device])
    told = [error for of_rank in ranks.exchange([str(error) for error in refused]) for error in of_rank]
    if told:
        raise VerifyError(REFUSED.format(told[0]))
    known = {(one.during, one.module, one.output): one for one in expected}
    missing = [one for one in found if (one.during, one.module, one.output) not in known]
    if missing:
        failed.append(stopped(missing[0].during, "the original has none", missing[0].module, missing[0].output))
    wanted = [known[one.during, one.module, one.output] for one in found] if not missing else []
    return _together(failed[0] if failed else compare(wanted, found, tolerance, work), work, notes, ranks)


def without_cache(model: nn.Module, plan: Plan, inputs: Any) -> Any:
    """The inputs; where there are none, those of the model's configuration, without a cache in stages: layers share it.

    Stages that are sharded or cut call their layers whole, and refuse a call that makes one.
    """
    known = "use_cache" in inspect.signature(model.forward).parameters
    if inputs is not None or not known or plan.mesh is None or plan.mesh.pp == 1 or plan.workload.generates:
        return inputs
    return {**calls_of(model, None, plan.workload)[0][1], "use_cache": False}


def in_own_precision(model: nn.Module, plan: Plan) -> Plan:
    """A plan for processes that train, in the precision of the model itself."""
    if plan.launch != "processes" or not plan.workload.training:
        return plan
    own = "full" if any(one.dtype in (torch.float32, torch.float64) for one in model.parameters()) else "pure"
    return plan if plan.precision == own else replace(plan, precision=own)


def _batch_of(model: nn.Module, plan: Plan, work: Work) -> BatchAxis | None:
    """How the replicas of a plan for processes divide the batch, None where there is one."""
    if plan.batch is not None or plan.mesh is None or plan.mesh.data == 1:
        return plan.batch
    assumed, inputs = ASSUMED in plan.reasons, work.kwargs or work.args
    return find_batch_axis(model, inputs, plan.workload, assume_independent_rows=assumed)


def _on_own_rows(model: nn.Module, plan: Plan, batch: BatchAxis | None, work: Work, rank: int) -> Work:
    """The work with the arguments of this rank's replica."""
    mesh = plan.mesh
    assert mesh is not None
    if mesh.data == 1:
        return work
    assert batch is not None
    replica = mesh.place(rank // mesh.cp)[0]  # ranks that share a sequence are neighbours
    part = split(batch, model, work.args, work.kwargs, even_shares(batch.size, mesh.data))[replica]
    return replace(work, args=part.args, kwargs=part.kwargs)


def _original(
    model: nn.Module, plan: Plan, batch: BatchAxis | None, work: Work, ranks: ProcessRanks, device: torch.device
) -> Iterator[RunResult]:
    """What a rank should have: outputs of its rows; gradients and parameters of all rows."""
    mesh = plan.mesh
    assert mesh is not None
    if not work.training:
        yield from run(model, work)
        return
    parameters = dict(model.named_parameters())
    output = model(*work.args, **work.kwargs)
    _loss(batch, output).backward()
    yield from results_of("forward", "", "output", output)
    if mesh.data > 1:
        is_mean = _own_loss(output) is not None
        # A schedule adds up a sum over rows; else each replica counts as much as any other.
        weight = 1.0 if mesh.pp > 1 and not is_mean else 1.0 / mesh.data
        alike = mesh.pp * mesh.tp * mesh.cp  # ranks of a replica, which have computed the same
        for parameter in parameters.values():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad * weight
            gradient = ranks.all_reduce(gradient.to(device)).to(parameter.device)
            parameter.grad = gradient / alike if parameter.requires_grad else None
    yield from _trained(model, parameters, work)


def _applied(model: nn.Module, batch: BatchAxis | None, work: Work) -> Iterator[RunResult]:
    record = pipeline_record(model)
    if not work.training:
        if record is None or record.plan.workload.generates:
            yield from (one for one in run(model, work) if not one.output.startswith("buffer"))
            return
        output = RankSchedule(model).eval(*work.args, **work.kwargs)
    elif record is None:
        output = model(*work.args, **work.kwargs)
        _loss(batch, output).backward()
    else:
        assert batch is not None
        output = _step(model, batch, work.args, work.kwargs)
    if output is not None:  # on the rank of the last stage
        yield from results_of("forward", "", "output", output)
    if work.training:
        has = record.has if record is not None else lambda name: True
        yield from _trained(model, {name: one for name, one in model.named_parameters() if has(name)}, work)


def _step(model: nn.Module, batch: BatchAxis, args: tuple, kwargs: dict[str, Any]) -> Any:
    """A step of the schedule: with the model's own loss where the plan knows one, as `_loss` finds it."""
    named = any(one.path.rpartition(".")[2] == "loss" for one in batch.outputs)
    if named or [one.how for one in batch.outputs] in (["weighted"], ["mean"], ["sum"]):
        return RankSchedule(model).step(*args, **kwargs)
    return RankSchedule(model, lambda output: _loss(batch, output), "sum").step(*args, **kwargs)


def _trained(model: nn.Module, parameters: dict[str, nn.Parameter], work: Work) -> Iterator[RunResult]:
    """Gradients, and parameters after a step of the optimizer; all ranks of a stage are asked for the same."""
    optimizer = optimizer_of(work.optimizer, [one for one in parameters.values() if one.requires_grad])
    yield from after_backward(model, parameters, optimizer, softened=1.0)  # alike on all ranks


def _own_loss(output: Any) -> torch.Tensor | None:
    """The model's own loss, as a schedule finds it: what is called so, else the only number; None without."""
    try:
        return own_loss(output)
    except PlanError:
        return None


def _loss(batch: BatchAxis | None, output: Any) -> torch.Tensor:
    """The model's own loss; else one of what has rows, or of all where nothing is divided."""
    own = _own_loss(output)
    if own is not None:
        return own
    if batch is None:
        return loss_of(output, lambda path: 0)
    rows = {one.path: one.dim for one in batch.outputs if one.how == "cat"}
    if not any(path in rows and one.is_floating_point() for path, one in tensors_in(output)):
        raise VerifyError("no output of the model is known to have rows and numbers, so there is no loss to compare.")
    return loss_of(output, rows.get)


def _together(errors: Errors, work: Work, notes: list[str], ranks: ProcessRanks) -> Verification:
    """The same verdict on all ranks: the first difference of the first rank that has one."""
    rows: list[Any] = ranks.exchange((errors.largest, errors.relative, errors.first))
    largest, relative, firsts = zip(*rows, strict=True)
    rank = next((rank for rank, one in enumerate(firsts) if one is not None), None)
    first: Difference | None = None
    if rank is not None:
        message = f"on rank {rank}{': ' if firsts[rank].message else ''}{firsts[rank].message}"
        first = replace(firsts[rank], message=message)
        if max(largest) < inf:
            notes.append(CHOOSING)
    return verification(Errors(max(largest), max(relative), first), work, notes)
