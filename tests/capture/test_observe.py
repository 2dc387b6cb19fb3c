"""The arguments that modules were called with: what they keep of tensors, objects and identities."""

import threading

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.capture import capture, observe_calls
from autoshard.capture.observe import TensorSpec, fill_specs
from autoshard.plan.workload import Workload
from tests.models import HF_CASES, by_name, over


class State:
    """A cache: one tensor per layer, in an object."""

    def __init__(self) -> None:
        self.rows = {}

    def update(self, layer, x):
        self.rows[layer] = x if layer not in self.rows else torch.cat([self.rows[layer], x])
        return self.rows[layer]


class Layer(nn.Module):
    def __init__(self, index) -> None:
        super().__init__()
        self.index, self.mix = index, nn.Linear(4, 4)

    def forward(self, query, key, *, mask, state, lock=None):
        assert query is key
        return state.update(self.index, self.mix(query) * mask)


class Stack(nn.Module):
    def __init__(self, lock=False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index) for index in range(3))
        self.lock = threading.Lock() if lock else None

    def forward(self, x, ids):
        x = self.layers[0].mix(x)
        state = State()
        for layer in self.layers:
            x = layer(x, x, mask=(ids > 2)[:, None], state=state, lock=self.lock)
        return self.layers[0](x, x, mask=torch.ones(1), state=State()), self.layers[0](
            x, x, mask=torch.ones(1), state=State()
        )


X, IDS = torch.randn(3, 4), torch.tensor([1, 5, 3])


def test_tensors_keep_shape_dtype_and_known_values():
    found = observe_calls(Stack(), (X, IDS), None, ["layers.0", "layers.1", "layers.7"])
    assert list(found) == ["layers.0", "layers.1", "layers.7"] and found["layers.7"] == []
    assert [len(calls) for calls in found.values()] == [2, 1, 0]
    args, kwargs = found["layers.0"][0]
    assert [(spec.shape, spec.dtype, spec.value) for spec in args] == [((3, 4), torch.float32, None)] * 2
    assert kwargs["mask"].value.tolist() == [[False], [True], [True]]
    assert kwargs["lock"] is None


def test_objects_are_as_they_were_before_the_call():
    found = observe_calls(Stack(), (X, IDS), None, ["layers.0", "layers.2"])
    assert found["layers.0"][0][1]["state"].rows == {}
    rows = found["layers.2"][0][1]["state"].rows
    assert list(rows) == [0, 1] and all(type(row) is TensorSpec and row.shape == (3, 4) for row in rows.values())
    assert rows[1] is found["layers.2"][0][0][0]  # what the layer before gave, here and there


def test_filled_arguments_run_a_layer_alone():
    model = Stack()
    (call,) = observe_calls(model, (X, IDS), None, ["layers.2"])["layers.2"]
    made = []

    def make(spec):
        made.append(spec)
        return torch.randn(spec.shape) if spec.value is None else spec.value.clone()

    args, kwargs = fill_specs(call, make)
    assert args[0] is args[1] is kwargs["state"].rows[1] and len(made) == 3
    out = model.layers[2](*args, **kwargs)
    assert torch.equal(out, model.layers[2].mix(args[0]) * kwargs["mask"])
    again = fill_specs(call, make)
    assert 2 in kwargs["state"].rows and 2 not in again[1]["state"].rows


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
