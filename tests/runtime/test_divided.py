"""Calls divided along their batch in one process, in micro-batches or over replicas: as one call of the whole model."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.errors import PlanError
from autoshard.plan.batching import BatchOutput
from autoshard.plan.sharding import proportional_shares
from tests.hooks import is_hooked
from tests.runtime.pipelines import LABELLED, ROWS, VOCAB, close, pipeline, replicas, sentences, words

HOWS = {"pipeline": pipeline, "replicas": replicas}
BOTH = pytest.mark.parametrize("how", HOWS)


@pytest.fixture
def devices():
    with autoshard.simulate("3x16MiB") as here:
        yield here


def divided(how, model, inputs, *batch, **settings):
    """The model with a plan applied, and a twin without."""
    twin = copy.deepcopy(model)
    return autoshard.apply(model, HOWS[how](model, inputs, *batch, **settings)), twin


def counted(model):
    """Rows with which the first block is called, call by call."""
    rows = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    return rows


def gradients(model):
    return [torch.zeros(()) if one.grad is None else one.grad for one in model.parameters()]


def all_close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ("pipeline", {}),
        ("pipeline", {"recompute": True}),
        ("replicas", {}),
        ("replicas", {"shares": (5, 2, 1)}),
    ],
)
def test_steps_are_those_of_the_whole_batch(how, settings, devices):
    """Three steps of whole batches and of others; nobody sees that there are parts, and nothing stays."""
    model, inputs = words(), sentences()
    names, objects = list(model.state_dict()), [*model.modules(), *model.parameters()]
    model, original = divided(how, model, inputs, **settings)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, original)]
    for rows in (8, 7, 8):
        given = {name: tensor[:rows] for name, tensor in inputs.items()}
        found, wanted = model(**given), original(**given)
        assert found["logits"].device == torch.device("cpu")
        close(found["logits"], wanted["logits"])
        close(found["loss"], wanted["loss"])
        for optimizer, result in zip(optimizers, (found, wanted), strict=True):
            optimizer.zero_grad()
            result["loss"].backward()
        all_close(gradients(model), gradients(original))
        for optimizer in optimizers:
            optimizer.step()
    del found, result
    assert list(model.state_dict()) == names and [*model.modules(), *model.parameters()] == objects
    autoshard.remove(model)
    assert not is_hooked(model) and {one.device for one in model.parameters()} == {torch.device("cpu")}
    all_close(model.parameters(), original.parameters())


@BOTH
@pytest.mark.parametrize("rows", [8, 3, 2, 1])
def test_answers_to_many_and_few_rows(how, rows, devices):
    (model, original), inputs = divided(how, words(), sentences()), sentences()
    given = {name: tensor[:rows] for name, tensor in inputs.items()}
    with torch.inference_mode():
        found, wanted = model(**{name: one.to("cpu:0") for name, one in given.items()}), original(**given)
    close(found["logits"], wanted["logits"])
    close(found["loss"], wanted["loss"])


def test_one_part_is_bit_for_bit_the_same(devices):
    (model, original), inputs = divided("pipeline", words(), sentences(), count=1), sentences()
    with torch.no_grad():
        assert torch.equal(model(**inputs)["logits"], original(**inputs)["logits"])


@pytest.mark.parametrize("rows", [16, 8, 3, 1])
def test_replicas_have_the_rows_that_were_planned(rows, devices):
    """Seen from the modules: on two devices 3 rows of 16, and 13."""
    model, seen = words(), []
    model.head.register_forward_hook(lambda module, args, output: seen.append((str(output.device), len(output))))
    model, _ = divided("replicas", model, sentences(16), shares=(3, 13))
    seen.clear()
    with torch.no_grad():
        model(**sentences(rows))
    shares = proportional_shares(rows, (3, 13)) if rows > 1 else (1,)
    assert sorted(seen) == list(zip(("cpu:0", "cpu:1"), shares, strict=False))


def two_calls(model, inputs):
    (model(**inputs)["loss"] + model(inputs["ids"][:6], inputs["labels"][:6])["loss"]).backward()
    return gradients(model)


def asked_for(model, inputs):
    return torch.autograd.grad(model(**inputs)["loss"], list(model.blocks.parameters()))


def steps_by_hand(model, inputs):
    """Writes that torch does not count."""
    for _ in range(2):
        model(**inputs)["loss"].backward()
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
            if parameter.grad is not None:
                parameter.data.add_(parameter.grad, alpha=-0.1)
                parameter.grad = None
    return [model(**inputs)["logits"]]


def frozen(model, inputs):
    model.blocks[1].requires_grad_(False)
    model(**inputs)["loss"].backward()
    assert model.blocks[1][0].weight.grad is None
    return gradients(model)


def other_attributes(model, inputs):
    model(**inputs)
    model.blocks[0].forward = lambda x: x * 2
    model.eval()
    return [model(**inputs)["loss"]]


def compiled_in_place(model, inputs):
    block = model.blocks[1][0]
    call = block._call_impl
    block._compiled_call_impl = lambda *args, **kwargs: call(*args, **kwargs)  # as torch does in `compile`
    return [model(**inputs)["loss"]]


def shifting_hooks(model, inputs):
    """Around whole calls: what they give is divided, and what they are given is put together."""
    sizes = []

    def shifted(module, args, kwargs):
        return args, {**kwargs, "ids": (kwargs["ids"] + 1) % VOCAB}

    model.register_forward_pre_hook(shifted, with_kwargs=True)
    model.register_forward_hook(lambda module, args, output: sizes.append(len(output["logits"])), prepend=True)
    results = [model(**inputs)["loss"] for _ in range(2)]
    assert sizes == [8, 8]
    return results


def positional_hook(model, inputs):
    model.register_forward_pre_hook(lambda module, args: ((args[0] + 1) % VOCAB, *args[1:]))
    return [model(*inputs.values())["loss"]]


def gradient_hooks(model, inputs):
    """On the gradient of the whole batch, once."""
    weight, seen = model.blocks[2][0].weight, []
    weight.register_hook(lambda gradient: gradient / gradient.norm())
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.norm()))
    model(**inputs)["loss"].backward()
    assert len(seen) == 1
    return [weight.grad, *seen]


def checkpointed(model, inputs):
    """The whole call runs again in backward, in the same parts."""
    checkpoint(model, *inputs.values(), use_reentrant=False)["loss"].backward()
    return gradients(model)


HABITS = (
    two_calls, asked_for, steps_by_hand, frozen, other_attributes, compiled_in_place, shifting_hooks, positional_hook,
    gradient_hooks, checkpointed,
)  # fmt: skip


@BOTH
@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__)
def test_what_people_do_with_a_model(habit, how, devices):
    (model, original), inputs = divided(how, words(), sentences()), sentences()
    all_close(habit(model, inputs), habit(original, inputs))


@BOTH
def test_copies_of_the_model_have_parts_of_their_own(how, devices):
    (model, original), inputs = divided(how, words(), sentences()), sentences()
    with torch.no_grad():
        model(**inputs)
        other = copy.deepcopy(model)
        other.blocks[0][0].weight.zero_()
        close(model(**inputs)["logits"], original(**inputs)["logits"])
        original.blocks[0][0].weight.zero_()
        close(other(**inputs)["logits"], original(**inputs)["logits"])


@BOTH
def test_no_other_plan_is_made_of_a_divided_model(how, devices):
    model, _ = divided(how, words(), sentences())
    with pytest.raises(PlanError, match=r"autoshard\.remove\(model\)"):
        autoshard.plan(model, devices, inputs=sentences())


class Tapped(nn.Module):
    """A hook of a layer hands something to the forward by an attribute of the model, which is empty afterwards."""

    def __init__(self, hook=None):
        super().__init__()
        self.layer, self.head, self.tapped = nn.Linear(6, 6), nn.Linear(6, 6), None
        self.layer.register_forward_hook(hook or (lambda module, args, output: setattr(self, "tapped", output)))

    def forward(self, x):
        x = self.head(self.layer(x))
        tapped, self.tapped = self.tapped, None
        return x if tapped is None else x + tapped


def test_functions_that_hold_modules_of_the_model_have_no_replicas(devices):
    """The hook of a replica would set the attribute of the model itself; a copy would do so, too."""
    model, x = Tapped().double(), torch.randn(8, 6, dtype=torch.float64)
    expected = model(x)
    with pytest.raises(PlanError, match="layer has a function in forward_hooks that refers to modules of the model"):
        autoshard.plan(model, devices, inputs=x, strategy="data-parallel", objective="throughput")
    plan = autoshard.plan(model, devices, inputs=x, strategy="pipeline", num_microbatches=2)
    close(autoshard.apply(model, plan)(x), expected)
    other = Tapped(lambda module, args, output: output.sin())
    other.register_load_state_dict_pre_hook(lambda *args: other.layer.eval())  # no forward calls it
    assert autoshard.plan(other, devices, inputs=x, strategy="data-parallel", objective="throughput").mesh.data > 1


@pytest.mark.slow
def test_replicas_of_what_torch_compile_returns(devices):
    model, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()).double(), torch.randn(8, 6, dtype=torch.float64)
    expected, compiled = model(x), torch.compile(model, backend="eager")
    plan = autoshard.plan(compiled, devices, inputs=x, strategy="data-parallel", objective="throughput")
    autoshard.apply(compiled, plan)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "autoshard")  # it runs divided
        close(compiled(x), expected)


def test_pickled_models_run_in_parts_too():
    model, inputs = words(), sentences()
    plan = pipeline(model, inputs, recompute=True)
    autoshard.apply(model, replace(plan, placements=dict.fromkeys(plan.placements, "cpu")))
    other = pickle.loads(pickle.dumps(model))
    seen = counted(other)
    with torch.no_grad():
        assert torch.equal(other(**inputs)["logits"], model(**inputs)["logits"])
    assert seen == [2, 2, 2, 2]


def test_recomputed_stages_keep_less(devices):
    """What a device holds between forward and backward, and dropout that falls out as it did."""
    held, found, inputs = {}, {}, sentences(8, 18)
    for recompute in (False, True):
        model, _ = divided("pipeline", words(dropout=0.5), inputs, recompute=recompute)
        torch.manual_seed(5)
        loss = model(**inputs)["loss"]
        held[recompute] = devices.memory("cpu:1")[0]
        loss.backward()
        found[recompute] = [one.cpu() for one in gradients(model)]
        del loss, model
    assert held[True] < 0.5 * held[False]
    assert all(torch.equal(*pair) for pair in zip(*found.values(), strict=True))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ({"positions": torch.arange(6)[None]}, "the plan was made without the argument positions"),
        ({"scale": 2.0}, "the plan was made with no other value, and this call has scale=2.0"),
    ],
)
def test_calls_of_another_kind_run_whole_and_say_so_once(call, said, devices):
    (model, original), inputs = divided("pipeline", words(), sentences(), replace(LABELLED, whole=())), sentences()
    call, seen = {"ids": inputs["ids"], **call}, counted(model)
    with torch.no_grad():
        with pytest.warns(RuntimeWarning, match=said):
            found = model(**call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**call)
    assert seen == [8, 8] and torch.equal(found["logits"], original(**call)["logits"])


def test_a_call_with_unequal_rows_runs_whole_and_fails_as_the_model_does(devices):
    (model, _), inputs = divided("pipeline", words(), sentences()), sentences()
    with pytest.raises(ValueError, match="batch_size"), pytest.warns(RuntimeWarning, match="ids has 8, labels has 2"):
        model(inputs["ids"], labels=torch.zeros(2, 6, dtype=torch.long))


def test_a_call_with_a_cache_runs_whole(devices):
    (model, _), inputs = divided("pipeline", words(), sentences()), sentences()
    seen = counted(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        model(inputs["ids"], cache=nn.Identity())
        model(inputs["ids"][:3])
    assert seen == [8, 1, 1, 1]


def test_modules_that_mix_rows_in_training_stay_in_evaluation_mode(devices):
    model, inputs = words(), sentences()
    model.blocks[1].eval()
    model, _ = divided("pipeline", model, inputs, replace(LABELLED, frozen=("blocks.1",)))
    seen = counted(model)
    model(**inputs)
    model.blocks[1][2].train()
    with pytest.warns(RuntimeWarning, match=r"blocks\.1 was in evaluation mode at planning"):
        model(**inputs)
    assert seen == [2, 2, 2, 2, 8]


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))


class Memory:
    def __init__(self, keys):
        self.keys = keys


class Remembers(Blocks):
    """Returns an object that holds keys, as caches do."""

    def forward(self, x, memory=None):
        keys = self.blocks[0](x)
        keys = keys if memory is None else torch.cat([memory.keys, keys], 1)
        return self.blocks[2](self.blocks[1](keys)), Memory(keys)


class Watched(Blocks):
    """Registers hooks of its own at its first forward, as libraries do that collect hidden states."""

    seen: list = []  # noqa: RUF012

    def forward(self, x):
        if not self.blocks[0]._forward_hooks:
            for block in self.blocks:
                block.register_forward_hook(lambda layer, args, output: self.seen.append(output))
        self.seen.clear()
        for block in self.blocks:
            x = block(x)
        return torch.stack(self.seen, 1)


class Recurrent(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.steps(self.blocks[0](x).unflatten(1, (2, 4)))[0]


class Checkpointed(Blocks):
    """Calls a helper through a bound method."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.feed

    def feed(self, x):
        return self.blocks[1](self.blocks[0](x).tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def made(kind):
    torch.manual_seed(0)
    return kind().double(), torch.randn(8, 8, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Watched, Recurrent, Checkpointed])
def test_what_models_do_in_their_forward(kind, devices):
    """Hooks that a forward registers see what they see in the whole model."""
    model, x = made(kind)
    model, original = divided("replicas", model, {"x": x}, ROWS)
    for _ in range(2):
        for one in (model, original):
            one.zero_grad()
        found, wanted = model(x), original(x)
        close(found, wanted)
        found.sum().backward()
        wanted.sum().backward()
        all_close(gradients(model), gradients(original))


@BOTH
def test_what_a_model_remembers_is_not_put_together(how, devices):
    """What is called with it runs whole."""
    model, x = made(Remembers)
    batch = replace(ROWS, outputs=(BatchOutput(path="0", how="cat", axis="*8"),))
    model, original = divided(how, model, {"x": x}, batch)
    with torch.no_grad():
        output, memory = model(x)
        close(output, original(x)[0])
        with pytest.raises(PlanError, match="the output 1 is a Memory of which every part"):
            memory.keys  # noqa: B018
        none = torch.zeros(8, 0, dtype=torch.float64)
        close(model(x, Memory(none.to("cpu:0")))[1].keys, original(x, Memory(none))[1].keys)


def test_arguments_for_all_parts_are_copied_once_per_device(devices):
    model, inputs, given = words(), sentences(), []
    inputs["positions"] = torch.arange(6)[None]
    model, _ = divided("pipeline", model, inputs)
    model.places.register_forward_hook(lambda module, args, output: given.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    assert len({id(one) for one in given}) == 1 and len(given) == 4


def test_an_error_in_one_part_leaves_the_model_as_it_was(devices):
    (model, _), inputs = divided("pipeline", words(), sentences()), sentences()
    with torch.no_grad():
        wanted = model(**inputs)["logits"]
        broken = inputs["ids"].clone()
        broken[5, 0] = 99  # in the third part
        with pytest.raises(IndexError):
            model(broken)
        assert torch.equal(model(**inputs)["logits"], wanted)


@pytest.mark.slow
def test_compiled_models_are_equal():
    """Compiled blocks go with parts of the batch; a model that is compiled as a whole runs undivided."""
    original, model, inputs = words(), words(), sentences()
    plan = pipeline(model, inputs)
    autoshard.apply(model, replace(plan, placements=dict.fromkeys(plan.placements, "cpu")))
    found, wanted = torch.compile(model, backend="eager")(**inputs), original(**inputs)
    close(found["loss"], wanted["loss"])
    for block in model.blocks:
        block.compile(backend="eager")
    seen = counted(model)
    close(model(**inputs)["loss"], wanted["loss"])
    assert seen == [2, 2, 2, 2]


@pytest.mark.gpu
def test_parts_arrive_on_other_devices_while_these_compute():
    """Large parts, many times: a copy that did not wait for its source, or was not waited for, would show."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).double()
    original, x = copy.deepcopy(model), torch.randn(64, 2048, dtype=torch.float64)
    batch = replace(ROWS, inputs=(replace(ROWS.inputs[0], path="input"),))
    plan = pipeline(model, {"input": x}, batch, count=16, devices=2)
    placements = {path: device.replace("cpu", "cuda") for path, device in plan.placements.items()}
    autoshard.apply(model, replace(plan, placements=placements))
    original(x).square().sum().backward()
    for _ in range(20):
        model.zero_grad()
        found = model(x)
        found.square().sum().backward()
        close(found, original(x))
        all_close(gradients(model), gradients(original))
