"""Pipelines in one process: calls run in parts of their batch, and give what one call of the whole model gives."""

import copy
import pickle
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from tests.hooks import is_hooked
from tests.runtime.pipelines import LABELLED, VOCAB, pipeline, sentences, words


def counted(model):
    """Rows with which the first block is called, call by call."""
    rows = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    return rows


def close(found, wanted):
    """Equal to the rounding of float64, told from the largest value."""
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=1e-12 * float(wanted.detach().abs().max()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("rows", [8, 7])
def test_outputs_and_gradients_are_those_of_the_whole_batch(recompute, rows):
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, recompute=recompute))
        inputs = {name: tensor[:rows] for name, tensor in inputs.items()}
        seen = counted(model)
        wanted, found = original(**inputs), model(**inputs)
        assert seen == [2, 2, 2, rows - 6]
        assert found["logits"].device == torch.device("cpu")
        close(found["logits"], wanted["logits"])
        close(found["loss"], wanted["loss"])
        wanted["loss"].backward()
        found["loss"].backward()
        assert len(seen) == (8 if recompute else 4)
        for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
            if theirs.grad is not None:
                close(ours.grad, theirs.grad)
        del found
        autoshard.remove(model)
    assert not is_hooked(model, other_than=model.blocks[0])


@pytest.mark.parametrize("named", [True, False])
def test_hooks_of_the_users_are_around_whole_calls(named):
    """Registered after the plan was applied, and before what others have registered."""
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        seen, sizes = counted(model), []
        for one in (original, model):
            one.register_forward_pre_hook(shifted if named else shifted_first, with_kwargs=named)
            one.register_forward_hook(lambda module, args, output: sizes.append(len(output["logits"])), prepend=True)
        for _ in range(2):
            wanted, found = ((one(**inputs) if named else one(*inputs.values())) for one in (original, model))
            close(found["loss"], wanted["loss"])
        assert seen == [2] * 8 and sizes == [8] * 4


def shifted(module, args, kwargs):
    return args, {**kwargs, "ids": (kwargs["ids"] + 1) % VOCAB}


def shifted_first(module, args):
    return (args[0] + 1) % VOCAB, *args[1:]


def test_inference_mode():
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs))
        moved = {name: tensor.to("cpu:0") for name, tensor in inputs.items()}
        with torch.inference_mode():
            found, wanted = model(**moved), original(**inputs)
        close(found["logits"], wanted["logits"])
        close(found["loss"], wanted["loss"])


def test_one_part_is_bit_for_bit_the_same():
    original, model, inputs = words(), words(), sentences()
    with autoshard.simulate("3x16MiB"), torch.no_grad():
        autoshard.apply(model, pipeline(model, inputs, count=1))
        assert torch.equal(model(**inputs)["logits"], original(**inputs)["logits"])


def test_recomputed_stages_keep_less():
    """What a device holds between forward and backward, and dropout that falls out as it did."""
    held, gradients = {}, {}
    inputs = sentences(8, 18)
    for recompute in (False, True):
        model = words(dropout=0.5)
        plan = pipeline(model, inputs, recompute=recompute)
        with autoshard.simulate("3x16MiB") as devices:
            autoshard.apply(model, plan)
            torch.manual_seed(5)
            loss = model(**inputs)["loss"]
            held[recompute] = devices.memory("cpu:1")[0]
            loss.backward()
            gradients[recompute] = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
            del loss, model
    assert held[True] < 0.5 * held[False]
    assert all(torch.equal(*pair) for pair in zip(gradients[False], gradients[True], strict=True))


@pytest.mark.parametrize(
    ("call", "words_of"),
    [
        ({"positions": torch.arange(6)[None]}, "the plan was made without the argument positions"),
        ({"scale": 2.0}, "the plan was made with no other value, and this call has scale=2.0"),
        ({"labels": torch.zeros(2, 6, dtype=torch.long)}, "ids has 8, labels has 2"),
    ],
)
def test_calls_of_another_kind_run_whole_and_say_so_once(call, words_of):
    original, model, inputs = words(), words(), sentences()
    batch = replace(LABELLED, whole=())
    call = {"ids": inputs["ids"], **call}
    with autoshard.simulate("3x16MiB"), torch.no_grad():
        autoshard.apply(model, pipeline(model, inputs, batch))
        seen = counted(model)
        if "labels" in call:
            with pytest.raises(ValueError, match="batch_size"), pytest.warns(RuntimeWarning, match=words_of):
                model(**call)
            assert seen == [8]
            return
        with pytest.warns(RuntimeWarning, match=words_of):
            found = model(**call)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(**call)
        assert seen == [8, 8]
        assert torch.equal(found["logits"], original(**call)["logits"])


def test_a_cache_belongs_to_all_rows():
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        autoshard.apply(model, pipeline(model, inputs))
        seen = counted(model)
        model(inputs["ids"], cache=nn.Identity())
        model(inputs["ids"][:1])
        model(inputs["ids"][:3])
    assert seen == [8, 1, 1, 1, 1]


def test_modules_that_mix_rows_in_training_stay_in_evaluation_mode():
    model, inputs = words(), sentences()
    model.blocks[1][2].eval()
    batch = replace(LABELLED, frozen=("blocks.1",))
    model.blocks[1].eval()
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, inputs, batch))
        seen = counted(model)
        model(**inputs)
        model.blocks[1][2].train()
        with pytest.warns(RuntimeWarning, match=r"blocks\.1 was in evaluation mode at planning"):
            model(**inputs)
    assert seen == [2, 2, 2, 2, 8]


class Counts(nn.Module):
    """Counts its calls, by which it scales what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x) * self.calls
        return x


def test_buffers_begin_alike_in_every_part():
    batch = BatchAxis(
        size=8, inputs=(BatchInput(path="x", dim=0, axis="*8"),), written=("calls",),
        outputs=(BatchOutput(path="", how="cat", axis="*8"),),
    )  # fmt: skip
    torch.manual_seed(0)
    model, x = Counts().double(), torch.randn(8, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, pipeline(model, {"x": x}, batch))
        for _ in range(2):
            found = model(x)
            found.sum().backward()
            wanted = original(x)
            wanted.sum().backward()
            close(found.detach(), wanted.detach())
        assert model.calls.item() == 2
        for ours, theirs in zip(model.parameters(), original.parameters(), strict=True):
            close(ours.grad, theirs.grad)


class Remembers(nn.Module):
    """Returns an object that holds keys of every block, as caches do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, memory=None):
        memory = Memory() if memory is None else memory
        for block in self.blocks:
            x = block(x)
            memory.layers.append(Layer(x))
        memory.first = memory.layers[0]
        return x, memory


class Layer:
    def __init__(self, keys: torch.Tensor) -> None:
        self.keys = keys


class Memory:
    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.first: Layer | None = None


def test_what_a_model_remembers_is_not_put_together():
    batch = BatchAxis(
        size=8, inputs=(BatchInput(path="x", dim=0, axis="*8"),),
        outputs=(BatchOutput(path="0", how="cat", axis="*8"),),
    )  # fmt: skip
    torch.manual_seed(0)
    model, x = Remembers().double(), torch.randn(8, 8, dtype=torch.float64)
    original = copy.deepcopy(model)
    with autoshard.simulate("3x16MiB"), torch.no_grad():
        autoshard.apply(model, pipeline(model, {"x": x}, batch))
        output, memory = model(x)
        close(output, original(x)[0])
        with pytest.raises(PlanError, match="the output 1 is a Memory of which every part"):
            memory.layers  # noqa: B018


def test_arguments_for_all_parts_are_copied_once_per_device():
    model, inputs = words(), sentences()
    inputs["positions"] = torch.arange(6)[None]
    with autoshard.simulate("3x16MiB"), torch.no_grad():
        autoshard.apply(model, pipeline(model, inputs))
        given = []
        model.places.register_forward_hook(lambda module, args, output: given.append(args[0]))
        model(**inputs)
    assert len({id(one) for one in given}) == 1 and len(given) == 4


def test_an_error_in_one_part_leaves_the_model_as_it_was():
    model, inputs = words(), sentences()
    with autoshard.simulate("3x16MiB"), torch.no_grad():
        autoshard.apply(model, pipeline(model, inputs))
        wanted = model(**inputs)["logits"]
        broken = inputs["ids"].clone()
        broken[5, 0] = 99  # in the third part
        with pytest.raises(IndexError):
            model(broken)
        assert torch.equal(model(**inputs)["logits"], wanted)


def test_an_output_nobody_knows_is_refused():
    model, inputs = words(), sentences()
    batch = replace(LABELLED, outputs=LABELLED.outputs[:1])
    with autoshard.simulate("3x16MiB"), torch.no_grad():
        autoshard.apply(model, pipeline(model, inputs, batch))
        with pytest.raises(PlanError, match="the output loss was not there at planning"):
            model(**inputs)
        assert model(inputs["ids"])["logits"].shape[0] == 8


def test_copies_of_the_model_run_in_parts_too():
    model, inputs = words(), sentences()
    plan = pipeline(model, inputs, recompute=True)
    here = dict.fromkeys(plan.placements, "cpu")
    with torch.no_grad():
        autoshard.apply(model, replace(plan, placements=here))
        wanted = model(**inputs)["logits"]
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            seen = counted(other)
            assert list(other.state_dict()) == list(words().state_dict())
            assert torch.equal(other(**inputs)["logits"], wanted)
            assert seen == [2, 2, 2, 2]


@pytest.mark.slow
def test_compiled_models_are_equal():
    """Compiled blocks go with parts of the batch; a model that is compiled as a whole runs undivided."""
    original, model, inputs = words(), words(), sentences()
    plan = pipeline(model, inputs)
    autoshard.apply(model, replace(plan, placements=dict.fromkeys(plan.placements, "cpu")))
    compiled = torch.compile(model, backend="eager")
    found, wanted = compiled(**inputs), original(**inputs)
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
    x = torch.randn(64, 2048, dtype=torch.float64)
    wanted = model(x)
    wanted.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    batch = BatchAxis(
        size=64,
        inputs=(BatchInput(path="input", dim=0, axis="*64"),),
        outputs=(BatchOutput(path="", how="cat", axis="*64"),),
    )
    plan = pipeline(model, {"input": x}, batch, count=16, devices=2)
    placements = {path: device.replace("cpu", "cuda") for path, device in plan.placements.items()}
    autoshard.apply(model, replace(plan, placements=placements))
    for _ in range(20):
        model.zero_grad()
        found = model(x)
        found.square().sum().backward()
        close(found.detach(), wanted.detach())
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            close(parameter.grad, gradient)
