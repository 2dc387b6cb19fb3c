"""The calls that show what plans cost: every strategy in one table, why something is where it is, a page to send."""

import os
from typing import TYPE_CHECKING

from torch import nn

from autoshard.errors import SpecError
from autoshard.plan.choices import Objective, check_choices
from autoshard.plan.workload import Workload
from autoshard.search.asked import as_plan, chosen_for, cluster_for, measured_for

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from autoshard.cluster.cluster import Cluster
    from autoshard.cluster.parse import Devices
    from autoshard.plan import Plan
    from autoshard.plan.choices import DeviceMap, Inputs, Size
    from autoshard.profile.profile import Profile
    from autoshard.report.explanation import Explanation
    from autoshard.search.study import Study
    from autoshard.strategies.compare import Comparison


def compare(
    model: nn.Module,
    devices: "Devices" = "auto",
    *,
    inputs: "Inputs | None" = None,
    objective: Objective = "latency",
    workload: Workload | None = None,
    max_memory: "Mapping[Any, Size] | None" = None,
    profile: "Profile | None" = None,
    assume_independent_rows: bool = False,
) -> "Comparison":
    """Return the best plan of every strategy with what it costs, and what the maps of Accelerate would.

    The arguments are those of `plan`. Printing the result shows one line per strategy; `.alternatives` and `.peers`
    have the plans and estimates. Raises `SpecError`, `CaptureError`, or `PlanError` if no strategy gives a plan.
    """
    from autoshard.search.compared import compare_processes
    from autoshard.search.comparing import compare_all
    from autoshard.search.request import Request

    check_choices(objective=objective)
    cluster = cluster_for(devices, max_memory)
    chosen = chosen_for(
        model, inputs, workload or Workload(assumed=True), cluster, strategy="auto", objective=objective,
        max_memory=max_memory, assume_independent_rows=assume_independent_rows,
    )  # fmt: skip
    if chosen is not None:
        return compare_processes(chosen, cluster)
    request = Request(
        model=model, inputs=inputs, profile=measured_for(model, inputs, workload, profile), cluster=cluster,
        objective=objective, max_memory=max_memory, assume_independent_rows=assume_independent_rows,
    )  # fmt: skip
    return compare_all(request)


def explain(
    plan: "Plan | DeviceMap", profile: "Profile", subject: str = "", *, devices: "Devices | None" = None
) -> "Explanation":
    """Return why a plan, or a module or device of it, is as it is, and what other choices would cost.

    `subject`: a module path such as "layers.3", a device such as "cuda:0", or "" for all. `devices`: as in `plan`; None
    means the plan's own. Printing the result shows sentences and a line per choice. Raises `SpecError` for an unknown
    `subject`.
    """
    from autoshard.report.explanation import explain as find

    plan = as_plan(plan, profile)
    cluster = cluster_for(plan if devices is None else devices)
    return find(plan, profile, cluster, subject, _study(plan, profile, cluster, sizes=not subject))


def _study(plan: "Plan", profile: "Profile", cluster: "Cluster", *, sizes: bool = True) -> "Study | None":
    """The search around a plan for processes; None of one for one process."""
    if not plan.launch:
        return None
    from autoshard.search.study import study
    from autoshard.search.traced import trace

    if profile.source is None:
        raise SpecError("this profile does not have its model any more: take it again with autoshard.profile().")
    return study(plan, trace(*profile.source, plan.workload), cluster, sizes=sizes)


def report(
    plan: "Plan | DeviceMap",
    profile: "Profile",
    path: "str | os.PathLike[str]",
    *,
    devices: "Devices | None" = None,
    comparison: "Comparison | None" = None,
    title: str = "",
) -> None:
    """Write a plan as one HTML page: devices, timeline, module tree, transfers, reasons, assumptions.

    `comparison`: from `compare`, shown as a table. `devices`: as in `plan`; None means the plan's own. The page of
    `autoshard report` prices other sizes as well. Raises `SpecError` if `path` can't be written.
    """
    from autoshard.api import estimate
    from autoshard.common.files import check_writable, write_whole
    from autoshard.report.page import make_page

    check_writable(path)
    plan = as_plan(plan, profile)
    cluster = cluster_for(plan if devices is None else devices)
    study = _study(plan, profile, cluster)
    rows = (*comparison.alternatives, *comparison.peers) if comparison is not None else ()
    own = estimate(plan, profile, cluster) if study is None else study.estimate
    page = make_page(plan, own, profile, cluster, title=title, alternatives=rows, study=study)
    write_whole(path, page)
