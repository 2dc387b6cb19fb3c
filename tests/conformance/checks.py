"""Running a model in a way that can be compared bit for bit, and hand-made maps that no planner would choose."""

import copy
import random
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

import autoshard
from autoshard.capture.backward import training_loss
from autoshard.capture.decode import NO_TOKEN
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.parse import parse_devices
from autoshard.nested import map_tensors, tensors_in
from autoshard.plan.placement import resolve_execution_devices
from autoshard.profile.profile import Profile
from autoshard.strategies import make_plan
from tests.replay import replay

SEED = 7


def seed(number: int = SEED) -> None:
    """Set every random number generator that a model may draw from."""
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)


def plain(value: Any) -> Any:
    """A copy of a nested output on the ordinary CPU that later calls cannot change; generators are run to their end."""
    if isinstance(value, types.GeneratorType):
        value = list(value)
    return map_tensors(value, lambda tensor: tensor.detach().cpu().clone())


def forward(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """One forward without gradients, from fixed random numbers, on fresh copies of the inputs (some write them)."""
    seed()
    with torch.no_grad():
        return plain(model(**copy.deepcopy(inputs)))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, also those that are not in the state dict."""
    return {name: tensor.detach().cpu().clone() for name, tensor in named_tensors(model)}


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every name of every parameter and buffer, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def loss_of(output: Any) -> torch.Tensor | None:
    """A scalar that depends on every differentiable tensor of the output; None if there is none."""
    if isinstance(output, types.GeneratorType):
        output = list(output)
    found = [tensor for _, tensor in tensors_in(output) if tensor.requires_grad and tensor.numel()]
    terms = [(t.abs() if t.is_complex() else t).float().pow(2).mean().cpu() for t in found]
    return sum(terms[1:], terms[0]) if terms else None


def train(model: nn.Module, inputs: dict[str, Any], steps: int = 3) -> tuple[dict[str, Any], list[Any]]:
    """Gradients of the first step by name, and what `steps` AdamW steps printed and left: losses, then all tensors."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # gradients may differ by rounding
    gradients: dict[str, Any] = {}
    trace: list[Any] = []
    for step in range(steps):
        seed(SEED + step)
        loss = loss_of(model(**copy.deepcopy(inputs)))
        assert loss is not None, "nothing in the output is differentiable"
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if not step:
            gradients = {
                name: None if p.grad is None else p.grad.detach().cpu().clone() for name, p in model.named_parameters()
            }
        optimizer.step()
        trace.append(loss.detach().cpu())
    return gradients, [*trace, state(model)]


def first_difference(left: Any, right: Any, rounding: float = 0.0) -> str:
    """Where two nested values differ first, for messages; "" if they are the same bit for bit.

    `rounding`: what passes, of the largest value of a tensor and 0.05: sums of large numbers may come to nothing.
    """
    ours, theirs = dict(tensors_in(left)), dict(tensors_in(right))
    if list(ours) != list(theirs):
        return f"other tensors: {sorted(set(ours) ^ set(theirs))[:4]}"
    for path, a in ours.items():
        b = theirs[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{path}: {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
        passes = rounding * (float(a.abs().nan_to_num().max()) + 5e-2) if rounding and a.numel() else 0.0
        if not torch.allclose(a, b, rtol=0, atol=passes, equal_nan=True):
            return f"{path}: differs by up to {(a.double() - b.double()).abs().max().item():.3g}"
    return ""


def atoms(model: nn.Module) -> list[str]:
    """The finest placements: modules that hold tensors and have none below them, else each direct tensor by name."""
    found = []
    for path, module in model.named_modules(remove_duplicate=False):
        direct = [name for name, _ in named_tensors(module) if "." not in name]
        below = any("." in name for name, _ in named_tensors(module))
        if direct and not below:
            found.append(path)
        else:
            found += [f"{path}.{name}".lstrip(".") for name in direct]
    return found


def random_map(model: nn.Module, devices: list[str], luck: int) -> dict[str, str]:
    """Every atom on a device of its own luck."""
    chance = random.Random(luck)
    return {path: chance.choice(devices) for path in atoms(model)}


def split_before(model: nn.Module, path: str, devices: list[str]) -> dict[str, str]:
    """All atoms registered before `path` on the first device, the others on the second."""
    found = atoms(model)
    cut = next(index for index, atom in enumerate(found) if atom == path or atom.startswith(path + "."))
    return {atom: devices[0] if index < cut else devices[1] for index, atom in enumerate(found)}


def unequal(total_bytes: int) -> Iterator[dict[str, int]]:
    """Three unequal device memories, tighter than needed at first: no single one holds `total_bytes` alone."""
    for growth in range(12):
        shares = (share * 1.25**growth * total_bytes for share in (0.60, 0.50, 0.35))
        yield {f"cpu:{index}": max(4096, int(nbytes)) for index, nbytes in enumerate(shares)}


def profiled(make: Callable[[], nn.Module], inputs: Any, workload: autoshard.Workload | None = None) -> Profile:
    """Profile a model as it runs when it is measured: from the same random numbers, see `measured_peaks`."""
    model = make()
    seed()
    return autoshard.profile(model, inputs, workload=workload)


def plan_tightly(profile: Profile, strategy: str) -> tuple[autoshard.Plan, autoshard.Estimate]:
    """Plan with zero hints on three unequal devices, as small as the strategy can do with.

    What would help where nothing fits is not looked for: that takes as long as several plans.
    """
    for memory in unequal(profile.peak_bytes):
        try:
            plan = make_plan(profile, parse_devices(memory), strategy=strategy, advise=False)
        except autoshard.PlanError:
            continue
        return plan, autoshard.estimate(plan, profile)
    raise AssertionError(f"{strategy} finds no plan even on devices that hold the model several times over")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What runs gave on a model to which nothing is applied, and what they left: its tensors, the number of hooks."""

    results: list[Any]
    state: dict[str, torch.Tensor]
    hooks: int


def run_plainly(make: Callable[[], nn.Module], runs: list[Callable[[nn.Module], Any]]) -> Plain:
    """Run things one after the other on a plain model."""
    model = make()
    return Plain(results=[run(model) for run in runs], state=state(model), hooks=count_hooks(model))


def difference_when_placed(
    make: Callable[[], nn.Module],
    placement: autoshard.Plan | dict[str, str],
    runs: list[Callable[[nn.Module], Any]],
    devices: Any = "3x1GiB",
    known: Plain | None = None,
    rounding: float = 0.0,
) -> str:
    """Run the same things on the plain and on the placed model; where results or tensors differ first, "" if nowhere.

    Then the placement is removed: the model must be the same object with the same keys, without a trace of hooks.
    `known`: what `run_plainly` gave for the same `make` and `runs`, if it is known. `rounding`: see `first_difference`.
    """
    whole = known or run_plainly(make, runs)
    model = make()
    kind, keys = type(model), list(model.state_dict())
    with autoshard.simulate(devices):
        assert autoshard.apply(model, placement) is model
        assert list(model.state_dict()) == keys
        found = [run(model) for run in runs]
        difference = first_difference([*whole.results, whole.state], [*found, state(model)], rounding)
        assert autoshard.remove(model) is model
    assert type(model) is kind and list(model.state_dict()) == keys
    assert count_hooks(model) == whole.hooks  # some models hook themselves at their first forward
    assert all(tensor.device.index is None for _, tensor in named_tensors(model))
    return difference or first_difference(whole.state, state(model), rounding)


def difference_when_replayed(make: Callable[[], nn.Module], inputs: Any, graph: ModelGraph, training: bool) -> str:
    """Replay a captured graph with real weights, and compare outputs (and gradients) with a plain run.

    The graph was captured from the same random numbers: some models make shapes out of them.
    """
    model, twin = make(), make()
    seed()
    outputs, gradients = replay(graph, twin, copy.deepcopy(inputs))
    seed()
    with torch.set_grad_enabled(training):
        result = model(**copy.deepcopy(inputs))
    expected = [tensor for _, tensor in tensors_in(result)]
    wanted = {}
    if training:
        training_loss(result, type(model).__name__).backward()
        wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(gradients) == set(wanted), set(gradients) ^ set(wanted)
    return first_difference([expected, wanted], [list(outputs), {name: gradients[name] for name in wanted}])


def count_hooks(model: nn.Module) -> int:
    """How many hooks of any kind hang on the model's modules."""
    return sum(
        len(getattr(module, name))
        for module in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    )


def measured_peaks(
    model: nn.Module, plan: autoshard.Plan, inputs: dict[str, Any], training: bool, new_tokens: int = 0,
    around: Callable[[], Any] = torch.no_grad,
) -> dict[str, int]:  # fmt: skip
    """Peak bytes of each simulated device over a forward, a training step or a greedy generation in the long run.

    The second one is measured: by then all copies of tied parameters and all optimizer state are there. It draws the
    same random numbers and finds the same weights as the capture did, since some models make shapes out of either
    (a router that sends other tokens to an expert of another device).

    `around`: the context of each forward, in inference.

    Inputs start where the estimate assumes them: at the home of the root, or with the caller if they are in a list or
    a dict.
    """
    tensors = [name for name, _ in named_tensors(model)]
    home = resolve_execution_devices(plan.placements, [path for path, _ in model.named_modules()], tensors).device_of(
        ""
    )
    with autoshard.simulate({device.name: "1GiB" for device in plan.devices}) as devices:
        autoshard.apply(model, plan)
        inputs = {name: value.to(home) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0) if training else None
        for _ in range(2):
            seed()
            devices.reset_peak()
            if new_tokens:
                model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=NO_TOKEN)
            elif optimizer is None:
                with around(), torch.no_grad():
                    model(**inputs)
            else:
                optimizer.zero_grad(set_to_none=True)
                output = model(**inputs)
                training_loss(output, type(model).__name__).backward()
                optimizer.step()
                del output
        return {name: devices.memory(name)[1] for name in devices}
