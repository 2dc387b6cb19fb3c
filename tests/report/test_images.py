"""Pictures: well-formed SVG with the estimate's figures, PNG where resvg is installed and a clear word where not."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest

import autoshard
from autoshard.common.sizes import format_bytes
from autoshard.errors import SpecError
from autoshard.report.images import pictures, to_png
from tests.engine.test_events import made

SVG = "{http://www.w3.org/2000/svg}"


def drawn(case):
    plan, profile, cluster = made(case)
    estimate = autoshard.estimate(plan, profile, cluster)
    return estimate, pictures(plan, estimate, profile, cluster, title="<net> & co")


@pytest.mark.parametrize("case", ["training", "cuts", "streamed", "pipeline"])
def test_pictures_are_svg_with_their_figures(case):
    estimate, found = drawn(case)
    assert set(found) == {"memory", "timeline", "placement"}
    for svg in found.values():
        root = ElementTree.fromstring(svg)
        width, height = float(root.get("width")), float(root.get("height"))
        assert root.find(f"{SVG}title").text.endswith("<net> & co")
        for box in root.iter(f"{SVG}rect"):
            assert float(box.get("x")) + float(box.get("width")) <= width + 0.1
            assert float(box.get("y")) + float(box.get("height")) <= height + 0.1
    for device in estimate.devices:
        if device.peak_bytes:
            assert f"{format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}" in found["memory"]


def test_png():
    pytest.importorskip("resvg_py", reason="the images extra is not installed")
    _, found = drawn("placements")
    data = to_png(found["memory"], zoom=1.0)
    assert data.startswith(b"\x89PNG") and int.from_bytes(data[16:20], "big") == 960


def test_png_without_resvg_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(SpecError, match="pip install resvg-py"):
        to_png("<svg/>")
