"""compare: every strategy, and what peers would do, in one table."""

from typing import Any

from autoshard.cli.console import output, print_json, reports_errors, step
from autoshard.cli.options import (
    AssumeOption,
    BatchOption,
    DevicesOption,
    JsonOption,
    MaxMemoryOption,
    NewTokensOption,
    ObjectiveOption,
    OptimizerOption,
    SeqOption,
    TargetArgument,
    TrainOption,
)
from autoshard.cli.steps import check_before, devices_of, load, pairs, profile_of, workload_of


@reports_errors
def compare_command(
    target: TargetArgument,
    devices: DevicesOption = "auto",
    objective: ObjectiveOption = "latency",
    batch: BatchOption = None,
    seq: SeqOption = None,
    new_tokens: NewTokensOption = None,
    train: TrainOption = False,
    optimizer: OptimizerOption = None,
    max_memory: MaxMemoryOption = None,
    assume_independent_rows: AssumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Plan TARGET with every strategy, and price what Accelerate and Transformers would do: fits, memory, seconds."""
    from autoshard.cli.processes import choose_processes
    from autoshard.search.compared import compare_processes
    from autoshard.search.comparing import compare_all
    from autoshard.search.request import Request

    check_before(None, objective=objective)
    limits = pairs(max_memory, "--max-memory", "cuda:0=20GiB")
    cluster = devices_of(devices, limits)
    workload = workload_of(batch, seq, new_tokens, train, optimizer)
    loaded = load(target, workload)
    settings: dict[str, Any] = {"strategy": "auto", "objective": objective, "max_memory": limits}
    settings |= {"assume_independent_rows": assume_independent_rows}
    chosen = choose_processes(loaded, workload, cluster, settings)
    if chosen is not None:
        with step("pricing the best recipe of every kind"):
            found = compare_processes(chosen, cluster)
    else:
        request = Request(
            model=loaded.model, inputs=loaded.inputs, profile=profile_of(loaded), cluster=cluster, objective=objective,
            max_memory=limits, assume_independent_rows=assume_independent_rows,
        )  # fmt: skip
        with step("planning with every strategy"):
            found = compare_all(request)
    if as_json:
        from autoshard.report.compared import comparison_document

        print_json(comparison_document(found, title=loaded.title))
        return
    from autoshard.report.compared import print_comparison

    print_comparison(output(), found, title=loaded.title)
