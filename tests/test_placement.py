"""Where modules live under a placement: homes, hooks, entries, ties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.errors import PlanError
from autoshard.plan.placement import resolve_execution_devices, tensor_devices

MODULES = ["", "embed", "layers", "layers.0", "layers.0.mlp", "layers.0.act", "layers.1", "layers.1.mlp", "head"]
TENSORS = ["embed.weight", "layers.0.scale", "layers.0.mlp.weight", "layers.1.mlp.weight", "head.weight"]


def test_mixed_modules_take_their_own_first_tensor_or_else_their_first_child():
    execution_devices = resolve_execution_devices(
        {"embed": "a", "layers.0.scale": "b", "layers.0.mlp": "c", "layers.1": "c", "head": "a"}, MODULES, TENSORS
    )
    assert execution_devices.mixed == {"", "layers", "layers.0"}
    assert execution_devices.devices == {
        "": "a", "embed": "a", "layers": "b", "layers.0": "b", "layers.0.mlp": "c", "layers.1": "c",
        "layers.1.mlp": "c", "head": "a",
    }  # fmt: skip
    assert execution_devices.hooked == ("", "embed", "layers", "layers.0", "layers.0.mlp", "layers.1", "head")


def test_elements_are_hooked_where_a_list_of_modules_has_no_forward():
    execution_devices = resolve_execution_devices(
        {"embed": "a", "layers": "b", "head": "b"}, MODULES, TENSORS, uncallable=["layers"]
    )
    assert execution_devices.hooked == ("", "embed", "layers.0", "layers.1", "head")
    assert resolve_execution_devices({"": "a"}, MODULES, TENSORS, uncallable=["layers"]).hooked == ("",)


def test_what_has_a_list_of_layers_is_hooked_in_a_mixed_model_wherever_it_is():
    modules = ["", "eyes", "inner", "inner.tower", "inner.tower.layers", "inner.tower.layers.0",
               "inner.tower.layers.0.experts"]  # fmt: skip
    tensors = ["eyes.weight", "inner.weight", "inner.tower.layers.0.experts.0.weight"]
    lists = ["inner.tower.layers", "inner.tower.layers.0.experts"]
    execution_devices = resolve_execution_devices({"eyes": "a", "inner": "b"}, modules, tensors, uncallable=lists)
    assert execution_devices.hooked == ("", "eyes", "inner", "inner.tower")
    assert resolve_execution_devices({"": "a"}, modules, tensors, uncallable=lists).hooked == ("",)


def test_a_tensor_without_an_entry_is_refused_by_name():
    with pytest.raises(PlanError, match=r"layers\.0\.scale"):
        resolve_execution_devices({"embed": "a", "head": "a"}, MODULES, TENSORS)


def test_tied_tensors_live_with_their_first_name_but_homes_follow_entries():
    execution_devices = resolve_execution_devices({"embed": "a", "layers": "a", "head": "b"}, MODULES, TENSORS)
    assert execution_devices.devices["head"] == "b"
    assert tensor_devices(execution_devices, [("embed.weight", "head.weight")])["head.weight"] == "a"


def test_a_shared_module_is_hooked_at_its_first_place_only():
    modules = ["", "a", "a.shared", "b"]
    tensors = ["a.shared.weight", "b.shared.weight", "b.bias"]
    execution_devices = resolve_execution_devices({"a": "x", "b.shared": "y", "b.bias": "x"}, modules, tensors)
    assert execution_devices.devices["b"] == "x"
    assert "b" in execution_devices.mixed
    assert "b.shared" not in execution_devices.hooked


@given(st.dictionaries(st.sampled_from([t.rpartition(".")[0] for t in TENSORS]), st.sampled_from("xyz"), min_size=1))
def test_homes_are_devices_of_tensors_below(placements):
    placements = {"": "w", **placements}
    execution_devices = resolve_execution_devices(placements, MODULES, TENSORS)
    for path, home in execution_devices.devices.items():
        below = {d for name, d in execution_devices.entries.items() if not path or name.startswith(path + ".")}
        assert home in below
        assert (path in execution_devices.mixed) == (len(below) > 1)
