"""The timeline of a pipeline on the terminal."""

import io

from rich.console import Console

from autoshard.cluster.parse import parse_devices
from autoshard.engine.estimate import Event
from autoshard.engine.pipelines import estimate_stages
from autoshard.report.document import estimate_data
from autoshard.report.pipelined import lane
from autoshard.report.terminal import print_plan
from tests.pipeline_models import Decoder, halves, plan_by_hand, profile_of


def event(kind, begin, end, microbatch=0):
    return Event(device="d", kind=kind, begin_seconds=begin, end_seconds=end, microbatch=microbatch)


def test_a_lane_shows_what_takes_most_of_each_slice():
    events = [event("forward", 0, 2), event("forward", 2, 4, 1), event("backward", 6, 9, 1), event("weight", 9, 10)]
    assert lane(events, 10.0, 10).plain == "0011..bbbw"
    assert lane(events, 10.0, 5).plain == "01.bb"
    assert lane([], 0.0, 5).plain == ""


def test_a_busy_device_looks_busy_however_short_its_events_are():
    events = [event("forward", at / 10, (at + 0.9) / 10, at % 10) for at in range(100)]
    assert lane(events, 10.0, 5).plain.count(".") == 0
    assert lane([event("forward", at, at + 0.3) for at in range(10)], 10.0, 5).plain == "....."


def test_a_plan_shows_a_lane_per_device_within_80_columns():
    profile = profile_of(Decoder(), training=True)
    plan = plan_by_hand(profile, "2xA100-40GB", halves(), schedule="1f1b")
    figures = estimate_stages(plan, profile, parse_devices("2xA100-40GB"))
    text = io.StringIO()
    print_plan(Console(file=text, width=80), plan, figures, profile)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines[lines.index("Stages  seconds and bytes of one micro-batch") :])) <= 80
    lanes = [line for line in lines if line.startswith("  cuda:") and "." in line]
    assert [line.split()[0] for line in lanes] == ["cuda:0", "cuda:1"]
    assert "1f1b, 4 micro-batches: devices wait" in text.getvalue()
    assert all(mark in lanes[0] for mark in "0123abcd")


def test_json_has_the_stages_and_leaves_events_to_the_trace():
    profile = profile_of(Decoder())
    plan = plan_by_hand(profile, "2xA100-40GB", halves())
    data = estimate_data(estimate_stages(plan, profile, parse_devices("2xA100-40GB")))
    assert "events" not in data["pipelining"]
    assert [stage["device"] for stage in data["pipelining"]["stages"]] == ["cuda:0", "cuda:1"]
