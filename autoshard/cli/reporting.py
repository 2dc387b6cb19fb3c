"""report and trace: a plan as a page to look at, and its predicted pass as a trace."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.console import errors, reports_errors, step
from autoshard.cli.options import (
    AssumeOption,
    BatchOption,
    DevicesOption,
    MaxMemoryOption,
    MicroBatchesOption,
    NewTokensOption,
    ObjectiveOption,
    OptimizerOption,
    PinOption,
    ScheduleOption,
    SeqOption,
    StrategyOption,
    TrainOption,
)
from autoshard.cli.processes import OpenedProcesses, choose_processes, open_chosen, open_processes, process_page
from autoshard.cli.steps import check_before, check_same_model, devices_of, load, pairs, profile_of, workload_of
from autoshard.cli.target import UserCodeError
from autoshard.common.files import write_whole
from autoshard.errors import CaptureError, PlanError, SpecError
from autoshard.plan.choices import strategy_named
from autoshard.plan.workload import Workload

if TYPE_CHECKING:
    from autoshard.cli.plans import Opened
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.engine.estimate import Estimate, Event
    from autoshard.plan import Plan
    from autoshard.profile.profile import Profile
    from autoshard.search.sizes import Cell
    from autoshard.strategies.compare import Alternative

MOST_TRACED = 100_000
"""Events of a trace."""
PlanOrTarget = Annotated[
    str, typer.Argument(metavar="TARGET|PLAN", help="What to plan, or a plan file followed by TARGET.")
]
SecondTarget = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="The model of the plan file.", show_default=False)
]


@reports_errors
def report_command(
    first: PlanOrTarget,
    second: SecondTarget = None,
    devices: DevicesOption = "auto",
    strategy: StrategyOption = "auto",
    objective: ObjectiveOption = "latency",
    batch: BatchOption = None,
    seq: SeqOption = None,
    new_tokens: NewTokensOption = None,
    train: TrainOption = False,
    optimizer: OptimizerOption = None,
    max_memory: MaxMemoryOption = None,
    pin: PinOption = None,
    micro_batches: MicroBatchesOption = None,
    schedule: ScheduleOption = None,
    assume_independent_rows: AssumeOption = False,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page.")] = Path("report.html"),
    image: Annotated[
        str | None, typer.Option("--image", metavar="svg|png", help="Write each picture beside the page, too.")
    ] = None,
    what_if: Annotated[
        bool,
        typer.Option("--what-if/--no-what-if", help="Other sizes and devices in the page; takes some seconds."),
    ] = True,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="A table of what every other strategy would give.")
    ] = True,
) -> None:
    """Write a plan as one HTML page: devices, timeline, model tree, transfers, reasons, assumptions."""
    from autoshard.cli.plans import is_plan

    if image not in (None, "svg", "png"):
        raise SpecError(f"--image {image} makes no sense: write svg or png.")
    strategy = strategy_named(strategy)
    check_before(out, strategy, objective, schedule)
    workload = workload_of(batch, seq, new_tokens, train, optimizer)
    settings: dict[str, Any] = {
        "strategy": strategy, "objective": objective, "max_memory": pairs(max_memory, "--max-memory", "cuda:0=20GiB"),
        "pins": pairs(pin, "--pin", "model.layers.0=cuda:0"), "num_microbatches": micro_batches, "schedule": schedule,
        "assume_independent_rows": assume_independent_rows,
    }  # fmt: skip
    opened = _opened(first, second, devices, workload, settings)
    if isinstance(opened, OpenedProcesses):
        if image is not None:
            raise SpecError("--image draws plans of one process: the pictures of this one are in its page.")
        _write(out, process_page(opened, sizes=what_if).encode())
        return
    text = second or (opened.plan.target if is_plan(first) else first)
    for path, content in _drawn(opened, text, out, image, what_if=what_if, compare=compare).items():
        _write(path, content)


def _drawn(
    opened: "Opened", text: str, out: Path, image: str | None, *, what_if: bool, compare: bool
) -> dict[Path, bytes]:
    """The page of a plan of one process, and its pictures as files of their own."""
    from autoshard.api import estimate
    from autoshard.report.images import pictures, to_png
    from autoshard.report.page import make_page

    loaded, plan, profile, cluster = opened.loaded, opened.plan, opened.profile, opened.cluster
    others = _alternatives(loaded, plan, profile, cluster) if compare else ()
    figures = estimate(plan, profile, cluster)
    cells = _cells(opened, text, figures) if what_if else ()
    with step("drawing"):
        notes = (*loaded.notes, *cluster.notes)
        drawn = plan, figures, profile, cluster
        page = make_page(*drawn, title=loaded.title, notes=notes, alternatives=others, cells=cells)
        files = {out: page.encode()}
        for name, svg in (pictures(*drawn, title=loaded.title) if image else {}).items():
            content = to_png(svg) if image == "png" else svg.encode()
            files[out.with_name(f"{out.stem}-{name}.{image}")] = content
    return files


@reports_errors
def trace_command(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file, or a JSON file with a device_map.")],
    target: SecondTarget = None,
    out: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The trace.")] = Path("trace.json"),
    measure: Annotated[
        bool, typer.Option("--measure", help="Run the model on the plan's devices, and add the measured pass.")
    ] = False,
) -> None:
    """Write the predicted pass of a plan as a trace for ui.perfetto.dev or chrome://tracing."""
    from autoshard.engine.events import events
    from autoshard.report.trace import trace_document

    check_before(out)
    opened = _opened(plan_file, target, "auto", Workload(assumed=True), {})
    title, cluster = opened.loaded.title, opened.cluster
    if isinstance(opened, OpenedProcesses):
        if measure:
            raise SpecError("--measure runs a plan in this process, and this one is for one process per device.")
        from autoshard.report.page.processes import events_of

        predicted, _ = events_of(opened.study(sizes=False), most=MOST_TRACED)
        document = trace_document(predicted, cluster, title=title)
    else:
        with step("laying out the pass"):
            laid_out = events(opened.plan, opened.profile, cluster)
        measured = _measured(target or opened.plan.target, opened.plan, opened.loaded) if measure else ()
        document = trace_document(laid_out, cluster, title=title, measured=measured)
    _write(out, json.dumps(document, separators=(",", ":"), allow_nan=False).encode())


def _opened(
    first: str, second: str | None, devices: str, workload: Workload, settings: dict[str, Any]
) -> "Opened | OpenedProcesses":
    """Read the plan of a model, or make one; `settings` are those of `plan_measured`."""
    from autoshard.cli.plans import Opened, is_plan, model_of, read_plan
    from autoshard.cluster.parse import cluster_of
    from autoshard.search.planning import plan_measured

    if second is None and not is_plan(first):
        cluster = devices_of(devices, settings.get("max_memory", {}))
        loaded = load(first, workload)
        chosen = choose_processes(loaded, workload, cluster, {"strategy": "auto", "objective": "latency"} | settings)
        if chosen is not None:
            return open_chosen(chosen, loaded, first)
        profile = profile_of(loaded)
        with step("planning"):
            plan = plan_measured(loaded.model, loaded.inputs, profile, cluster, **settings)
        cluster = cluster.with_memory({row.name: row.memory_bytes for row in plan.devices})
        return Opened(plan=plan, loaded=loaded, profile=profile, cluster=cluster)
    plan = read_plan(first)
    if plan.launch:
        if not workload.assumed:
            raise SpecError("the plan has its workload: leave out --batch, --seq, --new-tokens and --train.")
        return open_processes(plan, first, model_of(plan, first, second), devices)
    if not (second or plan.target):
        raise SpecError(f"{first} is a plan: say of which model, as in `autoshard report {first} model.py`.")
    cluster = cluster_of(plan.devices) if devices == "auto" else devices_of(devices, {})
    loaded = load(second or plan.target, plan.workload if workload.assumed else workload)
    profile = profile_of(loaded)
    check_same_model(plan, profile, first)
    return Opened(plan=plan, loaded=loaded, profile=profile, cluster=cluster)


def _measured(text: str, plan: "Plan", loaded: "Target") -> "tuple[Event, ...]":
    """Run the model with its weights on the devices of the plan. Raises what applying the plan raises."""
    from autoshard.cli.verifying import build
    from autoshard.verify.measured import measure_pass

    real = build(lambda with_weights: load(text, loaded.workload, with_weights=with_weights))
    with step("running the model"):
        return measure_pass(real.model, real.inputs, real.workload, plan)


def _alternatives(loaded: "Target", plan: "Plan", profile: "Profile", cluster: "Cluster") -> "tuple[Alternative, ...]":
    """Plan with every strategy, for the same objective; none if none gives a plan."""
    from autoshard.search.comparing import compare_all
    from autoshard.search.request import Request

    request = Request(
        model=loaded.model, inputs=loaded.inputs, profile=profile, cluster=cluster, objective=plan.objective
    )  # fmt: skip
    try:
        with step("planning with every strategy"):
            found = compare_all(request)
    except PlanError:
        return ()
    return (*found.alternatives, *found.peers)


def _cells(opened: "Opened", text: str, figures: "Estimate") -> "tuple[Cell, ...]":
    """Price other sizes and devices, each from a recorded run of its own."""
    from autoshard.api import profile
    from autoshard.cli.target import of_other_size
    from autoshard.search.planning import place
    from autoshard.search.request import Request
    from autoshard.search.sizes import cells

    loaded, plan, recorded = opened.loaded, opened.plan, opened.profile

    def record(workload: Workload) -> "Profile":
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
        return tuple(cells(plan, figures, recorded, opened.cluster, sizes, record, plan_anew))


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    write_whole(path, content)
    errors().print(f"written to {path}", style="bright_black", soft_wrap=True)
