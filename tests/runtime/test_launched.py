"""Plans made for processes before they run, carried out by them: replicas, sharded ones, both; recomputed; in 16 bits.

Every process computes its own samples. What they train is held against one process that has all samples.
"""

import dataclasses
import functools
import gc
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime.cut_state import whole_tensor
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.data_parallel import replica_record
from autoshard.runtime.dtensors import whole_of
from autoshard.search import asked
from tests.hooks import is_hooked
from tests.ranks import run_jobs, run_ranks
from tests.search.models import Decoder, Layer
from tests.torch_releases import sharded_replicas

SAMPLES, LENGTH, WORDS = 8, 6, 48


class Scaled(nn.Linear):
    """With a parameter that has no dimension, whose gradient every rank that cuts the matrix has a part of."""

    def __init__(self, width):
        super().__init__(width, width, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.875))

    def forward(self, x):
        return super().forward(x) * self.scale


class Shifted(Layer):
    """A layer that adds a parameter at last: its gradient is there before anything of the layer is computed again."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.v = Scaled(width)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return super().forward(x) + self.shift


class Scalars(Decoder):
    """Logits are divided by a parameter without a dimension, which belongs to the model itself."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids, labels=None):
        logits = super().forward(ids) / self.temperature
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder(dtype=torch.float32):
    torch.manual_seed(0)
    model = Scalars(32, 3, 4, WORDS)
    model.layers = nn.ModuleList(Shifted(32, 4) for _ in range(3))
    return model.to(dtype)


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)


def devices_of(count):
    return {f"cpu:{index}": "1GiB" for index in range(count)}


@functools.cache
def plan_for(mesh, devices, model_dtype=torch.float32, **wishes):
    """A plan that is made without processes, and goes through its file."""
    ids = samples()
    plan = autoshard.plan(
        decoder(model_dtype), devices_of(devices), inputs={"ids": ids, "labels": ids},
        workload=Workload(mode="training", batch_size=SAMPLES), launch="processes", mesh=mesh, **wishes,
    )  # fmt: skip
    return plan.to_json()


def completed(text, model, inputs):
    """A plan with its cuts and how its batch is divided, found once here and not by every process: as from a file."""
    plan = Plan.from_json(text)
    with mock.patch("autoshard.runtime.launched.count_processes", lambda: plan.mesh.size):
        found = asked.completed(model, plan, inputs)
    again = Plan.from_json(found.to_json())
    assert again == found and again.to_json() == found.to_json()
    return again


def train(model, ids, steps=3, micro_batch=None):
    """Losses and norms of some steps of AdamW with clipping, the gradients of the first, and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)  # numbers below are rounding
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        if step != 1:
            optimizer.zero_grad()
        parts = ids.split(micro_batch or len(ids))
        total = 0.0
        for number, part in enumerate(parts):
            loss = model(part, labels=part) / len(parts)
            if step == 1 and not number:  # modules have other parameters here than between steps
                model.zero_grad()
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        named = model.named_parameters()  # ranks have no gradient of experts that others have
        gradients = gradients or wholes(
            model, {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named}
        )
        unclipped = float(autoshard.clip_grad_norm_(model, math.inf))
        norms.append(float(autoshard.clip_grad_norm_(model, 0.5)))
        assert norms[-1] == unclipped
        optimizer.step()
    return losses, norms, gradients, wholes(model, dict(model.named_parameters()))


def wholes(model, tensors):
    """Copies of tensors that are laid out as the parameters of these names, put together."""
    cuts = cut_record(model)
    return (
        {name: whole_tensor(one.detach(), name, cuts).clone() for name, one in tensors.items()}
        if cuts
        else {name: whole_of(one).detach().clone() for name, one in tensors.items()}
    )


def own_part(ids, tensor=1):
    """The samples of this process; those that share matrices have the same."""
    replica, replicas = dist.get_rank() // tensor, dist.get_world_size() // tensor
    return ids[replica * len(ids) // replicas : (replica + 1) * len(ids) // replicas]


def largest_error(found, expected):
    """Relative to the largest number of each tensor."""
    assert found.keys() == expected.keys()
    return max(
        float(
            (found[name].float() - one.float()).abs().max().detach() / one.detach().float().abs().max().clamp(min=1e-12)
        )
        for name, one in expected.items()
    )


def relative(found, expected):
    return max(abs(one - other) / other for one, other in zip(found, expected, strict=True))


def trained(make, plan, ids, sharing=1, watched=None):
    """How far three steps are from those of one process that has all samples; what a rank has of the parameters.

    `sharing`: how many ranks have the same samples; `watched`: a module, of which the length of its input is told.
    """
    plan = Plan.from_json(plan) if isinstance(plan, str) else plan
    expected, model = train(make(), ids), make()
    dtypes = {one.dtype for one in model.parameters()}
    whole = sum(one.numel() for one in model.parameters())
    autoshard.apply(model, plan, inputs={"ids": ids, "labels": ids})
    kept = sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in model.parameters()) / whole
    stored = {one.dtype for one in model.parameters()}
    module, lengths = model.get_submodule(watched) if watched else None, set()
    if module is not None:
        nn.Module.register_forward_pre_hook(module, lambda module, args: lengths.add(args[0].shape[1]))
    losses, norms, gradients, values = train(model, own_part(ids, sharing), micro_batch=plan.micro_batch)
    assert {one.dtype for one in gradients.values()} == stored
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means)
    record = replica_record(model)
    autoshard.remove(model)
    assert record is None or not record.made.groups  # they end with the model
    assert {one.dtype for one in model.parameters()} == dtypes
    assert all(torch.equal(one, values[name].to(one.dtype)) for name, one in model.named_parameters())
    assert not is_hooked(model, other_than=module)
    return {
        "losses": relative((means / dist.get_world_size()).tolist(), expected[0]),
        "norms": relative(norms, expected[1]), "gradients": largest_error(gradients, expected[2]),
        "values": largest_error(values, expected[3]), "kept": kept, "stored": stored, "lengths": lengths,
    }  # fmt: skip


CASES = {
    "sharded": ("fsdp=2", {"recompute": "selective"}),
    "replicas": ("dp=2", {}),
    "columns": ("tp=2", {"recompute": "full"}),
    "sharded replicas": ("dp=2,fsdp=2", {"recompute": "full"}),
    "sharded columns": ("fsdp=2,tp=2", {}),
    "more columns": ("tp=4", {"recompute": "selective"}),
    "replicas of columns": ("dp=2,tp=2", {"recompute": "full"}),
    "all": ("dp=2,fsdp=2,tp=2", {}),
}
SLOW = ("sharded replicas", "more columns", "replicas of columns", "all")


def size_of(mesh):
    return math.prod(int(degree.split("=")[1]) for degree in mesh.split(","))


class Widening(nn.Module):
    """Half of the layers have three heads, which two ranks don't share evenly: they are priced whole, and cut."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.widen = nn.Embedding(WORDS, 24), nn.Linear(24, 48)
        self.narrow = nn.ModuleList(Layer(24, 3) for _ in range(2))
        self.wide, self.head = nn.ModuleList(Layer(48, 6) for _ in range(2)), nn.Linear(48, WORDS)

    def forward(self, ids, labels):
        x = self.embed(ids)
        for layer in self.narrow:
            x = layer(x)
        x = self.widen(x)
        for layer in self.wide:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@functools.cache
def steps_on(size, slow):
    """All cases for so many ranks in one launch."""
    ids, jobs = samples(), {}
    for name, (mesh, wishes) in CASES.items():
        if size_of(mesh) == size and (name in SLOW) == slow:
            plan = completed(plan_for(mesh, size, precision="full", **wishes), decoder(), {"ids": ids, "labels": ids})
            jobs[name] = trained, decoder, plan, ids, plan.mesh.tp
    if "columns" in jobs:
        jobs[other_inputs] = other_inputs, jobs["columns"][2]
    if size == 2:
        plan = autoshard.plan(
            Widening(), devices_of(2), inputs={"ids": ids, "labels": ids}, launch="processes", mesh="tp=2",
            workload=Workload(mode="training", batch_size=SAMPLES), precision="full",
        )  # fmt: skip
        plan = completed(plan.to_json(), Widening(), {"ids": ids, "labels": ids})
        assert {block for cut in plan.cuts for block in cut.blocks} >= {"narrow.0", "wide.0"}
        jobs[Widening] = trained, Widening, plan, ids, 2
    return run_ranks(run_jobs, size, jobs)


@sharded_replicas
@pytest.mark.parametrize("name", [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in CASES])
def test_steps_are_those_of_one_process(name):
    """Sums in another order: 1e-5 of the largest number of a tensor."""
    mesh = CASES[name][0]
    for results in steps_on(size_of(mesh), name in SLOW):
        found = results[name]
        assert found["losses"] < 1e-5 and found["norms"] < 1e-5 and found["gradients"] < 1e-5, found
        assert found["values"] < 1e-4, found  # AdamW divides by the root of small gradients
        parts = size_of(mesh.removeprefix("dp=2,")) if mesh != "dp=2" else 1
        assert found["kept"] == pytest.approx(1 / parts, abs=0.05)  # norms are in no part


@sharded_replicas
def test_layers_with_an_odd_number_of_heads():
    for results in steps_on(2, False):
        found = results[Widening]
        assert found["losses"] < 1e-5 and found["gradients"] < 1e-5 and found["values"] < 1e-4, found


def other_inputs(plan):
    """Ranks that divide tokens would train on parts of two batches: gradients are sums, and equal."""
    model, ids = autoshard.apply(decoder(), plan), samples() + dist.get_rank()
    with pytest.raises(RankError, match="rank 1 has other inputs than rank 0"):
        model(ids, labels=ids)


def interrupted(text):
    """A backward that an error ended leaves gradients behind. Applied again, with other parameters, it is well."""
    plan, model, ids = Plan.from_json(text), decoder(), samples()
    expected = train(decoder(), ids)
    loss = autoshard.apply(model, plan)(ids, labels=ids)
    handle = model.layers[1].register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids, labels=ids).backward()
    handle.remove()
    with pytest.raises(ApplyError, match="the last backward ended with an error"):
        model(ids, labels=ids)
    model.zero_grad()
    gc.disable()  # what was noted before is of no matter, collected or not
    autoshard.apply(model, plan)
    found = train(model, ids, micro_batch=plan.micro_batch)
    gc.enable()
    return loss.item() - expected[0][0], largest_error(found[3], expected[3])


def accumulated(text):
    """Which tables have a gradient after two parts, each of which used another one."""
    plan, model = Plan.from_json(text), decoder()
    model.tables = nn.ModuleList(nn.Embedding(WORDS, 4) for _ in range(3))
    autoshard.apply(model, dataclasses.replace(plan, fingerprint=""))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    usual = type(model).forward
    model.forward = lambda ids, table: usual(model, ids, ids) + model.tables[table](ids).sum()
    with model.no_sync():
        model(samples(), 0).backward()
    model(samples(), 1).backward()
    optimizer.step()
    return [table.weight.grad is not None for table in model.tables]


def hooked(text):
    """A hook on a gradient that fully_shard would not call is refused: there before apply, or hung up afterwards."""
    plan, model = Plan.from_json(text), decoder()
    handle = model.embed.weight.register_hook(lambda gradient: gradient / 2)
    with pytest.raises(ApplyError, match="has a hook on its gradient"):
        autoshard.apply(model, plan)
    handle.remove()
    autoshard.apply(model, plan)
    model.embed.weight.register_hook(lambda gradient: gradient / 2)
    model(samples(), labels=samples()).backward()
    with pytest.raises(ApplyError, match="fully_shard calls no such hook"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()


def adapted(dtype=torch.bfloat16):
    """Of each layer, some parameters are trained, beside frozen ones in the same module."""
    model = decoder(dtype).requires_grad_(False)
    for layer in model.layers:
        layer.shift.requires_grad_()
        layer.v.weight.requires_grad_()
    return model


def adapters(text, folder):
    """How far frozen weights and a checkpoint are from the model's; what is said of one that is trained later."""
    ids, plan = own_part(samples()), Plan.from_json(text)
    model, frozen = adapted(), {name: one for name, one in adapted().named_parameters() if not one.requires_grad}
    autoshard.apply(model, plan)
    stored = {name: one.dtype for name, one in model.named_parameters()}
    optimizer = torch.optim.AdamW((one for one in model.parameters() if one.requires_grad), lr=0.01)
    for _ in range(2):
        model(ids, labels=ids).backward()
        optimizer.step()
        optimizer.zero_grad()
    autoshard.save(model, f"{folder}/weights")
    autoshard.save_checkpoint(f"{folder}/training", model, optimizer)
    again = autoshard.apply(adapted(), plan)
    other = torch.optim.AdamW((one for one in again.parameters() if one.requires_grad), lr=0.01)
    autoshard.load_checkpoint(f"{folder}/training", again, other)
    losses = [each(ids, labels=ids) for each in (model, again)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    other.step()
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(whole_of(one), whole_of(value)) for one, value in pairs)
    values = {name: whole_of(one) for name, one in model.named_parameters()}
    assert all(torch.equal(values[name], one) for name, one in frozen.items())
    files = load_file(f"{folder}/weights/model.safetensors")
    assert all(torch.equal(files[name], one) for name, one in frozen.items())
    model.embed.weight.requires_grad_()
    with pytest.raises(ApplyError, match=r"embed\.weight was not trained when .* kept in torch\.bfloat16"):
        model(ids, labels=ids)
    return {dtype for name, dtype in stored.items() if name in frozen}, set(stored.values())


def thawed(text):
    """How far the gradient of a parameter without a dimension is off that was frozen when the plan was applied."""
    model, expected, ids = decoder(), decoder(), samples()
    model.temperature.requires_grad_(False)
    autoshard.apply(model, Plan.from_json(text))
    model.temperature.requires_grad_()
    model(own_part(ids), labels=own_part(ids)).backward()
    expected(ids, labels=ids).backward()
    return float(model.temperature.grad - expected.temperature.grad)


def backward_flops(plan):
    model = autoshard.apply(decoder(), plan)
    part = own_part(samples())[: plan.micro_batch]
    loss = model(part, labels=part)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counts = counter.get_flop_counts()["Global"]  # of products: since torch 2.15 those of attention are counted, too
    return sum(count for op, count in counts.items() if "attention" not in str(op))


@sharded_replicas
def test_sharded_training(tmp_path):
    """In one launch: what is computed again, gradients of accumulated parts, and 16 bits, also of frozen parameters.

    Computed again are all products of a layer but the last, which backward does not need, or the second and fourth of
    its six. Two parts in 2**8 of bfloat16, through three layers, are 5 % of the largest number of a gradient.
    """
    texts = {one: plan_for("fsdp=2", 2, recompute=one, micro_batch=1) for one in ("none", "selective", "full")}
    plans = {name: Plan.from_json(text) for name, text in texts.items()}
    plans["one full"] = replace(plans["full"], kept_layers=2)
    lowered = functools.partial(decoder, torch.bfloat16)
    jobs = {name: (backward_flops, plan) for name, plan in plans.items()}
    jobs["accumulated"] = (accumulated, texts["none"])
    jobs["hooked"] = (hooked, texts["none"])
    jobs["interrupted"] = (interrupted, texts["none"])
    for mesh in ("fsdp=2", "dp=2"):
        jobs[mesh] = (trained, lowered, plan_for(mesh, 2, torch.bfloat16, precision="mixed"), samples())
    jobs["thawed"] = (thawed, texts["none"])
    jobs["frozen"] = (trained, adapted, jobs["fsdp=2"][2], samples())
    jobs["adapters"] = (adapters, jobs["fsdp=2"][2], str(tmp_path))
    jobs["float64"] = (
        trained,
        functools.partial(decoder, torch.float64),
        plan_for("fsdp=2", 2, torch.float64),
        samples(),
    )
    square, wide = 2 * 32 * 32, 2 * 32 * 128
    for found in run_ranks(run_jobs, 2, jobs):
        none, selective, full, one_full = (found[name] for name in plans)
        assert full - none == 3 * LENGTH * (4 * square + wide)
        assert selective - none == 3 * LENGTH * 2 * square
        assert full - none == 3 * (one_full - none)
        assert found["accumulated"] == [True, True, False]
        assert found["interrupted"] == pytest.approx((0, 0), abs=1e-4)
        assert found["float64"]["stored"] == {torch.float64} and found["float64"]["gradients"] < 1e-12
        assert found["thawed"] == pytest.approx(0, abs=1e-5)
        assert found["adapters"] == ({torch.bfloat16}, {torch.bfloat16, torch.float32})
        assert found["frozen"]["stored"] == {torch.bfloat16, torch.float32}
        assert found["frozen"]["losses"] < 0.01 and found["frozen"]["gradients"] < 0.05, found["frozen"]
        for mesh in ("fsdp=2", "dp=2"):
            assert found[mesh]["stored"] == {torch.float32}
            assert found[mesh]["losses"] < 0.01 and found[mesh]["gradients"] < 0.05, found


def answered(text):
    plan, ids = Plan.from_json(text), samples()
    model, expected = decoder(), decoder()(ids)
    whole = sum(one.numel() for one in model.parameters())
    autoshard.apply(model, plan, inputs={"ids": ids})
    if plan.mesh.pp > 1:
        found = autoshard.schedule(model).eval(ids)
        found = expected if found is None else found  # on the rank of the last stage
    else:
        with torch.no_grad():
            found = model(ids)
    kept = sum(one.numel() for one in model.parameters() if not one.is_meta)
    return float((found - expected).detach().abs().max()), kept / whole


def refused(text):
    model = decoder()
    before = dict(model.named_parameters())
    with pytest.raises(PlanError) as caught:
        autoshard.apply(model, Plan.from_json(text))
    assert all(one is before[name] for name, one in model.named_parameters())
    return str(caught.value)


def test_answers_of_plans():
    """Where to cut is found by the processes."""

    def text(mesh):
        return autoshard.plan(
            decoder(), devices_of(2), inputs={"ids": samples()}, launch="processes", mesh=mesh
        ).to_json()

    for found in run_ranks(run_jobs, 2, {mesh: (answered, text(mesh)) for mesh in ("tp=2", "pp=2")}):
        for error, kept in found.values():
            assert error < 1e-5 and 0.3 < kept < 0.7


def test_what_does_not_run_is_refused_with_what_does():
    assert "optimizer keeps a copy" in refused(plan_for("fsdp=2", 2, precision="master"))
    alone = refused(plan_for("fsdp=2", 2))
    assert "for 2 processes, one per device, and this is none of torchrun's" in alone
    assert "torchrun --nproc-per-node=2" in alone
