"""Traces: as the format has them, and the events of the timeline in microseconds."""

import json

import pytest
import torch

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.engine.events import events
from autoshard.plan.workload import Workload
from autoshard.report.trace import trace_document
from autoshard.verify.measured import measure_pass, measuring
from tests.engine.test_events import Net, made
from tests.hooks import is_hooked


def check_format(document):
    """What "Trace Event Format" asks of complete and metadata events in an object."""
    assert document["displayTimeUnit"] in ("ms", "ns")
    for row in document["traceEvents"]:
        assert row["ph"] in ("X", "M") and row["name"] and {type(row["pid"]), type(row["tid"])} == {int}
        assert row["args"] is not None and (row["ph"] == "M" or (row["ts"] >= 0 and row["dur"] >= 0 and row["cat"]))


@pytest.mark.parametrize("case", ["training", "unequal cuts", "offloaded to two"])
def test_a_trace_is_valid_and_has_every_event(case):
    plan, profile, cluster = made(case)
    found = events(plan, profile, cluster)
    document = json.loads(json.dumps(trace_document(found, cluster, title="net"), allow_nan=False))
    check_format(document)
    rows = [row for row in document["traceEvents"] if row["ph"] == "X"]
    assert len(rows) == len(found)
    for row, event in zip(rows, found, strict=True):
        assert (row["ts"], row["cat"]) == (event.begin_seconds * 1e6, event.kind)
        assert row["dur"] == pytest.approx((event.end_seconds - event.begin_seconds) * 1e6)
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in document["traceEvents"]
               if row["name"] == "thread_name"}  # fmt: skip
    assert {threads[row["pid"], row["tid"]].removeprefix("to ") for row in rows} == {event.device for event in found}


@pytest.mark.parametrize("training", [False, True])
def test_a_measured_pass_stands_beside_the_predicted_one(training):
    inputs, workload = torch.zeros(4, 8, dtype=torch.long), Workload(mode="training" if training else "inference")
    profile, cluster = autoshard.profile(Net().train(training), inputs, workload=workload), parse_devices("cpu=1GiB")
    plan = autoshard.plan(Net().train(training), cluster, inputs=inputs, workload=workload)
    taken = measure_pass(Net(), inputs, workload, plan)
    kinds = {"forward", "backward"} if training else {"forward"}
    assert {(event.kind, event.label) for event in taken} >= {(kind, "ups.2") for kind in kinds}
    assert {event.kind for event in taken} == kinds and {event.device for event in taken} == {"cpu"}
    assert all(0 <= event.begin_seconds < event.end_seconds for event in taken)
    forward = [event for event in taken if event.kind == "forward"]
    assert [event.label for event in forward][:3] == ["embed", "ups.0", "downs.0"]
    document = trace_document(events(plan, profile, cluster), cluster, measured=taken)
    check_format(json.loads(json.dumps(document)))
    names = {row["args"]["name"] for row in document["traceEvents"] if row["name"] == "process_name"}
    assert names == {"host0, predicted", "host0, measured"}


def test_measuring_leaves_no_hooks_and_sees_devices_apart():
    model = Net()
    inputs = torch.zeros(4, 8, dtype=torch.long)
    with measuring(model) as taken:
        model(inputs)
    seen = len(taken())
    model(inputs)
    assert len(taken()) == seen == 10
    assert not is_hooked(model)
