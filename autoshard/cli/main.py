"""The commands: plan, profile, verify, devices, estimate. Each reads its options, calls the packages and prints."""

import errno
import gc
import inspect
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.comparing import compare_command
from autoshard.cli.console import IMPOSSIBLE, errors, output, print_json, reports_errors, step
from autoshard.cli.explaining import explain_command
from autoshard.cli.machine import doctor_command, run_command
from autoshard.cli.options import (
    AssumeOption,
    BatchOption,
    CompileOption,
    DevicesOption,
    DtypeOption,
    JsonOption,
    LaunchOption,
    MaxBatchOption,
    MaxMemoryOption,
    MaxSeqOption,
    MeshOption,
    MicroBatchesOption,
    MicroBatchOption,
    NewTokensOption,
    ObjectiveOption,
    OptimizerOption,
    PinOption,
    PrecisionOption,
    RecomputeOption,
    ScheduleOption,
    SeqOption,
    StrategyOption,
    TargetArgument,
    TrainOption,
)
from autoshard.cli.reporting import report_command, trace_command
from autoshard.cli.steps import (
    capturing,
    changed_workload,
    check_before,
    check_same_model,
    devices_of,
    load,
    pairs,
    profile_of,
    workload_of,
)
from autoshard.common.start import end_quietly
from autoshard.errors import PlanError, SpecError
from autoshard.plan.choices import strategy_named
from autoshard.plan.workload import Workload

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.engine.estimate import Estimate
    from autoshard.plan import Plan
    from autoshard.plan.batching import BatchAxis
    from autoshard.profile.profile import Profile

app = typer.Typer(
    help="Profile a PyTorch model without allocating it, plan where every module goes, and check it by running it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes cut names of options at 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    """Take the options that stand before a command."""
    if version:
        import autoshard

        typer.echo(f"autoshard {autoshard.__version__}")
        raise typer.Exit


@app.command("plan")
@reports_errors
def plan_command(
    target: TargetArgument,
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
    max_batch: MaxBatchOption = False,
    max_seq: MaxSeqOption = False,
    launch: LaunchOption = None,
    mesh: MeshOption = None,
    micro_batch: MicroBatchOption = None,
    recompute: RecomputeOption = None,
    precision: PrecisionOption = "auto",
    dtype: DtypeOption = "auto",
    compiled: CompileOption = None,
    out: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Plan where every module of TARGET goes, and print what that costs. Nothing is allocated."""
    strategy = strategy_named(strategy)
    check_before(out, strategy, objective, schedule)
    limits, pins = pairs(max_memory, "--max-memory", "cuda:0=20GiB"), pairs(pin, "--pin", "model.layers.0=cuda:0")
    cluster = devices_of(devices, limits)
    workload = workload_of(batch, seq, new_tokens, train, optimizer)
    wishes = {"launch": launch, "mesh": mesh, "micro_batch": micro_batch, "recompute": recompute}
    wishes |= {"precision": precision, "dtype": dtype, "compiled": compiled}
    settings: dict[str, Any] = {"strategy": strategy, "objective": objective, "max_memory": limits, "pins": pins}
    settings |= {"num_microbatches": micro_batches, "schedule": schedule}
    settings |= {"assume_independent_rows": assume_independent_rows}
    plan, profile, loaded, estimated = _made(target, workload, cluster, settings, wishes, max_batch, max_seq)
    plan = replace(plan, target=target)
    if out is not None:
        plan.save(out)
    # The plan's devices have the limits in them.
    limited = cluster.with_memory({device.name: device.memory_bytes for device in plan.devices})
    _show_plan(plan, profile, limited, loaded, as_json, estimated)
    if out is not None:
        errors().print(f"written to {out}", style="bright_black", soft_wrap=True)


def _made(
    target: str, workload: Workload, cluster: "Cluster", settings: dict[str, Any], wishes: dict[str, Any],
    max_batch: bool, max_seq: bool,
) -> "tuple[Plan, Profile, Target, Estimate | None]":  # fmt: skip
    """Make the plan, for processes or for one; of those for processes there is an estimate already."""
    from autoshard.cli.growing import check_one_size, plan_largest
    from autoshard.cli.processes import choose_processes, plan_largest_processes
    from autoshard.cluster.limits import limited_to
    from autoshard.search.fewer_bits import with_hint
    from autoshard.search.planning import plan_measured

    check_one_size(max_batch, max_seq)
    if max_batch or max_seq:
        grown = plan_largest_processes(target, workload, cluster, max_batch, settings, wishes)
        if grown is not None:
            chosen, loaded = grown
            return chosen.plan, chosen.profile, loaded, chosen.estimate
        plan, loaded, profile = plan_largest(target, workload, cluster, max_batch, settings)
        return plan, profile, loaded, None
    loaded = load(target, workload)
    made = choose_processes(loaded, workload, cluster, settings, wishes)
    if made is not None:
        return made.plan, made.profile, loaded, made.estimate
    profile = profile_of(loaded)
    with step("planning"):
        plan = plan_measured(loaded.model, loaded.inputs, profile, cluster, **settings)
    with step("pricing fewer bits"):
        plan = with_hint(plan, profile, limited_to(cluster, settings["max_memory"]))
    return plan, profile, loaded, None


@app.command("profile")
@reports_errors
def profile_command(
    target: TargetArgument,
    batch: BatchOption = None,
    seq: SeqOption = None,
    new_tokens: NewTokensOption = None,
    train: TrainOption = False,
    optimizer: OptimizerOption = None,
    depth: Annotated[int, typer.Option("--depth", metavar="N", min=1, help="Levels of the module tree to show.")] = 3,
    axes: Annotated[bool, typer.Option("--axes", help="Show what can be cut over devices, and what can't.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show memory and compute of TARGET, module by module. Nothing is allocated."""
    if axes:
        _show_axes(load(target, workload_of(batch, seq, new_tokens, train, optimizer)), as_json)
        return
    loaded = load(target, workload_of(batch, seq, new_tokens, train, optimizer))
    profile = profile_of(loaded)
    if as_json:
        from autoshard.report.document import profile_document

        print_json(profile_document(profile, title=loaded.title, notes=loaded.notes))
        return
    from autoshard.report.terminal import print_profile

    print_profile(output(), profile, title=loaded.title, depth=depth, notes=loaded.notes)


@app.command("estimate")
@reports_errors
def estimate_command(
    plan_file: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan file, or a JSON file with a device_map.", show_default=False)
    ],
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="The model; default: what the plan was made for.", show_default=False),
    ] = None,
    devices: Annotated[
        str | None, typer.Option("--devices", "-d", metavar="SPEC", help="Default: the devices of the plan.")
    ] = None,
    batch: BatchOption = None,
    seq: SeqOption = None,
    new_tokens: NewTokensOption = None,
    train: TrainOption = False,
    optimizer: OptimizerOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say what a plan, or a device_map, costs for TARGET: the plan's own workload unless another is given."""
    from autoshard.cli.plans import model_of, read_plan
    from autoshard.cluster.parse import cluster_of
    from autoshard.search.processes import for_workload
    from autoshard.search.sizes import for_size

    plan = read_plan(plan_file)
    wanted = model_of(plan, plan_file, target)
    asked = changed_workload(plan.workload, batch, seq, new_tokens, train, optimizer)
    if asked != plan.workload:
        plan = for_workload(plan, asked) if plan.launch else for_size(plan, asked)
    unknown = [device.name for device in plan.devices if not device.memory_bytes]
    if unknown and devices is None:
        raise SpecError(
            f"{plan_file} does not say how much memory {', '.join(unknown)} have. Name the devices, for example with "
            f"--devices '{len(unknown)}x24GiB'."
        )
    cluster = cluster_of(plan.devices) if devices is None else devices_of(devices, {})
    loaded = load(wanted, asked)
    profile = profile_of(loaded)
    check_same_model(plan, profile, plan_file)
    if not _show_plan(plan, profile, cluster, loaded, as_json).fits:
        raise typer.Exit(IMPOSSIBLE)


@app.command("verify")
@reports_errors
def verify_command(
    target: TargetArgument,
    plan_file: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="The plan to verify; without it one is made.")
    ] = None,
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
    as_json: JsonOption = False,
) -> None:
    """Run TARGET whole and split, on simulated devices where real ones are missing, and compare the results."""
    from autoshard.api import verify
    from autoshard.cli.plans import read_plan
    from autoshard.cli.verifying import build
    from autoshard.search.planning import plan_measured

    check_before(None, strategy, objective, schedule)
    limits, pins = pairs(max_memory, "--max-memory", "cuda:0=20GiB"), pairs(pin, "--pin", "model.layers.0=cuda:0")
    workload = workload_of(batch, seq, new_tokens, train, optimizer)
    plan = read_plan(plan_file) if plan_file is not None else None
    if plan is not None and workload.assumed:
        workload = plan.workload
    cluster = None if plan is not None else devices_of(devices, limits)
    loaded = build(lambda with_weights: load(target, workload, with_weights=with_weights))
    profile = profile_of(loaded)
    if plan is not None:
        check_same_model(plan, profile, plan_file or "")
    elif cluster is not None:
        plan = plan_measured(
            loaded.model, loaded.inputs, profile, cluster,
            strategy=strategy, objective=objective, max_memory=limits, pins=pins,
            num_microbatches=micro_batches, schedule=schedule, assume_independent_rows=assume_independent_rows,
        )  # fmt: skip
    with step("running the model whole and split"):
        found = verify(loaded.model, plan, inputs=loaded.inputs, training=train or None, new_tokens=new_tokens)
    if as_json:
        from autoshard.report.verification import verification_document

        print_json(verification_document(found, title=loaded.title))
    else:
        from autoshard.report.verification import print_verification

        print_verification(output(), found, title=loaded.title)
    if not found.ok:
        raise typer.Exit(IMPOSSIBLE)


@app.command("devices")
@reports_errors
def devices_command(
    spec: Annotated[str, typer.Argument(metavar="SPEC", help="As --devices of plan.", show_default=True)] = "auto",
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure rates, at most 2 s per device; of a disk by a file without a name in this directory.",
        ),
    ] = False,
    known: Annotated[bool, typer.Option("--known", help="List the hardware that has a name.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write a cluster file for --devices.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the devices of this machine, or of SPEC, with memory, rates and links."""
    from autoshard.cluster.calibrate import calibrate as measure
    from autoshard.cluster.files import cluster_to_dict, write_cluster
    from autoshard.report.devices import print_devices, print_hardware

    if known:
        if as_json:
            from autoshard.cluster.hardware import known_names

            print_json(known_names())
        else:
            print_hardware(output())
        return
    check_before(out)
    cluster = devices_of(spec, {})
    if calibrate:
        with step("measuring"):
            cluster = measure(cluster)
    if out is not None:
        write_cluster(cluster, out)
    if as_json:
        print_json(cluster_to_dict(cluster))
    else:
        print_devices(output(), cluster)


app.command("compare")(compare_command)
app.command("explain")(explain_command)
app.command("report")(report_command)
app.command("trace")(trace_command)
app.command("doctor")(doctor_command)
app.command("run", context_settings={"allow_interspersed_args": False})(run_command)
for listed in app.registered_commands:  # whole sentences in the list of commands, not their first words
    listed.short_help = (inspect.getdoc(listed.callback) or "").partition("\n")[0]


def run() -> None:
    """Entry point of the command."""
    # What is imported stays, and so do the half million objects of a large model and its graph, which are scanned again
    # and again otherwise: 0.7 s of 6 for 405B.
    gc.freeze()
    imported = gc.get_freeze_count()
    gc.set_threshold(1_000_000, 50, 1000)
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGPIPE"):  # `| head` reads a few lines and goes: that is no error
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        app(prog_name="autoshard")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        sys.exit(f"Error: cannot write the output: {error.strerror}.")
    finally:
        end_quietly()
        if gc.get_freeze_count() > imported:  # by `all_listed`: libraries in C++ report what is never let go of
            gc.unfreeze()


def _show_axes(target: "Target", as_json: bool) -> None:
    from autoshard.axes.groups import find_groups
    from autoshard.capture.capture import capture
    from autoshard.check.batch import find_batch_axis
    from autoshard.profile.measure import profile_graph
    from autoshard.report.axes import axes_document, print_axes

    if target.workload.training:
        raise SpecError("--axes looks at a forward: what can be cut is the same for training. Leave out --train.")
    with capturing(target):
        graph = capture(target.model, target.inputs, workload=target.workload, composite=True)
        found = find_groups(graph)
        try:
            batch: BatchAxis | str = find_batch_axis(target.model, target.inputs, target.workload, graph)
        except PlanError as error:
            batch = str(error)
    profile = profile_graph(graph, target.workload)
    if as_json:
        print_json(axes_document(profile, found, batch=batch, title=target.title, notes=target.notes))
    else:
        print_axes(output(), profile, found, batch=batch, title=target.title, notes=target.notes)


def _show_plan(
    plan: "Plan", profile: "Profile", cluster: "Cluster", target: "Target", as_json: bool,
    estimated: "Estimate | None" = None,
) -> "Estimate":  # fmt: skip
    """Print a plan with its estimate, and return that."""
    from autoshard.api import estimate

    if estimated is None:
        with step("estimating"):
            estimated = estimate(plan, profile, cluster)
    notes = (*target.notes, *cluster.notes)
    if as_json:
        from autoshard.report.document import plan_document

        print_json(plan_document(plan, estimated, profile, title=target.title, notes=notes))
        return estimated
    from autoshard.report.terminal import print_plan

    kinds = {device.name: device.kind for device in cluster.devices}
    print_plan(output(), plan, estimated, profile, title=target.title, kinds=kinds, notes=notes)
    return estimated
