"""The report of large models: bytes of the page, seconds to make it, seconds until a browser has it.

    python benchmarks/report.py                          # Llama-3.1-405B on 16 devices: sizes and times of making it
    python benchmarks/report.py --chromium /usr/bin/chromium    # and of opening it
    python benchmarks/report.py --case pipeline          # as a pipeline of 16 micro-batches
    python benchmarks/report.py --case offload           # on one device, the rest on the host and on disk
    python benchmarks/report.py --case training          # Llama-3.1-70B trained as a pipeline on 32 devices

Bars, for 405B on 16 devices: at most 1.5 MB, 15 s beyond its plan, 1 s to open.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import parse_devices
from autoshard.planning import Request, place
from autoshard.profile.profile import Profile
from autoshard.report.page import make_page
from autoshard.search.sizes import cells

CONFIG = pathlib.Path(__file__).parent.parent / "examples" / "llama-3.1-405b"
RUNS = 5
ONE = {"cuda:0": "80GB", "cpu": "200GB", "disk": "2TB"}
SMALLER = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
CASES: dict[str, tuple[object, autoshard.Workload, dict[str, object], dict[str, int]]] = {
    "placements": (
        "1 host of 16xH100-80GB", autoshard.Workload(batch_size=1, sequence_length=2048),
        {"strategy": "balanced", "objective": "throughput"}, {},
    ),
    "pipeline": (
        "1 host of 16xH100-80GB", autoshard.Workload(batch_size=16, sequence_length=2048),
        {"strategy": "pipeline", "num_microbatches": 16}, {},
    ),
    "offload": (ONE, autoshard.Workload(batch_size=1, sequence_length=2048), {"strategy": "balanced"}, {}),
    "training": (
        "4 hosts of 8xH100-80GB", autoshard.Workload(batch_size=64, sequence_length=1024, mode="training"),
        {"strategy": "pipeline", "num_microbatches": 64, "schedule": "1f1b"}, SMALLER,
    ),
}  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--chromium")
    options.add_argument("--case", choices=CASES, default="placements")
    chromium, case = options.parse_args().chromium, options.parse_args().case
    spec, workload, settings, sizes = CASES[case]
    cluster = parse_devices(spec)
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(CONFIG, **sizes)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train(workload.training)
    started = time.perf_counter()
    profile = autoshard.profile(model, workload=workload)
    print(f"profile          {time.perf_counter() - started:6.2f} s")
    started = time.perf_counter()
    plan = autoshard.plan(model, cluster, profile=profile, workload=workload, **settings)
    print(f"plan             {time.perf_counter() - started:6.2f} s")
    estimate = autoshard.estimate(plan, profile, cluster)
    started = time.perf_counter()

    def record(sizes: autoshard.Workload) -> Profile:
        return autoshard.profile(model, workload=sizes)

    def plan_anew(others: Cluster) -> autoshard.Plan:
        request = Request(model=model, inputs=None, profile=profile, cluster=others, objective=plan.objective)
        return place(request, plan.strategy, advise=False)

    priced = tuple(cells(plan, estimate, profile, cluster, workload, record, plan_anew))
    print(f"{len(priced):3} cells        {time.perf_counter() - started:6.2f} s")
    times: list[float] = []
    for _ in range(RUNS):
        begin = time.perf_counter()
        page = make_page(plan, estimate, profile, cluster, title=f"Llama-3.1-405B, {case}", cells=priced)
        times.append(time.perf_counter() - begin)
    print(f"page             {statistics.median(times):6.2f} s, median of {RUNS}")
    print(f"page             {len(page.encode()) / 1e6:6.3f} MB")
    if chromium:
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "report.html"
            file.write_text(page, encoding="utf-8")
            print(f"open             {opening_seconds(file, chromium):6.2f} s, median of {RUNS}")


def opening_seconds(file: pathlib.Path, chromium: str) -> float:
    """Median seconds from navigation until the page's script has run and the page answers."""
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for _ in range(RUNS):
            page = browser.new_page()
            started = time.perf_counter()
            page.goto(file.as_uri())
            page.click("#close-all")
            found.append(time.perf_counter() - started)
            page.close()
        browser.close()
    return statistics.median(found)


if __name__ == "__main__":
    main()
