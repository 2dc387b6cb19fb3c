"""Hand-made models under hand-made maps: the same bits, the same objects, and nothing left behind."""

import collections
import copy
import dataclasses
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import map_tensors, tensors_in
from autoshard.plan import Plan
from autoshard.runtime.around import layers_of
from autoshard.runtime.dispatch import apply_device_map, apply_plan, is_applied, remove
from tests.hooks import is_hooked
from tests.models import same
from tests.runtime.models import HARD, D, rows

CPU = torch.device("cpu")


def plain(value):
    return map_tensors(value, lambda tensor: tensor.detach().cpu().clone())


def build(name):
    torch.manual_seed(0)
    return HARD[name].make().train(HARD[name].train_mode)


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("mode", ["no_grad", "grad", "inference_mode"])
def test_same_bits_and_full_reversal(name, mode):
    case = HARD[name]
    context = {"no_grad": torch.no_grad, "grad": torch.enable_grad, "inference_mode": torch.inference_mode}[mode]
    original, model = build(name), build(name)
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


@pytest.mark.parametrize("name", HARD)
def test_training_steps_are_the_same(name):
    """Gradients and three optimizer steps; the optimizer was made before apply and outlives remove."""
    case = HARD[name]
    inputs = [rows() for _ in range(4)]

    def train(model, optimizer, steps):
        for x in steps:
            losses = [t.float().square().mean().cpu() for _, t in tensors_in(model(x.clone())) if t.requires_grad]
            optimizer.zero_grad()
            sum(losses).backward()
            optimizer.step()

    original, model = build(name), build(name)
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
    """Hooks on gradients run once, on the whole of it; a tie goes through the file of a plan."""
    original, model, x, norms = build("tied"), build("tied"), rows(), []
    for one in (original, model):
        one.body.weight.register_hook(lambda gradient: gradient / gradient.norm())
        one.body.weight.register_post_accumulate_grad_hook(lambda parameter: norms.append(parameter.grad.norm().item()))
    original(x).square().mean().backward()
    with autoshard.simulate("3x1MiB"):
        apply_plan(model, Plan.from_json(Plan.from_device_map(HARD["tied"].device_map).to_json()))
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.device == torch.device("cpu:0")  # the first of its names decides
        model(x).square().mean().backward()
        remove(model)
    assert norms[0] == norms[1] and len(norms) == 2
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
    model, other = build("residual"), build("residual")
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


@pytest.mark.parametrize("first", [{}, {"a": "cpu:0", "b": "cpu:2", "c": "cpu:0"}], ids=["unplaced", "placed"])
def test_failing_half_way_changes_nothing(first):
    """A plan that was there before stays."""
    model, x = build("residual"), rows()
    expected = model(x)
    model.a.weight.grad = torch.ones(D, D)
    with autoshard.simulate({"cpu:0": "1MiB", "cpu:1": "64B", "cpu:2": "1MiB"}) as devices:
        if first:
            apply_device_map(model, first)
        before = {name: (tensor, tensor.device, tensor.data_ptr()) for name, tensor in model.named_parameters()}
        with pytest.raises(ApplyError, match=r"b\.weight.*cpu:1"):
            apply_device_map(model, {"a": "cpu:0", "b": "cpu:1", "c": "cpu:0"})
        assert is_applied(model) is bool(first) and is_hooked(model) is bool(first)
        assert first or devices.memory("cpu:0")[0] == 0
        for name, tensor in model.named_parameters():
            old, device, address = before[name]
            assert tensor is old and tensor.device == device
            assert first or (type(tensor) is nn.Parameter and tensor.data_ptr() == address)
        assert same(model(x), expected) and torch.equal(model.a.weight.grad.cpu(), torch.ones(D, D))


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


def test_nothing_stays_where_apply_fails_after_the_move(monkeypatch):
    model = build("residual")

    def fail(*given):
        raise RuntimeError("no page-locked memory")

    monkeypatch.setattr("autoshard.runtime.streaming.Streams.pin", fail)
    with autoshard.simulate("3x1MiB"), pytest.raises(RuntimeError, match="page-locked"):
        apply_device_map(model, HARD["residual"].device_map)
    assert all(type(one) is nn.Parameter and one.device == CPU for one in model.parameters())
    assert not is_hooked(model)


@pytest.mark.parametrize(
    "device_map, kind, words",
    [
        ({"a": "cpu:0", "b": "cpu:1"}, PlanError, "c.weight"),
        ({"a": "cpu:0", "b": "cpu:1", "c": "cpu:0", "d": "cpu:0"}, PlanError, "'d'"),
        ({"": "cuda:0"}, ApplyError, "cuda:0"),
        ({"": "cpu:7"}, ApplyError, "cpu:7"),
        ({"": "meta"}, ApplyError, "meta"),
        ({"": "disk"}, ApplyError, "has it in memory, not in a file. Save the model with autoshard.save"),
        ({"a": "disk", "b": "cpu:0", "c": "cpu:0"}, ApplyError, "keeps a.weight on disk"),
    ],
)
def test_maps_that_make_no_sense(device_map, kind, words):
    if words == "cuda:0" and torch.cuda.is_available():
        pytest.skip("this machine has cuda:0")
    model = build("residual")
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
    model = build("residual")
    with pytest.raises(PlanError, match="another model"):
        apply_plan(model, Plan.from_device_map({"": "cpu"}, fingerprint="0" * 64))
    apply_device_map(model.a, {"": "cpu"})
    with pytest.raises(ApplyError, match="'a'"):
        apply_device_map(model, {"": "cpu"})


@pytest.mark.parametrize("name", ["residual", "tied", "counting"])
def test_model_is_freed_without_gc(name):
    with autoshard.simulate("3x1MiB") as devices:
        model = apply_device_map(build(name), HARD[name].device_map)
        model(rows())
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
    model = build("residual")
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        model.to("cpu:2")
        with pytest.raises(ApplyError, match=r"autoshard\.remove"):
            model(rows())
        remove(model)
        assert all(p.device == CPU for p in model.parameters())
        model(rows())


def test_what_is_added_or_replaced_elsewhere_is_named():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    with autoshard.simulate("3x1MiB"):
        autoshard.apply(model, autoshard.plan(model, ["cpu:0", "cpu:1"], inputs=rows(), pins={"1": "cpu:1"}))
        model[1] = nn.Linear(D, D)
        with pytest.raises(
            ApplyError, match=r"1\.weight is on cpu, and its module is on cpu:1: it was added, replaced"
        ):
            model(rows())
        model[1].to("cpu:1")
        model(rows())


def test_dtype_may_change_under_a_plan():
    original, model, x = build("tied"), build("tied"), rows()
    with autoshard.simulate("3x1MiB"), torch.no_grad():
        apply_device_map(model, HARD["tied"].device_map)
        model(x)  # leaves a lasting copy of the tied weight
        assert same(model.double()(x), original.double()(x))


def test_deep_copies_and_pickles_have_hooks_of_their_own():
    model, x = build("tied"), rows()
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


def interrupt(module, args, output):
    raise KeyboardInterrupt


def test_errors_and_interrupts_in_the_forward_leave_no_watcher():
    """torch runs no hooks after Ctrl-C; the next forward must find a clean slate."""
    model, x = build("residual"), rows()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        with pytest.raises(RuntimeError):
            model(torch.randn(2, D + 1))
        assert torch._C._len_torch_function_stack() == 0
        handle = model.c.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()
        model(x)
        assert torch._C._len_torch_function_stack() == 0
        with pytest.raises(RuntimeError, match="same device"):
            torch.ones(2, device="cpu:0") + torch.ones(2, device="cpu:1")


def test_names_without_simulation_are_the_plain_cpu():
    """There, function transforms run through a placed model."""
    model, x = build("residual"), torch.randn(3, D)
    per_row = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))
    expected = model(x), per_row(x)
    apply_device_map(model, HARD["residual"].device_map)
    assert same((model(x), per_row(x)), expected) and all(type(p) is nn.Parameter for p in model.parameters())
    remove(model)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers(layout):
    model = nn.Sequential(nn.Linear(3, 3))
    model.register_buffer("adjacency", torch.eye(3).to_sparse(layout=layout))
    remove(apply_device_map(model, {"": "cpu"}))
    assert model.adjacency.layout is layout


@dataclasses.dataclass
class Fields(collections.OrderedDict):
    """Fields that are items in the order in which they were given a value, as outputs of Transformers are."""

    last: torch.Tensor | None = None
    pooled: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("last", "pooled"):
            if getattr(self, name) is not None:
                self[name] = getattr(self, name)


class SetsLater(nn.Linear):
    """Sets a field of its output after one that is declared later."""

    def forward(self, x):
        made = Fields(pooled=x.sum(-1))
        made.last = made["last"] = super().forward(x)
        return made


def test_items_of_an_output_keep_their_order():
    model, x = SetsLater(4, 4), torch.randn(2, 4)
    expected = model(x)
    with autoshard.simulate("2x1MiB"):
        made = apply_device_map(model, {"": "cpu:1"})(x)
        assert list(made) == list(expected) == ["pooled", "last"]
        assert same(plain(expected), plain(made))


def test_layers_without_transfers_have_one_hook():
    """A contiguous split hooks modules at placement roots, nothing below them, and no list that is never called."""
    model = nn.Sequential(nn.Sequential(nn.Linear(D, D), nn.Tanh()), nn.Sequential(nn.Linear(D, D), nn.Tanh()))
    apply_device_map(model, {"0": "cpu:0", "1": "cpu:1"})
    assert {path for path, module in model.named_modules() if layers_of(module)} == {"", "0", "1"}
    apply_device_map(model, {"": "cpu:0"})
    assert {path for path, module in model.named_modules() if layers_of(module)} == {""}


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(D, D)])

    def forward(self, x):
        return torch.tanh(self.layers[0](x))


class Parted(nn.Module):
    """A part with a list of layers, and ops around it."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Part()

    def forward(self, x):
        return self.part(x + 1) * 2


def test_a_model_on_one_device_compiles_to_one_graph():
    """A hook of a part would break the graph there: torch.compile can't look through it."""
    graphs, model, x = [], Parted(), torch.randn(2, D)
    expected = model(x)
    apply_device_map(model, {"": "cpu:0"})
    compiled = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    assert torch.equal(compiled(x), expected) and len(graphs) == 1


class Steps(nn.Module):
    """The output is a generator: everything runs after the call has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        for _ in range(3):
            x = self.a(x) + self.b(x)
            yield x


def test_outputs_that_are_generators():
    model, x = Steps(), rows()
    expected = plain(list(model(x)))
    with autoshard.simulate("2x1MiB"), torch.no_grad():
        apply_device_map(model, {"a": "cpu:0", "b": "cpu:1"})
        found = list(model(x))
        assert same(plain(found), expected) and {one.device for one in found} == {CPU}
