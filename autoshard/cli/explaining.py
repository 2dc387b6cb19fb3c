"""explain: why a module or a device is as a plan has it."""

from dataclasses import asdict
from typing import Annotated

import typer

from autoshard.cli.console import output, print_json, reports_errors, step


@reports_errors
def explain_command(
    plan_file: Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of sentences.")] = False,
) -> None:
    """Say why PLAN, a module or a device of it, is as it is, what binds it, and what other choices would cost."""
    from autoshard.cli.plans import model_of, open_plan, read_plan
    from autoshard.cli.processes import open_processes
    from autoshard.report.explained_processes import explain_study
    from autoshard.report.explanation import explain

    plan = read_plan(plan_file)
    if plan.launch:
        opened_processes = open_processes(plan, plan_file, model_of(plan, plan_file, target))
        found = explain_study(opened_processes.study(sizes=not subject), subject)
    else:
        opened = open_plan(plan_file, target)
        with step("pricing other choices"):
            found = explain(opened.plan, opened.profile, opened.cluster, subject)
    if as_json:
        print_json(asdict(found))
        return
    from autoshard.report.explained import print_explanation

    print_explanation(output(), found)
