"""Plans made for processes before they run, carried out by them: replicas, sharded ones, both; recomputed; in 16 bits.

Every process computes its own samples. What they train is held against one process that has all samples.
"""

import dataclasses
import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import autoshard
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime.cut_state import whole_tensor
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.sharded import whole_of
from tests.hooks import is_hooked
from tests.ranks import run_ranks
from tests.search.models import Decoder, Layer
from tests.torch_releases import sharded_replicas

SAMPLES, LENGTH, WORDS = 8, 6, 48


class Shifted(Layer):
    """A layer that adds a parameter at last: its gradient is there before anything of the layer is computed again."""

    def __init__(self, width, heads):
        super().__init__(width, heads)
        self.shift = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return super().forward(x) + self.shift


def decoder(dtype=torch.float32):
    torch.manual_seed(0)
    model = Decoder(32, 3, 4, WORDS)
    model.layers = nn.ModuleList(Shifted(32, 4) for _ in range(3))
    return model.to(dtype)


def samples():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)


def plan_for(mesh, devices, model_dtype=torch.float32, **wishes):
    """A plan that is made without processes, and goes through its file."""
    ids = samples()
    plan = autoshard.plan(
        decoder(model_dtype), {f"cpu:{index}": "8GiB" for index in range(devices)}, inputs={"ids": ids, "labels": ids},
        workload=Workload(mode="training", batch_size=SAMPLES), launch="processes", mesh=mesh, **wishes,
    )  # fmt: skip
    return plan.to_json()


def train(model, ids, steps=3, micro_batch=None):
    """Losses and norms of some steps of AdamW with clipping, the gradients of the first, and the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)  # numbers below are rounding
    losses, norms, gradients = [], [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        parts = ids.split(micro_batch or len(ids))
        total = 0.0
        for part in parts:
            loss = model(part, labels=part) / len(parts)
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients = gradients or wholes(
            model, {n: one.grad for n, one in model.named_parameters() if one.grad is not None}
        )
        norms.append(float(autoshard.clip_grad_norm_(model, 0.5)))
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


def trained(text, dtype=torch.float32):
    """How far three steps are from those of one process that has all samples, and what the parameters were."""
    plan, ids = Plan.from_json(text), samples()
    expected = train(decoder(dtype), ids)
    model = decoder(dtype)
    whole = sum(one.numel() for one in model.parameters())
    autoshard.apply(model, plan, inputs={"ids": ids, "labels": ids})
    kept = sum(one.to_local().numel() for one in model.parameters()) / whole
    stored = {one.dtype for one in model.parameters()}
    losses, norms, gradients, values = train(model, own_part(ids, plan.mesh.tp), micro_batch=plan.micro_batch)
    assert {one.dtype for one in gradients.values()} == stored
    means = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(means)
    means /= dist.get_world_size()
    autoshard.remove(model)
    assert {one.dtype for one in model.parameters()} == {dtype}
    assert not is_hooked(model)
    return {
        "losses": max(abs(one - other) / other for one, other in zip(means.tolist(), expected[0], strict=True)),
        "norms": max(abs(one - other) / other for one, other in zip(norms, expected[1], strict=True)),
        "gradients": largest_error(gradients, expected[2]),
        "values": largest_error(values, expected[3]),
        "kept": kept, "stored": stored,
    }  # fmt: skip


MESHES = {"fsdp=2": 2, "dp=2": 2, "dp=2,fsdp=2": 4, "tp=2": 2, "tp=4": 4, "dp=2,tp=2": 4, "fsdp=2,tp=2": 4}
MESHES["dp=2,fsdp=2,tp=2"] = 8


QUICK = {("fsdp=2", "selective"), ("dp=2", "none"), ("dp=2,fsdp=2", "full"), ("tp=2", "full"), ("fsdp=2,tp=2", "none")}


@sharded_replicas
@pytest.mark.parametrize(
    ("mesh", "recompute"),
    [
        pytest.param(mesh, recompute, marks=() if (mesh, recompute) in QUICK else pytest.mark.slow)
        for mesh in MESHES
        for recompute in ("none", "selective", "full")
    ],
)
def test_steps_are_those_of_one_process(mesh, recompute):
    """Sums in another order: 1e-5 of the largest number of a tensor."""
    text = plan_for(mesh, MESHES[mesh], recompute=recompute, precision="full")
    for found in run_ranks(trained, MESHES[mesh], text):
        assert found["losses"] < 1e-5 and found["norms"] < 1e-5 and found["gradients"] < 1e-5, found
        assert found["values"] < 1e-4, found  # AdamW divides by the root of small gradients
        parts = math.prod(int(degree[-1]) for degree in mesh.split(",") if not degree.startswith("dp"))
        assert found["kept"] == pytest.approx(1 / parts, abs=0.05)  # norms are in no part


@sharded_replicas
@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("dp=2", marks=pytest.mark.slow)])
def test_mixed_precision_keeps_float32_and_computes_in_bfloat16(mesh):
    """Two parts in 2**8 of bfloat16, through three layers: 5 % of the largest number of a gradient."""
    text = plan_for(mesh, 2, torch.bfloat16, precision="mixed")
    for found in run_ranks(trained, 2, text, torch.bfloat16):
        assert found["stored"] == {torch.float32}
        assert found["losses"] < 0.01 and found["gradients"] < 0.05, found


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


@sharded_replicas
def test_what_one_part_of_an_accumulation_used_keeps_its_gradient():
    assert run_ranks(accumulated, 2, plan_for("fsdp=2", 2, recompute="none")) == [[True, True, False]] * 2


def backward_flops(text):
    plan = Plan.from_json(text)
    model = autoshard.apply(decoder(), plan)
    part = own_part(samples())[: plan.micro_batch]
    loss = model(part, labels=part)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    counts = counter.get_flop_counts()["Global"]  # of products: since torch 2.15 those of attention are counted, too
    return sum(count for op, count in counts.items() if "attention" not in str(op))


@sharded_replicas
def test_layers_are_computed_again_as_the_plan_says():
    """All products of a layer but the last, which backward does not need; or the second and fourth of its six."""
    plans = [plan_for("fsdp=2", 2, recompute=one, micro_batch=1) for one in ("none", "selective", "full")]
    plans.append(replace(Plan.from_json(plans[-1]), kept_layers=2).to_json())
    none, selective, full, one_full = (run_ranks(backward_flops, 2, plan)[0] for plan in plans)
    square, wide = 2 * 32 * 32, 2 * 32 * 128
    assert full - none == 3 * LENGTH * (4 * square + wide)
    assert selective - none == 3 * LENGTH * 2 * square
    assert full - none == 3 * (one_full - none)


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


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2"])
def test_answers_of_plans(mesh):
    """Where to cut is found by the processes."""
    ids = samples()
    plan = autoshard.plan(
        decoder(), {f"cpu:{index}": "8GiB" for index in range(2)}, inputs={"ids": ids}, launch="processes", mesh=mesh
    )
    for error, kept in run_ranks(answered, 2, plan.to_json()):
        assert error < 1e-5 and 0.3 < kept < 0.7


def refused(text):
    model = decoder()
    before = dict(model.named_parameters())
    with pytest.raises(PlanError) as caught:
        autoshard.apply(model, Plan.from_json(text))
    assert all(one is before[name] for name, one in model.named_parameters())
    return str(caught.value)


def test_stages_do_not_generate():
    ids = samples()
    plan = autoshard.plan(
        decoder(), {f"cpu:{index}": "8GiB" for index in range(2)}, inputs={"ids": ids}, launch="processes", mesh="pp=2",
        workload=Workload(batch_size=SAMPLES, new_tokens=4),
    )  # fmt: skip
    assert 'mesh="tp=2"' in run_ranks(refused, 2, plan.to_json())[0]


def test_what_does_not_run_is_refused_with_what_does():
    assert "optimizer keeps a copy" in refused(plan_for("fsdp=2", 2, precision="master"))
    alone = refused(plan_for("fsdp=2", 2))
    assert "for 2 processes, one per device, and this is none of torchrun's" in alone
    assert "torchrun --nproc-per-node=2" in alone
