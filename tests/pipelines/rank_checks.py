"""What every rank of a test does: apply, step, compare with the model itself. Returns what was wrong, "" if nothing."""

from contextlib import nullcontext

import torch
from torch import nn

import autoshard
from autoshard.nested import tensors_in
from tests.pipelines.plans import plan_of

TOLERANCE = 1e-5
"""Of the largest value: parts of a batch are other matrix products than the whole, so the last bits differ."""
NOISE = 1e-2
"""What is smaller than this part of the largest tensor compared is compared with it: a key's bias has no gradient."""


def token_loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())


def differences(
    make, positions, schedule, parts=4, loss=None, target=None, return_outputs=True, around=nullcontext,
    tolerance=TOLERANCE, **settings,
):  # fmt: skip
    """Train a step and evaluate; `make`: () -> (model, stages, keyword inputs); `around`: the context of forwards."""
    torch.manual_seed(0)
    model, stages, inputs = make()
    model.train()
    with around():
        reference = model(**inputs)
        value = loss(reference, target) if loss else reference["loss"]
    value.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = None
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = plan_of(model, stages, positions, inputs, parts=parts, schedule=schedule, **settings)
    autoshard.apply(model, plan)
    problems, losses = [], []
    runner = autoshard.schedule(model, loss)
    with around():
        stepped = runner.step(**inputs, target=target, losses=losses, return_outputs=return_outputs)
        evaluated = runner.eval(**inputs, target=target)
    has_last = evaluated is not None
    if (stepped is not None) != (has_last and return_outputs):
        problems.append(f"a step returns {type(stepped).__name__}")
    for output in (stepped, evaluated):
        if output is not None:
            problems += unlike("output", tensors_in(output), tensors_in(reference), tolerance)
    if has_last != bool(losses) or (has_last and len(losses) != parts):
        problems.append(f"{len(losses)} losses")
    found = {name: parameter.grad for name, parameter in model.named_parameters() if not parameter.is_meta}
    problems += unlike("gradient", found.items(), [(name, wanted[name]) for name in found], tolerance)
    if any(parameter.grad is not None for parameter in model.parameters() if parameter.is_meta):
        problems.append("a parameter of another stage has a gradient")
    autoshard.remove(model)
    if any(not torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()):
        problems.append("remove brings back other values")
    return "; ".join(problems)


def unlike(what, found, wanted, tolerance=TOLERANCE):
    problems, found, wanted = [], list(found), list(wanted)
    floor = max((float(other.detach().abs().max()) for _, other in wanted if other is not None), default=0.0) * NOISE
    for (name, one), (_, other) in zip(found, wanted, strict=True):
        if one is None or other is None:
            if one is not other:
                problems.append(f"{what} {name}: {one is not None}, {other is not None}")
            continue
        error = float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=max(floor, 1e-6)))
        if not error < tolerance:
            problems.append(f"{what} {name} is off by {error:.1e}")
    return problems
