"""Fit what kernels and collectives reach of published peaks, and write autoshard/engine/efficiency.csv.

    python benchmarks/fit_efficiency.py runs.csv                 # on half of the runs; the others are the test
    python benchmarks/fit_efficiency.py runs.csv --dry-run       # print the table instead
    python benchmarks/fit_efficiency.py runs.csv --each          # errors of each source by a fit on all others

All generations and stacks are fitted at once, since they share what does not depend on both (`parameter_of`). Runs are
divided by model and cluster (`fitted_on`), so that no recipe of a fitted group is in the test. What is made small is
the soft-L1 sum of the logarithms of predicted over measured throughput: one odd run counts little. Each source weighs
as the square root of its runs, and a pull towards what kernels were measured to reach elsewhere (`FIRST`) holds what
the runs can't tell apart. A value that fewer than `FEWEST` runs depend on stays where it begins.
"""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from math import log
from pathlib import Path

import numpy as np
from common import run_command
from published import errors, fitted_on, price_rows, read_rows
from published_rows import DECODE, THROUGHPUT, Row, Unpriced, estimated, family, hardware_of, price, run_of, stack_of
from scipy.optimize import least_squares

import autoshard.engine.efficiency as efficiency
from autoshard.engine.efficiency import Efficiency, efficiency_table
from autoshard.errors import AutoshardError

TABLE = Path(efficiency.__file__).with_name("efficiency.csv")
FEWEST = 3
PULL = 0.5
BOUNDS = {
    "matmul": (0.4, 0.95), "half_size": (10.0, 400.0), "half_rows": (10.0, 1000.0),
    "attention": (0.1, 0.8), "attention_backward": (0.1, 0.8),
    "memory": (0.4, 0.95), "local": (0.4, 0.95), "network": (0.2, 0.95),
    "network_limit": (5e9, 5e10), "launch_seconds": (1e-6, 5e-5),
    "overlap": (0.0, 0.6),
}  # fmt: skip
FIRST = {
    ("sm80", "eager"): (0.82, 60, 0.6, 0.5), ("sm80", "compiled"): (0.82, 60, 0.6, 0.5),
    ("sm80", "early"): (0.82, 60, 0.45, 0.3), ("sm80", "fused"): (0.82, 60, 0.5, 0.5),
    ("sm80", "deepspeed"): (0.82, 60, 0.5, 0.5),
    ("sm90", "eager"): (0.72, 90, 0.45, 0.38), ("sm90", "compiled"): (0.72, 90, 0.45, 0.38),
    ("sm90", "early"): (0.72, 90, 0.25, 0.2), ("sm90", "fused"): (0.72, 90, 0.5, 0.45),
}  # fmt: skip
"""First values of matmul, half_size, attention and attention_backward: large products of cuBLAS; attention by
FlashAttention 2, of fused stacks of 2021 by batched products."""
OTHERS = {"memory": 0.8, "local": 0.75, "network": 0.75, "network_limit": 3e10, "overlap": 0.1}
SHARED = ("network", "network_limit", "launch_seconds", "overlap")
"""What does not depend on a generation: cards that no run is of have it too."""
LAUNCH = {"eager": 2.5e-5, "early": 1.5e-5, "compiled": 4e-6, "fused": 6e-6, "deepspeed": 6e-6}
NOISY = re.compile(r"^nano|^kf-moe")
"""Runs of no fit: nanotron's times differ by factors (those of 16 and 64 GPUs by its source's words), and mixtures took
2 to 3 times what is predicted, for a reason that is not known."""
KERNELS = {"eager": "torch", "compiled": "torch", "early": "early", "fused": "fused", "deepspeed": "fused"}
"""Whose matrix products and attention a stack has."""


def key_of(row: Row) -> tuple[str, str]:
    """The row of the table that prices a run."""
    return hardware_of(row)[0].generation, stack_of(row)


def cases_of(rows: Sequence[Row]) -> list[Row]:
    """Runs that can be priced; one figure of each run."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["metric"] in (*THROUGHPUT, *DECODE) and run_of(row) not in found and not NOISY.search(row["id"]):
            with suppress(Unpriced, AutoshardError):
                price(row, serves=row["metric"] in DECODE)
                if key_of(row) in FIRST:
                    found[run_of(row)] = row
    return list(found.values())


def parameter_of(generation: str, stack: str, name: str) -> str:
    """The name of the fitted number that a cell of the table has: the network's are those of all cards and stacks."""
    of: tuple[str, ...] = {"local": (generation,), "launch_seconds": (stack,)}.get(name, ())
    if name == "half_rows" and stack == "deepspeed":
        of = (stack,)
    elif name in ("matmul", "half_size", "half_rows"):
        name = name.replace("rows", "size")
        # Products of 2023 reached of the A100 what they do today, and less of the H100, which was new.
        of = generation, "torch" if (generation, stack) == ("sm80", "early") else KERNELS[stack]
    elif name.startswith("attention"):
        of = generation, KERNELS[stack]
    return " ".join((name, *of))


def cells() -> Iterator[tuple[tuple[str, str], str, str, float]]:
    """(generation and stack, column, its fitted number, its first value) of the table."""
    for key, first in FIRST.items():
        own = dict(zip(("matmul", "half_size", "attention", "attention_backward"), first, strict=True))
        rows = 600 if key[1] == "deepspeed" else own["half_size"]
        values = {**OTHERS, "half_rows": rows, "launch_seconds": LAUNCH[key[1]], **own}
        for name in BOUNDS:
            yield key, name, parameter_of(*key, name), values[name]


def fit(cases: Sequence[Row]) -> dict[tuple[str, str], Efficiency]:
    """The table that fits these runs best."""
    table = efficiency_table()
    runs, keys = Counter(map(family, cases)), Counter(map(key_of, cases))
    users: Counter[str] = Counter()
    for key, number in {(key, number) for key, _, number, _ in cells()}:
        users[number] += keys[key]
    starts = {number: (name, value) for _, name, number, value in reversed(list(cells()))}
    names = sorted(number for number in starts if users[number] >= FEWEST)
    low, high = np.array([BOUNDS[starts[number][0]] for number in names]).T
    first = np.clip((np.array([starts[number][1] for number in names]) - low) / (high - low), 0.01, 0.99)

    def fill(scaled: np.ndarray) -> None:
        known = dict(zip(names, (low + scaled * (high - low)).tolist(), strict=True))
        rows: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
        for key, name, number, value in cells():
            rows[key][name] = known.get(number, value)
        table.update({key: Efficiency(**row) for key, row in rows.items()})
        estimated.cache_clear()

    def differences(scaled: np.ndarray) -> list[float]:
        fill(scaled)
        ratios = [(row, price(row, serves=row["metric"] in DECODE) / float(row["value"])) for row in cases]
        return [log(ratio) / runs[family(row)] ** 0.25 for row, ratio in ratios] + list(PULL * (scaled - first))

    found = least_squares(differences, first, bounds=(0, 1), loss="soft_l1", f_scale=0.1, diff_step=0.01, max_nfev=40)
    fill(found.x)
    return {key: table[key] for key in FIRST}


def lines_of(found: Mapping[tuple[str, str], Efficiency], cases: Sequence[Row]) -> list[dict[str, str]]:
    """Rows of the table, with what they were fitted on."""
    lines = []
    for key, reached in found.items():
        own = [row for row in cases if key_of(row) == key]
        line = {"generation": key[0], "stack": key[1]}
        line |= {field.name: f"{getattr(reached, field.name):.3g}" for field in fields(Efficiency)}
        sources = " ".join(sorted({family(row) for row in own}))
        line["source"] = f"fitted on {len(own)} runs of {sources}" if own else "shared with other rows of this table"
        lines.append(line)
    return lines


def left_out(rows: Sequence[Row]) -> Iterator[str]:
    """Errors of each source, priced with what is fitted on the other sources."""
    half = cases_of([row for row in rows if fitted_on(row)])
    for name in dict.fromkeys(family(row) for row in rows):
        own = [row for row in rows if family(row) == name and row["metric"] in (*THROUGHPUT, *DECODE)]
        if cases_of(own):
            fit([row for row in half if family(row) != name])
            yield from (line for line in errors(price_rows(own)[0]) if f" {name} " in line)


def main(file: Path, dry_run: bool = False, each: bool = False) -> None:
    rows = read_rows(file)
    if each:
        print("\n".join(left_out(rows)))
        return
    cases = cases_of([row for row in rows if fitted_on(row)])
    fitted = lines_of(fit(cases), cases)
    for line in fitted:
        print(",".join(line.values()), flush=True)
    if dry_run:
        return
    kept = [one for one in read_rows(TABLE) if (one["generation"], one["stack"]) not in FIRST]
    by_stack = {line["stack"]: line for line in fitted}
    kept = [one | {name: by_stack[one["stack"]][name] for name in SHARED} for one in kept]
    with TABLE.open("w", newline="") as out:
        writer = csv.DictWriter(out, fitted[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(kept + fitted)


if __name__ == "__main__":
    run_command(__doc__, main)
