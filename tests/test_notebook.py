"""What a notebook shows of plans and profiles: well-formed, escaped, short."""

import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

import autoshard
from tests.engine.test_events import made


@pytest.mark.parametrize("case", ["unequal cuts", "offloaded"])
def test_a_plan_shows_itself(case):
    plan, profile, _ = made(case)
    root = ElementTree.fromstring(plan._repr_html_())
    text = "".join(root.itertext())
    assert f"{plan.strategy}, for {plan.objective}" in text
    assert all(device.name in text for device in plan.devices)
    assert ("are cut over 2 devices" in text) == bool(plan.cuts) and ("are kept on cpu" in text) == bool(plan.offloaded)
    assert "Net" in "".join(ElementTree.fromstring(profile._repr_html_()).itertext())


def test_names_are_escaped_and_long_texts_end():
    model = nn.ModuleDict({f"<b>{i}": nn.Linear(4, 4) for i in range(60)})
    model.forward = lambda x: sum(part(x) for part in model.values())
    profile = autoshard.profile(model, torch.zeros(1, 4))
    shown = profile._repr_html_()
    assert "<b>0" not in shown and "&lt;b&gt;0" in shown and "more lines" in shown
    plan = autoshard.Plan.from_device_map({f"<b>{i}": i % 2 for i in range(60)}, profile)
    assert "<b>0" not in plan._repr_html_() and "more lines" in plan._repr_html_()
