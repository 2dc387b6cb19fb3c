"""What loops do with a model that processes share beside forward, backward and step: equal, or an error says why."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard import ApplyError, RankError, apply
from autoshard.plan.workload import Workload
from tests.pipeline_models import Block
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import completed, decoder, devices_of, own_part, plan_for, samples, wholes
from tests.torch_releases import sharded_replicas


def error_of(call, *args):
    try:
        call(*args)
    except ApplyError as error:
        return str(error)
    return ""


def loaded(model, tensors):
    """Whether a state of whole, plain tensors is what a model has after it is loaded."""
    whole = {name: torch.randn(one.shape, generator=torch.Generator().manual_seed(1)) for name, one in tensors.items()}
    model.load_state_dict(whole)
    found = wholes(model, dict(model.named_parameters()))
    return all(torch.equal(one, whole[name]) for name, one in found.items())


def loops(plan):
    model = decoder()
    whole, ids = model.state_dict(), own_part(samples(), plan.mesh.tp)
    own = {"zero_grad": functools.partial(nn.Module.zero_grad, model), "save_pretrained": lambda folder, **given: None}
    vars(model).update(own)
    apply(model, plan, inputs={"ids": samples(), "labels": samples()})
    found = {"state": loaded(model, whole)}
    model.load_state_dict(decoder().state_dict())
    model.embed.load_state_dict(decoder().embed.state_dict(), assign=True)
    single = decoder()
    for one in (model, single):  # two forwards, one backward
        rows = ids if one is model else samples()
        (one(rows, labels=rows) + one(rows.flip(1), labels=rows)).backward()
    expected = {name: parameter.grad for name, parameter in single.named_parameters()}
    gradients = wholes(model, {name: parameter.grad for name, parameter in model.named_parameters()})
    found["gradients"] = max(float((gradients[name] - one).abs().max()) for name, one in expected.items())
    found["copies"] = [error_of(copy.deepcopy, model), error_of(pickle.dumps, model), error_of(model.share_memory)]
    embedding, before = model.get_parameter("embed.weight"), model.get_parameter("embed.weight").data
    embedding.data = before.clone()  # as averages of parameters are put in their place
    calls = (model.state_dict, functools.partial(model, ids, labels=ids), functools.partial(autoshard.remove, model))
    found["assigned"] = [error_of(one) for one in calls]
    model.load_state_dict(whole)  # as the error says, which is not said again
    replaced = (model.embed, "weight", nn.Parameter(torch.zeros(embedding.shape))), (model, "head", nn.Linear(32, 48))
    found["replaced"] = [error_of(setattr, *one) for one in replaced]
    model.layers[2].o = nn.Sequential(model.layers[2].o)
    loss = model(ids, labels=ids)
    between = torch.optim.SGD(model.parameters(), 0.1)  # of parameters that are let go in the backward
    loss.backward()
    found["between"] = error_of(between.step)
    grads = torch.autograd.grad(model(ids, labels=ids), [*model.parameters()], allow_unused=True)
    found["taken"] = grads[0] is not None, error_of(torch.optim.SGD(model.parameters(), 0.1).step)
    found["factored"] = error_of(torch.optim.Adafactor(model.parameters()).step)
    model.save_pretrained("folder", state_dict={})
    found["pretrained"] = error_of(model.save_pretrained, "folder")
    model.layers[2].o = model.layers[2].o[0]
    found["unseen"] = unseen(model, ids)
    found["resumed"] = resumed(model, single, ids)
    own["no_sync"] = model.no_sync = functools.partial(model.no_sync)
    autoshard.remove(model)
    found["kept"] = own == {name: one for name, one in vars(model).items() if callable(one)}
    return found


def unseen(model, ids):
    """What is said of parameters where no registration hook sees them: trained, frozen, and none."""
    table = model.head._parameters
    said, own = [], table["weight"]
    for other in (*(nn.Parameter(torch.zeros(own.shape), trained) for trained in (True, False)), None):
        table["weight"] = other
        said.append(error_of(functools.partial(model, ids, labels=ids)))
    table["weight"] = own
    model.layers.insert(1, nn.Linear(32, 32))  # all behind it have new names
    said.append(error_of(functools.partial(model, ids, labels=ids)))
    del model.layers[1]
    return said


def resumed(model, single, ids):
    """How far a step is from that of one process whose optimizer's state was loaded, or why it can't be."""
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01, eps=1e-6) for one in (single, model)]
    optimizers[0].step()
    model(ids, labels=ids)  # what is outside of layers is gathered, and no backward lets it go
    model.load_state_dict(single.state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for one, rows, optimizer in zip((single, model), (samples(), ids), optimizers, strict=True):
        one.zero_grad()
        one(rows, labels=rows).backward()
        try:
            optimizer.step()
        except ApplyError as error:
            return str(error)
    found, wanted = wholes(model, dict(model.named_parameters())), dict(single.named_parameters())
    return max(float((found[name] - one).abs().max()) for name, one in wanted.items())


QUICK = ("fsdp=2", "tp=2")


@functools.cache
def results_of(*meshes):
    """Of all that processes do with these meshes, in one launch: they find out once how tensors are laid out."""
    inputs = {"ids": samples(), "labels": samples()}
    jobs = {mesh: (loops, completed(plan_for(mesh, 2, precision="full"), decoder(), inputs)) for mesh in meshes}
    if "tp=2" in meshes:
        plan = autoshard.plan(
            net(), devices_of(2), inputs=(INPUT,), launch="processes", mesh="tp=2", precision="full",
            workload=Workload(mode="training", batch_size=8),
        )  # fmt: skip
        plan = completed(plan.to_json(), net(), (INPUT,))
        assert any(action.kind == "scatter" for cut in plan.cuts for action in cut.actions)
        whole = autoshard.plan(net(), devices_of(2), inputs=(INPUT,), strategy="column-parallel", objective="memory")
        jobs["wrapped"], jobs["overwritten"] = (wrapped, whole), (overwritten, whole)
        for one, kind in (("fsdp=2", Recomputing), ("tp=2", Recomputing), ("tp=2", Towered)):
            jobs[one, kind] = checkpointed, one, functools.partial(recomputing, kind)
        jobs["alone"], jobs["compiled"], jobs["other"] = (alone, plan), (compiled, plan), (other_numbers, plan)
        jobs["compiled layers"] = compiled_layers, whole_layers()
    return run_ranks(run_jobs, 2, jobs)


@sharded_replicas
@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.slow), *QUICK])
def test_states_and_optimizers_and_layers_by_themselves(mesh):
    for results in results_of(*(QUICK if mesh in QUICK else [mesh])):
        found = results[mesh]
        assert found["state"] and found["gradients"] < 1e-5
        assert "made between a forward and its backward" in found["between"] and found["kept"]
        assert found["taken"][0] and "torch.autograd.grad was called for " in found["taken"][1]
        assert "Adafactor" in found["factored"]
        if mesh == "tp=2":  # whose state_dict() is whole
            assert not found["pretrained"] and "state of the whole" in found["resumed"]
        else:
            assert "autoshard.save(" in found["pretrained"] and found["resumed"] < 1e-6
        assert all("weight (Embedding) was assigned to" in said for said in found["assigned"])
        for said, name in zip(found["replaced"], ("embed.weight", "head"), strict=True):
            assert f"{name} can't be replaced while" in said
        for said, name in zip(
            found["unseen"], ("head.weight", *["weight (Linear)"] * 2, "layers.1.weight"), strict=True
        ):
            assert f"{name} was added, removed or replaced after" in said
        assert all("a model that is divided over processes can't be" in said for said in found["copies"])


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 16), *(Block(16) for _ in range(2))), nn.Linear(16, 4))


def alone(plan):
    model = net()
    apply(model, plan, inputs=(INPUT,))
    fine = error_of(model, INPUT)
    with torch.no_grad():
        whole = model[0][2](torch.ones(8, 6, 16)).shape
    trained = torch.ones(8, 6, 16, requires_grad=True)
    return whole, error_of(model[0][2], trained), fine


INPUT = torch.ones(8, 6, 4)


@sharded_replicas
def test_a_layer_with_a_part_of_the_tokens_is_not_called_by_itself():
    """Without gradients it has all of them."""
    for results in results_of(*QUICK):
        whole, error, fine = results["alone"]
        assert whole == (8, 6, 16) and "0.2 was called by itself" in error and not fine


class Holder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return self.model(x)


def wrapped(plan):
    """What is said where DDP, or `fully_shard`, takes the parts of a model that is cut for copies."""
    said = []
    for outer in (nn.parallel.DistributedDataParallel, lambda one: nn.parallel.DistributedDataParallel(Holder(one))):
        said.append(error_of(outer(apply(net(), plan)), NUMBERS))
    layered = apply(net(), plan)
    fully_shard(layered[0][2])
    return [*said, error_of(fully_shard(apply(net(), plan)), NUMBERS), error_of(layered, NUMBERS)]


def overwritten(plan):
    """What is said where each rank has whole matrices in the places of its parts, whose sum would be twice as much."""
    model, other = apply(net(), plan), net()[0][2]
    for name in ("up", "down"):
        model[0][2].get_submodule(name)._parameters.update(other.get_submodule(name).named_parameters())
    return error_of(model, NUMBERS)


@sharded_replicas
def test_whole_parameters_in_the_places_of_parts_are_refused():
    for results in results_of(*QUICK):
        assert (
            "weight (Linear) is of shape [64, 16], and this rank has a part of shape [32, 16]" in results["overwritten"]
        )


@sharded_replicas
def test_a_model_that_is_cut_is_not_wrapped_as_if_all_ranks_had_the_same():
    """The first rank's parts were given to all: losses looked as if they were right."""
    for results in results_of(*QUICK):
        assert all("whose matrices are cut over processes" in said for said in results["wrapped"])


def compiled(plan):
    """How far gradients of some steps are from those of one process, where the model is compiled after apply."""
    model, single = net(), net()
    run = torch.compile(apply(model, plan, inputs=(INPUT,)), backend="eager")
    worst = 0.0
    for _ in range(3):
        for one, call in ((model, run), (single, single)):
            one.zero_grad()
            call(NUMBERS).square().mean().backward()
        found = wholes(model, {name: one.grad for name, one in model.named_parameters()})
        worst = max(worst, *(float((found[name] - one.grad).abs().max()) for name, one in single.named_parameters()))
    return worst


@sharded_replicas
def test_a_compiled_model_that_is_cut_has_the_same_gradients_in_every_step():
    """What sums gradients over ranks is hung up once, not once more by every call that runs what was traced."""
    assert all(results["compiled"] < 1e-5 for results in results_of(*QUICK))


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))


def whole_layers():
    return autoshard.plan(layers(), devices_of(2), inputs=(INPUT,), strategy="column-parallel", objective="memory")


def compiled_layers(plan):
    """How far outputs are off where what is traced breaks between a layer's hooks and its forward."""
    run, single = torch.compile(apply(layers(), plan), backend="eager"), layers()
    handle = nn.Module.register_forward_pre_hook(run._orig_mod[2], lambda *_: torch._dynamo.graph_break())
    worst = max(float((run(NUMBERS) - single(NUMBERS)).abs().max()) for _ in range(2))
    handle.remove()
    return worst


@sharded_replicas
def test_a_sum_that_was_traced_is_not_made_once_more_as_it_runs():
    """The layer is called by the graph, inside of the mode that added up its parts when it was traced."""
    assert all(results["compiled layers"] < 1e-6 for results in results_of(*QUICK))


class Recomputing(nn.Module):
    """Its layers are called under checkpoints, in which gradients are disabled until they are computed again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 16), *(Block(16) for _ in range(2)), nn.Linear(16, 4)])

    def forward(self, x):
        first, *blocks, last = self.layers
        x = first(x)
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return last(x)


class Towered(Recomputing):
    """Some of its layers are run without gradients."""

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            with torch.set_grad_enabled(number > 1 and torch.is_grad_enabled()):
                x = layer(x)
        return x


def recomputing(kind):
    torch.manual_seed(0)
    return kind()


def checkpointed(mesh, make):
    """How far a step of a model that disables gradients in layers is from that of one process."""
    plan = autoshard.plan(
        make(), devices_of(2), inputs=(INPUT,), launch="processes", mesh=mesh, precision="full",
        workload=Workload(mode="training", batch_size=8),
    )  # fmt: skip
    model, single = apply(make(), plan, inputs=(INPUT,)), make()
    for one, x in ((model, own_part(NUMBERS, plan.mesh.tp)), (single, NUMBERS)):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        (one(x) - x).square().mean().backward()
        optimizer.step()
    found = wholes(model, dict(model.named_parameters()))
    return max(float((found[name] - one).abs().max()) for name, one in single.named_parameters())


@sharded_replicas
def test_layers_under_reentrant_checkpoints_are_trained():
    """They were taken for layers that nobody used, and ranks that divide tokens took them for calls of their own."""
    for results in results_of(*QUICK):
        found = {job: error for job, error in results.items() if isinstance(job, tuple)}
        assert len(found) == 3 and max(found.values()) < 1e-6, found


NUMBERS = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(3))


def other_numbers(plan):
    """What a rank says of numbers that are not those of the other; some of them may differ by rounding."""
    model = apply(net(), plan, inputs=(INPUT,))
    model(NUMBERS * (1 + 1e-6 * dist.get_rank())).mean().backward()
    said = []
    for other in (NUMBERS + dist.get_rank(), NUMBERS.roll(dist.get_rank(), 0)):
        try:
            model(other)
        except RankError as error:
            said.append(str(error))
    return said


@sharded_replicas
def test_ranks_that_share_a_replica_are_told_of_other_numbers():
    """Images and features, as tokens: nothing else would show it, for gradients are sums and equal on all ranks."""
    for results in results_of(*QUICK):
        assert len(results["other"]) == 2, results["other"]
        assert all("rank 1 has other inputs than rank 0" in said for said in results["other"])
