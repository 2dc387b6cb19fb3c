"""Plans a model with benign inputs, carries the plan out, and runs it on what a user may bring later.

`outcome` gives "refused", "whole" (a plan that cuts or divides nothing) or "equal", and raises `Difference` for all
else: other values than the original's, or an error that is not for users.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard

Inputs = dict[str, Any]
State = Callable[[nn.Module], None]


class Difference(AssertionError):
    """What the applied model gives and the original does not."""


@dataclass(frozen=True, kw_only=True)
class Adversary:
    """One model, what it is planned with, and what comes later.

    Attributes:
        name: the name of its class, by which tests pin its outcome.
        build: makes the model with benign values.
        inputs: makes the inputs of the plan.
        others: makes inputs that come after planning.
        states: changes of parameters and buffers that another checkpoint could bring; the first one is none.
        training: planned for training, and gradients are compared.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    others: Callable[[], list[Inputs]]
    states: tuple[State, ...]
    training: bool


def as_given(model: nn.Module) -> None:
    """Leave the values as they are."""


def scaled(factor: float, names: str = ".*") -> State:
    """Multiply the parameters whose names match by `factor`."""

    def change(model: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if re.fullmatch(names, name):
                    parameter.mul_(factor)

    return change


def drawn(names: str = ".*", scale: float = 0.5) -> State:
    """Draw parameters and floating-point buffers anew, as training would have changed zeros and ones."""

    def change(model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if re.fullmatch(names, name) and tensor.is_floating_point():
                    tensor.copy_(scale * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))

    return change


def random(*shape: int, seed: int = 1, scale: float = 1.0) -> torch.Tensor:
    """Numbers in double precision, the same for the same seed."""
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int, high: int = 20, seed: int = 1) -> torch.Tensor:
    """Whole numbers from 1 up to `high`, the same for the same seed."""
    return torch.randint(1, high, shape, generator=torch.Generator().manual_seed(seed))


def _larger(inputs: Inputs) -> Inputs:
    return {name: value * 40 if torch.is_floating_point(value) else value for name, value in inputs.items()}


def registry() -> tuple[dict[str, Adversary], Callable[..., Callable[[type[nn.Module]], type[nn.Module]]]]:
    """Return an empty dict of cases, and the decorator that fills it."""
    cases: dict[str, Adversary] = {}

    def adversary(
        inputs: Callable[[], Inputs],
        others: Callable[[], list[Inputs]] = list,
        states: tuple[State, ...] = (scaled(8.0), scaled(0.125)),
        training: bool = False,
        prepare: State = as_given,
    ) -> Callable[[type[nn.Module]], type[nn.Module]]:
        def register(model_class: type[nn.Module]) -> type[nn.Module]:
            def build() -> nn.Module:
                torch.manual_seed(3)
                model = model_class().double()
                prepare(model)
                return model.train(training)

            cases[model_class.__name__] = Adversary(
                name=model_class.__name__, build=build, inputs=inputs,
                others=lambda: [inputs(), _larger(inputs()), *others()],
                states=(as_given, *states), training=training,
            )  # fmt: skip
            return model_class

        return register

    return cases, adversary


def planned(case: Adversary, strategy: str, devices: Any) -> autoshard.Plan:
    """The plan for the benign model and the benign inputs."""
    settings: dict[str, Any] = {
        "column-parallel": {"objective": "memory"},
        "pipeline": {"objective": "throughput", "num_microbatches": 4},
        "data-parallel": {"objective": "throughput"},
    }[strategy]
    workload = autoshard.Workload(mode="training" if case.training else "inference")
    torch.manual_seed(5)
    return autoshard.plan(case.build(), devices, inputs=case.inputs(), strategy=strategy, workload=workload, **settings)


def divides(plan: autoshard.Plan) -> bool:
    """Whether the plan cuts a parameter or divides the batch at all."""
    return bool(plan.cuts) or plan.num_microbatches > 1 or (plan.mesh is not None and plan.mesh.data > 1)


def outcome(case: Adversary, strategy: str) -> str:
    """Return "refused", "whole", "equal", or "late" if only other inputs or values than the plan's are refused.

    Raises `Difference` for what is silently wrong, or stops with an error that is not for users.
    """
    with autoshard.simulate("2x64MiB") as devices:
        try:
            plan = planned(case, strategy, devices)
        except autoshard.AutoshardError as error:
            _check_message(case, str(error))
            return "refused"
        if not divides(plan):
            return "whole"
        for number, change in enumerate(case.states):
            late = _compare(case, plan, change, f"state {number}")
            if late:
                return late
    return "equal"


def _compare(case: Adversary, plan: autoshard.Plan, change: State, state: str) -> str:
    """Run the original and the applied model side by side; "late" if the applied one says that it can't."""
    for number, _ in enumerate(case.others()):
        where = f"{state}, inputs {number}"
        original, applied = case.build(), case.build()  # not a copy: that would lose hooks on parameters
        change(original)
        change(applied)
        try:
            autoshard.apply(applied, plan)
            expected = _results(case, original, case.others()[number])
            found = _results(case, applied, case.others()[number])
            autoshard.remove(applied)
        except autoshard.AutoshardError as error:
            if (state, number) == ("state 0", 0):
                raise Difference(f"refused only when it is called as it was planned for: {error}") from error
            _check_message(case, str(error))
            return "late"
        except Exception as error:
            raise Difference(f"{where}: {type(error).__name__}: {error}") from error
        _check_equal(found, expected, where)
        _check_equal(dict(applied.state_dict()), dict(original.state_dict()), f"{where}, state_dict after remove")
    return ""


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss if it gives one, else a sum over what it gives that weighs all numbers differently."""
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    total = torch.zeros((), dtype=torch.float64)
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            weights = torch.linspace(0.5, 1.5, leaf.numel(), dtype=torch.float64).reshape(leaf.shape)
            total = total + (weights * leaf.square()).sum()
    return total


def _results(case: Adversary, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """Outputs and the inputs as the call left them, with gradients; those of parameters become the parameters.

    Parts of a parameter have parts of a gradient: put back together by `remove`, they can be compared.
    """
    torch.manual_seed(9)
    if not case.training:
        with torch.no_grad():
            return {"output": model(**inputs), "inputs": inputs}
    inputs = {
        name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in inputs.items()
    }
    output = model(**inputs)
    loss_of(output).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return {"output": output, "gradient of inputs": {name: value.grad for name, value in inputs.items()}}


def _leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)[0]:
        yield pytree.keystr(path), leaf


def _check_equal(found: Any, expected: Any, where: str) -> None:
    found, expected = dict(_leaves(found)), dict(_leaves(expected))
    if found.keys() != expected.keys():
        raise Difference(f"{where}: leaves {sorted(found.keys() ^ expected.keys())} on one side only")
    for path, value in expected.items():
        _check_leaf(found[path], value, f"{where}, {path}")


def _check_leaf(found: Any, expected: Any, where: str) -> None:
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        if type(found) is not type(expected) or found != expected:
            raise Difference(f"{where}: {found!r} instead of {expected!r}")
        return
    found, expected = found.detach().to("cpu"), expected.detach().to("cpu")
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Difference(f"{where}: {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}")
    if not expected.is_floating_point():
        if not torch.equal(found, expected):
            raise Difference(f"{where}: other whole numbers")
        return
    size = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 0.0
    if not torch.allclose(found, expected, rtol=1e-5, atol=1e-5 * size + 1e-12, equal_nan=True):
        off = (found - expected).abs().max().item() / (size or 1.0)
        raise Difference(f"{where}: off by {off:.2g} of the largest value")


def _check_message(case: Adversary, message: str) -> None:
    """A refusal names a module, a parameter, an input, an op or a class of this model."""
    model = case.build()
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    names |= {name for name, _ in model.named_buffers()} | set(case.inputs())
    names |= {type(module).__name__ for module in model.modules()}
    output = model(**case.inputs())
    names |= set(output) if isinstance(output, dict) else set()
    words = set(re.findall(r"[\w.]+", message))
    stems = words | {word.rstrip(".") for word in words} | {part for word in words for part in word.split(".")}
    if not (names - {""}) & stems and "aten" not in message:
        raise Difference(f"the refusal names nothing of the model: {message!r}")
