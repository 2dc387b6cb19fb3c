"""doctor and run: check this machine, and start a script with as many processes as its plan wants."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from autoshard.cli.console import IMPOSSIBLE, command, output, print_json, step
from autoshard.errors import PlanError, SpecError
from autoshard.plan import PLAN_VARIABLE, Plan


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
    launch = launch_of(
        script, arguments or [], plan_file=plan_file, processes=processes, node_rank=node_rank,
        rendezvous=rendezvous, max_restarts=max_restarts,
    )  # fmt: skip
    if dry_run:
        typer.echo(launch.shown)
        return
    start(launch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A command, and what its environment has besides ours."""

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """As one would type it."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*settings, shlex.join(self.command)])


def processes_of(plan: Plan) -> int:
    """How many processes a plan runs best with: one per device where ranks share parameters or the batch, else one."""
    if plan.mesh is not None:
        return plan.mesh.size
    return len(plan.devices) if plan.cuts else 1


def launch_of(
    script: Path,
    arguments: Sequence[str],
    *,
    plan_file: Path | None = None,
    processes: int | None = None,
    node_rank: int | None = None,
    rendezvous: str | None = None,
    max_restarts: int = 0,
) -> Launch:
    """Work out the command. Raises `SpecError` where the plan, the machines and the options don't go together."""
    from autoshard.cluster.detect import accelerator_names

    if not script.is_file():
        raise SpecError(f"there is no file {script}. Name the Python file to run: autoshard run train.py")
    plan = Plan.load(plan_file) if plan_file is not None else None
    hosts = len({device.host for device in plan.devices}) if plan is not None else 1
    count = processes or (processes_of(plan) if plan is not None else max(1, len(accelerator_names())))
    if plan is not None and plan.mesh is not None and count not in (1, plan.mesh.size):
        raise PlanError(
            f"{plan_file} is for {plan.mesh.size} processes, one per device, or for one that uses all devices; "
            f"--processes says {count}. Leave it out, or plan for {count} devices."
        )
    environment: dict[str, str] = {}
    if plan_file is not None:
        environment[PLAN_VARIABLE] = str(plan_file.resolve())
    if count == 1:
        return Launch(command=(sys.executable, str(script), *arguments), environment=environment)
    here, rest = divmod(count, hosts)
    if rest:
        raise SpecError(f"{count} processes don't divide over the {hosts} machines of the plan. Give --processes.")
    if "OMP_NUM_THREADS" not in os.environ:  # torchrun sets 1, which leaves cores idle
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // here))
    if max_restarts:
        # torchrun's processes otherwise meet in a store that still has the addresses of those that were killed.
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = [f"--nproc-per-node={here}", f"--max-restarts={max_restarts}"]
    if hosts > 1:
        if node_rank is None or rendezvous is None:
            raise SpecError(
                f"this plan is for {hosts} machines. On each of them run the same command with --node-rank 0 to "
                f"{hosts - 1} and --rendezvous HOST:PORT, where HOST is the first of them."
            )
        options += [
            f"--nnodes={hosts}", f"--node-rank={node_rank}", "--rdzv-backend=c10d", f"--rdzv-endpoint={rendezvous}",
        ]  # fmt: skip
    else:
        options.append("--standalone")
    command = (sys.executable, "-m", "torch.distributed.run", *options, str(script), *arguments)
    return Launch(command=command, environment=environment)


def start(launch: Launch) -> NoReturn:
    """Become the command: signals reach it, and its exit status is that of this process."""
    os.execve(launch.command[0], launch.command, {**os.environ, **launch.environment})
