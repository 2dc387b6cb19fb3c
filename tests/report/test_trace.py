"""Traces: valid by the format's schema, and the events of the timeline in microseconds."""

import json

import jsonschema
import pytest

from autoshard.report.trace import trace_document
from autoshard.timeline import events
from tests.timeline.test_timeline import made

SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["ph", "name", "pid", "tid"],
                "properties": {
                    "ph": {"enum": ["X", "M"]},
                    "name": {"type": "string", "minLength": 1},
                    "pid": {"type": "integer"},
                    "tid": {"type": "integer"},
                    "ts": {"type": "number", "minimum": 0},
                    "dur": {"type": "number", "minimum": 0},
                    "args": {"type": "object"},
                },
                "if": {"properties": {"ph": {"const": "X"}}},
                "then": {"required": ["ts", "dur", "cat"]},
                "else": {"required": ["args"]},
            },
        },
    },
}
"""What "Trace Event Format" asks of complete and metadata events in an object."""


@pytest.mark.parametrize("case", ["training", "cuts", "streamed to two"])
def test_a_trace_is_valid_and_has_every_event(case):
    plan, profile, cluster = made(case)
    found = events(plan, profile, cluster)
    document = json.loads(json.dumps(trace_document(found, cluster, title="net"), allow_nan=False))
    jsonschema.validate(document, SCHEMA)
    rows = [row for row in document["traceEvents"] if row["ph"] == "X"]
    assert len(rows) == len(found)
    for row, event in zip(rows, found, strict=True):
        assert (row["ts"], row["cat"]) == (event.begin_seconds * 1e6, event.kind)
        assert row["dur"] == pytest.approx((event.end_seconds - event.begin_seconds) * 1e6)
    threads = {(row["pid"], row["tid"]): row["args"]["name"] for row in document["traceEvents"]
               if row["name"] == "thread_name"}  # fmt: skip
    assert {threads[row["pid"], row["tid"]].removeprefix("to ") for row in rows} == {event.device for event in found}
