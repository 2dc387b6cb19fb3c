"""Price published runs with the recipe they were run with, and compare.

    python benchmarks/published.py runs.csv            # per source, in all, and rankings of recipes
    python benchmarks/published.py runs.csv --rows     # every row, too, the worst of each metric first and last
    python benchmarks/published.py runs.csv --json     # {"rows": [...], "unpriced": [...]}
    python benchmarks/published.py runs.csv --halves   # errors of the half that was fitted on, and of the other

Each row names a model by its dimensions, the hardware, the recipe and one measured figure. A model is built on meta
from its dimensions: a Llama-like decoder of transformers, a mixture of experts, or a GPT-like one.
"""

import argparse
import csv
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from published_rows import (
    DECODE,
    MEMORY,
    TFLOPS,
    THROUGHPUT,
    UNITS,
    Row,
    Unpriced,
    dimensions_of,
    family,
    find_peak,
    hardware_of,
    recipe_of,
    run_of,
    serving_of,
    work_of,
)  # fmt: skip

from autoshard.engine.blocks import ModelWork
from autoshard.engine.generation import GenerationEstimate, price_generation
from autoshard.engine.local import sums_of
from autoshard.engine.price import StepEstimate, price_step
from autoshard.engine.recipe import Recipe
from autoshard.errors import AutoshardError

METERS = {"bs": "used", "kf": "allocated", "kfc": "allocated"}
"""What a source read its peak from, where it is not what the allocator reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One row with its figure predicted."""

    row: Row
    predicted: float
    measured: float

    @property
    def family(self) -> str:
        return family(self.row)

    @property
    def metric(self) -> str:
        return self.row["metric"]

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured if self.measured else float(self.predicted == self.measured)


def predicted(row: Row, estimate: StepEstimate, work: ModelWork, recipe: Recipe) -> float:
    """The figure of a training row's metric, in its unit."""
    gpus, metric = recipe.devices, row["metric"]
    if metric == "tokens_per_s_per_gpu":
        return estimate.tokens_per_second / gpus
    if metric in ("tokens_per_s_total", "tokens_per_s"):
        return estimate.tokens_per_second
    if metric == "step_time":
        return estimate.seconds * (1e3 if row["unit"].startswith("ms") else 1)
    if metric in TFLOPS:
        again = 4 / 3 if metric[0] in "hp" and recipe.recompute == "full" else 1
        rate = model_flops(work) * recipe.global_batch * work.tokens * again / estimate.seconds / gpus
        return 100 * rate / find_peak(row) if metric in ("mfu", "hfu", "percent_of_peak") else rate / 1e12
    if metric == "allocated_between_steps":
        return estimate.memory.curve[0].allocated / UNITS[row["unit"]]
    if metric in MEMORY:
        meter = {"peak_allocated_per_gpu": "allocated", "peak_reserved_per_gpu": "reserved"}.get(metric)
        meter = meter or METERS.get(family(row), "reserved")
        return getattr(estimate.memory, meter) / UNITS[row["unit"]]
    if metric == "fits":
        return float(estimate.fits)
    raise Unpriced(f"the metric {metric} is of one source alone")


def generated(row: Row, estimate: GenerationEstimate, recipe: Recipe) -> float:
    """The figure of an inference row's metric, in its unit."""
    metric = row["metric"]
    if metric == "decode_tokens_per_s":
        return estimate.decode_tokens_per_second
    if metric in ("ms_per_token_per_sequence", "s_per_token"):
        return estimate.token_seconds * (1e3 if metric.startswith("ms") else 1)
    if metric == "generation_tokens_per_s":
        return estimate.tokens_per_second
    if metric in MEMORY:
        return sum(estimate.memory.values()) / UNITS[row["unit"]]
    if metric == "fits":
        return float(estimate.fits)
    raise Unpriced(f"the metric {metric} is of one source alone")


def model_flops(work: ModelWork) -> float:
    """FLOPs per token of forward and backward, as model FLOPs are counted: all products, and attention, three times."""
    total = 0.0
    for block in work.blocks:
        sums = sums_of(block)
        total += block.count * (sum(one.flops for one in sums.products) + sum(one.flops for one in sums.attentions))
    return 3 * total / (work.samples * work.tokens)


def price_rows(rows: Sequence[Row]) -> tuple[list[Priced], list[dict[str, str]]]:
    """Price all rows that can be; the others with the reason."""
    priced: list[Priced] = []
    unpriced: list[dict[str, str]] = []
    serving = {run_of(row) for row in rows if row["metric"] in DECODE}
    known: dict[Any, Any] = {}
    for index, row in enumerate(rows):
        if sys.stderr.isatty():
            print(f"\r{index + 1}/{len(rows)}", end="", file=sys.stderr)
        try:
            serves = run_of(row) in serving or "decode" in row["source"]
            value = price_serving(row, known) if serves else price_training(row, known)
            priced.append(Priced(row=row, predicted=value, measured=float(row["value"])))
        except (Unpriced, AutoshardError) as error:
            unpriced.append({"id": row["id"], "reason": str(error)})
    return priced, unpriced


def price_training(row: Row, known: dict[Any, Any]) -> float:
    recipe, shape = recipe_of(row), dimensions_of(row)
    card, topology = hardware_of(row)
    key = (shape, recipe, card, topology)
    if key not in known:
        known[key] = price_step(work_of(shape), recipe, card, topology)
    return predicted(row, known[key], work_of(shape), recipe)


def price_serving(row: Row, known: dict[Any, Any]) -> float:
    (recipe, batch, prompt, new), shape = serving_of(row), dimensions_of(row)
    card, topology = hardware_of(row)
    key = (shape, recipe, card, topology, batch, prompt, new)
    if key not in known:
        known[key] = price_generation(
            work_of(shape), recipe, card, topology, batch=batch, prompt_tokens=prompt, new_tokens=new
        )
    return generated(row, known[key], recipe)


def errors_of(priced: Sequence[Priced]) -> tuple[float, float]:
    """Median and 90th percentile of |error|."""
    errors = sorted(abs(one.ratio - 1) for one in priced)
    return statistics.median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))]


def summary(priced: Sequence[Priced]) -> Iterator[str]:
    """Errors per source and in all, and rankings."""
    yield from errors(priced)
    yield from rankings(priced)


def errors(priced: Sequence[Priced]) -> Iterator[str]:
    """Errors per source and in all."""
    for kind, metrics in (("throughput", THROUGHPUT), ("memory", MEMORY), ("decode", DECODE)):
        chosen = [one for one in priced if one.metric in metrics]
        for name in [*dict.fromkeys(one.family for one in chosen), "all"] if chosen else []:
            own = [one for one in chosen if name in (one.family, "all")]
            median, ninety = errors_of(own)
            ratio = statistics.median(one.ratio for one in own)
            yield (
                f"{kind:11} {name:8} {len(own):4} rows  median error {100 * median:5.1f} %  "
                f"90th {100 * ninety:5.1f} %  median ratio {ratio:.2f}"
            )
    fits = [one for one in priced if one.metric == "fits"]
    if fits:
        right = sum(one.predicted == one.measured for one in fits)
        yield f"fits        all      {len(fits):4} rows  right {100 * right / len(fits):.0f} %"


def rankings(priced: Sequence[Priced]) -> Iterator[str]:
    """Groups of four or more recipes of one model on one cluster: is the best found, and are they in order?"""
    names = ("model", "hidden", "layers", "heads", "seq", "gpu", "gpus")
    groups: dict[tuple[str, ...], dict[Any, Priced]] = defaultdict(dict)
    for one in priced:
        if one.metric in THROUGHPUT:
            recipe = recipe_of(one.row)
            groups[one.family, *(one.row[name] for name in names)].setdefault(recipe, one)
    regrets, taus = [], []
    for key, members in groups.items():
        metric = Counter(one.metric for one in members.values()).most_common(1)[0][0]
        runs = [(one, recipe) for recipe, one in members.items() if one.metric == metric]
        if len(runs) < 4:
            continue
        # Steps of different batches are compared by samples per second.
        sign = [recipe.global_batch if metric == "step_time" else 0 for _, recipe in runs]
        rate = [batch / one.measured if batch else one.measured for (one, _), batch in zip(runs, sign, strict=True)]
        guess = [batch / one.predicted if batch else one.predicted for (one, _), batch in zip(runs, sign, strict=True)]
        regret = 1 - rate[guess.index(max(guess))] / max(rate)
        pairs = list(combinations(range(len(rate)), 2))
        tau = sum(1 if (rate[i] - rate[j]) * (guess[i] - guess[j]) > 0 else -1 for i, j in pairs) / len(pairs)
        regrets.append(regret)
        taus.append(tau)
        label = f"{key[0]} {key[1]} on {key[7]} {key[6]}"
        yield f"ranking     {label}: {len(runs)} recipes, best {100 * regret:.0f} % off, tau {tau:.2f}"
    if regrets:
        good = sum(regret <= 0.1 for regret in regrets)
        yield (
            f"rankings    {len(regrets)} groups: best within 10 % in {100 * good / len(regrets):.0f} %, "
            f"median tau {statistics.median(taus):.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rows", action="store_true")
    parser.add_argument("--halves", action="store_true")
    given = parser.parse_args()
    with open(given.file, newline="") as lines:
        rows = list(csv.DictReader(lines))
    priced, unpriced = price_rows(rows)
    if given.json:
        listed = [
            {"id": one.row["id"], "metric": one.metric, "predicted": one.predicted, "measured": one.measured}
            for one in priced
        ]
        print(json.dumps({"rows": listed, "unpriced": unpriced}))
        return
    if given.rows:
        for one in sorted(priced, key=lambda one: (one.metric, one.ratio)):
            print(f"{one.metric:24} {one.ratio:5.2f}  {one.predicted:12.4g} {one.measured:12.4g}  {one.row['id']}")
    for reason, count in Counter(one["reason"] for one in unpriced).most_common():
        print(f"not priced  {count:4} rows  {reason}")
    if given.halves:
        from fit_efficiency import fitted_on

        for name, half in (("fitted on", True), ("the other", False)):
            print(f"-- {name} half")
            print("\n".join(summary([one for one in priced if fitted_on(one.row) == half])))
        return
    print("\n".join(summary(priced)))


if __name__ == "__main__":
    main()
