"""doctor and run: check this machine, and start a script with as many processes as its plan wants."""

from pathlib import Path
from typing import Annotated

import typer

from autoshard.cli.console import IMPOSSIBLE, command, output, print_json, step


@command
def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a list.")] = False,
) -> None:
    """Check this machine: torch, devices, copies between them, memory, processes, disk; and say what to fix."""
    from dataclasses import asdict

    from autoshard.report.doctor import examine, print_findings

    with step("looking at this machine"):
        findings = list(examine())
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        print_findings(output(), findings)
    if any(finding.status == "bad" for finding in findings):
        raise typer.Exit(IMPOSSIBLE)


@command
def run_command(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="The Python file to run.", show_default=False)],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Its arguments.", show_default=False)
    ] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Start what this plan wants; Plan.load() without a path gets it."),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            "--processes",
            "-p",
            metavar="N",
            min=1,
            help="So many; default: what the plan wants, or one per accelerator.",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option("--node-rank", metavar="N", min=0, help="Which of several machines this is.", show_default=False),
    ] = None,
    rendezvous: Annotated[
        str | None,
        typer.Option("--rendezvous", metavar="HOST:PORT", help="Where several machines meet.", show_default=False),
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", metavar="N", min=0, help="Start again so often after a crash.")
    ] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command and start nothing.")] = False,
) -> None:
    """Run SCRIPT under torchrun with the right number of processes, or plainly where one is enough."""
    from autoshard.cli.launch import launch_of, start

    launch = launch_of(
        script, arguments or [], plan_file=plan_file, processes=processes, node_rank=node_rank,
        rendezvous=rendezvous, max_restarts=max_restarts,
    )  # fmt: skip
    if dry_run:
        typer.echo(launch.shown)
        return
    start(launch)
