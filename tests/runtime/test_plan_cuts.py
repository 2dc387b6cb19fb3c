"""Plans with cuts as files: what is written comes back, and nothing else is read."""

import dataclasses
import json
import typing

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import PlanError
from autoshard.plan import Plan, PlanDevice
from autoshard.plan.sharding import Action, Cut, Part, Results, Scale, Shard, Whole, coordinates_of, is_axis
from autoshard.plan.workload import Workload
from tests.runtime.test_plan_file import JSON
from tests.runtime.test_plan_file import example as example_without_cuts

HEADS = Cut(
    blocks=("layers.0", "layers.1"),
    size=8,
    shares=(5, 3),
    shards=(Shard(name="a.q.weight", dim=0, axis="(*8x4x64|*8x64|512)"), Shard(name="a.o.weight", dim=1, axis="*8x4")),
    actions=(
        Action(kind="reduce", module="a.o", function="linear", occurrence=0, addend="0.2"),
        Action(kind="slice", module="a", argument="1.mask", dim=1, axis="*8"),
    ),
    scales=(Scale(module="a", attribute="config.count", value=32, local=(20, 12)),),
    summed=("a.norm.weight",),
    title="8 heads",
    proof="on random weights",
)
PLAIN = Cut(blocks=("",), size=2, shares=(1, 1), shards=(Shard(name="table", dim=0, axis="*2"),))


def example() -> Plan:
    return Plan(
        strategy="column-parallel",
        objective="latency",
        workload=Workload(),
        devices=(PlanDevice(name="cuda:0", memory_bytes=1), PlanDevice(name="cuda:1", memory_bytes=1)),
        placements={"": "cuda:0"},
        cuts=(HEADS, PLAIN),
        whole=(Whole(blocks=("layers.0",), names=("a.r.weight",), reason="sort in layers.0.a mixes along it"),),
        results=(Results(modules=("layers",), tensors=("0:3",), parts=(Part(path="1", dim=2, axis="*8x4", cut=0),)),),
    )


def test_round_trip():
    text = example().to_json()
    assert Plan.from_json(text) == example()
    assert Plan.from_json(text).to_json() == text


def test_plans_without_cuts_look_as_before():
    data = json.loads(example_without_cuts().to_json())
    assert "cuts" not in data and "whole" not in data
    assert Plan.from_json(json.dumps(data)).cuts == ()
    assert Plan.from_json(json.dumps(data | {"cuts": [], "whole": []})) == example_without_cuts()


def test_no_device_map_says_what_is_cut():
    with pytest.raises(PlanError, match="cuts parameters over 2 devices"):
        _ = example().device_map


def test_fields_that_have_a_default_may_be_missing():
    data = json.loads(example().to_json())
    del data["cuts"][1]["scales"], data["cuts"][0]["actions"][0]["argument"]
    assert Plan.from_json(json.dumps(data)) == example()


@pytest.mark.parametrize(
    "path, value, words",
    [
        (("shares",), [5, 4], r"cuts\[0\]\.shares"),
        (("shares",), [8], "2 positive shares"),
        (("shares",), [8, 0], "2 positive shares"),
        (("shares", 0), True, r"shares\[0\].*integer"),
        (("shares", 0), 5.0, r"shares\[0\].*integer"),
        (("blocks",), [], "blocks"),
        (("blocks", 1), "layers.0", "different module paths"),
        (("size",), 1, "more than one"),
        (("shards",), [], "what is cut"),
        (("shards", 0, "axis"), "*4x64", r"\*8"),
        (("shards", 0, "dim"), -1, "dimension"),
        (("shards", 1, "name"), "a.q.weight", "nothing else cuts"),
        (("actions", 0, "kind"), "jump", "one of reduce"),
        (("actions", 1, "axis"), "8", "axis"),
        (("actions", 1, "surprise"), 1, "surprise"),
        (("scales", 0, "local"), [20], "2 numbers"),
        (("title",), None, "a string"),
        (("training",), 1, "true or false"),
        (("summed",), "a.norm.weight", "a list"),
    ],
)
def test_damage_is_named(path, value, words):
    data = json.loads(example().to_json())
    place = data["cuts"][0]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    "field, value, words", [("cut", 2, "one of the cuts"), ("axis", "*4", r"\*8 in it"), ("dim", -1, "from 0")]
)
def test_damage_of_results_is_named(field, value, words):
    data = json.loads(example().to_json())
    data["results"][0]["parts"][0][field] = value
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps(data))


def test_cuts_and_placements_agree():
    data = json.loads(example().to_json())
    for placements in ({"": "cuda:1"}, {"layers": "cuda:0", "table": "cuda:1"}):
        with pytest.raises(PlanError, match="as parameters are cut"):
            Plan.from_json(json.dumps(data | {"placements": placements}))


def leaves(data, path=()):
    """Paths of everything in a document."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


PATHS = [path for part in ("cuts", "whole") for path in leaves(json.loads(example().to_json())[part], (part,))]


@given(st.sampled_from(PATHS), JSON)
def test_any_value_anywhere_is_accepted_or_refused(path, value):
    """Never another error, and what is accepted says the same when written and read again."""
    data = json.loads(example().to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    try:
        plan = Plan.from_json(json.dumps(data))
    except PlanError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return
    assert Plan.from_json(plan.to_json()) == plan


AXES = st.recursive(
    st.sampled_from(["1", "3", "64", "*8"]),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map("x".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
    ),
    max_leaves=6,
)


@given(AXES | st.text("*x()|18", max_size=8))
def test_what_is_an_axis_can_be_read(text):
    if is_axis(text, 8):
        coordinates = coordinates_of(text)
        counts = [(coordinates == index).sum() for index in range(8)]
        assert min(counts) == max(counts) > 0 and set(numpy.unique(coordinates)) <= set(range(-1, 8))


@pytest.mark.parametrize("text", ["*8x*8", "(*8|2)x*8", "8", "", "*8x", "(*8", "*8)", "x*8", "*8x0", "*8x99999999999"])
def test_what_is_no_axis(text):
    assert not is_axis(text, 8)


def test_every_field_is_read_by_its_type():
    """A new kind of field needs a reader: it knows strings, numbers, booleans, literals, tuples and dataclasses."""
    for kind in (Cut, Shard, Action, Scale, Whole, Results, Part):
        for name, hint in typing.get_type_hints(kind).items():
            while typing.get_origin(hint) is tuple:
                assert typing.get_args(hint)[1] is Ellipsis
                hint = typing.get_args(hint)[0]
            known = (
                hint in (str, int, bool) or typing.get_origin(hint) is typing.Literal or dataclasses.is_dataclass(hint)
            )
            assert known, f"{kind.__name__}.{name}: {hint}"
