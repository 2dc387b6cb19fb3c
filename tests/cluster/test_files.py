"""Cluster files: what is written is read back equal, short files by hand work, wrong ones are refused with a reason."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cluster.files import cluster_from_dict, cluster_to_dict
from autoshard.cluster.parse import parse_devices
from autoshard.errors import SpecError


def test_round_trip_through_a_file(tmp_path):
    cluster = parse_devices("2 hosts of 2xA100-40GB,cpu=10GiB")
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(cluster_to_dict(cluster)))
    assert parse_devices(str(path)) == cluster
    assert parse_devices(path) == cluster


def test_a_short_file_by_hand(tmp_path):
    path = tmp_path / "two.json"
    path.write_text(
        json.dumps(
            {
                "devices": [
                    {"name": "cuda:0", "kind": "H100-80GB"},
                    {"name": "cuda:1", "kind": "H100-SXM", "memory": "60GiB"},
                    {"name": "cuda:2", "memory": "24GiB", "host": "other", "flops_per_second": {"bfloat16": 1e14}},
                ],
                "hosts": [{"name": "host0", "nic_bytes_per_second": 1.25e9, "latency_seconds": 0.001}],
                "links": [["cuda:0", "cuda:1", 123e9, 4e-6]],
            }
        )
    )
    cluster = parse_devices(str(path))
    assert cluster.spec == str(path)
    assert cluster.device("cuda:0").kind == "H100-SXM"
    assert cluster.device("cuda:1").memory_bytes == 60 * 2**30
    assert cluster.device("cuda:2").flops("bfloat16") == 1e14
    assert cluster.link("cuda:0", "cuda:1").bytes_per_second == 123e9
    assert cluster.link("cuda:1", "cuda:0").bytes_per_second == pytest.approx(360e9)
    assert cluster.link("cuda:0", "cuda:2").seconds(1e9) == pytest.approx(1.001)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ([], "the cluster should be an object"),
        ({"devices": []}, "devices should be a list of 1 to"),
        ({"devices": [{"name": "cuda:0", "memory": "1GiB"}], "version": 99}, "Update autoshard"),
        ({"devices": [{"name": "a", "memory": "1GiB"}], "hosts": [{"name": "host0", "nics": 0}]}, "above 0"),
        ({"devices": [{"name": "cuda:0", "memory": "1GiB", "bytes_per_second": None}]}, "should be a number"),
        ({"devices": [{"name": "cuda:0", "memory": "1GiB", "network": "1600Gb/s"}]}, "which hosts have"),
        ({"devices": [{"name": "cuda:0", "memory": "1GiB"}], "colour": 1}, "found .'colour'"),
        ({"devices": [{"name": "cuda:0"}]}, "memory of device 'cuda:0' should be a size"),
        ({"devices": [{"name": "cuda:0", "memory": "1GiB", "speed": 3}]}, "found .'speed'"),
        ({"devices": [{"name": "cuda:0", "kind": "H1000"}]}, "unknown hardware"),
        ({"devices": [{"name": "cuda:0", "memory": "1GiB"}] * 2}, "twice"),
        ({"devices": [{"name": "a", "memory": "1GiB"}], "links": [["a", "b", 1, 1]]}, "a link should be"),
        ({"devices": [{"name": n, "memory": "1GiB"} for n in "ab"], "links": [["a", "b", 0, 1]]}, "above 0"),
    ],
)
def test_wrong_files(tmp_path, data, says):
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(data))
    with pytest.raises(SpecError, match=says) as caught:
        parse_devices(str(path))
    assert str(path) in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=50)
@given(st.data())
def test_a_damaged_file_gives_a_cluster_or_a_spec_error(data):
    good = cluster_to_dict(parse_devices("2x24GiB,cpu=10GiB"))
    target = good
    for _ in range(data.draw(st.integers(0, 2))):
        inner = [
            v for v in (target.values() if isinstance(target, dict) else target) if isinstance(v, (dict, list)) and v
        ]
        if not inner:
            break
        target = data.draw(st.sampled_from(inner))
    key = data.draw(st.sampled_from(sorted(target) if isinstance(target, dict) else range(len(target))))
    if data.draw(st.booleans()):
        target[key] = data.draw(JSON)
    else:
        del target[key]
    try:
        cluster = cluster_from_dict(good)
    except SpecError as error:
        assert str(error)
    else:
        assert cluster.devices and all(d.memory_bytes > 0 for d in cluster.devices)
