"""Fit what kernels and collectives reach of published peaks, and write autoshard/engine/efficiency.csv.

    python benchmarks/fit_efficiency.py runs.csv             # on every second run; the others are the test
    python benchmarks/fit_efficiency.py runs.csv --dry-run   # print the table instead

One row of the table per GPU generation and software stack that has at least `FEWEST` runs; the others are left as they
are. What is made small is the soft-L1 sum of the logarithms of predicted over measured throughput, so that one odd run
counts little. Values stay within bounds that kernels were seen in.
"""

import argparse
import csv
import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import log
from pathlib import Path
from typing import Any

from published import predicted
from published_rows import THROUGHPUT, Row, Unpriced, dimensions_of, hardware_of, recipe_of, run_of, work_of
from scipy.optimize import least_squares

import autoshard.engine.efficiency as efficiency
from autoshard.engine.efficiency import Efficiency, efficiency_of, efficiency_table
from autoshard.engine.price import price_step
from autoshard.errors import AutoshardError

TABLE = Path(efficiency.__file__).with_name("efficiency.csv")
FEWEST = 12
BOUNDS = {
    "matmul": (0.4, 0.95), "half_size": (10.0, 400.0), "attention": (0.1, 0.8), "attention_backward": (0.1, 0.8),
    "memory": (0.4, 0.95), "local": (0.3, 0.95), "network": (0.1, 0.95), "launch_seconds": (1e-6, 3e-5),
    "overlap": (0.0, 0.6),
}  # fmt: skip


def fitted_on(row: Row) -> bool:
    """Whether a run is one that is fitted on: half of them, by their names."""
    return hashlib.sha256(run_of(row).encode()).digest()[0] % 2 == 0


def cases_of(rows: Sequence[Row]) -> Mapping[tuple[str, str], list[tuple[Row, Any]]]:
    """(generation, stack) -> runs with what prices them; one throughput of each run."""
    found: dict[tuple[str, str], dict[str, tuple[Row, Any]]] = defaultdict(dict)
    for row in rows:
        if row["metric"] not in THROUGHPUT:
            continue
        try:
            recipe, work = recipe_of(row), work_of(dimensions_of(row))
            card, topology = hardware_of(row)
        except (Unpriced, AutoshardError):
            continue
        key = (card.generation, recipe.stack)
        found[key].setdefault(run_of(row), (row, (work, recipe, card, topology)))
    return {key: list(runs.values()) for key, runs in found.items()}


def fit(key: tuple[str, str], cases: Sequence[tuple[Row, Any]]) -> tuple[Efficiency, float]:
    """The best row of the table for these runs, and the mean of |log ratio|."""
    table = efficiency_table()
    start = efficiency_of(*key)
    names = list(BOUNDS)

    def errors(scaled: Sequence[float]) -> list[float]:
        values = {
            name: low + one * (high - low) for (name, (low, high)), one in zip(BOUNDS.items(), scaled, strict=True)
        }
        table[key] = replace(start, **values)
        logs = []
        for row, (work, recipe, card, topology) in cases:
            try:
                value = predicted(row, price_step(work, recipe, card, topology), work, recipe)
            except AutoshardError:
                continue
            logs.append(log(value / float(row["value"])))
        # A weak pull towards the start keeps apart what the runs can't tell apart.
        pull = [0.05 * (one - other) for one, other in zip(scaled, first, strict=True)]
        return logs + pull

    first = [(getattr(start, name) - low) / (high - low) for name, (low, high) in BOUNDS.items()]
    first = [min(0.99, max(0.01, one)) for one in first]
    found = least_squares(errors, first, bounds=(0, 1), loss="soft_l1", f_scale=0.1, diff_step=0.02, max_nfev=25)
    logs = errors(found.x)[: -len(names)]
    return table[key], sum(map(abs, logs)) / len(logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    with open(given.file, newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if fitted_on(row)]
    with TABLE.open(newline="") as lines:
        table = list(csv.DictReader(lines))
    for key, cases in cases_of(rows).items():
        if len(cases) < FEWEST:
            continue
        reached, error = fit(key, cases)
        sources = sorted({row["id"].split("-")[0] for row, _ in cases})
        line = {"generation": key[0], "stack": key[1]}
        line |= {field.name: f"{getattr(reached, field.name):.3g}" for field in fields(Efficiency)}
        line["source"] = f"fitted on {len(cases)} runs of {' '.join(sources)}; mean error {error:.1%}"
        table = [one for one in table if (one["generation"], one["stack"]) != key] + [line]
        print(",".join(line.values()), flush=True)
    if not given.dry_run:
        with TABLE.open("w", newline="") as out:
            writer = csv.DictWriter(out, table[0].keys(), lineterminator="\n")
            writer.writeheader()
            writer.writerows(table)


if __name__ == "__main__":
    main()
