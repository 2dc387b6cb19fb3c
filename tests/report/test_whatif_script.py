"""The sliders' script, run outside of a browser: it computes what its Python twin does, for every kind of plan."""

import json
import shutil
import subprocess
from importlib import resources

import pytest

from autoshard.report.page.page import FORMULAS
from autoshard.report.whatif import predict
from tests.report.divided_plans import CASES, divided

NODE = shutil.which("node")
POINTS = ((8, 20, 0, "", 0), (26, 50, 0, "", 0), (8, 20, 0, "H100-SXM", 0), (8, 20, 0, "", 5))
RUN = """
const read = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(read.map(([data, ...at]) => predict(data, ...at))));
"""


def figures(predicted):
    return [predicted["latency"], predicted["bottleneck"], *(one for row in predicted["devices"] for one in row[1:])]


@pytest.mark.skipif(NODE is None, reason="node is not installed: the script is only read")
def test_the_script_is_its_python_twin(tmp_path):
    page = resources.files("autoshard.report.page")
    script = tmp_path / "formulas.js"
    script.write_text("\n".join([*(page.joinpath(name).read_text() for name in FORMULAS), RUN]))
    asked = [(divided(name)[2], *point) for name in CASES for point in POINTS]
    done = subprocess.run([NODE, script], input=json.dumps(asked), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for (data, *point), got in zip(asked, json.loads(done.stdout), strict=True):
        want = predict(data, *point)
        assert got["fits"] == want["fits"]
        assert figures(got) == pytest.approx(figures(want), rel=1e-9)
