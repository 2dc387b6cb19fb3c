"""compare, explain, report and trace: what other plans would cost, why this one, as a page, and as a trace."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli import options as o
from autoshard.cli.console import command, errors, output, print_json, step
from autoshard.cli.opening import Opened, is_plan, make_plan, open_plan
from autoshard.cli.steps import capturing, devices_of, load, load_to_run, profile_of
from autoshard.cli.target import UserCodeError
from autoshard.common.files import check_writable, write_whole
from autoshard.errors import CaptureError, PlanError, SpecError

if TYPE_CHECKING:
    from autoshard.cluster.cluster import Cluster
    from autoshard.engine.estimate import Estimate, Event
    from autoshard.plan import Plan
    from autoshard.plan.workload import Workload
    from autoshard.profile.profile import Profile
    from autoshard.search.sizes import Cell
    from autoshard.strategies.compare import Alternative

MOST_TRACED = 100_000
"""Events of a trace."""


@command
def compare_command(
    target: o.TargetName,
    devices: o.Devices = "auto",
    *,
    comparing: o.ComparisonOptions,
    asked: o.WorkloadOptions,
    as_json: o.Json = False,
) -> None:
    """Plan TARGET with every strategy, and price what Accelerate and Transformers would do: fits, memory, seconds."""
    from autoshard.report.compared import comparison_document, print_comparison
    from autoshard.report.reporting import compare

    settings, workload = comparing.settings(), asked.workload()
    cluster = devices_of(devices, settings["max_memory"])
    loaded = load(target, workload)
    workload = replace(loaded.workload, batch_size=workload.batch_size)
    with capturing(loaded, "planning with every strategy"):
        found = compare(loaded.model, cluster, inputs=loaded.inputs, workload=workload, **settings)
    if as_json:
        print_json(comparison_document(found, title=loaded.title))
    else:
        print_comparison(output(), found, title=loaded.title)


@command
def explain_command(
    plan_file: o.PlanFile,
    subject: Annotated[
        str,
        typer.Argument(
            metavar="MODULE|DEVICE",
            help="A module path such as layers.3, or cuda:0. Default: the whole plan.",
            show_default=False,
        ),
    ] = "",
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="TARGET", help="The model; default: what the plan was made for."),
    ] = None,
    as_json: o.Json = False,
) -> None:
    """Say why PLAN, a module or a device of it, is as it is, what binds it, and what other choices would cost."""
    from autoshard.report.explanation import explain, print_explanation

    opened = open_plan(plan_file, target, memory_known=False)
    study = opened.study(sizes=not subject)
    with step("pricing other choices"):
        found = explain(opened.plan, opened.profile, opened.cluster, subject, study)
    if as_json:
        print_json(asdict(found))
    else:
        print_explanation(output(), found)


@command
def report_command(
    first: Annotated[
        str, typer.Argument(metavar="TARGET|PLAN", help="What to plan, or a plan file followed by TARGET.")
    ],
    second: o.OfPlan = None,
    devices: o.Devices = "auto",
    *,
    planning: o.PlanOptions,
    asked: o.WorkloadOptions,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = Path("report.html"),
    what_if: Annotated[
        bool,
        typer.Option("--what-if/--no-what-if", help="Other sizes and devices in the page; takes some seconds."),
    ] = True,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="A table of what every other strategy would give.")
    ] = True,
) -> None:
    """Write a plan as one HTML page: devices, timeline, alternatives, model tree, transfers, reasons, assumptions."""
    from autoshard.report.page import make_page

    settings = planning.settings(out)
    if second is not None or is_plan(first):
        spec = None if devices == "auto" else devices
        opened = open_plan(first, second, spec, asked.changed)
    else:
        opened = make_plan(first, asked.workload(), devices_of(devices, settings["max_memory"]), settings)
    study = opened.study(sizes=what_if)
    estimate = opened.estimate() if study is None else study.estimate
    others = _alternatives(opened) if compare and study is None else ()
    cells = _cells(opened, second or opened.plan.target, estimate) if what_if and study is None else ()
    profile = opened.profile if study is None else _whole_profile(opened)
    with step("drawing"):
        page = make_page(
            opened.plan, estimate, profile, opened.cluster, title=opened.loaded.title,
            notes=opened.loaded.notes, alternatives=others, cells=cells, study=study,
        )  # fmt: skip
    _write(out, page)


def _whole_profile(opened: Opened) -> "Profile":
    """The profile of the workload with its backward pass; FLOPs are of all samples, of which few are recorded."""
    from autoshard.search.traced import TRACED_SAMPLES

    loaded, workload = opened.loaded, opened.plan.workload
    samples = workload.batch_size or 1
    few = min(samples, TRACED_SAMPLES) if loaded.inputs is None else samples
    try:
        profile = profile_of(replace(loaded, workload=replace(workload, batch_size=few)))
    except CaptureError:  # the forward pass alone was recorded: its work is not that of a step
        return replace(opened.profile, flops=0)
    return replace(profile, workload=workload, flops=profile.flops * samples // few)


def _alternatives(opened: Opened) -> "tuple[Alternative, ...]":
    """Plan with every strategy, for the same objective; none if none gives a plan."""
    from autoshard.search.comparing import compare_all
    from autoshard.search.request import Request

    request = Request(
        model=opened.loaded.model, inputs=opened.loaded.inputs, profile=opened.profile, cluster=opened.cluster,
        objective=opened.plan.objective,
    )  # fmt: skip
    try:
        with step("planning with every strategy"):
            found = compare_all(request)
    except PlanError:
        return ()
    return (*found.alternatives, *found.peers)


def _cells(opened: Opened, text: str, estimate: "Estimate") -> "tuple[Cell, ...]":
    """Price other sizes and devices, each from a recorded run of its own."""
    from autoshard.api import profile
    from autoshard.cli.target import of_other_size
    from autoshard.search.planning import place
    from autoshard.search.request import Request
    from autoshard.search.sizes import cells

    loaded, plan, recorded = opened.loaded, opened.plan, opened.profile

    def record(workload: "Workload") -> "Profile":
        try:
            other = of_other_size(text, loaded, workload)
        except UserCodeError as error:
            raise CaptureError(str(error)) from error
        return profile(other.model, other.inputs, workload=other.workload)

    def plan_anew(cluster: "Cluster") -> "Plan":
        request = Request(
            model=loaded.model, inputs=loaded.inputs, profile=recorded, cluster=cluster, objective=plan.objective
        )
        return place(request, plan.strategy, advise=False)  # advice where nothing fits takes longer than all the rest

    with step("pricing other sizes and devices"):
        sizes = loaded.sizes or recorded.workload
        return tuple(cells(plan, estimate, recorded, opened.cluster, sizes, record, plan_anew))


@command
def trace_command(
    plan_file: o.PlanFile,
    target: o.OfPlan = None,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace.")] = Path("trace.json"),
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the model on the plan's devices, and add the measured pass.")
    ] = False,
) -> None:
    """Write the predicted pass of a plan as a trace for ui.perfetto.dev or chrome://tracing."""
    from autoshard.report.page.lanes import events_of
    from autoshard.report.trace import trace_document

    check_writable(out)
    opened = open_plan(plan_file, target, memory_known=False)
    if measure and opened.plan.launch:
        raise SpecError("--measure runs a plan in this process, and this one is for one process per device.")
    study = opened.study(sizes=False)
    with step("laying out the pass"):
        predicted, _ = events_of(opened.plan, opened.profile, opened.cluster, study, MOST_TRACED)
    measured = _measured(target or opened.plan.target, opened) if measure else ()
    document: dict[str, Any] = trace_document(predicted, opened.cluster, title=opened.loaded.title, measured=measured)
    _write(out, json.dumps(document, separators=(",", ":"), allow_nan=False))


def _measured(text: str, opened: Opened) -> "tuple[Event, ...]":
    """Run the model with its weights on the devices of the plan. Raises what applying the plan raises."""
    from autoshard.verify.measured import measure_pass

    real = load_to_run(text, opened.loaded.workload)
    with step("running the model"):
        return measure_pass(real.model, real.inputs, real.workload, opened.plan)


def _write(path: Path, content: str) -> None:
    """Write a file whole or not at all."""
    write_whole(path, content)
    errors().print(f"written to {path}", style="bright_black", soft_wrap=True)
