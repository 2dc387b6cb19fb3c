"""What must hold of a pipeline whose processes all run the user's own forward: every rank runs these."""

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.fingerprint import fingerprint
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.runtime.moves import named_tensors
from autoshard.workload import Workload
from tests.models import by_name

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def atoms_of(model: nn.Module) -> list[str]:
    """Modules without lists inside, and tensors of those with some, in the order of registration."""
    found: list[str] = []

    def walk(path: str, module: nn.Module) -> None:
        divided = isinstance(module, _LISTS) or any(isinstance(one, _LISTS) for one in module.modules())
        if path and not divided:
            found.extend([path] if named_tensors(module) else [])
            return
        dotted = f"{path}." if path else ""
        found.extend(dotted + name for name, _ in (*module.named_parameters(recurse=False),))
        found.extend(dotted + name for name, _ in module.named_buffers(recurse=False))
        for name, child in module._modules.items():  # under each of its names
            if child is not None:
                walk(dotted + name, child)

    walk("", model)
    return found


def plan_in_stages(model: nn.Module, count: int, *, each: int = 1) -> Plan:
    """A plan of `count` positions with `each` stages of about as many atoms."""
    atoms, stages = atoms_of(model), count * each
    sizes = [len(atoms) // stages + (number < len(atoms) % stages) for number in range(stages)]
    divided = [tuple(atoms[sum(sizes[:number]) :][:size]) for number, size in enumerate(sizes)]
    return Plan(
        strategy="pipeline",
        objective="throughput",
        workload=Workload(),
        devices=tuple(PlanDevice(name=f"cpu:{number}", memory_bytes=1 << 34) for number in range(count)),
        placements={path: f"cpu:{number % count}" for number, paths in enumerate(divided) for path in paths},
        stages=tuple(Stage(paths=paths) for paths in divided),
        mesh=Mesh(pp=count),
        fingerprint=fingerprint(model),
    )


def generated(model: Any, inputs: dict[str, Any], **options: Any) -> torch.Tensor:
    """Tokens: greedily, by beams, sampled."""
    kept = {name: value for name, value in inputs.items() if name not in ("use_cache", "decoder_input_ids", "labels")}
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, **options}
    torch.manual_seed(5)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        return model.generate(**kept, **options)


WAYS: tuple[dict[str, Any], ...] = ({}, {"num_beams": 2}, {"do_sample": True}, {"cache_implementation": "static"})


def check_models(names: list[str], ways: tuple[dict[str, Any], ...] = WAYS[:3], each: int = 1) -> None:
    """Forward and generation of some models are those of the whole model, bit for bit."""
    for name in names:
        case = by_name(name)
        model = case.model().eval()
        inputs = [case.example(shape) for shape in case.shapes]
        with torch.inference_mode():  # in which stages compute; torch's own attention has other bits there
            expected = [model(**example) for example in inputs]
        tokens = [generated(model, inputs[0], **way) for way in ways] if case.generates else []
        model = case.model().eval()  # afresh: some count their calls
        inputs = [case.example(shape) for shape in case.shapes]
        autoshard.apply(model, plan_in_stages(model, dist.get_world_size(), each=each))
        with torch.no_grad():
            found = [model(**example) for example in inputs]
        assert_same(found, expected, name)
        for way, sequence in zip(ways, tokens, strict=False):
            assert torch.equal(generated(model, inputs[0], **way), sequence), (name, way)
        autoshard.remove(model)
        if case.generates:
            with torch.no_grad():
                assert_same(model(**inputs[0]), expected[0], f"{name} after removal")


def assert_same(found: Any, expected: Any, what: str) -> None:
    """Nested outputs are equal bit for bit."""
    from autoshard.nested import tensors_in

    left, right = list(tensors_in(found)), list(tensors_in(expected))
    assert [path for path, _ in left] == [path for path, _ in right], what
    for (path, one), (_, other) in zip(left, right, strict=True):
        assert type(one) is torch.Tensor and not one.is_inference(), (what, path, type(one))
        assert torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True), (what, path)
