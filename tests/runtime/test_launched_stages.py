"""Plans for processes with stages (pp): alone, sharded over replicas (fsdp), with cut matrices (tp), replicated (dp).

What processes train in micro-batches is held against one process that has all samples at once.
"""

import copy
import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

import autoshard
from autoshard.errors import PlanError
from autoshard.nested import tensors_in
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime import sharded
from tests.models import by_name
from tests.ranks import run_ranks
from tests.runtime.test_launched import decoder, largest_error, refused, samples, wholes
from tests.torch_releases import sharded_replicas

ROWS = 8


def square(output, target):
    """A loss of what a model gives first."""
    return next(one for _, one in tensors_in(output) if one.is_floating_point()).float().sub(0.1).pow(2).mean()


def build(name):
    """A model, ROWS samples, and a loss function where it has no loss of its own."""
    if name == "decoder":
        return decoder(), {"ids": samples(), "labels": samples()}, None
    case = by_name(name)
    return case.model(), case.example((ROWS, 6)), square


def plan_for(name, mesh, **wishes):
    """A plan that is made without processes, and goes through its file."""
    model, inputs, _ = build(name)
    count = 2 ** mesh.count("=")
    return autoshard.plan(
        model, {f"cpu:{index}": "8GiB" for index in range(count)}, inputs=inputs, launch="processes", mesh=mesh,
        workload=Workload(mode="training", batch_size=ROWS),
        **{"precision": "full", "micro_batch": ROWS // max(count, 4), **wishes},
    ).to_json()  # fmt: skip


def part_of(inputs, index, count):
    return {name: one.chunk(count)[index] if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}


def train(model, step, clip, steps=3):
    """Losses and norms of some steps of AdamW with clipping, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-6)  # numbers below are rounding
    losses, norms, gradients = [], [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(step())
        named = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        gradients = gradients or wholes(model, named)
        norms.append(float(clip(model, 0.5)))
        optimizer.step()
    return losses, norms, gradients


def alone(name):
    """What one process that has all samples trains, and the parameters afterwards."""
    model, inputs, loss_of = build(name)

    def step():
        output = model(**inputs)
        loss = output if loss_of is None else loss_of(output, None)
        loss.backward()
        return float(loss.detach())

    found = train(model, step, lambda model, norm: autoshard.clip_grad_norm_(model.parameters(), norm))
    return *found, {name: one.detach() for name, one in model.named_parameters()}


def staged(name, plan):
    """The model of a process with its plan, and what runs a step of the samples of its replica."""
    model, inputs, loss_of = build(name)
    own = part_of(inputs, plan.mesh.place(dist.get_rank())[0], plan.mesh.data)
    autoshard.apply(model, plan, inputs=inputs)
    runner = autoshard.schedule(model, loss_of)
    target = None if loss_of is None else torch.zeros(ROWS // plan.mesh.data)

    def step():
        losses = []
        runner.step(**own, target=target, losses=losses)
        return float(sum(losses)) / len(losses) if losses else None

    return model, step


def trained(name, text):
    """How far three steps are from those of one process."""
    plan, expected = Plan.from_json(text), alone(name)
    model, step = staged(name, plan)
    kept = sum(sharded.own_part(one).numel() for one in model.parameters() if not one.is_meta)
    losses, norms, gradients = train(model, step, autoshard.clip_grad_norm_)
    autoshard.remove(model)
    values = {name: one.detach() for name, one in model.named_parameters()}
    return {
        "gradients": largest_error(gradients, {name: expected[2][name] for name in gradients}),
        "norms": max(abs(one - other) / other for one, other in zip(norms, expected[1], strict=True)),
        "values": largest_error(values, expected[3]), "names": set(gradients), "wanted": set(expected[2]),
        "losses": losses, "expected": expected[0], "kept": kept / sum(one.numel() for one in model.parameters()),
    }  # fmt: skip


def slow(*values, needs_shards=True):
    return pytest.param(*values, marks=[pytest.mark.slow, *([sharded_replicas] if needs_shards else [])])


@pytest.mark.parametrize(
    ("name", "mesh", "wishes"),
    [
        ("decoder", "pp=2", {"recompute": "full"}),
        pytest.param("decoder", "fsdp=2,pp=2", {"recompute": "selective"}, marks=sharded_replicas),
        slow("decoder", "pp=2", {"recompute": "selective"}, needs_shards=False),
        slow("decoder", "pp=2,tp=2", {}, needs_shards=False),
        slow("decoder", "dp=2,pp=2", {"recompute": "full"}, needs_shards=False),
        slow("decoder", "dp=2,pp=2,tp=2", {}, needs_shards=False),
        slow("decoder", "dp=2,fsdp=2,pp=2", {"micro_batch": 1}),
        slow("decoder", "fsdp=2,tp=2,pp=2", {"recompute": "full"}),
        slow("decoder", "fsdp=2,pp=2", {"schedule": "gpipe"}),
        slow("llama", "fsdp=2,tp=2,pp=2", {}),
        slow("t5", "fsdp=2,pp=2", {}),  # the embedding is the head, too
        slow("mixtral", "fsdp=2,pp=2", {}),  # with experts that nobody asks
        slow("mixtral", "pp=2,tp=2", {}, needs_shards=False),
    ],
)
def test_stages_are_trained_as_one_process(name, mesh, wishes):
    """Sums in another order: 1e-5 of the largest number of a tensor."""
    text = plan_for(name, mesh, **wishes)
    plan = Plan.from_json(text)
    assert plan.num_microbatches > 1
    every = run_ranks(trained, plan.mesh.size, name, text, timeout_seconds=300, group_seconds=120)
    for found in every:
        assert found["gradients"] < 1e-5 and found["norms"] < 1e-5 and found["values"] < 5e-5, found
        assert found["kept"] < 1.5 / plan.mesh.fsdp / plan.mesh.pp
    assert every[0]["wanted"] <= {one for found in every for one in found["names"]}
    lasts = [found["losses"] for found in every if found["losses"][0] is not None]
    means = [sum(losses) / len(losses) for losses in zip(*lasts, strict=True)]
    assert means == pytest.approx(every[0]["expected"], rel=1e-5)


def mixed(name, text):
    """How far gradients are from those of the same micro-batches, each computed in 16 bits, added up in 32."""
    plan = Plan.from_json(text)
    whole, inputs, _ = build(name)
    lowered, count = copy.deepcopy(whole).bfloat16(), plan.mesh.data * plan.num_microbatches
    expected = {name: torch.zeros_like(one) for name, one in whole.named_parameters()}
    for index in range(count):
        lowered.zero_grad()
        (lowered(**part_of(inputs, index, count)) / count).backward()
        for name, one in lowered.named_parameters():
            expected[name] += one.grad.float()
    model, step = staged("decoder", plan)
    step()
    stored = {one.dtype for one in model.parameters()}
    gradients = wholes(model, {name: one.grad for name, one in model.named_parameters() if one.grad is not None})
    autoshard.remove(model)
    return largest_error(gradients, {name: expected[name] for name in gradients}), stored


@sharded_replicas
@pytest.mark.parametrize("mesh", ["pp=2", pytest.param("fsdp=2,pp=2", marks=pytest.mark.slow)])
def test_mixed_precision_computes_in_bfloat16_and_adds_up_in_float32(mesh):
    text = plan_for("decoder", mesh, precision="mixed")
    for error, stored in run_ranks(mixed, 2 ** mesh.count("="), "decoder", text):
        assert error < 1e-3 and stored == {torch.float32}


def went_on(text, folder):
    """A run that is saved, and goes on in another model from what was saved: how far they are then."""
    plan = Plan.from_json(text)
    model, step = staged("decoder", plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step()
    optimizer.step()
    autoshard.save_checkpoint(folder, model, optimizer, state={"step": 1})
    other, again = staged("decoder", plan)
    restored = torch.optim.AdamW(other.parameters(), lr=0.5)
    assert autoshard.load_checkpoint(folder, other, restored) == {"step": 1}
    for one, run, stepped in ((model, step, optimizer), (other, again, restored)):
        stepped.zero_grad()
        run()
        stepped.step()
        autoshard.remove(one)
    return largest_error(*({name: one.detach() for name, one in model.named_parameters()} for model in (other, model)))


@sharded_replicas
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,pp=2", "fsdp=2,tp=2,pp=2"])
def test_training_goes_on_from_a_checkpoint_of_sharded_stages(mesh, tmp_path):
    assert max(run_ranks(went_on, 2 ** mesh.count("="), plan_for("decoder", mesh), str(tmp_path / "last"))) == 0.0


@sharded_replicas
def test_layers_that_share_parameters_are_refused():
    sharing, plan = decoder(), Plan.from_json(plan_for("decoder", "fsdp=2,pp=2"))
    sharing.layers[2].shift = sharing.layers[0].shift
    with pytest.raises(PlanError, match=re.escape("layers.2.shift is a parameter of layers.0 and of layers.2")):
        sharded.check_shardable(sharing, plan)


def test_what_stages_are_not_trained_with_is_refused():
    text = plan_for("decoder", "fsdp=2,pp=2")
    plan = Plan.from_json(text)
    assert plan.layers == tuple(f"layers.{index}" for index in range(3))
    older = dataclasses.replace(plan, layers=())
    assert "does not say which layers the model has" in refused(older.to_json())
    apart = dataclasses.replace(plan, schedule="zero-bubble")
    assert "Plan with --schedule 1f1b or interleaved" in refused(apart.to_json())
    with pytest.raises(PlanError, match=re.escape("zero-bubble")):
        plan_for("decoder", "fsdp=2,pp=2", schedule="zero-bubble")
    with pytest.raises(PlanError, match="more stages than the model has layers"):
        plan_for("albert", "fsdp=2,pp=2")
