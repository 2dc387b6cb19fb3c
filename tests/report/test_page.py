"""The page without a browser: one file, its figures those of the estimate, repeated blocks folded, names escaped."""

import io
import json
import re
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.events import events
from autoshard.report.document import estimate_data
from autoshard.report.page import make_page
from autoshard.report.page.lanes import events_of, timeline_data
from autoshard.report.page.page import _places_in, _transfers
from autoshard.report.page.places import places_of
from autoshard.report.rows import module_tree, transfer_rows
from autoshard.report.summary import verdict
from autoshard.report.terminal import print_plan
from autoshard.search.comparing import compare_all
from autoshard.search.request import Request
from autoshard.strategies.compare import Alternative
from tests.engine.test_events import CASES, made

VOID = {"meta", "link", "br", "input"}


class Structure(HTMLParser):
    """Open elements, ids and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids += [given["id"]] if "id" in given else []
        for name in ("src", "href"):
            if name in given and not given[name].startswith(("#", "data:")):
                self.fetched.append(given[name])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page(case: str, **more) -> str:
    plan, profile, cluster = made(case)
    return make_page(plan, autoshard.estimate(plan, profile, cluster), profile, cluster, **more)


def check_page(text: str) -> None:
    """Elements close, ids differ, links lead somewhere in the page, and nothing is fetched."""
    structure = Structure()
    structure.feed(text)
    assert not structure.open and not structure.fetched
    assert len(structure.ids) == len(set(structure.ids))
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "") and "https:" not in text
    assert set(re.findall(r'href="#([^"]*)"', text)) <= set(structure.ids)


@pytest.mark.parametrize("case", CASES)
def test_a_page_is_whole_and_fetches_nothing(case):
    check_page(page(case))


def test_figures_are_those_of_the_estimate():
    plan, profile, cluster = made("placements")
    estimate = autoshard.estimate(plan, profile, cluster)
    text = make_page(plan, estimate, profile, cluster, title="net")
    assert format_seconds(estimate.latency_seconds) in text
    for device in estimate.devices:
        if device.peak_bytes:
            assert f"{format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}" in text
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)[1])
    assert len(data["timeline"]["events"]) == len(events(plan, profile, cluster))
    assert max(row[3] for row in data["timeline"]["events"]) == pytest.approx(estimate.latency_seconds, rel=1e-8)


def test_what_is_moved_counts_the_parameters_that_are_brought():
    plan, profile, cluster = made("offloaded")
    estimate = autoshard.estimate(plan, profile, cluster)
    assert estimate.streaming is not None and estimate.moved_bytes >= estimate.streaming.nbytes > 0
    text = make_page(plan, estimate, profile, cluster)
    assert f"<dt>Moved per pass</dt><dd><b>{format_bytes(estimate.moved_bytes)}</b>" in text


def test_copies_are_not_called_waiting_and_brought_bytes_add_up_to_what_is_moved():
    plan, profile, cluster = made("offloaded")
    estimate = autoshard.estimate(plan, profile, cluster)
    assert "; waits " not in page("placements") and "; copies tensors " in page("placements")
    assert estimate.streaming is not None
    twice = replace(estimate, token_seconds=1.0)  # a prompt and a token are two passes
    for row, link in zip(
        _transfers(twice).rows[-len(estimate.streaming.links) :], estimate.streaming.links, strict=True
    ):
        assert row[3] == format_bytes(2 * link.nbytes)


def test_the_name_of_a_button_has_its_words_and_what_to_change_is_above_the_tree():
    text = page("placements", alternatives=[Alternative(name="other", refused="no")])
    for label, words in re.findall(r'<button[^>]*aria-label="([^"]*)">[^\w]*([^<]*)<', text):
        assert words in label
    assert text.index('id="timeline"') < text.index('id="alternatives"') < text.index('id="model"')
    assert "this plan</td>" in text  # also where no strategy gives it


def test_what_users_name_is_escaped():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("</script><script>alert(1)</script>", nn.Linear(4, 4))

        def forward(self, x):
            return next(self.children())(x)

    x = torch.zeros(2, 4)
    plan = autoshard.plan(Odd(), "2xT4", inputs=x)
    profile, cluster = autoshard.profile(Odd(), x), parse_devices("2xT4")
    text = make_page(plan, autoshard.estimate(plan, profile, cluster), profile, cluster, title="<b>&")
    assert "<script>alert" not in text and "&lt;b&gt;&amp;" in text


def test_equal_blocks_on_one_device_are_one_line():
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    x = torch.zeros(2, 8)
    profile = autoshard.profile(model, x)
    plan = autoshard.Plan.from_device_map({str(i): i // 4 for i in range(6)}, profile)
    places = places_of(plan, profile)
    rows = module_tree(profile, partial(_places_in, plan, places)).children
    assert [(node.label, node.count, node.nbytes) for node in rows] == [("0-3", 4, 288), ("4-5", 2, 288)]
    assert places.devices["4"] == {"cuda:1": 288}


class Scaled(nn.Module):
    """A parameter of its own beside its modules."""

    def __init__(self):
        super().__init__()
        self.scale, self.body, self.head = nn.Parameter(torch.ones(8)), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.body(x) * self.scale)


def test_a_parameter_of_the_root_is_in_the_tree_and_unused_devices_are_not_counted():
    x, cluster = torch.zeros(2, 8), parse_devices("3xT4")
    profile = autoshard.profile(Scaled(), x)
    plan = autoshard.Plan.from_device_map({"scale": 1, "body": 1, "head": 2}, profile)
    rows = module_tree(profile).children
    assert (rows[0].label, rows[0].module.class_name, rows[0].nbytes) == ("scale", "parameter", 32)
    assert places_of(plan, profile).devices["scale"] == {"cuda:1": 32}
    assert sum(node.nbytes for node in rows) == profile.parameter_bytes
    estimate = autoshard.estimate(plan, profile, cluster)
    assert verdict(plan, estimate)[1] == "Fits on 2 of 3 devices"
    routes = {row.largest for row in transfer_rows(estimate.transfers)}
    assert routes == {"(model) -> head", "head -> (outputs)"}


def test_of_a_long_timeline_the_longest_events_are_drawn():
    plan, profile, cluster = made("training")
    every, _ = events_of(plan, profile, cluster, None)
    few, said = events_of(plan, profile, cluster, None, most=5)
    shortest = min(event.end_seconds - event.begin_seconds for event in few)
    assert 5 <= len(few) < len(every) and f"Of {len(every)} events the {len(few)} longest are drawn." == said
    assert all(event in few or event.end_seconds - event.begin_seconds <= shortest for event in every)
    assert timeline_data(every, cluster.names, 0.0)["lanes"][0] == cluster.names[0]


def test_alternatives_are_listed_best_first_and_this_plan_is_marked():
    model, x, cluster = nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), torch.zeros(2, 64), parse_devices("2xT4")
    profile = autoshard.profile(model, x)
    request = Request(model=model, inputs=x, profile=profile, cluster=cluster)
    found = compare_all(request)
    plan = found.chosen.plan
    rows = (*found.alternatives, *found.peers)
    estimate = autoshard.estimate(plan, profile, cluster)
    text = make_page(plan, estimate, profile, cluster, alternatives=rows)
    assert text.count('<tr class="chosen">') == 1 and all(row.name in text for row in rows)


def test_the_page_says_what_is_cut():
    assert "cut over 2" in page("unequal cuts") and "with what it is tied to" in page("unequal cuts")
    assert "if passes overlap" not in page("training")


def test_a_pipeline_is_printed_within_80_columns_and_its_events_are_left_to_the_trace():
    plan, profile, cluster = made("pipeline")
    estimate, text = autoshard.estimate(plan, profile, cluster), io.StringIO()
    print_plan(Console(file=text, width=80), plan, estimate, profile)
    assert max(map(len, text.getvalue().splitlines())) <= 80 and estimate.pipelining is not None
    assert f"{estimate.pipelining.bubble:.0%}  of the time, for other stages" in text.getvalue()
    for stage in estimate.pipelining.stages:
        assert format_seconds(stage.forward_seconds) in text.getvalue()
    data = estimate_data(estimate)["pipelining"]
    assert "events" not in data and [stage["device"] for stage in data["stages"]] == ["cuda:0", "cuda:1"]
