"""Running a model in a way that can be compared bit for bit, and hand-made maps that no planner would choose."""

import copy
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoshard.nested import map_tensors, tensors_in

SEED = 7


def plain(value: Any) -> Any:
    """A copy of a nested output on the ordinary CPU that later calls cannot change; generators are run to their end."""
    if isinstance(value, types.GeneratorType):
        value = list(value)
    return map_tensors(value, lambda tensor: tensor.detach().cpu().clone())


def forward(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """One forward without gradients, from fixed random numbers, on fresh copies of the inputs (some write them)."""
    torch.manual_seed(SEED)
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gradients: dict[str, Any] = {}
    trace: list[Any] = []
    for step in range(steps):
        torch.manual_seed(SEED + step)
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


def first_difference(left: Any, right: Any) -> str:
    """Where two nested values differ first, for messages; "" if they are the same bit for bit."""
    ours, theirs = dict(tensors_in(left)), dict(tensors_in(right))
    if list(ours) != list(theirs):
        return f"other tensors: {sorted(set(ours) ^ set(theirs))[:4]}"
    for path, a in ours.items():
        b = theirs[path]
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{path}: {tuple(a.shape)} {a.dtype} against {tuple(b.shape)} {b.dtype}"
        if not torch.allclose(a, b, rtol=0, atol=0, equal_nan=True):
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


def random_map(model: nn.Module, devices: list[str], seed: int) -> dict[str, str]:
    """Every atom on a device of its own luck."""
    chance = random.Random(seed)
    return {path: chance.choice(devices) for path in atoms(model)}


def split_before(model: nn.Module, path: str, devices: list[str]) -> dict[str, str]:
    """All atoms registered before `path` on the first device, the others on the second."""
    found = atoms(model)
    cut = next(index for index, atom in enumerate(found) if atom == path or atom.startswith(path + "."))
    return {atom: devices[0] if index < cut else devices[1] for index, atom in enumerate(found)}


def grown(attempt: Callable[[list[int]], Any], total_bytes: int, error: type[Exception]) -> Any:
    """Call `attempt` with three unequal memories, as small as it can take; at first none holds `total_bytes` alone."""
    shares, factor = (0.50, 0.35, 0.25), 1.0
    while True:
        try:
            return attempt([max(4096, int(share * factor * total_bytes)) for share in shares])
        except error:
            factor *= 1.25
            if factor > 12:
                raise
