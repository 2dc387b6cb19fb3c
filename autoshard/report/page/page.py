"""Put the page together: figures as the template shows them, and the data that its script draws from."""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, Estimate
from autoshard.engine.events import events
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.figures import speed
from autoshard.report.layout import format_number
from autoshard.report.page.assumptions import assumptions
from autoshard.report.page.colours import KINDS, PARTS, device_colours
from autoshard.report.page.lanes import timeline_data
from autoshard.report.page.sizes import cell_data, grids, unit
from autoshard.report.page.summary import key_figures, sentences, verdict
from autoshard.report.page.tree import module_tree
from autoshard.report.rows import device_parts, device_runs, tied_modules, transfer_rows
from autoshard.report.terminal import describe_workload
from autoshard.search.sizes import Cell
from autoshard.strategies.compare import Alternative

if TYPE_CHECKING:
    from jinja2 import Template


def make_page(
    plan: Plan,
    estimate: Estimate,
    profile: Profile,
    cluster: Cluster,
    *,
    title: str = "",
    notes: Iterable[str] = (),
    alternatives: Sequence[Alternative] = (),
    cells: Sequence[Cell] = (),
) -> str:
    """Return one HTML document that needs no other file and no network.

    `alternatives`: the best plan of every strategy, this one among them. `cells`: of other sizes and devices, the
    plan's own first.
    """
    return render(
        "page.html.j2", plan, estimate, profile, cluster, title=title, notes=notes, cells=cells,
        scripts=("page.js", "tree.js", "sizes.js"),
        timeline=timeline_data(events(plan, profile, cluster), cluster.names, estimate.recorded_seconds),
        subtitle=f"{plan.strategy}, for {plan.objective}",
        figures=key_figures(plan, estimate, profile),
        sentences=sentences(plan, estimate, profile),
        lanes=_lanes(estimate, cluster),
        legend=[part for part in PARTS if any(device_parts(device)[part] for device in estimate.devices)],
        part_colours=PARTS,
        device_colours=device_colours([device.name for device in cluster.devices]),
        tree=module_tree(plan, profile),
        tied=tied_modules(profile),
        pinned=set(plan.pins),
        transfers=_transfers(estimate),
        alternatives=sorted(alternatives, key=lambda one: one.value),
        chosen=next((one.name for one in alternatives if _decisions(one.plan) == _decisions(plan)), ""),
    )  # fmt: skip


def render(
    name: str, plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, *, title: str, notes: Iterable[str],
    timeline: Mapping[str, Any], cells: Sequence[Cell], scripts: Sequence[str], **more: Any,
) -> str:  # fmt: skip
    """Fill a template with what every page shows, and with `more`."""
    data = {"timeline": timeline, "kinds": KINDS, "cells": cell_data(cells)}
    return _template(name).render(
        title=title or profile.modules[0].class_name,
        workload=describe_workload(plan.workload, profile.dtype),
        plan=plan,
        estimate=estimate,
        profile=profile,
        verdict=verdict(estimate),
        assumptions=assumptions(plan, estimate, profile, cluster, notes),
        grids=grids(cells) if len(cells) > 1 else [],
        unit=unit(plan.workload),
        speed=speed,
        plan_json=plan.to_json(),
        data=_embedded(data),
        style=_page_file("page.css"),
        script="\n".join(map(_page_file, scripts)),
        **more,
    )


def _template(name: str) -> "Template":
    """The template of a page, with the filters that write figures."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("autoshard.report.page", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "number": format_number}
    return environment.get_template(name)


def _embedded(data: Any) -> str:
    """JSON that can stand inside a script element: no "</" in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _page_file(name: str) -> str:
    """The text of a file of the page."""
    return resources.files("autoshard.report.page").joinpath(name).read_text(encoding="utf-8")


def _lanes(estimate: Estimate, cluster: Cluster) -> list[dict[str, Any]]:
    """One lane per device, equal neighbours folded: what fills its memory, as shares of the lane."""
    lanes = []
    for device, label in device_runs(estimate.devices):
        full = max(device.memory_bytes, device.peak_bytes, 1)
        parts = [
            {"name": name, "nbytes": nbytes, "percent": 100 * nbytes / full}
            for name, nbytes in device_parts(device).items() if nbytes
        ]  # fmt: skip
        lanes.append(
            {
                "label": label,
                "name": device.name,
                "hardware": cluster.device(device.name).kind,
                "device": device,
                "parts": parts,
                "limit_percent": 100 * device.memory_bytes / full,
                "words": _words(device),
            }
        )
    return lanes


def _words(device: DeviceEstimate) -> str:
    """What fills a device, for those who don't see the bar."""
    parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in device_parts(device).items() if nbytes]
    rest = f"free {format_bytes(device.free_bytes)}" if device.free_bytes >= 0 else "over full"
    return ", ".join([*parts, rest])


def _decisions(plan: Plan | None) -> tuple[object, ...]:
    """What makes two plans the same."""
    if plan is None:
        return ()
    order = plan.mesh, plan.stages, plan.num_microbatches, plan.schedule
    return dict(plan.placements), plan.cuts, dict(plan.streamed), *order


def _transfers(estimate: Estimate) -> dict[str, Any]:
    """Rows of what moves per pass, with the largest for the bars."""
    rows = transfer_rows([transfer for transfer in estimate.transfers if transfer.nbytes])
    links = estimate.streaming.links if estimate.streaming is not None else ()
    return {
        "rows": rows,
        "links": links,
        "most": max([row.nbytes for row in rows] + [link.nbytes for link in links], default=0),
    }
