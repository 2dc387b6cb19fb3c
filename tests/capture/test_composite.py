"""Composite graphs: ops such as `linear` stay whole, and every site is found again by a mode when the model runs."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autoshard import nested
from autoshard.capture.capture import capture
from autoshard.capture.shapes import Shapes
from autoshard.common.attention import written_out
from autoshard.errors import SpecError
from autoshard.plan.workload import Workload
from tests.models import WORKING_CASES, over

aten = torch.ops.aten


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x, *, scale=None):
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:-1], 3, 2, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        mixed = torch.einsum("btd,ed->bte", mixed, self.out.weight).softmax(-1) + self.out.bias
        return {"out": mixed if scale is None else mixed * scale, "parts": (q, None)}


def seen_by_a_mode(model, run):
    """What a torch function mode sees in a real run: (path, time, function, occurrence) -> tensors in and out.

    Written by hand, after what the runtime does, so as to share no code with capture.
    """
    paths = {module: path for path, module in model.named_modules()}
    stack, times, found = [], {}, {}
    call = nn.Module.__call__

    def counted_call(self, *args, **kwargs):
        if self not in paths:  # not part of the model: its calls are those of whoever calls it
            return call(self, *args, **kwargs)
        path = paths[self]
        times[path] = times.get(path, -1) + 1
        stack.append((path, times[path], {}))
        try:
            return call(self, *args, **kwargs)
        finally:
            stack.pop()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            name = func.__name__
            if not stack:
                return func(*args, **kwargs)
            if (inside := written_out(func, args, kwargs)) is not None:  # as the mode of a cut model does
                with self:
                    return inside()
            key = (*stack[-1][:2], name, stack[-1][2].get(name, 0))
            for _, _, counts in stack:
                counts[name] = counts.get(name, 0) + 1
            result = func(*args, **kwargs)
            found[key] = shapes((args, kwargs)), shapes(result)
            return result

    nn.Module.__call__ = counted_call
    try:
        with torch.no_grad(), Mode():
            run(model)
    finally:
        nn.Module.__call__ = call
    return found


def shapes(arguments):
    return {path: tuple(tensor.shape) for path, tensor in nested.tensors_in(arguments) if not tensor.is_nested}


def test_modules_that_look_for_overrides_take_the_path_they_take_under_a_mode():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    graph = capture(layer, torch.randn(2, 3, 8), composite=True)
    assert aten._transformer_encoder_layer_fwd.default not in {op.target for op in graph.ops}
    assert {"linear1", "linear2"} <= {graph.calls[site.call].path for site in graph.sites}


class KnownMask(nn.Module):
    """Known masks and counts meet unknown tensors of which only the shape matters."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, ids):
        x = self.table(ids)
        mask = (ids > 3).unsqueeze(-1).expand_as(x)
        chosen = x[mask].numel()
        spread = x[0].repeat_interleave(ids[0], dim=0)
        places = torch.where(ids.type_as(x) > 3)
        return x.sum() + chosen, spread, places


def test_known_values_stay_known():
    ids = torch.tensor([[1, 5, 0], [7, 2, 8]])
    usual, composite = (capture(KnownMask(), ids, composite=whole) for whole in (False, True))
    assert usual.level == composite.level == "fake" and usual.notes == composite.notes
    result = [[graph.values[value].shape for value in graph.outputs] for graph in (usual, composite)]
    assert result[0] == result[1] and result[0][1] == (6, 4)


def test_running_statistics_are_written():
    model = nn.BatchNorm1d(4).train()
    graph = capture(model, torch.randn(5, 4), composite=True)
    (op,) = [op for op in graph.ops if op.target is aten.batch_norm.default]
    names = {tensor.value: tensor.name for tensor in graph.tensors}
    assert {names[value] for value in op.mutates} == {"running_mean", "running_var"}


def test_training_graphs_are_not_composite():
    with pytest.raises(SpecError, match="forward only"):
        capture(Block(), torch.randn(2, 3, 8), workload=Workload(mode="training"), composite=True)


@over(WORKING_CASES)
def test_every_site_is_found_again(case):
    graph = capture(case.model(), case.example(), composite=True)
    if graph.level == "invented":  # experts get equal shares there
        graph = capture(case.model(), case.example(), composite=True, level="real")
    found = seen_by_a_mode(case.model(), lambda model: model(**case.example()))
    time, seen = {}, {}
    for call in graph.calls:
        time[call.index] = seen[call.path] = seen.get(call.path, -1) + 1
    assert graph.sites
    for site in graph.sites:
        key = (graph.calls[site.call].path, time[site.call], site.function, site.occurrence)
        assert key in found, f"{key} was not called"
        for rows, at_run in zip((site.inputs, site.outputs), found[key], strict=True):
            recorded = {path: graph.values[value].shape for path, value in rows}
            assert recorded.items() <= at_run.items(), f"{key}: {recorded}, and when run {at_run}"


def test_what_an_op_made_of_a_known_tensor_is_no_copy_of_another():
    """Dropout in evaluation gives what it was given; of a tensor with values another is made, which is remembered."""
    known = torch.zeros(2, 3)

    def gives_what_it_was_given(shapes):
        made = shapes.fresh(known.shape, known.stride(), known.dtype)
        return shapes.run(aten.dropout.default, (made, 0.5, False), {}) is made

    shapes = Shapes()
    assert shapes.run(aten.dropout.default, (known, 0.5, False), {}) is not known
    assert gives_what_it_was_given(shapes) == gives_what_it_was_given(Shapes())  # torch before 2.14 makes another
