"""The page of a plan for processes: its figures are those of the terminal, --json, explain and the play."""

import io
import json
import re
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from rich.console import Console
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph
from autoshard.report.document import plan_document
from autoshard.report.explanation import explain
from autoshard.report.page import make_page
from autoshard.report.page.lanes import events_of
from autoshard.report.page.page import _held
from autoshard.report.summary import time_rows
from autoshard.report.terminal import print_plan
from autoshard.report.trace import trace_document
from autoshard.search.limits import Asked
from autoshard.search.processes import plan_processes
from autoshard.search.study import study
from tests.report.test_page import check_page
from tests.search.models import traced

CASES = {
    "sharded": ("8xA100-40GB", {}, Asked(mesh={"fsdp": 8})),
    "tensor": ("8xA100-40GB", {}, Asked(mesh={"fsdp": 4, "tp": 2}, micro_batch=2)),
    "pipeline": ("8xA100-40GB", {}, Asked(mesh={"fsdp": 2, "pp": 4}, micro_batch=2, schedule="1f1b")),
    "interleaved": ("4xA100-40GB", {}, Asked(mesh={"pp": 4}, micro_batch=4, schedule="interleaved")),
    "answer": ("4xA100-40GB", {"training": False, "new_tokens": 100}, Asked(mesh={"tp": 2, "pp": 2})),
    "forward": ("4xA100-40GB", {"training": False}, Asked(mesh={"dp": 4})),
}
SLOW = ("sharded", "tensor", "interleaved")


def page_of(found, profile, cluster) -> str:
    return make_page(found.plan, found.estimate, profile, cluster, title="decoder", study=found)


@pytest.fixture(
    scope="module",
    params=["pipeline", "answer", "forward", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)],
)
def case(request):
    """A study of a plan, its profile and cluster, and its page."""
    spec, changes, given = CASES[request.param]
    work, cluster = traced(**changes), parse_devices(spec)
    plan, _, _ = plan_processes(work, cluster, given)
    found = study(plan, work, cluster)
    profile = profile_graph(work.graph, work.workload)
    return found, profile, cluster, page_of(found, profile, cluster)


def test_a_page_is_whole_and_fetches_nothing(case):
    check_page(case[3])
    assert len(case[3]) < 1_500_000


def test_the_tree_names_the_ranks_of_a_stage_and_answers_have_no_schedule(case):
    found, _, _, text = case
    tree = text[text.index('id="model"') : text.index('id="why"')]
    assert " peak" not in tree and " saved" not in tree and f"the {len(found.plan.devices)} ranks of" in tree
    each = len(found.plan.devices) // found.own.recipe.pp
    if found.own.recipe.pp > 1:
        assert (f"cuda:0 and {each - 1} more" in tree) == (each > 1)
        assert f"</span>{len(found.plan.devices)} devices" in tree
    if found.plan.workload.new_tokens:
        assert found.plan.schedule == "none" and "gpipe" not in text


def test_terminal_json_page_and_explain_say_the_same(case):
    found, profile, cluster, text = case
    plan, estimate = found.plan, found.estimate
    screen = io.StringIO()
    print_plan(Console(file=screen, width=160), replace(plan, reasons=found.reasons), estimate, profile)
    printed, document = screen.getvalue(), plan_document(plan, estimate, profile)["estimate"]
    said = explain(plan, profile, cluster, "", found)
    explained = " ".join(said.sentences)
    seconds = format_seconds(document["latency_seconds"])
    assert all(seconds in shown for shown in (printed, text)) and said.chosen is not None
    assert said.chosen.value == document["latency_seconds"]
    for _, figure, _ in time_rows(plan, estimate, profile):
        assert figure in printed and figure in text
    fullest = max(document["devices"], key=lambda row: row["peak_bytes"])
    assert all(format_bytes(fullest["peak_bytes"]) in shown for shown in (printed, text, explained))
    if plan.workload.new_tokens:
        for name in ("prompt_seconds", "token_seconds", "latency_seconds"):
            assert format_seconds(document[name]) in printed and format_seconds(document[name]) in text
    for rank, row in zip(estimate.ranks, document["ranks"], strict=True):
        assert row["peak_bytes"] == rank.peak_bytes
        assert format_seconds(rank.compute_seconds) in text
    assert max(row.tokens_per_second for row in found.rows if row is found.own) == pytest.approx(
        document["tokens_per_second"]
    )


def test_the_timeline_ends_with_the_pass_and_its_parts_are_those_of_the_ranks(case):
    found, profile, cluster, text = case
    estimate, (played, stretch) = found.estimate, found.played()
    assert max(event.end_seconds for event in played) == pytest.approx(estimate.latency_seconds, rel=1e-6)
    assert abs(stretch - 1) < 0.05
    each = len(found.plan.devices) // found.own.recipe.pp
    network = ("gather", "reduce")
    for number in range(found.own.recipe.pp):
        name = found.plan.devices[number * each].name
        rank = next((one for one in estimate.ranks if one.first == name), None)
        if rank is None:
            continue
        own = [event for event in played if event.device == name]
        busy = sum(event.seconds for event in own if event.kind not in (*network, "exchange"))
        assert busy == pytest.approx(rank.compute_seconds, rel=0.08)
        total = rank.compute_seconds + rank.exposed_seconds + rank.idle_seconds
        assert total == pytest.approx(estimate.latency_seconds, rel=0.02)
        streams = [[s for s in own if s.kind in network], [s for s in own if s.kind not in network]]
        for stream in streams:
            for before, after in pairwise(stream):
                assert after.begin_seconds >= before.end_seconds - 1e-9
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert data["timeline"]["end"] == pytest.approx(estimate.latency_seconds)
    assert {data["timeline"]["kinds"][row[1]] for row in data["timeline"]["events"]} <= set(data["kinds"])
    rows = trace_document(events_of(found.plan, profile, cluster, found)[0], cluster)["traceEvents"]
    assert max(row["ts"] + row["dur"] for row in rows if row["ph"] == "X") == pytest.approx(
        1e6 * estimate.latency_seconds
    )


def test_memory_by_rank_adds_up_and_the_fullest_is_the_estimate_s(case):
    found, _, _, text = case
    estimate = found.estimate
    assert sum(rank.devices for rank in estimate.ranks) == len(found.plan.devices)
    for rank in estimate.ranks:
        assert max(sum(kinds.values()) for _, kinds in _held(rank)) == rank.peak_bytes
        assert format_bytes(rank.peak_bytes) in text
    peaks = {device.peak_bytes for device in estimate.devices if device.peak_bytes}
    assert peaks == {rank.peak_bytes for rank in estimate.ranks}
    assert len(estimate.curve) >= 2 and estimate.curve in [rank.curve for rank in estimate.ranks]


@pytest.mark.slow
def test_other_sizes_are_what_would_be_planned_for_them():
    work, cluster = traced(), parse_devices("8xA100-40GB")
    plan, _, _ = plan_processes(work, cluster, Asked())
    found = study(plan, work, cluster)
    own = next(cell for cell in found.cells if cell.own)
    assert own.seconds == pytest.approx(found.estimate.latency_seconds)
    for cell in found.cells:
        other, searched, _ = plan_processes(
            replace(work, samples=cell.batch), parse_devices(f"{cell.devices}xA100-40GB"), Asked()
        )
        assert searched.best is not None and cell.seconds == pytest.approx(searched.best.seconds), cell
        assert other.mesh is not None and cell.mesh.count("=") == sum(n > 1 for n in other.mesh.degrees.values())
    assert len(found.cells) > 4 and found.changes


def test_a_full_device_is_amber_and_what_does_not_fit_says_what_to_change():
    work, cluster = traced(), parse_devices("8xA100-40GB")
    plan, _, _ = plan_processes(work, cluster, Asked(mesh={"fsdp": 8}, micro_batch=4))
    peak = max(device.peak_bytes for device in study(plan, work, cluster, sizes=False).estimate.devices)
    for memory, kind, words in ((peak * 1.03, "amber", "full"), (peak * 0.97, "bad", "Does not fit")):
        less = {device.name: int(memory) for device in plan.devices}
        tight = replace(plan, devices=tuple(replace(one, memory_bytes=int(memory)) for one in plan.devices))
        found = study(tight, work, cluster.with_memory(less), sizes=False)
        text = page_of(found, profile_graph(work.graph, work.workload), cluster.with_memory(less))
        assert f'<p class="verdict {kind}">' in text and words in text
        assert "What to change:" in text and "it fits: " in found.to_fit
        assert found.estimate.fits == (kind == "amber")


def test_the_same_from_python(tmp_path):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(8)])
    inputs, workload = torch.empty(64, 4096, device="meta"), Workload(batch_size=4096, mode="training")
    plan = autoshard.plan(model, "4xA100-40GB", inputs=inputs, mesh={"fsdp": 4}, workload=workload)
    profile = autoshard.profile(model, inputs, workload=workload)
    seconds = autoshard.estimate(plan, profile).latency_seconds
    autoshard.report(plan, profile, tmp_path / "page.html")
    assert format_seconds(seconds) in (tmp_path / "page.html").read_text()
    said = autoshard.explain(plan, profile)
    assert said.chosen is not None and said.chosen.value == seconds and "torchrun" in str(said)
    compared = autoshard.compare(model, "4xA100-40GB", inputs=inputs, workload=workload)
    assert any(row.name.startswith("fsdp: fsdp=") and row.estimate is not None for row in compared.alternatives)
