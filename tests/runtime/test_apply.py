"""Hand-made models under hand-made maps: the same bits, the same objects, and nothing left behind."""

import collections
import copy
import dataclasses
import pickle
import types
import weakref

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import map_tensors, tensors_in
from autoshard.plan import Plan
from autoshard.runtime import apply_device_map, apply_plan, is_applied, remove
from autoshard.runtime.around import layers_of
from tests.hooks import is_hooked
from tests.models import same
from tests.runtime.models import HARD, D, Residual, SharedDict, Tied, rows

CPU = torch.device("cpu")


def plain(value):
    value = list(value) if isinstance(value, types.GeneratorType) else value
    return map_tensors(value, lambda tensor: tensor.detach().cpu().clone())


def build(case):
    torch.manual_seed(0)
    return case.make().train(case.train_mode)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("mode", ["no_grad", "grad", "inference_mode"])
def test_same_bits_and_full_reversal(name, mode):
    case = HARD[name]
    context = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference_mode": torch.inference_mode}[mode]
    original, model = build(case), build(case)
    kinds = {path: (type(m), set(vars(m))) for path, m in model.named_modules()}
    objects = [*model.parameters(), *model.buffers()]
    inputs = [rows(), rows(3, 4), rows(2, 2), rows(2, 5)]
    with context():
        expected = [plain(original(x.clone())) for x in inputs]
    with autoshard.simulate("3x1MiB"):
        assert apply_device_map(model, case.device_map) is model and is_applied(model)
        assert list(model.state_dict()) == list(original.state_dict())
        with context():
            found = []
            for x in inputs:
                output = model(x.clone())
                output = list(output) if isinstance(output, types.GeneratorType) else output
                assert all(tensor.device == CPU for _, tensor in tensors_in(output))
                found.append(plain(output))
                del output  # its graph holds simulated parameters, and remove would refuse to exchange them
        assert same(expected, found)
        assert remove(model) is model and not is_applied(model)
    assert not is_hooked(model)
    assert {path: (type(m), set(vars(m))) for path, m in model.named_modules()} == kinds
    after = [*model.parameters(), *model.buffers()]
    assert all(old is new for old, new in zip(objects, after, strict=True))
    assert all(type(t) in (torch.Tensor, nn.Parameter) and t.device == CPU for t in after)
    assert same(dict(original.named_buffers()), dict(model.named_buffers()))
    assert same(dict(original.named_parameters()), dict(model.named_parameters()))


@pytest.mark.parametrize("name", [name for name, case in HARD.items() if case.trains])
def test_training_steps_are_the_same(name):
    """Gradients and three optimizer steps; the optimizer was made before apply and outlives remove."""
    case = HARD[name]
    inputs = [rows() for _ in range(4)]

    def train(model, optimizer, steps):
        for x in steps:
            output = model(x.clone())
            output = list(output) if isinstance(output, types.GeneratorType) else output
            losses = [t.float().square().mean().cpu() for _, t in tensors_in(output) if t.requires_grad]
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()

    original, model = build(case), build(case)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, foreach=False) for m in (original, model)]
    train(original, optimizers[0], inputs)
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, case.device_map)
        train(model, optimizers[1], inputs[:3])
        gradients = {name: p.grad.device for name, p in model.named_parameters() if p.grad is not None}
        assert all(device.index is not None for device in gradients.values()) and gradients
        remove(model)
    assert all(p.grad is None or p.grad.device == CPU for p in model.parameters())
    for state in optimizers[1].state.values():
        for key, value in state.items():
            state[key] = value.cpu() if isinstance(value, torch.Tensor) else value
    train(model, optimizers[1], inputs[3:])
    for (name, left), right in zip(original.named_parameters(), model.parameters(), strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=1e-7), name


def test_gradients_of_a_tie_and_a_contiguous_split_are_bitwise():
    original, model = build(HARD["tied"]), build(HARD["tied"])
    x = rows()
    original(x).square().mean().backward()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["tied"].device_map)
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.device == torch.device("cpu:0")  # the first of its names decides
        model(x).square().mean().backward()
        remove(model)
    for left, right in zip(original.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_different_objects_on_one_storage_stay_on_one():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    model[1].weight = nn.Parameter(model[0].weight.detach().T)
    x = rows()
    expected = model(x)
    with autoshard.simulate("2x1MiB") as devices:
        apply_device_map(model, {"0": "cpu:0", "1": "cpu:1"})
        assert devices.memory("cpu:1")[0] == model[1].bias.nbytes
        assert same(model(x), expected)
        with torch.no_grad():
            model[0].weight.mul_(2)
        remove(model)
    assert torch.equal(model[1].weight, model[0].weight.T)
    assert model[1].weight.data_ptr() == model[0].weight.data_ptr()


def test_applying_again_is_removing_first():
    model, other = build(HARD["residual"]), build(HARD["residual"])
    x = rows()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, {"a": "cpu:2", "b": "cpu:0", "c": "cpu:0"})
        model(x)
        apply_device_map(model, HARD["residual"].device_map)
        once = apply_device_map(other, HARD["residual"].device_map)
        assert same(model(x), once(x))
        assert [len(layers_of(one)) for one in model.modules()] == [len(layers_of(one)) for one in other.modules()]
        assert [p.device for p in model.parameters()] == [p.device for p in other.parameters()]
        remove(model)
    assert all(p.device == CPU for p in model.parameters())


def test_failing_half_way_changes_nothing():
    model = build(HARD["residual"])
    model.a.weight.grad = torch.ones(D, D)
    before = {name: (tensor, tensor.data_ptr(), tensor.clone()) for name, tensor in model.named_parameters()}
    with autoshard.simulate({"cpu:0": "1MiB", "cpu:1": "64B"}) as devices:
        with pytest.raises(ApplyError, match=r"b\.weight.*cpu:1"):
            apply_device_map(model, {"a": "cpu:0", "b": "cpu:1", "c": "cpu:0"})
        assert devices.memory("cpu:0")[0] == 0
    assert not is_applied(model) and not is_hooked(model)
    for name, tensor in model.named_parameters():
        old, address, values = before[name]
        assert tensor is old and type(tensor) is nn.Parameter and tensor.data_ptr() == address
        assert torch.equal(tensor, values)
    assert torch.equal(model.a.weight.grad, torch.ones(D, D))


def test_everything_within_autocast():
    """Torch refers to parameters that it has cast until autocast ends, and does not exchange what is referred to."""
    model, original = (nn.Sequential(nn.Linear(D, 16), nn.Linear(16, D)) for _ in range(2))
    original.load_state_dict(model.state_dict())
    x = rows(3, 4)
    with autoshard.simulate("2x1MiB"), torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for device_map in ({"0": "cpu:0", "1": "cpu:1"}, {"0": "cpu:1", "1": "cpu:0"}):
            assert torch.equal(apply_device_map(model, device_map)(x), original(x))
        assert torch.equal(remove(model)(x), original(x))
    assert same(dict(model.state_dict()), dict(original.state_dict()))


def test_failing_again_leaves_the_first_plan():
    model, x = build(HARD["residual"]), rows()
    expected = model(x)
    with autoshard.simulate({"cpu:0": "1MiB", "cpu:1": "64B", "cpu:2": "1MiB"}):
        apply_device_map(model, {"a": "cpu:0", "b": "cpu:2", "c": "cpu:0"})
        with pytest.raises(ApplyError):
            apply_device_map(model, {"a": "cpu:0", "b": "cpu:1", "c": "cpu:0"})
        assert is_applied(model) and model.b.weight.device == torch.device("cpu:2")
        assert same(model(x), expected)


@pytest.mark.parametrize(
    "device_map, kind, words",
    [
        ({"a": "cpu:0", "b": "cpu:1"}, PlanError, "c.weight"),
        ({"a": "cpu:0", "b": "cpu:1", "c": "cpu:0", "d": "cpu:0"}, PlanError, "'d'"),
        ({"": "cpu:0", "a": "cpu:1"}, PlanError, "overlap"),
        ({"": "cuda:0"}, ApplyError, "cuda:0"),
        ({"": "cpu:7"}, ApplyError, "cpu:7"),
        ({"": "meta"}, ApplyError, "meta"),
        ({"": "disk"}, ApplyError, "has it in memory, not in a file. Save the model with autoshard.save"),
        ({"a": "disk", "b": "cpu:0", "c": "cpu:0"}, ApplyError, "keeps a.weight on disk"),
        ({}, PlanError, "empty"),
        ({"a": None, "b": 0, "c": 0}, PlanError, "None"),
        ({3: "cpu"}, PlanError, "3"),
    ],
)
def test_maps_that_make_no_sense(device_map, kind, words):
    if words == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has cuda:0")
    model = build(HARD["residual"])
    with autoshard.simulate("2x1MiB"), pytest.raises(kind) as caught:
        apply_device_map(model, device_map)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not is_hooked(model) and all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_models_that_cannot_be_placed():
    with pytest.raises(ApplyError, match="no data"), torch.device("meta"):
        apply_device_map(nn.Linear(2, 2), {"": "cpu"})
    with pytest.raises(ApplyError, match="lazy"):
        apply_device_map(nn.LazyLinear(2), {"": "cpu"})
    with pytest.raises(ApplyError, match="0 is TorchScript"):
        apply_device_map(nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))), {"": "cpu"})
    with pytest.raises(ApplyError, match="nothing to remove"):
        remove(nn.Linear(2, 2))
    model = build(HARD["residual"])
    apply_device_map(model.a, {"": "cpu"})
    with pytest.raises(ApplyError, match="'a'"):
        apply_device_map(model, {"": "cpu"})


def test_plan_of_another_model_is_refused():
    plan = Plan.from_device_map({"": "cpu"}, fingerprint="0" * 64)
    with pytest.raises(PlanError, match="another model"):
        apply_plan(build(HARD["residual"]), plan)


@pytest.mark.parametrize("name", ["residual", "tied", "shared-dict", "counting"])
def test_model_is_freed_without_gc(name):
    import gc

    case = HARD[name]
    with autoshard.simulate("3x1MiB") as devices:
        model = build(case)
        apply_device_map(model, case.device_map)
        output = model(rows())
        del output
        with torch.no_grad():
            model(rows())
        parts = [weakref.ref(module) for module in model.modules()]
        gc.disable()
        try:
            del model
            assert not any(part() for part in parts)
            assert [devices.memory(name)[0] for name in devices] == [0, 0, 0]
        finally:
            gc.enable()


def test_moving_an_applied_model_is_answered_with_what_to_do():
    model = build(HARD["residual"])
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        model.to("cpu:2")
        with pytest.raises(ApplyError, match=r"autoshard\.remove"):
            model(rows())
        remove(model)
        assert all(p.device == CPU for p in model.parameters())
        model(rows())


def test_dtype_may_change_under_a_plan():
    original, model, x = build(HARD["tied"]), build(HARD["tied"]), rows()
    with autoshard.simulate("3x1MiB"), torch.no_grad():
        apply_device_map(model, HARD["tied"].device_map)
        model(x)  # leaves a lasting copy of the tied weight
        assert same(model.double()(x), original.double()(x))


def test_deep_copies_and_pickles_have_hooks_of_their_own():
    model, x = build(HARD["tied"]), rows()
    expected = model(x)
    apply_device_map(model, {"embed": "cpu", "body": "cpu", "head": "cpu"})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert is_applied(twin) and same(twin(x), expected)
        remove(twin)
        assert not is_applied(twin) and not is_hooked(twin) and same(twin(x), expected)
    assert is_applied(model)
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["tied"].device_map)
        twin = copy.deepcopy(model)
        assert same(twin(x), expected)
        with torch.no_grad():
            twin.embed.weight.zero_()
        assert same(model(x), expected) and not same(twin(x), expected)


def test_lists_and_dicts_are_passed_by_identity():
    """A dict that the caller gives is filled by layers on three devices, and comes back filled."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = SharedDict.Child(0)

        def forward(self, x, store, log):
            return self.inner(x, store, log)

    model, store, log = Outer(), {}, []
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, {"": "cpu:2"})
        model(rows(), store, log)
    assert list(store) == [0] and log[0] is store[0]


def test_interrupted_forward_leaves_no_watcher():
    """torch runs no hooks after Ctrl-C; the next forward must find a clean slate."""
    interrupt = [True]

    class Interrupts(Residual):
        def forward(self, x):
            h = super().forward(x)
            if interrupt[0]:
                raise KeyboardInterrupt
            return h

    model, x = Interrupts(), rows()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        interrupt[0] = False
        model(x)
        assert torch._C._len_torch_function_stack() == 0
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="cpu:0") + torch.ones(2, device="cpu:1")


def test_error_in_forward_leaves_no_watcher():
    model = build(HARD["residual"])
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, D + 1))
        assert torch._C._len_torch_function_stack() == 0


def test_names_without_simulation_are_the_plain_cpu():
    model, x = build(HARD["tied"]), rows()
    expected = model(x)
    apply_device_map(model, HARD["tied"].device_map)
    assert same(model(x), expected) and all(type(p) is nn.Parameter for p in model.parameters())
    remove(model)


def test_tied_stays_tied_for_plan_round_trip(tmp_path):
    plan = Plan.from_device_map(HARD["tied"].device_map)
    plan.save(tmp_path / "plan.json")
    model, x = Tied(), rows()
    expected = model(x)
    with autoshard.simulate("3x1MiB"):
        apply_plan(model, Plan.load(tmp_path / "plan.json"))
        assert same(model(x), expected)
        assert [model.body.weight.device.index, model.head.weight.device.index] == [1, 0]


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    """Fields that are items in the order in which they were given a value, as outputs of Transformers are."""

    last: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    hidden: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("last", "pooled", "hidden"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class SetsLater(nn.Linear):
    """Sets a field of its output after a field that is declared later."""

    def forward(self, x):
        made = Fields(last=super().forward(x), hidden=x)
        made.pooled = made["pooled"] = x.sum(-1)
        return made


def test_items_of_an_output_keep_their_order():
    model, x = SetsLater(4, 4), torch.randn(2, 4)
    expected = model(x)
    with autoshard.simulate("2x1MiB"):
        apply_device_map(model, {"": "cpu:1"})
        made = model(x)
        remove(model)
    assert list(made) == list(expected) == ["last", "hidden", "pooled"]
    assert same(plain(expected), plain(made))
