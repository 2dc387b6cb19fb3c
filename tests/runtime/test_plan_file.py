"""Plans as files: what is written comes back, and nothing else is read."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import PlanError, SpecError
from autoshard.plan import PLAN_VERSION, Plan, PlanDevice
from autoshard.plan.workload import Workload

NAMES = st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def example() -> Plan:
    return Plan(
        strategy="balanced",
        objective="latency",
        workload=Workload(batch_size=4, sequence_length=128, mode="training"),
        devices=(
            PlanDevice(name="cuda:0", memory_bytes=80 * 10**9, kind="H100-SXM"),
            PlanDevice(name="cuda:1", memory_bytes=24 * 2**30, host="host1"),
        ),
        placements={"embed": "cuda:0", "layers.0": "cuda:0", "layers.1": "cuda:1"},
        aligned=("layers",),
        written_back=("layers.1",),
        reasons=("because of ‘unicode’ \U0001f600",),
        fingerprint="ab" * 32,
        pins={"embed": "cuda:0"},
    )


def test_round_trip_in_text_and_file(tmp_path):
    plan = example()
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert list(Plan.load(tmp_path / "plan.json").device_map) == list(plan.placements)  # the order is kept


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


@given(st.sampled_from(sorted(json.loads(example().to_json()))), JSON)
def test_any_value_in_any_field_is_accepted_or_refused(name, value):
    """Never another error, and what is accepted says the same when written again."""
    data = json.loads(example().to_json())
    data[name] = value
    try:
        plan = Plan.from_json(json.dumps(data))
    except PlanError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
        return
    assert json.loads(plan.to_json()) == json.loads(json.dumps(data))


@given(
    st.sampled_from(["workload", "devices"]), st.sampled_from(["batch_size", "mode", "name", "memory_bytes", "x"]), JSON
)
def test_any_value_inside_is_accepted_or_refused(part, key, value):
    data = json.loads(example().to_json())
    (data[part] if part == "workload" else data[part][0])[key] = value
    try:
        plan = Plan.from_json(json.dumps(data))
    except PlanError:
        return
    assert json.loads(plan.to_json()) == json.loads(json.dumps(data))


@given(st.integers(0, len(example().to_json().rstrip()) - 1))
def test_every_cut_file_is_refused(length):
    with pytest.raises(PlanError):
        Plan.from_json(example().to_json()[:length])


@pytest.mark.parametrize(
    "change, words",
    [
        ({"version": PLAN_VERSION + 1}, "newer"),
        ({"version": True}, "version"),
        ({"surprise": 1}, "surprise"),
        ({"placements": {}}, "empty"),
        ({"placements": {"a": "cuda:0", "a.b": "cuda:1"}}, "overlap"),
        ({"placements": {"": "cuda:0", "a": "cuda:1"}}, "overlap"),
        ({"placements": {"a..b": "cuda:0"}}, "a..b"),
        ({"placements": {"a": "cuda:9"}}, "cuda:9"),
        ({"placements": {"a": ""}}, "'a'"),
        ({"devices": []}, "devices"),
        ({"num_microbatches": 0}, "num_microbatches"),
        ({"format": "something"}, "not a plan"),
    ],
)
def test_damage_is_named(change, words):
    data = json.loads(example().to_json()) | change
    with pytest.raises(PlanError, match=words.replace(".", r"\.")):
        Plan.from_json(json.dumps(data))


def test_doubled_keys_and_missing_fields_are_refused():
    text = example().to_json()
    with pytest.raises(PlanError, match="twice"):
        Plan.from_json(text.replace('"embed": "cuda:0",', '"embed": "cuda:0", "embed": "cuda:1",', 1))
    data = json.loads(text)
    del data["placements"]
    with pytest.raises(PlanError, match="placements"):
        Plan.from_json(json.dumps(data))


def test_a_plan_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    example().save(path)
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(SpecError, match="No space left"):
        example().save(path)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    with pytest.raises(SpecError, match="cannot write"):
        example().save(tmp_path / "no" / "plan.json")
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "none.json")


def test_device_maps_as_people_write_them():
    accelerator = torch.accelerator.current_accelerator()
    kind = accelerator.type if accelerator is not None else "cuda"
    plan = Plan.from_device_map({"a": 0, "b": "1", "c": torch.device("cpu"), "d": "cuda:3"})
    assert plan.device_map == {"a": f"{kind}:0", "b": f"{kind}:1", "c": "cpu", "d": "cuda:3"}
    assert {device.name for device in plan.devices} == set(plan.placements.values())
    for wrong in (["a"], {"a": -1}, {"a": None}, {"a": True}, {"a": 1.5}, {"a": {}}, {}, {"": 0, "b": 1}):
        with pytest.raises(PlanError):
            Plan.from_device_map(wrong)
