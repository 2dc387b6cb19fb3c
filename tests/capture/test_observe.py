"""The arguments that modules were called with: what they keep of tensors, objects and identities."""

import torch

from autoshard import nested
from autoshard.capture.capture import capture, observe_calls
from autoshard.capture.observe import TensorSpec, fill_specs
from autoshard.plan.workload import Workload
from tests.models import HF_CASES, by_name, over


def test_of_a_generation_only_the_first_forward_is_seen():
    case = next(case for case in HF_CASES if case.generates and case.layers)
    workload = Workload(new_tokens=3)
    path = f"{case.layers}.0"
    calls = observe_calls(case.model(), case.example(), workload, [path])[path]
    assert len(calls) == 1
    length = case.example()["input_ids"].shape[1]
    assert next(spec for spec in calls[0][0] if isinstance(spec, TensorSpec)).shape[1] == length
    graph = capture(case.model(), case.example(), workload=workload, composite=True)
    assert "decode" in {name for name, _, _ in graph.phases}


@over([case for case in HF_CASES if case.layers])
def test_blocks_of_transformers_run_alone(case):
    model = by_name(case.name).model()
    paths = [path for path, _ in model.get_submodule(case.layers).named_children()]
    found = observe_calls(model, case.example(), None, [f"{case.layers}.{path}" for path in paths])
    for path, calls in found.items():
        for call in calls:
            args, kwargs = fill_specs(
                call,
                lambda spec: torch.randn(spec.shape, dtype=spec.dtype) if spec.value is None else spec.value.clone(),
            )
            with torch.no_grad():
                output = model.get_submodule(path)(*args, **kwargs)
            assert any(True for _ in nested.tensors_in(output))
