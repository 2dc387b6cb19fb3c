"""plan with a process per device on the command line: what is fixed, what is refused, and what is printed."""

import json

import pytest
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.common.sizes import format_seconds
from autoshard.plan import Plan
from autoshard.report.layout import format_flops
from tests.report.net import BLOCK

MODEL = f"""
{BLOCK.replace("64", "512").replace("256", "2048")}
model = nn.Sequential(*[Block() for _ in range(6)])

def example_inputs(batch_size=8):
    return torch.randn(batch_size, 512)
"""


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path / "net.py"


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "100"})


def test_a_recipe_is_given_and_the_rest_chosen(net, tmp_path):
    out = tmp_path / "plan.json"
    done = run("plan", net, "-d", "8xA100-40GB", "--train", "--batch", "64", "--mesh", "fsdp=4,tp=2", "-o", out)
    assert done.exit_code == 0, done.output
    for words in (
        "fsdp=4, tp=2",
        "per step, of ",
        " each",
        "one training step",
        "samples/s",
        "Memory over a step",
        "--nproc-per-node=8",
    ):
        assert words in done.output
    plan = Plan.load(out)
    assert plan.mesh is not None and (plan.mesh.fsdp, plan.mesh.tp, plan.mesh.dp) == (4, 2, 1)
    shown = json.loads(run("estimate", out, "--json").output)
    assert shown["plan"]["mesh"] == {"dp": 1, "fsdp": 4, "tp": 2, "pp": 1, "cp": 1, "ep": 1}
    assert shown["estimate"]["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("word", "degree"), [("zero3", "fsdp"), ("fsdp", "fsdp"), ("ddp", "dp"), ("tp", "tp"), ("pp", "pp")]
)
def test_a_strategy_that_is_named_is_taken(net, word, degree):
    """Of a process per device, as the devices are elsewhere, though one of them would be enough."""
    done = run("plan", net, "-d", "2xA100-40GB", "--train", "--batch", "64", "-s", word, "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.output)["plan"]
    assert plan["mesh"][degree] == 2 and plan["launch"] == "processes"


@pytest.mark.parametrize("workload", [["--train"], []])
def test_parts_of_the_batch_are_as_asked(net, workload):
    done = run(
        "plan", net, "-d", "4xA100-40GB", "--batch", "64", "--mesh", "pp=4", "--micro-batch", "8", *workload, "--json"
    )
    plan, figures = (json.loads(done.output)[name] for name in ("plan", "estimate"))
    assert (plan["micro_batch"], plan["num_microbatches"]) == (8, 8)
    assert figures["bubble"] > 0 and not {"gap", "lower_bound_seconds", "collective_seconds"} & figures.keys()
    assert bool(workload) == ("exposed_seconds" in figures)


@pytest.mark.parametrize(
    ("options", "status", "words"),
    [
        (["--mesh", "fsdp=3"], 1, "degrees other than ep must multiply to 8"),
        (["--mesh", "tp=7,fsdp=2"], 1, "must multiply to 8"),
        (["--mesh", "ep=8,fsdp=8"], 1, "no experts were found"),
        (["--mesh", "pp=8"], 1, "at most 6"),
        (["--mesh", "cp=8"], 1, "scaled_dot_product_attention"),
        (["--mesh", "fast"], 2, "write degrees such as"),
        (["--precision", "half"], 2, "unknown precision"),
        (["--recompute", "some"], 2, "unknown recomputation"),
        (["--dtype", "int8"], 2, "weights of int8 are for answers"),
        (["--dtype", "int3"], 2, "unknown dtype"),
        (["--launch", "both"], 2, "one-process or processes"),
        (["--launch", "one-process", "--mesh", "fsdp=8"], 2, "leave out one-process"),
        (["--mesh", "fsdp=8", "--pin", "0=cuda:0"], 2, "a pin is for one process"),
    ],
)
def test_what_makes_no_sense_is_one_paragraph(net, tmp_path, options, status, words):
    out = tmp_path / "plan.json"
    done = run("plan", net, "-d", "8xA100-40GB", "--train", "--batch", "64", "-o", out, *options)
    assert done.exit_code == status and words in " ".join(done.output.split()), done.output
    assert not out.exists() and "Traceback" not in done.output


@pytest.mark.parametrize("options", [["--precision", "int8"], ["--recompute", "full"]])
def test_what_is_for_training_is_not_left_unread(net, options):
    done = run("plan", net, "-d", "8xA100-40GB", "--batch", "64", *options)
    assert done.exit_code == 2 and f"{options[0]} is read with --train only" in " ".join(done.output.split())


@pytest.mark.parametrize("mesh", ["fsdp=8", "cp=8"])
def test_meshes_of_training_alone_are_refused_for_answers(net, mesh):
    done = run("plan", net, "-d", "8xA100-40GB", "--batch", "64", "--mesh", mesh)
    assert done.exit_code == 1 and "only for training steps" in " ".join(done.output.split())


@pytest.fixture
def plan_file(net, tmp_path):
    out = tmp_path / "plan.json"
    words = ["plan", net, "-d", "4xA100-40GB", "--train", "--batch", "64", "--mesh", "fsdp=2,pp=2", "-o", out]
    done = run(*words)
    assert done.exit_code == 0, done.output
    return out


def test_a_plan_is_reported_explained_and_traced(plan_file, tmp_path):
    shown = json.loads(run("estimate", plan_file, "--json").output)["estimate"]
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    done = run("report", plan_file, "-o", page)
    assert done.exit_code == 0, done.output
    assert format_seconds(shown["latency_seconds"]) in page.read_text()
    words = json.loads(run("explain", plan_file, "--json").output)
    assert words["chosen"]["value"] == shown["latency_seconds"] and words["alternatives"]
    assert any("torchrun" in sentence for sentence in words["sentences"])
    assert "is rank 3 of 4. It has stage" in " ".join(run("explain", plan_file, "cuda:3").output.split())
    assert "stage" in run("explain", plan_file, "5").output  # the last block
    assert run("explain", plan_file, "cuda:9").exit_code == 2
    assert run("trace", plan_file, "-o", trace).exit_code == 0
    events = [row for row in json.loads(trace.read_text())["traceEvents"] if row["ph"] == "X"]
    ends = max(row["ts"] + row["dur"] for row in events)
    assert ends == pytest.approx(1e6 * shown["latency_seconds"])
    assert run("trace", plan_file, "--measure", "-o", trace).exit_code == 2


def test_a_target_is_reported_as_it_would_be_planned(net, tmp_path):
    page = tmp_path / "page.html"
    words = ["-d", "8xA100-40GB", "--train", "--batch", "64", "--strategy", "fsdp"]
    done = run("report", net, *words, "--no-what-if", "-o", page)
    assert done.exit_code == 0, done.output
    shown = json.loads(run("plan", net, *words, "--json").output)["estimate"]
    assert format_seconds(shown["latency_seconds"]) in page.read_text()
    work = format_flops(json.loads(run("profile", net, *words[2:5], "--json").output)["flops"])
    assert f"one training step takes {work}" in page.read_text()


def test_the_largest_batch_fits_and_the_next_does_not(net):
    words = ["-d", "2xT4", "--train", "--mesh", "fsdp=2", "--max-memory", "cuda:0=3GiB,cuda:1=3GiB"]
    done = run("plan", net, *words, "--max-batch", "--json")
    assert done.exit_code == 0, done.output
    batch = json.loads(done.stdout)["plan"]["workload"]["batch_size"]
    once = [*words, "--micro-batches", "1"]
    assert run("plan", net, *once, "--batch", str(batch)).exit_code == 0
    assert run("plan", net, *once, "--batch", str(batch + 2)).exit_code == 1


def test_an_estimate_keeps_what_options_leave_out_and_fails_where_it_does_not_fit(plan_file):
    more = json.loads(run("estimate", plan_file, "--batch", "128", "--json").output)
    assert more["plan"]["reasons"] == ["planned for another workload, and not again for what is priced here"]
    assert more["plan"]["workload"]["mode"] == "training" and more["plan"]["workload"]["batch_size"] == 128
    same = json.loads(run("estimate", plan_file, "--json").output)
    assert more["plan"]["num_microbatches"] == 2 * same["plan"]["num_microbatches"]
    assert more["estimate"]["latency_seconds"] > 1.3 * same["estimate"]["latency_seconds"]
    for options, words in ((["--batch", "65"], "no multiple"), (["--new-tokens", "8"], "needs one of its own")):
        done = run("estimate", plan_file, *options)
        assert done.exit_code == 1 and words in " ".join(done.output.split()), done.output
    done = run("estimate", plan_file, "-d", "4x1300MiB")
    assert done.exit_code == 1 and "it does not fit" in " ".join(done.output.split())


def test_every_kind_of_recipe_is_compared(net):
    words = [net, "-d", "4xA100-40GB", "--train", "--batch", "64"]
    found = json.loads(run("compare", *words, "--json").output)
    rows = {row["name"].partition(":")[0]: row for row in found["strategies"]}
    assert {"one device", "ddp", "fsdp", "tensor-parallel", "pipeline", "hybrid"} == set(rows)
    planned = json.loads(run("plan", *words, "--launch", "processes", "--json").output)
    chosen = next(row for row in found["strategies"] if row["name"] == found["chosen"])
    assert chosen["latency_seconds"] == planned["estimate"]["latency_seconds"]
    assert rows["fsdp"]["possible"] and rows["ddp"]["value"] > 0
    shown = " ".join(run("compare", *words).output.split())
    assert "has the fastest pass, or is the simplest" in shown and "fsdp: fsdp=" in shown


def test_of_cards_that_are_not_known_processes_are_named_where_they_are_faster(tmp_path):
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **sizes})
    )
    words = ["plan", tmp_path, "-d", "2x24GiB", "--train", "--batch", "8", "--seq", "1024", "--json"]
    said = json.loads(run(*words).output)["plan"]["reasons"][-1]
    found = json.loads(run(*words, "--launch", "processes").output)
    assert "a process per device would be" in said and found["plan"]["mesh"]["dp"] == 2
    assert said.endswith(format_seconds(found["estimate"]["latency_seconds"]))
    free = json.loads(run(*words, "--launch", "one-process").output)
    assert not any("a process per device" in reason for reason in free["plan"]["reasons"])
