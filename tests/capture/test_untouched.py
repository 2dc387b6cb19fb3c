"""A capture leaves no trace, whatever the forward does and whether or not it fails."""

import contextlib
import functools
import gc
import random
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import compile_compatible_method_lru_cache

from autoshard.capture.capture import capture
from autoshard.common.fingerprint import fingerprint
from autoshard.errors import CaptureError
from autoshard.plan.workload import Workload
from tests.replay import replay


class Messy(nn.Module):
    """Caches tensors, counts, appends, replaces its parameter, converts itself, draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(1))
        self.cached = None
        self.history = [torch.ones(4)]
        self.table = {"a": 1}
        self.plain = torch.ones(4)

    def forward(self, x, fail: bool = False):
        x += torch.randn(4) + random.random() + numpy.random.rand()
        self.cached = self.layer(x)
        self.history.append(self.cached)
        self.table["b"] = self.cached
        self.count += 1
        self.plain += 1
        self.register_buffer("late", torch.zeros(2), persistent=False)
        self.extra = nn.Linear(4, 4)
        self.layer = self.layer.double().float()
        if fail:
            raise ValueError("as asked")
        return nn.functional.dropout(self.norm(self.cached + x), 0.5)


def state_of(model):
    tensors = {
        name: (id(t), t._version, t.clone(), t.grad) for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    attributes = {path: {k: id(v) for k, v in vars(module).items()} for path, module in model.named_modules()}
    return tensors, attributes, [list(map(id, model.history)), dict(model.table), model.plain.clone(), model.training]


def same_state(before, after):
    assert before[0].keys() == after[0].keys()
    for name, (identity, version, content, grad) in before[0].items():
        assert after[0][name][:2] == (identity, version) and torch.equal(after[0][name][2], content)
        assert after[0][name][3] is grad
    assert before[1] == after[1]
    assert before[2][0] == after[2][0] and before[2][1] == after[2][1] and before[2][3] == after[2][3]
    assert torch.equal(before[2][2], after[2][2])


@pytest.mark.parametrize("level", ["fake", "real"])
@pytest.mark.parametrize("fail", [False, True], ids=["works", "fails"])
@pytest.mark.parametrize("mode", ["inference", "training"])
def test_the_model_and_the_world_are_as_they_were(level, fail, mode):
    model = Messy().train()
    hooked = []
    model.layer.register_forward_hook(lambda *_: hooked.append(1))
    x = torch.randn(3, 4)
    content, version = x.clone(), x._version
    before, call, apply = state_of(model), nn.Module.__call__, nn.Module._apply
    device = torch._subclasses.fake_tensor.FakeTensor.device
    seeds = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    collecting, grad = gc.isenabled(), torch.is_grad_enabled()
    if fail:
        with pytest.raises(CaptureError, match="as asked"):
            capture(model, (x, True), workload=Workload(mode=mode), level=level)
    else:
        capture(model, (x, False), workload=Workload(mode=mode), level=level)
    same_state(before, state_of(model))
    assert torch.equal(x, content) and x._version == version
    assert torch.equal(torch.get_rng_state(), seeds[0]) and random.getstate() == seeds[1]
    assert (numpy.random.get_state()[1] == seeds[2]).all()
    assert (nn.Module.__call__, nn.Module._apply) == (call, apply)
    assert torch._subclasses.fake_tensor.FakeTensor.device is device
    assert gc.isenabled() == collecting and torch.is_grad_enabled() == grad
    assert hooked == []  # the user's hook ran as part of the model; what it noted is taken back


def test_nothing_is_kept_alive():
    """No tensor of the run, nor the model, is held by the graph."""
    import weakref

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    watched = weakref.ref(model[0].weight)
    graph = capture(model, torch.randn(2, 4), workload=Workload(mode="training"))
    del model
    assert watched() is None and len(graph.ops)


def test_fingerprint_is_of_names_shapes_dtypes_and_ties():
    def build(tied=True, width=4, dtype=torch.float32, device="cpu"):
        with torch.device(device):
            model = nn.ModuleDict({"a": nn.Linear(4, width, bias=False), "b": nn.Linear(4, width, bias=False)}).to(
                dtype
            )
        if tied:
            model["b"].weight = model["a"].weight
        return model

    mark = fingerprint(build())
    assert mark == fingerprint(build()) == fingerprint(build(device="meta"))
    assert (
        len({mark, fingerprint(build(tied=False)), fingerprint(build(width=5)), fingerprint(build(dtype=torch.half))})
        == 4
    )
    model = build()
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    assert fingerprint(model) == mark
    model.register_buffer("saved", torch.zeros(3))
    assert fingerprint(model) != mark


class Cache:
    """An object of a class that nobody knows, with tensors inside."""

    def __init__(self) -> None:
        self.kept = [torch.ones(2, 4)]


class UsesCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, cache, log, options=None):
        cache.kept.append(self.layer(x))
        log.append(x)
        options["seen"] = True
        return sum(cache.kept)


def test_arguments_are_as_they_were():
    model, x, cache, log, options = UsesCache(), torch.randn(2, 4), Cache(), [], {"seen": False}
    kept = list(cache.kept)
    graph = capture(model, (x, cache, log, options))
    assert cache.kept == kept and log == [] and options == {"seen": False}
    assert len(graph.inputs) == 1
    outputs, _ = replay(graph, model, (x, cache, log, options))
    assert torch.equal(outputs[0], model(x, cache, log, options))


class KeepsOutside(nn.Module):
    def forward(self, x):
        contextlib.kept = x * 2  # in a file of others
        return x


def test_what_is_kept_outside_of_the_model_is_refused_with_its_maker():
    with pytest.raises(CaptureError, match=r"that aten.mul.Tensor made in the model was kept outside .* once before"):
        capture(KeepsOutside(), torch.randn(1 << 12, 1 << 11), level="fake")
    del contextlib.kept


class TensorError(ValueError):
    def __init__(self, tensor):
        super().__init__("not finite", tensor)
        self.tensor = tensor


class RaisesWithTensor(nn.Module):
    def __init__(self, act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x):
        return self.act(x * 2)


def _not_finite(x):
    raise TensorError(x)


@pytest.mark.parametrize(("act", "words"), [
    (lambda x: x.silu(), "AttributeError: .* has no attribute 'silu'"),
    (_not_finite, r"TensorError: .*not finite.*tensor of shape \(2, 4\)"),
])  # fmt: skip
def test_an_error_that_has_a_tensor_is_told_itself(act, words):
    """Not that somebody keeps a tensor."""
    with pytest.raises(CaptureError, match=rf"could not be run with the inputs given: {words}"):
        capture(RaisesWithTensor(act), torch.randn(2, 4))


@compile_compatible_method_lru_cache(maxsize=4)
def steps(length):
    """Of a cache whose decorator is in another file."""
    return torch.linspace(0, 1, length)


class CachesByShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @staticmethod
    @functools.lru_cache(maxsize=4)
    def positions(length):
        return torch.arange(length) / length

    @classmethod
    @functools.cache
    def both(cls, length):
        return cls.positions(length), torch.ones(length)

    @staticmethod
    @functools.cache
    def registry():
        return ["of the user's"]

    def forward(self, x):
        added, factor = self.both(x.shape[-1])
        return self.layer(x * factor + added + self.positions(4) + steps(4)) if self.registry() else x


def test_caches_have_no_tensors_at_the_beginning_of_any_run_and_at_its_end():
    model, inputs = CachesByShape(), torch.randn(2, 4)
    registry = model.registry()
    cold = [op.target for op in capture(model, inputs).ops]
    assert not model.positions.cache_info().currsize and not model.both.cache_info().currsize
    expected = model(inputs)
    assert [op.target for op in capture(model, inputs).ops] == cold
    assert {torch.ops.aten.arange.default, torch.ops.aten.linspace.default} <= set(cold)
    assert torch.equal(model(inputs), expected) and model.registry() is registry


class Threaded(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layer, self.way = nn.Linear(4, 4), way

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            work = {"module": self.layer, "function": torch.relu, "number": len}[self.way]
            return self.layer(x) * pool.submit(work, x).result()


@pytest.mark.parametrize("way", ["module", "function", "number"])
def test_work_of_other_threads_is_refused(way):
    if way == "number":
        assert capture(Threaded(way), torch.ones(2, 4)).ops
        return
    with pytest.raises(CaptureError, match="another thread"):
        capture(Threaded(way), torch.ones(2, 4))


def test_what_is_compiled_is_recorded_as_it_is_written():
    made = []
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend=lambda graph, inputs: made.append(1) or graph)
    model[0].compile(backend=lambda graph, inputs: made.append(1) or graph)
    assert capture(compiled, torch.randn(2, 4), level="fake").ops and not made
    compiled(torch.randn(2, 4))
    assert made
