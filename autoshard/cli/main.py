"""The commands: plan, profile, verify, devices, estimate. Each reads its options, calls the packages and prints."""

import errno
import gc
import inspect
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli import options as o
from autoshard.cli.console import IMPOSSIBLE, command, errors, output, print_json, step
from autoshard.cli.machine import doctor_command, run_command
from autoshard.cli.opening import Opened, make_largest, make_plan, open_plan, read_plan
from autoshard.cli.reporting import compare_command, explain_command, report_command, trace_command
from autoshard.cli.steps import (
    capturing,
    check_same_model,
    devices_of,
    load,
    load_skeleton,
    load_to_run,
    loading_for,
    profile_of,
)
from autoshard.common.files import check_writable
from autoshard.common.start import end_quietly, leave
from autoshard.errors import PlanError, SpecError

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.plan.batching import BatchAxis

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
@command
def plan_command(
    target: o.TargetName,
    devices: o.Devices = "auto",
    *,
    planning: o.PlanOptions,
    asked: o.WorkloadOptions,
    recipe: o.RecipeOptions,
    max_batch: Annotated[bool, typer.Option("--max-batch", help="Plan the largest batch that fits.")] = False,
    max_seq: Annotated[bool, typer.Option("--max-seq", help="Plan the longest sequence that fits.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan here.")] = None,
    as_json: o.Json = False,
) -> None:
    """Plan where every module of TARGET goes, and print what that costs. Nothing is allocated."""
    settings, wishes, workload = planning.settings(out), recipe.wishes(train=asked.train), asked.workload()
    if max_batch and max_seq:
        raise SpecError("--max-batch and --max-seq can't be asked for at once. Fix one of them with --batch or --seq.")
    cluster = devices_of(devices, settings["max_memory"])
    if max_batch or max_seq:
        vary = "batch_size" if max_batch else "sequence_length"
        opened = make_largest(target, workload, cluster, vary, settings, wishes)
    else:
        opened = make_plan(target, workload, cluster, settings, wishes)
    if out is not None:
        opened.plan.save(out)
    _show_plan(opened, as_json)
    if out is not None:
        errors().print(f"written to {out}", style="bright_black", soft_wrap=True)


@app.command("profile")
@command
def profile_command(
    target: o.TargetName,
    *,
    asked: o.WorkloadOptions,
    depth: Annotated[int, typer.Option("--depth", metavar="N", min=1, help="Levels of the module tree to show.")] = 3,
    axes: Annotated[bool, typer.Option("--axes", help="Show what can be cut over devices, and what can't.")] = False,
    as_json: o.Json = False,
) -> None:
    """Show memory and compute of TARGET, module by module. Nothing is allocated."""
    from autoshard.report.document import profile_document
    from autoshard.report.terminal import print_profile

    loaded = load(target, asked.workload())
    if axes:
        _show_axes(loaded, as_json)
        return
    profile = profile_of(loaded)
    if as_json:
        print_json(profile_document(profile, title=loaded.title, notes=loaded.notes))
    else:
        print_profile(output(), profile, title=loaded.title, depth=depth, notes=loaded.notes)


@app.command("estimate")
@command
def estimate_command(
    plan_file: o.PlanFile,
    target: o.OfPlan = None,
    devices: Annotated[
        str | None, typer.Option("--devices", "-d", metavar="SPEC", help="Default: the devices of the plan.")
    ] = None,
    *,
    asked: o.WorkloadOptions,
    as_json: o.Json = False,
) -> None:
    """Say what a plan, or a device_map, costs for TARGET: the plan's own workload unless another is given."""
    opened = open_plan(plan_file, target, devices, asked.changed)
    if not _show_plan(opened, as_json):
        raise typer.Exit(IMPOSSIBLE)


@app.command("verify")
@command
def verify_command(
    target: o.TargetName,
    plan_file: Annotated[
        str | None, typer.Option("--plan", metavar="FILE", help="The plan to verify; without it one is made.")
    ] = None,
    devices: o.Devices = "auto",
    *,
    planning: o.PlanOptions,
    asked: o.WorkloadOptions,
    as_json: o.Json = False,
) -> None:
    """Run TARGET whole and split, on simulated devices where real ones are missing, and compare the results.

    A plan for processes is verified in as many, which are started here.
    """
    from autoshard.api import verify
    from autoshard.cli.verifying import needs_processes, verify_in_processes
    from autoshard.report.verification import print_verification, verification_document
    from autoshard.search.planning import plan_measured

    settings, workload = planning.settings(), asked.workload()
    plan = read_plan(plan_file) if plan_file is not None else None
    if plan is not None and workload.assumed:
        workload = plan.workload
    cluster = None if plan is not None else devices_of(devices, settings["max_memory"])
    count = len(plan.devices) if plan is not None and needs_processes(plan) else 0
    with loading_for(plan_file, plan.workload if plan is not None else None, workload):
        loaded = load_skeleton(target, workload, count) if count else load_to_run(target, workload)
    profile = profile_of(loaded)
    if plan is not None:
        check_same_model(plan, profile, plan_file or "")
    elif cluster is not None:
        plan = plan_measured(loaded.model, loaded.inputs, profile, cluster, **settings)
    wanted: dict[str, Any] = {"training": asked.train or None, "new_tokens": asked.new_tokens}
    with step("running the model whole and split"):
        if plan is not None and count:
            found = verify_in_processes(target, plan, **wanted)
        else:
            found = verify(loaded.model, plan, inputs=loaded.inputs, **wanted)
    if as_json:
        print_json(verification_document(found, title=loaded.title))
    else:
        print_verification(output(), found, title=loaded.title)
    if not found.ok:
        raise typer.Exit(IMPOSSIBLE)


@app.command("devices")
@command
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
    as_json: o.Json = False,
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
    if out is not None:
        check_writable(out)
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
    gc.set_threshold(1_000_000, 50, 1000)
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(signal, "SIGPIPE"):  # `| head` reads a few lines and goes: that is no error
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        status = _status()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        sys.exit(f"Error: cannot write the output: {error.strerror}.")
    finally:
        end_quietly()
    leave(status)
    sys.exit(status)


def _status() -> int:
    """Run what the command line says, and return the exit status."""
    try:
        app(prog_name="autoshard")
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        sys.stdout.flush()
        return ended.code or 0
    return 0


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


def _show_plan(opened: Opened, as_json: bool) -> bool:
    """Print a plan with its estimate, and return whether it fits."""
    from autoshard.report.document import plan_document
    from autoshard.report.terminal import print_plan

    plan, profile, cluster, title = opened.plan, opened.profile, opened.cluster, opened.loaded.title
    estimate, notes = opened.estimate(), (*opened.loaded.notes, *cluster.notes)
    if as_json:
        print_json(plan_document(plan, estimate, profile, title=title, notes=notes))
    else:
        kinds = {device.name: device.kind for device in cluster.devices}
        print_plan(output(), plan, estimate, profile, title=title, kinds=kinds, notes=notes)
    return estimate.fits
