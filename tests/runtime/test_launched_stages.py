"""Plans for processes with stages (pp): alone, sharded over replicas (fsdp), with cut matrices (tp), replicated (dp).

What processes train in micro-batches is held against one process that has all samples at once.
"""

import copy
import dataclasses
import functools
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import autoshard
from autoshard.errors import ApplyError, AutoshardError, PlanError
from autoshard.nested import tensors_in
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime import sharded
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.dtensors import own_part
from autoshard.search.limits import parse_mesh
from tests.models import by_name
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import (
    WORDS,
    completed,
    decoder,
    devices_of,
    largest_error,
    refused,
    relative,
    samples,
    size_of,
    wholes,
)
from tests.runtime.test_results import ask_for_maps, plan_of_maps
from tests.search.models import Decoder
from tests.torch_releases import SHARDS_REPLICAS, TAKES_NO_GRADIENTS, sharded_replicas

ROWS = 8


def square(output, target):
    """A loss of what a model gives first."""
    return next(one for _, one in tensors_in(output) if one.is_floating_point()).float().sub(0.1).pow(2).mean()


class Tied(Decoder):
    """The model itself multiplies with the table of the first stage, in the last one."""

    def __init__(self):
        super().__init__(32, 3, 4, WORDS)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.linear(self.norm(x), self.head.weight)


class Stop(torch.nn.Module):
    def __init__(self, inner, stops):
        super().__init__()
        self.inner, self.stops = inner, stops

    def forward(self, x):
        return self.inner(x.detach() if self.stops else x)


class Stopped(Decoder):
    """No gradient goes through the last layer."""

    def __init__(self):
        super().__init__(32, 3, 4, WORDS)
        self.layers = torch.nn.ModuleList(Stop(layer, place == 2) for place, layer in enumerate(self.layers))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def build(name):
    """A model, ROWS samples, and a loss function where it has no loss of its own."""
    if name == "stopped":
        torch.manual_seed(0)
        return Stopped(), {"ids": samples()}, square
    if name == "tied":
        torch.manual_seed(0)
        return Tied(), {"ids": samples()}, square
    if name == "decoder":
        return decoder(), {"ids": samples(), "labels": samples()}, None
    case = by_name(name)
    return case.model(), case.example((ROWS, 6)), square


@functools.cache
def plan_for(name, mesh, **wishes):
    """A plan that is made without processes, and goes through its file."""
    model, inputs, _ = build(name)
    count = size_of(mesh)
    return autoshard.plan(
        model, devices_of(count), inputs=inputs, launch="processes", mesh=mesh,
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


@functools.cache
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
    state = copy.deepcopy(model.state_dict())
    for one in model.parameters():
        one.data.mul_(2)
    autoshard.apply(model, plan, inputs=inputs)
    model.load_state_dict(state)  # whole tensors, of which a rank takes its part
    runner = autoshard.schedule(model, loss_of)
    target = None if loss_of is None else torch.zeros(ROWS // plan.mesh.data)

    def step():
        losses = []
        runner.step(**own, target=target, losses=losses)
        return float(sum(losses)) / len(losses) if losses else None

    return model, step


def trained(name, plan):
    """How far three steps are from those of one process."""
    plan = Plan.from_json(plan) if isinstance(plan, str) else plan
    expected = alone(name)
    model, step = staged(name, plan)
    record = cut_record(model)
    kinds = {action.kind for cut in record.cuts for action in cut.actions} if record is not None else set()
    kept = sum(own_part(one).numel() for one in model.parameters() if not one.is_meta)
    losses, norms, gradients = train(model, step, autoshard.clip_grad_norm_)
    state = model.state_dict()  # with what other stages have
    if plan.mesh.fsdp > 1:
        assigned = next(one for one in model.parameters() if one.dim() and not one.is_meta)
        before, assigned.data = assigned.data, assigned.data.clone()
        with pytest.raises(ApplyError, match="was assigned to"):
            autoshard.remove(model)
        assigned.data = before
    autoshard.remove(model)
    values = {name: one.detach() for name, one in model.named_parameters()}
    torch.testing.assert_close(state, dict(model.state_dict()), rtol=0, atol=0)
    return {
        "gradients": largest_error(gradients, {name: expected[2][name] for name in gradients}),
        "norms": relative(norms, expected[1]),
        "values": largest_error(values, expected[3]), "names": set(gradients), "wanted": set(expected[2]),
        "losses": losses, "expected": expected[0], "kept": kept / sum(one.numel() for one in model.parameters()),
        "divides tokens": "scatter" in kinds,
    }  # fmt: skip


CASES = {
    "stages": ("decoder", "pp=2", {"recompute": "full"}),
    "sharded stages": ("decoder", "fsdp=2,pp=2", {"recompute": "selective"}),
    "selective": ("decoder", "pp=2", {"recompute": "selective"}),
    "cut stages": ("decoder", "pp=2,tp=2", {}),
    "replicas of stages": ("decoder", "dp=2,pp=2", {"recompute": "full"}),
    "replicas of cut stages": ("decoder", "dp=2,pp=2,tp=2", {}),
    "replicas of sharded stages": ("decoder", "dp=2,fsdp=2,pp=2", {"micro_batch": 1}),
    "sharded cut stages": ("decoder", "fsdp=2,tp=2,pp=2", {"recompute": "full"}),
    "gpipe": ("decoder", "fsdp=2,pp=2", {"schedule": "gpipe"}),
    "llama": ("llama", "fsdp=2,tp=2,pp=2", {}),
    "t5": ("t5", "fsdp=2,pp=2", {}),  # the embedding is the head, too
    "mixtral": ("mixtral", "fsdp=2,pp=2", {}),  # with experts that nobody asks
    "cut mixtral": ("mixtral", "pp=2,tp=2", {}),
    "cut bloom": ("bloom", "pp=2,tp=2", {}),  # calls an autograd function of its own
    "cut gemma2": ("gemma2", "pp=2,tp=2", {}),
    "cut and tied": ("tied", "pp=2,tp=2", {}),
}
DIVIDING = ("cut stages", "replicas of cut stages", "sharded cut stages", "llama", "cut gemma2", "cut and tied")
"""Cases in which ranks that share matrices divide tokens between them within a stage."""
QUICK = ("stages", "sharded stages", "cut stages")


def marks(name):
    return [*([sharded_replicas] if "fsdp" in CASES[name][1] else []), *([] if name in QUICK else [pytest.mark.slow])]


def jobs_of(case):
    """What the ranks of a case run, by case and kind. How a batch is divided is found by the processes for `stages`."""
    name, mesh, wishes = CASES[case]
    text = plan_for(name, mesh, **wishes)
    assert Plan.from_json(text).num_microbatches > 1
    jobs = {(case, "trained"): (trained, name, text if mesh == "pp=2" else completed(text, *build(name)[:2]))}
    if case in ("stages", "sharded stages") and SHARDS_REPLICAS:
        mixing = completed(plan_for("decoder", mesh, precision="mixed"), *build("decoder")[:2])
        jobs[case, "mixed"] = mixed, "decoder", mixing
    if case == "stages":
        plan = completed(plan_for("stopped", "pp=2"), *build("stopped")[:2])
        ways = {True: "frozen", False: "not frozen"} if TAKES_NO_GRADIENTS else {False: "not frozen"}
        jobs[case, "changed"] = changed, completed(plan_for("decoder", "pp=2"), *build("decoder")[:2])
        jobs |= {(case, way): (stopped, plan, frozen) for frozen, way in ways.items()}
    if case == "cut stages":
        jobs[case, "maps"] = ask_for_maps, plan_of_maps()
    return jobs


@functools.cache
def results_of(*cases):
    """Of cases with equally many ranks, in one launch."""
    jobs = {key: job for case in cases for key, job in jobs_of(case).items()}
    return run_ranks(run_jobs, size_of(CASES[cases[0]][1]), jobs, timeout_seconds=300, group_seconds=120)


@pytest.mark.parametrize("case", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_stages_are_trained_as_one_process(case):
    """Sums in another order: 1e-5 of the largest number of a tensor. In bfloat16, gradients are added up in float32."""
    mesh, together = CASES[case][1], (case,)
    if case in QUICK:
        able = [one for one in QUICK if SHARDS_REPLICAS or "fsdp" not in CASES[one][1]]
        together = tuple(one for one in able if size_of(CASES[one][1]) == size_of(mesh))
    degrees = parse_mesh(mesh)
    every = []
    for rank in results_of(*together):
        found, (error, stored) = rank[case, "trained"], rank.get((case, "mixed"), (0.0, {torch.float32}))
        assert found["gradients"] < 1e-5 and found["norms"] < 1e-5 and found["values"] < 5e-5, found
        assert found["kept"] < 1.5 / degrees.get("fsdp", 1) / degrees["pp"]
        assert found["divides tokens"] == (case in DIVIDING)
        assert error < 1e-3 and stored == {torch.float32}
        every.append(found)
    assert every[0]["wanted"] <= {one for found in every for one in found["names"]}
    lasts = [found["losses"] for found in every if found["losses"][0] is not None]
    means = [sum(losses) / len(losses) for losses in zip(*lasts, strict=True)]
    assert means == pytest.approx(every[0]["expected"], rel=1e-5)


def changed(plan):
    """A hook on a layer, which its stage calls, is called; on the model, which none calls, it would do nothing."""
    model, seen = decoder(), []
    autoshard.apply(model, plan, inputs={"ids": samples(), "labels": samples()})
    with pytest.raises(ApplyError, match="Start every process"):
        model.share_memory()
    with pytest.raises(ApplyError, match=r"can't be given \.to\(\)\. .*autoshard\.remove"):
        model.to("cpu")  # torch advises to_empty(), which drops the weights
    runner = autoshard.schedule(model)
    with model.no_sync():
        runner.step(ids=samples(), labels=samples())
    model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    runner.step(ids=samples(), labels=samples())
    assert bool(seen) == (not model.layers[0].o.weight.is_meta)
    head, model.head = model.head, torch.nn.Linear(32, WORDS, bias=False)
    with pytest.raises(ApplyError, match=r"head\.weight was added, removed or replaced after"):
        runner.step(ids=samples(), labels=samples())
    model.head = head
    handle = model.register_full_backward_pre_hook(lambda module, gradients: (2 * gradients[0],))
    with pytest.raises(PlanError, match="the Scalars has a backward hook"):
        runner.step(ids=samples(), labels=samples())
    handle.remove()
    model.register_forward_hook(lambda module, args, output: 2 * output)
    with pytest.raises(PlanError, match="of the Scalars was changed after"):
        runner.step(ids=samples(), labels=samples())
    fully_shard(model.layers[0].o)
    with pytest.raises(ApplyError, match="fully_shard was called for a FSDPLinear"):
        runner.step(ids=samples(), labels=samples())


def mixed(name, plan):
    """How far gradients are from those of the same micro-batches, each computed in 16 bits, added up in 32."""
    whole, inputs, _ = build(name)
    lowered, count = copy.deepcopy(whole).bfloat16(), plan.mesh.data * plan.num_microbatches
    expected = {name: torch.zeros_like(one) for name, one in whole.named_parameters()}
    for one in lowered.parameters():
        one.data = one.data if one.dim() else one.data.float()  # scalars are not gathered
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


def test_what_stages_are_not_trained_with_is_refused():
    text = plan_for("decoder", "fsdp=2,pp=2")
    plan = Plan.from_json(text)
    assert plan.layers == tuple(f"layers.{index}" for index in range(3))
    older = dataclasses.replace(plan, layers=())
    assert "names no layers to gather one by one" in refused(older.to_json())
    apart = dataclasses.replace(plan, schedule="zero-bubble")
    assert "Plan with --schedule 1f1b or interleaved" in refused(apart.to_json())
    with pytest.raises(PlanError, match=re.escape("zero-bubble")):
        plan_for("decoder", "fsdp=2,pp=2", schedule="zero-bubble")
    with pytest.raises(PlanError, match="more stages than the model has layers"):
        plan_for("albert", "fsdp=2,pp=2")


@sharded_replicas
def test_layers_that_share_parameters_are_refused():
    sharing, plan = decoder(), Plan.from_json(plan_for("decoder", "fsdp=2,pp=2"))
    sharing.layers[2].shift = sharing.layers[0].shift
    with pytest.raises(PlanError, match=re.escape("layers.2.shift is a parameter of layers.0 and of layers.2")):
        sharded.check_shardable(sharing, plan)


def stopped(plan, frozen):
    """What a rank says of a step in which no gradient goes back to the first stage; `frozen`: nor is it trained."""
    model, inputs, loss_of = build("stopped")
    for part in (model.embed, model.layers[:2]):
        part.requires_grad_(not frozen)
    autoshard.apply(model, plan, inputs=inputs)
    try:
        autoshard.schedule(model, loss_of).step(**inputs, target=torch.zeros(ROWS))
    except AutoshardError as error:
        return type(error).__name__, str(error)
    return "trained", ""


def test_a_stage_that_stops_gradients_of_layers_that_are_trained_is_refused():
    """Torch sends zeros in place of none, which weight decay would step."""
    said = results_of("stages")
    assert all(rank.get(("stages", "frozen"), ("trained", "")) == ("trained", "") for rank in said)
    assert [rank["stages", "not frozen"][0] for rank in said] == ["RankError", "ApplyError"]
    assert "a stage stops gradients" in said[1]["stages", "not frozen"][1]


def stepping_in_hooks(plan):
    """An optimizer that steps as soon as a gradient is there: other micro-batches have yet to go through."""
    model, inputs, loss_of = build("tied")
    autoshard.apply(model, plan, inputs=inputs)
    for one in model.parameters():
        optimizer = torch.optim.SGD([one], 0.1)
        one.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with pytest.raises(AutoshardError) as caught:
        autoshard.schedule(model, loss_of).step(**inputs, target=torch.zeros(ROWS))
    return type(caught.value).__name__, str(caught.value)


def test_optimizers_that_step_in_hooks_are_told_of():
    plan = completed(plan_for("tied", "pp=2"), *build("tied")[:2])
    said = run_ranks(stepping_in_hooks, 2, plan)
    assert any("SGD steps while a schedule runs" in text for _, text in said), said
    assert all(kind == "ApplyError" or "rank" in text for kind, text in said), said


def other_targets(plan):
    """What a rank says of targets: only the last stage's, those of all, and others than the other rank has."""
    model, inputs, loss_of = build("tied")
    autoshard.apply(model, plan, inputs=inputs)
    runner, said = autoshard.schedule(model, lambda output, target: loss_of(output + target.view(-1, 1, 1), None)), []
    rank, whole = dist.get_rank(), torch.arange(float(ROWS))
    for target in (whole if rank else None, whole, whole.roll(rank), whole + rank, whole.long() + rank):
        try:
            runner.step(**inputs, target=target)
            said.append("")
        except AutoshardError as error:
            said.append(str(error))
    return said


def test_targets_that_differ_between_stages_are_refused():
    """Samples of the first stage's rank would be held against labels of the last stage's."""
    plan = completed(plan_for("tied", "pp=2"), *build("tied")[:2])
    for last, every, *others in run_ranks(other_targets, 2, plan):
        assert last == every == ""
        assert all("rank 1 has another target than rank 0" in one for one in others), others
