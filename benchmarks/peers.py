"""What each tool does with the test models when given no hint: runs, and gives the same bits as the plain model.

    python benchmarks/peers.py [name ...]

The models are those of tests/models: small random transformers of many kinds, and hostile ones. Capture tools are asked
for a graph that gives the same output. Placement tools are asked to run the model spread: Accelerate half on the CPU
and half on disk (it has no simulated devices), autoshard over three simulated devices of which none holds the model.
Prints a Markdown table and the first line of every failure.
"""

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import accelerate
import torch
from common import print_header, print_row

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conformance import checks
from tests.models import HF_CASES, HOSTILE_CASES, Case, same


def equal(case: Case, model: torch.nn.Module) -> bool:
    """Whether a model gives what the case's own does."""
    return same(checks.forward(case.model(), case.example()), checks.forward(model, case.example()))


@torch.no_grad()
def exported(case: Case) -> torch.nn.Module:
    return torch.export.export(case.model(), (), case.example(), strict=False).module()


def autoshard_capture(case: Case) -> bool:
    graph = checks.profiled(case.model, case.example()).graph
    return not checks.difference_when_replayed(case.model, case.example(), graph, training=False)


def accelerate_split(case: Case) -> bool:
    """The first half of the modules that hold parameters on the CPU, the second half on disk."""
    model = case.model()
    paths = checks.atoms(model)
    device_map = {path: "cpu" if index < len(paths) / 2 else "disk" for index, path in enumerate(paths)}
    with tempfile.TemporaryDirectory() as folder:
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)
        return equal(case, model)


def autoshard_apply(case: Case) -> bool:
    plan, _ = checks.plan_tightly(checks.profiled(case.model, case.example()), "balanced")
    return not checks.difference_when_placed(case.model, plan, [lambda model: checks.forward(model, case.example())])


TOOLS: dict[str, Callable[[Case], bool]] = {
    "capture: torch.fx.symbolic_trace": lambda case: equal(case, torch.fx.symbolic_trace(case.model())),
    "capture: torch.export, strict=False": lambda case: equal(case, exported(case)),
    "capture: autoshard": autoshard_capture,
    "placement: Accelerate, CPU and disk": accelerate_split,
    "placement: autoshard, balanced": autoshard_apply,
}


def outcome(tool: str, case: Case) -> tuple[str, str]:
    """Whether it is "equal", "differs" or "fails", and what there is to say."""
    try:
        return ("equal", "") if TOOLS[tool](case) else ("differs", "other bits")
    except Exception as error:
        return "fails", f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"


def main(*names: str) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    groups = {"transformers": HF_CASES, "hostile": [case for case in HOSTILE_CASES if not case.refused]}
    groups = {group: [one for one in cases if one.name in names or not names] for group, cases in groups.items()}
    failures = []
    print_header("tool", *(f"{group}, of {len(cases)}: equal / differs / fails" for group, cases in groups.items()))
    for tool in TOOLS:
        cells = []
        for cases in groups.values():
            found = {case.name: outcome(tool, case) for case in cases}
            failures += [f"{tool}: {name}: {said}" for name, (_, said) in found.items() if said]
            score = Counter(result for result, _ in found.values())
            cells.append(" / ".join(str(score[result]) for result in ("equal", "differs", "fails")))
        print_row(tool, *cells)
    print("\n" + "\n".join(failures))


if __name__ == "__main__":
    main(*sys.argv[1:])
