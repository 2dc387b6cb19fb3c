"""Price published runs with the recipe they were run with, and compare.

    python benchmarks/published.py runs.csv            # per source, in all, and rankings of recipes
    python benchmarks/published.py runs.csv --rows     # every row, too, the worst of each metric first and last
    python benchmarks/published.py runs.csv --json     # {"rows": [...], "unpriced": [...]}
    python benchmarks/published.py runs.csv --halves   # errors of the half that was fitted on, and of the other

Each row names a model by its dimensions, the hardware, the recipe and one measured figure. A model is built on meta
from its dimensions: a Llama-like decoder of transformers, a mixture of experts, or a GPT-like one.
"""

import csv
import hashlib
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer
from common import run_command
from published_rows import ANSWERS, DECODE, MEMORY, THROUGHPUT, Row, Unpriced, family, price, recipe_of, run_of

from autoshard.errors import AutoshardError


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """One row with its figure predicted."""

    row: Row
    metric: str
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.measured if self.measured else float(self.predicted == self.measured)


def read_rows(file: Path) -> list[Row]:
    """All rows of a file of figures."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def fitted_on(row: Row) -> bool:
    """Whether a run is one that is fitted on: all recipes of one model on one cluster are, or none, by their names."""
    group = ",".join([family(row), *(row[name] for name in ("model", "hidden", "layers", "gpu", "gpus"))])
    return hashlib.sha256(group.encode()).digest()[0] % 2 == 0


def price_rows(rows: Sequence[Row]) -> tuple[list[Priced], list[dict[str, str]]]:
    """Price all rows that can be; the others with the reason."""
    priced: list[Priced] = []
    unpriced: list[dict[str, str]] = []
    serving = {run_of(row) for row in rows if row["metric"] in DECODE}
    for index, row in enumerate(rows):
        if sys.stderr.isatty():
            print(f"\r{index + 1}/{len(rows)}", end="", file=sys.stderr)
        try:
            serves = run_of(row) in serving or bool(ANSWERS.search(row["source"]))
            predicted, measured = price(row, serves=serves), float(row["value"])
            priced.append(Priced(row=row, metric=row["metric"], predicted=predicted, measured=measured))
        except (Unpriced, AutoshardError) as error:
            unpriced.append({"id": row["id"], "reason": str(error)})
    return priced, unpriced


def errors(priced: Sequence[Priced]) -> Iterator[str]:
    """Median and 90th percentile of |error| per source and in all."""
    for kind, metrics in (("throughput", THROUGHPUT), ("memory", MEMORY), ("decode", DECODE)):
        chosen = [one for one in priced if one.metric in metrics]
        for name in [*dict.fromkeys(family(one.row) for one in chosen), "all"] if chosen else []:
            own = [one for one in chosen if name in (family(one.row), "all")]
            off = sorted(100 * abs(one.ratio - 1) for one in own)
            ratio = statistics.median(one.ratio for one in own)
            yield (
                f"{kind:11} {name:8} {len(own):4} rows  median error {statistics.median(off):5.1f} %  "
                f"90th {off[int(0.9 * len(off))]:5.1f} %  median ratio {ratio:.2f}"
            )
    fits = [one.predicted == one.measured for one in priced if one.metric == "fits"]
    if fits:
        yield f"fits        all      {len(fits):4} rows  right {100 * statistics.mean(fits):.0f} %"


def rankings(priced: Sequence[Priced]) -> Iterator[str]:
    """Groups of four or more recipes of one model on one cluster: is the best found, and are they in order?"""
    names = ("model", "gpu", "gpus", "hidden", "layers", "heads", "seq")
    groups: dict[tuple[str, ...], dict[Any, Priced]] = defaultdict(dict)
    for one in priced:
        if one.metric in THROUGHPUT:
            groups[family(one.row), *(one.row[name] for name in names)].setdefault(recipe_of(one.row), one)
    regrets, taus = [], []
    for (source, model, gpu, gpus, *_), members in groups.items():
        metric = Counter(one.metric for one in members.values()).most_common(1)[0][0]
        # Steps of different batches are compared by samples per second.
        samples = {recipe: recipe.global_batch for recipe in members} if metric == "step_time" else {}
        pairs = [
            tuple(samples[recipe] / value if samples else value for value in (one.measured, one.predicted))
            for recipe, one in members.items() if one.metric == metric
        ]  # fmt: skip
        if len(pairs) < 4:
            continue
        chosen = max(pairs, key=lambda pair: pair[1])
        regrets.append(1 - chosen[0] / max(pairs)[0])
        orders = [1 if (a[0] - b[0]) * (a[1] - b[1]) > 0 else -1 for a, b in combinations(pairs, 2)]
        taus.append(statistics.mean(orders))
        yield (
            f"ranking     {source} {model} on {gpus} {gpu}: {len(pairs)} recipes, best {100 * regrets[-1]:.0f} % off, "
            f"tau {taus[-1]:.2f}"
        )
    if regrets:
        good = statistics.mean(regret <= 0.1 for regret in regrets)
        yield (
            f"rankings    {len(regrets)} groups: best within 10 % in {100 * good:.0f} %, "
            f"median tau {statistics.median(taus):.2f}"
        )


def main(
    file: Path, as_json: Annotated[bool, typer.Option("--json")] = False, rows: bool = False, halves: bool = False
) -> None:
    priced, unpriced = price_rows(read_rows(file))
    if as_json:
        names = ("metric", "predicted", "measured")
        listed = [{"id": one.row["id"], **{name: getattr(one, name) for name in names}} for one in priced]
        print(json.dumps({"rows": listed, "unpriced": unpriced}))
        return
    if rows:
        for one in sorted(priced, key=lambda one: (one.metric, one.ratio)):
            print(f"{one.metric:24} {one.ratio:5.2f}  {one.predicted:12.4g} {one.measured:12.4g}  {one.row['id']}")
    for reason, count in Counter(one["reason"] for one in unpriced).most_common():
        print(f"not priced  {count:4} rows  {reason}")
    parts = {"": priced}
    if halves:
        parts = {"fitted on": [one for one in priced if fitted_on(one.row)]}
        parts["the other"] = [one for one in priced if not fitted_on(one.row)]
    for name, part in parts.items():
        print("\n".join([f"-- {name} half"] * bool(name) + [*errors(part), *rankings(part)]))


if __name__ == "__main__":
    run_command(__doc__, main)
