"""What each tool does with the test models when given no hint: runs, and gives the same bits as the plain model.

    python benchmarks/peers.py [name ...]

The models are those of tests/models: small random transformers of many kinds, and hostile ones. Each tool gets the
model and inputs and no hint. Capture tools are asked for a graph that gives the same output. Placement tools are asked
to run the model spread: Accelerate half on the CPU and half on disk (it has no simulated devices), autoshard over three
simulated devices of which none holds the model.
Prints a Markdown table and the first line of every failure.
"""

import collections
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from tests.conformance.checks import (
    atoms,
    difference_when_placed,
    difference_when_replayed,
    forward,
    plan_tightly,
    profiled,
)
from tests.models import HF_CASES, HOSTILE_CASES, Case, same


def symbolic_trace(case: Case) -> bool:
    return _same(case, torch.fx.symbolic_trace(case.model()))


def export(case: Case) -> bool:
    with torch.no_grad():
        exported = torch.export.export(case.model(), (), case.example(), strict=False)
    return _same(case, exported.module())


def autoshard_capture(case: Case) -> bool:
    graph = profiled(case.model, case.example()).graph
    return not difference_when_replayed(case.model, case.example(), graph, training=False)


def accelerate_split(case: Case) -> bool:
    """The first half of the modules that hold parameters on the CPU, the second half on disk."""
    model = case.model()
    paths = atoms(model)
    device_map = {path: "cpu" if index < len(paths) / 2 else "disk" for index, path in enumerate(paths)}
    with tempfile.TemporaryDirectory() as folder:
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)
        return _same(case, model)


def autoshard_apply(case: Case) -> bool:
    plan, _ = plan_tightly(profiled(case.model, case.example()), "balanced")
    return not difference_when_placed(case.model, plan, [lambda model: forward(model, case.example())])


def _same(case: Case, callable_model: Any) -> bool:
    return same(forward(case.model(), case.example()), forward(callable_model, case.example()))


TOOLS: dict[str, Callable[[Case], bool]] = {
    "capture: torch.fx.symbolic_trace": symbolic_trace,
    "capture: torch.export, strict=False": export,
    "capture: autoshard": autoshard_capture,
    "placement: Accelerate, CPU and disk": accelerate_split,
    "placement: autoshard, balanced": autoshard_apply,
}


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    wanted = set(sys.argv[1:])
    groups = {"transformers": HF_CASES, "hostile": [case for case in HOSTILE_CASES if not case.refused]}
    score: collections.Counter[tuple[str, str, str]] = collections.Counter()
    total: collections.Counter[str] = collections.Counter()
    failures = []
    for group, cases in groups.items():
        for case in cases:
            if wanted and case.name not in wanted:
                continue
            total[group] += 1
            for tool, attempt in TOOLS.items():
                try:
                    outcome = "equal" if attempt(case) else "differs"
                except Exception as error:
                    lines = str(error).strip().splitlines() or [""]
                    outcome = "fails"
                    failures.append(f"{tool}: {case.name}: {type(error).__name__}: {lines[0][:120]}")
                score[tool, group, outcome] += 1
                if outcome == "differs":
                    failures.append(f"{tool}: {case.name}: other bits")
    print(
        "| tool | "
        + " | ".join(f"{group}, of {count}: equal / differs / fails" for group, count in total.items())
        + " |"
    )
    print("|---|" + "---|" * len(total))
    for tool in TOOLS:
        cells = (" / ".join(str(score[tool, group, o]) for o in ("equal", "differs", "fails")) for group in total)
        print(f"| {tool} | " + " | ".join(cells) + " |")
    print("\n" + "\n".join(failures))


if __name__ == "__main__":
    main()
