"""The commands as a user runs them: exit statuses, streams, JSON, files written whole or not at all."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.cli.steps import COPIES, load_skeleton
from autoshard.cluster.files import cluster_from_dict
from autoshard.cluster.parse import parse_devices
from autoshard.errors import PlanError
from autoshard.integrations.peer_maps import peer_maps
from autoshard.integrations.skeleton import parameter_bytes
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from tests.models import by_name
from tests.report.net import BLOCK
from tests.torch_releases import sharded_replicas

ROOT = Path(autoshard.__file__).parents[1]
MODEL = f"""
print("the file prints this")
{BLOCK}
def model():
    return nn.Sequential(*[Block() for _ in range(8)])

def example_inputs(batch_size=2):
    return torch.zeros(batch_size, 64)
"""
TWO_SMALL = "2x800KiB"  # the model has 1.0 MiB of weights


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def command(*arguments, expect=0):
    done = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "80"})
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == expect, done.output
    return done


def test_plan_writes_a_file_that_estimate_reads(file, tmp_path):
    out = tmp_path / "plan.json"
    document = json.loads(command("plan", file, "--devices", TWO_SMALL, "-o", out, "--json").stdout)
    plan = Plan.load(out)
    assert document["plan"] == json.loads(plan.to_json())
    assert document["plan"]["placements"] == dict(plan.placements)
    again = json.loads(command("estimate", out, file, "--json").stdout)
    assert again["plan"] == document["plan"]
    assert json.loads(command("estimate", out, "--json").stdout) == again  # the plan says which model it is for
    peaks = [[d["peak_bytes"] for d in doc["estimate"]["devices"]] for doc in (document, again)]
    assert peaks[0] == peaks[1]
    assert document["estimate"]["fits"] and all(d["free_bytes"] >= 0 for d in document["estimate"]["devices"])
    assert str(out) in command("plan", file, "--devices", TWO_SMALL, "-o", out).stderr


def test_json_is_one_document_and_nothing_else(file):
    done = command("profile", file, "--json", "--batch", "3", "--train", "--optimizer", "momentum")
    document = json.loads(done.stdout)
    parameters = 8 * (64 * 256 * 2 + 256 + 64) * 4
    assert document["parameter_bytes"] == document["gradient_bytes"] == document["optimizer_bytes"] == parameters
    assert document["workload"]["batch_size"] == 3
    assert document["modules"][0]["path"] == "" and len(document["modules"]) == 1 + 8 * 3
    assert document["model"]["capture_level"] == "fake"


def test_profile_folds_repeated_blocks(file):
    done = command("profile", file)
    assert "0-7  8 x each" in done.stdout and "1.01 MiB" in done.stdout
    assert "up" in done.stdout and "up" not in command("profile", file, "--depth", "1").stdout.split("On one")[0]


def test_limits_pins_and_workload(file):
    done = command(
        *("plan", file, "--devices", "2x4MiB", "--strategy", "sequential", "--json", "--batch", "4"),
        *("--max-memory", "cuda:0=700KiB", "--pin", "0=cuda:1"),
    )
    document = json.loads(done.stdout)
    assert document["plan"]["placements"]["0"] == "cuda:1" and document["plan"]["pins"] == {"0": "cuda:1"}
    assert document["plan"]["workload"]["batch_size"] == 4
    first = document["estimate"]["devices"][0]
    assert first["peak_bytes"] <= first["memory_bytes"] == 700 * 1024


def test_a_device_map_can_be_estimated(file, tmp_path):
    path = tmp_path / "map.json"
    path.write_text(json.dumps({str(i): int(i > 2) for i in range(8)}))
    document = json.loads(command("estimate", path, file, "--devices", "2x4MiB", "--json").stdout)
    assert document["plan"]["placements"]["3"] == "cuda:1"
    assert document["estimate"]["transfers"]
    assert "how much memory cuda:0, cuda:1 have" in command("estimate", path, file, expect=2).stderr
    path.write_text(json.dumps({**{str(i): 0 for i in range(8)}, "nine": 1}))
    assert "names 'nine'" in command("estimate", path, file, "--devices", "2x4MiB", expect=1).stderr


def test_devices(tmp_path):
    out = tmp_path / "cluster.json"
    done = command("devices", "2 hosts of 2xA100-40GB", "--json", "-o", out)
    assert cluster_from_dict(json.loads(done.stdout)) == cluster_from_dict(json.loads(out.read_text()))
    text = command("devices", out).stdout
    assert "A100-SXM-40" in text and "GB/s" in text and "host1" in text
    assert "cpu" in command("devices", "cpu").stdout
    assert "H100-SXM" in command("devices", "--known").stdout
    assert "H100-SXM" in json.loads(command("devices", "--known", "--json").stdout)


def test_devices_calibrate():
    done = command("devices", "cpu", "--calibrate", "--json")
    (device,) = json.loads(done.stdout)["devices"]
    assert device["measured"] and device["flops_per_second"]["float32"] > 1e8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--devices", "2xpotato"], "potato"),
        (["--devices", "2x0GiB"], "0GiB"),
        (["--devices", "2xA100-40GB, 1600Gbs"], "neither a size nor the speed of a network"),
        (["--strategy", "greedy"], "greedy"),
        (["--batch", "-3"], "Invalid value for '--batch'"),
        (["--new-tokens", "-1"], "--new-tokens"),
        (["--new-tokens", "4"], "--new-tokens has no effect: Sequential has no generate()"),
        (["--batch", "many"], "valid integer"),
        (["--seq", "7"], "--seq has no effect"),
        (["--optimizer", "adamw"], "--train"),
        (["--train", "--optimizer", "sophia"], "sophia"),
        (["--max-memory", "cuda:0"], "cuda:0=20GiB"),
        (["--max-memory", "cuda:7=1GiB"], "cuda:7"),
        (["--max-memory", "cuda:0=1GiB,cuda:0=2GiB"], "twice"),
        (["--pin", "0"], "--pin"),
        (["--pin", "0=cuda:9"], "cuda:9"),
        (["--pin", "nowhere=cuda:0"], "nowhere"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_usage_is_exit_status_2(file, arguments, says):
    devices = [] if "--devices" in arguments else ["--devices", "2x4MiB"]
    done = command("plan", file, *devices, *arguments, expect=2)
    assert says in done.stderr.replace("\n", " ").replace("│", ""), done.stderr
    assert not done.stdout.strip() and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("compare", "2x4MiB"), ("compare", "2xH100-80GB"), ("plan", "2xH100-80GB")])
def test_new_tokens_of_a_model_that_makes_none_are_refused_by_all_commands(file, words):
    done = command(words[0], file, "--devices", words[1], "--new-tokens", "4", expect=2)
    assert "--new-tokens has no effect: Sequential has no generate()" in done.stderr.replace("\n", " ")


def test_what_can_t_be_met_is_exit_status_1(file, tmp_path):
    out = tmp_path / "plan.json"
    done = command("plan", file, "--devices", "2x300KiB", "-o", out, "--json", expect=1)
    assert "cuda" in done.stderr and "KiB" in done.stderr and not done.stdout.strip()
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.parametrize("arguments", [("plan", "no.py"), ("report", "no.py"), ("trace", "no.json"), ("devices", "8x")])
def test_a_file_that_cant_be_written_is_refused_first_with_status_2(tmp_path, arguments):
    """Before the target, which is as wrong here, is looked at."""
    for out, says in ((tmp_path / "no such folder" / "p", "No such file"), (tmp_path, "is a folder")):
        done = command(*arguments, "-o", out, expect=2)
        assert "cannot write to" in done.stderr and says in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_device_file_is_written_not_replaced(file):
    command("plan", file, "--devices", "2x4MiB", "-o", os.devnull)
    assert not Path(os.devnull).is_file()


def test_a_comparison_of_what_does_not_fit_says_what_would_help(file):
    said = command("compare", file, "--devices", "2x300KiB", expect=1).stderr
    assert "It was checked that it fits" in " ".join(said.split())


def test_tensors_of_several_devices_meet_only_where_there_are_several(tmp_path):
    net = "class Net(nn.Linear):\n    def forward(self, x):\n        return x['a'] * self.bias\n"
    (tmp_path / "meet.py").write_text(
        f"import torch\nfrom torch import nn\n{net}model = Net(4, 4)\nexample_inputs = ({{'a': torch.zeros(2, 4)}},)\n"
    )
    assert "meet inside" not in command("plan", tmp_path / "meet.py", "--devices", "2x8MiB").stdout


def test_plans_that_do_not_belong(file, tmp_path):
    out, other = tmp_path / "plan.json", tmp_path / "other.py"
    command("plan", file, "--devices", TWO_SMALL, "-o", out)
    other.write_text(MODEL.replace("256", "128"))
    assert "another model" in command("estimate", out, other, expect=1).stderr
    plan = Plan.load(out)
    replace(plan, workload=replace(plan.workload, sequence_length=512)).save(out)  # which example_inputs don't have
    for arguments in (["estimate", out, other], ["verify", other, "--plan", out]):
        assert "another model" in command(*arguments, expect=1).stderr
    assert "--seq has no effect" in command("estimate", out, other, "--seq", "7", expect=2).stderr
    assert "does not exist" in command("estimate", tmp_path / "none.json", file, expect=2).stderr
    out.write_text(out.read_text()[:-30])
    assert "damaged" in command("estimate", out, file, expect=1).stderr
    out.write_text(json.dumps({"format": "autoshard plan", "version": 99}))
    assert "newer" in command("estimate", out, file, expect=1).stderr


def test_inputs_that_do_not_fit_or_are_missing(file, tmp_path):
    path = tmp_path / "other.py"
    path.write_text(MODEL.replace("torch.zeros(batch_size, 64)", "torch.zeros(batch_size, 65)"))
    done = command("plan", path, "--devices", "2x4MiB", expect=1)
    assert "could not be run" in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr
    path.write_text(MODEL.replace("example_inputs", "unused"))
    assert "example_inputs" in command("plan", path, "--devices", "2x4MiB", expect=1).stderr


PROCESS = """
import atexit, gc, autoshard_command
atexit.register(lambda: print("collecting" if gc.isenabled() else "not collecting"))
autoshard_command.run()
"""


def test_as_a_process(file, tmp_path):
    """Streams and exit status as a shell sees them; the same plan as in this process; and nothing is said at the end,
    where libraries in C++ report objects that are there when all is over, as after `gc.freeze` they are.
    """
    asked = ("plan", file, "--devices", TWO_SMALL, "--strategy", "column-parallel", "-o")
    command(*asked, tmp_path / "a.json")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    env |= {"PYTHONHASHSEED": "2", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, *asked, tmp_path / "b.json"], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert done.stderr == f"the file prints this\nwritten to {tmp_path / 'b.json'}\n"
    assert "####" in done.stdout and done.stdout.isascii()
    assert done.stdout.endswith("\ncollecting\n"), "the collector was off for the imports only"


def test_verify(file, tmp_path):
    done = command("verify", file, "--devices", "2x800KiB")
    assert done.stdout.strip().startswith("equal") and "bit for bit" in done.stdout and "simulated" in done.stdout
    out = tmp_path / "plan.json"
    command("plan", file, "--devices", "2x4MiB", "--train", "--optimizer", "sgd", "-o", out)
    document = json.loads(command("verify", file, "--plan", out, "--json").stdout)
    assert document["ok"] and document["max_error"] == 0 and "backward" in document["compared"]


@sharded_replicas
def test_verify_starts_the_processes_of_a_plan(file, tmp_path):
    """Of cards that are not here, which CPUs stand for."""
    out, words = tmp_path / "plan.json", ("--train", "--batch", "4", "--launch", "processes", "-o")
    command("plan", file, "--devices", "2xA100-40GB", "--mesh", "fsdp=2", *words, out)
    document = json.loads(command("verify", file, "--plan", out, "--json").stdout)
    assert document["ok"] and document["compared"] == ["forward", "backward", "optimizer step"]
    assert document["notes"][0].startswith("2 processes ran on this machine")
    command(
        "plan", file, "--devices", "32xA100-40GB", "--mesh", "fsdp=32", "--batch", "32", *words[:1], *words[3:], out
    )
    assert "verify starts at most 16" in command("verify", file, "--plan", out, expect=1).stderr


def test_verify_refuses_what_does_not_fit_here(tmp_path):
    """Sixteen terabytes: said before anything is allocated."""
    path = tmp_path / "huge.py"
    text = "import torch\nmodel = torch.nn.Sequential(*[torch.nn.Linear(2**20, 2**20) for _ in range(4)])\n"
    path.write_text(text + "example_inputs = torch.zeros(1, 2**20)\n")
    done = command("verify", path, "--devices", "8xMI325X", expect=1)
    assert "TiB of memory" in done.stderr and "free" in done.stderr


def test_verify_counts_what_all_processes_need(file, monkeypatch):
    needed = 4 * COPIES * parameter_bytes(load_skeleton(file, Workload(), 1).model)
    monkeypatch.setattr("autoshard.cluster.detect.free_host_bytes", lambda: needed)
    load_skeleton(file, Workload(), 4)
    with pytest.raises(PlanError, match=r"in each of 5 processes.* free"):
        load_skeleton(file, Workload(), 5)


def test_verify_finds_what_differs(tmp_path):
    """A model that answers by where its weights are is not equal when split."""
    path = tmp_path / "model.py"
    text = MODEL.replace("return x + self.down", "return x + (self.up.weight.device.index or 0) + self.down")
    path.write_text(text)
    done = command("verify", path, "--devices", "2x800KiB", expect=1)
    assert done.stdout.strip().startswith("not equal") and "First difference" in done.stdout
    document = json.loads(command("verify", path, "--devices", "2x800KiB", "--json", expect=1).stdout)
    assert not document["ok"] and document["first_difference"]["during"] == "forward"


def test_streamed_modules_are_shown_and_listed(file, tmp_path):
    plan = tmp_path / "plan.json"
    devices = "cuda:0=700KiB,disk=1GiB"
    shown = command("plan", file, "--devices", devices, "-o", plan).stdout
    assert "of them offloaded" in shown and "cuda:0, kept on disk" in shown
    assert max(map(len, shown.splitlines())) <= 80
    document = json.loads(command("plan", file, "--devices", devices, "--json").stdout)
    assert document["plan"]["offloaded"] == dict(Plan.load(plan).offloaded)
    streaming = document["estimate"]["streaming"]
    assert streaming["nbytes"] == sum(link["nbytes"] for link in streaming["links"]) > 0
    assert document["estimate"]["latency_seconds"] >= streaming["bound_seconds"]
    again = json.loads(command("estimate", plan, file, "--json").stdout)
    assert again["estimate"] == document["estimate"]


def test_largest_batch(file):
    """Every size is tried for real; progress is on stderr, one document on stdout."""
    asked = ("plan", file, "--devices", TWO_SMALL, "--strategy", "balanced", "--max-batch")
    done = command(*asked, "--json")
    size = json.loads(done.stdout)["plan"]["workload"]["batch_size"]
    assert size > 1 and "does not fit" in done.stderr and f"batch size {size} fits" in done.stderr
    assert "can't be asked for at once" in command(*asked, "--max-seq", expect=2).stderr


def test_a_plan_file_and_a_map_are_traced_and_reported(file, tmp_path):
    """A plan knows its model; a map needs it named."""
    plan, trace, page, maps = (tmp_path / name for name in ("plan.json", "trace.json", "page.html", "map.json"))
    command("plan", file, "-d", "cpu=1GiB", "-o", plan)
    command("trace", plan, "-o", trace, "--measure")
    events = json.loads(trace.read_text())["traceEvents"]
    processes = [row["args"]["name"] for row in events if row["name"] == "process_name"]
    assert processes == ["host0, predicted", "host0, measured"]
    command("report", plan, "-o", page, "--no-compare")
    assert page.read_text().endswith("</html>")
    maps.write_text(json.dumps({str(i): "cuda:0" if i < 3 else "cuda:1" for i in range(8)}))
    assert "does not say which model" in command("report", maps, expect=2).stderr
    command("trace", maps, file, "-o", trace)


def test_all_strategies_and_peers_are_priced_alike(file):
    asked = ("compare", file, "-d", "1x700KiB,1x1500KiB", "--objective", "throughput", "--batch", "4", "--json")
    data = json.loads(command(*asked).stdout)
    rows = {row["name"]: row for row in data["strategies"]}
    assert {"sequential", "balanced", "column-parallel", "pipeline", "data-parallel"} <= set(rows)
    assert all(row["possible"] or row["refused"] for row in rows.values())
    best = min((row for row in rows.values() if row["possible"] and row["usable_now"]), key=lambda row: row["value"])
    assert rows[data["chosen"]]["value"] == pytest.approx(best["value"], rel=1e-8)
    assert data["lower_bound"] <= best["value"] * (1 + 1e-9)
    theirs = {row["name"]: row for row in data["others"]}
    assert theirs["Accelerate balanced"]["bottleneck_seconds"] >= rows["balanced"]["bottleneck_seconds"]


def test_what_spills_is_said():
    case = by_name("llama")
    tight, roomy = (
        {one.name: one for one in peer_maps(case.model(), parse_devices({"cuda:0": size, "cuda:1": size}))}
        for size in ("50KB", "1GiB")
    )
    assert all(one.refused and not one.device_map for one in tight.values())
    assert set(roomy["Accelerate balanced"].device_map.values()) == {"cuda:0", "cuda:1"}


def test_a_model_without_parameters_is_compared(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import torch\nmodel, example_inputs = torch.nn.Identity(), torch.zeros(2, 3)\n")
    others = json.loads(command("compare", file, "-d", "2x1MiB", "--json").stdout)["others"]
    assert all("placements are empty" in row["refused"] for row in others)
