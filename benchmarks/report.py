"""The report of Llama-3.1-405B on 16 devices: bytes of the page, seconds to make it, seconds until a browser has it.

    python benchmarks/report.py                          # sizes and times of making it
    python benchmarks/report.py --chromium /usr/bin/chromium    # and of opening it

Bars: at most 1.5 MB, 1 s to make after planning, 1 s to open.
"""

import argparse
import pathlib
import statistics
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.profile.scaling import find_scaling, other_size
from autoshard.report.page import make_page
from autoshard.report.whatif import what_if_data

CONFIG = pathlib.Path(__file__).parent.parent / "examples" / "llama-3.1-405b"
RUNS = 5


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--chromium")
    chromium = options.parse_args().chromium
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG), dtype=torch.bfloat16).eval()
    workload, cluster = autoshard.Workload(batch_size=1, sequence_length=2048), parse_devices("16xH100-80GB")
    started = time.perf_counter()
    profile = autoshard.profile(model, workload=workload)
    print(f"profile          {time.perf_counter() - started:6.2f} s")
    started = time.perf_counter()
    plan = autoshard.plan(model, cluster, workload=workload, strategy="balanced", objective="throughput")
    print(f"profile and plan {time.perf_counter() - started:6.2f} s")
    started = time.perf_counter()
    other = autoshard.profile(model, workload=other_size(workload))
    print(f"second profile   {time.perf_counter() - started:6.2f} s")
    estimate = autoshard.estimate(plan, profile, cluster)
    times: dict[str, list[float]] = {"scaling": [], "what-if data": [], "page": []}
    for _ in range(RUNS):
        begin = time.perf_counter()
        scaling = find_scaling(profile, other)
        assert scaling is not None
        scaled = time.perf_counter()
        data = what_if_data(plan, estimate, profile, cluster, scaling)
        built = time.perf_counter()
        page = make_page(plan, estimate, profile, cluster, title="Llama-3.1-405B", what_if=data)
        for name, seconds in zip(times, (scaled - begin, built - scaled, time.perf_counter() - built), strict=True):
            times[name].append(seconds)
    for name, values in times.items():
        print(f"{name:16} {statistics.median(values):6.2f} s, median of {RUNS}")
    print(f"in all           {sum(statistics.median(values) for values in times.values()):6.2f} s")
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
