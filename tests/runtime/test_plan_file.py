"""Plans as files, also those with cuts: what is written comes back, and nothing else is read."""

import dataclasses
import json
import typing

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import autoshard
from autoshard.errors import PlanError, SpecError
from autoshard.plan import PLAN_VERSION, Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.sharding import Action, Cut, Part, Results, Scale, Shard, Whole, coordinates_of, is_axis
from autoshard.plan.workload import Workload
from tests.blocks import Block

NAMES = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


PLACED = Plan(
    strategy="balanced",
    objective="latency",
    workload=Workload(batch_size=4, sequence_length=128, mode="training"),
    devices=(
        PlanDevice(name="cuda:0", memory_bytes=80 * 10**9, kind="H100-SXM"),
        PlanDevice(name="cuda:1", memory_bytes=24 * 2**30, host="host1"),
    ),
    placements={"embed": "cuda:0", "layers.0": "cuda:0", "layers.1": "cuda:1"},
    mixed_device=("layers",),
    written_back=("layers.1",),
    reasons=("because of ‘unicode’ \U0001f600",),
    fingerprint="ab" * 32,
    pins={"embed": "cuda:0"},
)
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
CUT = Plan(
    strategy="column-parallel",
    objective="latency",
    workload=Workload(),
    devices=(PlanDevice(name="cuda:0", memory_bytes=1), PlanDevice(name="cuda:1", memory_bytes=1)),
    placements={"": "cuda:0"},
    cuts=(HEADS, PLAIN),
    whole=(Whole(blocks=("layers.0",), names=("a.r.weight",), reason="sort in layers.0.a mixes along it"),),
    results=(Results(modules=("layers",), tensors=("0:3",), parts=(Part(path="1", dim=2, axis="*8x4", cut=0),)),),
)


MESHED = Plan(
    strategy="pipeline",
    objective="throughput",
    workload=Workload(batch_size=8),
    devices=tuple(PlanDevice(name=f"cuda:{i}", memory_bytes=1 << 30) for i in range(4)),
    placements={"embed": "cuda:0", "layers.0": "cuda:0", "layers.1": "cuda:1", "head": "cuda:1"},
    mesh=Mesh(dp=2, pp=2, shares=(2, 1)),
    stages=(Stage(paths=("embed", "layers.0")), Stage(paths=("layers.1", "head"), recompute=True)),
    batch=BatchAxis(
        size=8,
        inputs=(BatchInput(path="input_ids", dim=0, axis="*8"),),
        outputs=(BatchOutput(path="loss", how="mean"), BatchOutput(path="logits", how="cat", axis="*8x3")),
        whole=("position_ids",),
        proof="by its axes",
    ),
    num_microbatches=4,
    schedule="1f1b",
)


@pytest.mark.parametrize("plan", [PLACED, CUT, MESHED], ids=["placed", "cut", "meshed"])
def test_round_trip_in_text_and_file(plan, tmp_path):
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert list(Plan.load(tmp_path / "plan.json").placements) == list(plan.placements)  # the order is kept


def test_plans_without_cuts_look_as_before():
    data = json.loads(PLACED.to_json())
    assert "cuts" not in data and "whole" not in data
    assert Plan.from_json(json.dumps(data | {"cuts": [], "whole": []})) == PLACED


def test_fields_that_have_a_default_may_be_missing():
    data = json.loads(CUT.to_json())
    del data["cuts"][1]["scales"], data["cuts"][0]["actions"][0]["argument"]
    assert Plan.from_json(json.dumps(data)) == CUT


def test_no_device_map_says_what_is_cut():
    with pytest.raises(PlanError, match="cuts parameters over 2 devices"):
        _ = CUT.device_map


@given(
    st.dictionaries(NAMES, st.sampled_from(["cuda:0", "cpu", "xpu:3"]), min_size=1, max_size=5),
    st.lists(st.text(max_size=8), max_size=3),
    st.integers(1, 64),
)
def test_any_plan_round_trips(placements, reasons, count):
    plan = Plan.from_device_map(placements)
    plan = Plan(
        **{**{f: getattr(plan, f) for f in Plan.__slots__}, "reasons": tuple(reasons), "num_microbatches": count}
    )
    assert Plan.from_json(plan.to_json()) == plan


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_any_file_is_a_plan_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert "\n" not in str(caught.value)


@given(JSON)
def test_any_json_is_refused(data):
    with pytest.raises(PlanError):
        Plan.from_json(json.dumps(data))


def leaves(data, path=()):
    """Paths of everything in a document."""
    yield path
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, item in items:
        yield from leaves(item, (*path, key))


def changed(plan, path, value):
    """The data of a plan, of which one place has another value."""
    data = json.loads(plan.to_json())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return data


PLACES = [(PLACED, path) for path in leaves(json.loads(PLACED.to_json())) if path]
PLACES += [
    (plan, path)
    for plan, parts in ((CUT, ("cuts", "whole")), (MESHED, ("mesh", "stages", "batch")))
    for part in parts
    for path in leaves(json.loads(plan.to_json())[part], (part,))
]


@settings(max_examples=150)
@given(st.sampled_from(PLACES), JSON)
def test_any_value_anywhere_is_accepted_or_refused(place, value):
    """Never another error, and what is accepted says the same when written and read again."""
    data = changed(*place, value)
    try:
        plan = Plan.from_json(json.dumps(data))
    except PlanError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return
    assert Plan.from_json(plan.to_json()) == plan
    assert place[0] is not PLACED or json.loads(plan.to_json()) == json.loads(json.dumps(data))


@given(st.integers(0, len(PLACED.to_json().rstrip()) - 1))
def test_every_cut_file_is_refused(length):
    with pytest.raises(PlanError):
        Plan.from_json(PLACED.to_json()[:length])


FIRST = ("cuts", 0)


@pytest.mark.parametrize(
    ("plan", "path", "value", "words"),
    [
        (PLACED, ("version",), PLAN_VERSION + 1, "newer"),
        (PLACED, ("surprise",), 1, "surprise"),
        (PLACED, ("placements",), {}, "empty"),
        (PLACED, ("placements",), {"a": "cuda:0", "a.b": "cuda:1"}, "overlap"),
        (PLACED, ("placements",), {"": "cuda:0", "a": "cuda:1"}, "overlap"),
        (PLACED, ("placements",), {"a..b": "cuda:0"}, r"a\.\.b"),
        (PLACED, ("placements",), {"a": "cuda:9"}, "cuda:9"),
        (PLACED, ("placements",), {"a": ""}, "'a'"),
        (PLACED, ("devices",), [], "devices"),
        (PLACED, ("num_microbatches",), 0, "num_microbatches"),
        (PLACED, ("format",), "something", "not a plan"),
        (CUT, ("placements",), {"": "cuda:1"}, "as parameters are cut"),
        (CUT, ("placements",), {"layers": "cuda:0", "table": "cuda:1"}, "as parameters are cut"),
        (CUT, (*FIRST, "shares"), [5, 4], r"cuts\[0\]\.shares"),
        (CUT, (*FIRST, "shares"), [8, 0], "2 positive shares"),
        (CUT, (*FIRST, "shares", 0), True, r"shares\[0\].*integer"),
        (CUT, (*FIRST, "blocks"), [], "blocks"),
        (CUT, (*FIRST, "blocks", 1), "layers.0", "different module paths"),
        (CUT, (*FIRST, "size"), 1, "more than one"),
        (CUT, (*FIRST, "shards"), [], "what is cut"),
        (CUT, (*FIRST, "shards", 0, "axis"), "*4x64", r"\*8"),
        (CUT, (*FIRST, "shards", 0, "dim"), -1, "dimension"),
        (CUT, (*FIRST, "shards", 1, "name"), "a.q.weight", "nothing else cuts"),
        (CUT, (*FIRST, "actions", 0, "kind"), "jump", "one of reduce"),
        (CUT, (*FIRST, "actions", 1, "axis"), "8", "axis"),
        (CUT, (*FIRST, "scales", 0, "local"), [20], "2 numbers"),
        (CUT, (*FIRST, "title"), None, "a string"),
        (CUT, (*FIRST, "training"), 1, "true or false"),
        (CUT, ("results", 0, "parts", 0, "cut"), 2, "one of the cuts"),
        (CUT, ("results", 0, "parts", 0, "axis"), "*4", r"\*8 in it"),
        (CUT, ("results", 0, "parts", 0, "dim"), -1, "from 0"),
    ],
)
def test_damage_is_named(plan, path, value, words):
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps(changed(plan, path, value)))


@pytest.mark.parametrize("kind", ["scatter", "whole", "collect", "divide", "join", "own"])
def test_a_cut_of_tokens_has_no_tensors_of_its_own(kind):
    data = changed(CUT, (*FIRST, "actions", 0, "kind"), kind)
    data["cuts"][0]["shards"] = []
    assert not Plan.from_json(json.dumps(data)).cuts[0].shards


def test_doubled_keys_and_missing_fields_are_refused():
    text = PLACED.to_json()
    with pytest.raises(PlanError, match="twice"):
        Plan.from_json(text.replace('"embed": "cuda:0",', '"embed": "cuda:0", "embed": "cuda:1",', 1))
    data = json.loads(text)
    del data["placements"]
    with pytest.raises(PlanError, match="placements"):
        Plan.from_json(json.dumps(data))


def test_a_plan_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    PLACED.save(path)
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SpecError, match="No space left"):
        PLACED.save(path)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(SpecError, match="cannot write"):
        PLACED.save(tmp_path / "no" / "plan.json")
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")


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


def test_device_maps_as_people_write_them():
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    plan = Plan.from_device_map({"a": 0, "b": "1", "c": torch.device("cpu"), "d": "cuda:3"})
    assert plan.device_map == {"a": f"{kind}:0", "b": f"{kind}:1", "c": "cpu", "d": "cuda:3"}
    assert {device.name for device in plan.devices} == set(plan.placements.values())
    for wrong in (["a"], {3: "cpu"}, {"a": -1}, {"a": None}, {"a": True}, {"a": 1.5}, {"a": {}}, {}, {"": 0, "b": 1}):
        with pytest.raises(PlanError):
            Plan.from_device_map(wrong)


def test_mesh_numbers_its_devices():
    mesh = Mesh(dp=2, pp=3, tp=4)
    places = [(d, p, t) for d in range(2) for p in range(3) for t in range(4)]
    assert [mesh.rank(data=d, pipeline=p, tensor=t) for d, p, t in places] == [*range(24)]
    assert [mesh.place(rank) for rank in range(24)] == places


def test_a_mesh_of_version_1_is_read():
    data = json.loads(MESHED.to_json())
    data["version"], data["mesh"] = 1, {"data": 2, "pipeline": 2, "tensor": 1, "sharded": False, "shares": [2, 1]}
    assert Plan.from_json(json.dumps(data)) == MESHED
    data["mesh"], data["stages"] = {"data": 4, "pipeline": 1, "tensor": 1, "sharded": True, "shares": []}, []
    assert Plan.from_json(json.dumps(data)).mesh == Mesh(fsdp=4)


def test_names_of_version_2_are_read():
    offloaded = dataclasses.replace(PLACED, offloaded={"head": "cpu"})
    data = json.loads(offloaded.to_json())
    data["version"], data["streamed"], data["aligned"] = 2, data.pop("offloaded"), data.pop("mixed_device")
    assert Plan.from_json(json.dumps(data)) == offloaded
    entering = dataclasses.replace(HEADS, actions=(Action(kind="copy_to", module="a"),))
    text = dataclasses.replace(CUT, cuts=(entering, PLAIN)).to_json().replace('"copy_to"', '"enter"')
    assert Plan.from_json(json.dumps({**json.loads(text), "version": 2})).cuts[0] == entering


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data["mesh"].update(dp=3), "a product of 4"),
        (lambda data: data["mesh"].update(shares=[1]), "mesh.shares"),
        (lambda data: data["batch"].update(inputs=[]), "what is divided"),
        (lambda data: data["batch"]["inputs"][0].update(axis="*9"), "batch.axis"),
        (lambda data: data["batch"]["outputs"][0].update(how="median"), "one of cat"),
        (lambda data: data["stages"].pop(), "paths of the placements"),
        (lambda data: data["stages"][1]["paths"].append("embed"), "different paths"),
        (lambda data: data["stages"].append({"paths": []}), "multiple of 2"),
    ],
)
def test_a_damaged_plan_is_refused(change, words):
    data = json.loads(MESHED.to_json())
    change(data)
    with pytest.raises(PlanError, match=words):
        Plan.from_json(json.dumps(data))


STRATEGIES = ("auto", "balanced", "sequential", "pipeline", "data-parallel", "column-parallel")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plans_of_all_strategies_are_applied_from_files(strategy):
    model = torch.nn.Sequential(*(Block(16) for _ in range(4)))
    x, devices = torch.randn(4, 16), {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    workload = Workload(batch_size=4, mode="training")
    plan = autoshard.plan(model, devices, inputs=(x,), strategy=strategy, workload=workload)
    again = Plan.from_json(plan.to_json())
    assert again == plan
    expected = model(x)
    autoshard.apply(model, again)
    torch.testing.assert_close(model(x), expected)
