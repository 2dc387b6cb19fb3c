"""Plans a model with benign inputs, carries the plan out, and runs it on what a user may bring later.

`outcome` says whether the plan was refused, or its results are equal to the original's, and raises `Difference` for all
else: other values, or an error that is not for users.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import autoshard

Inputs = dict[str, Any]
Leaves = dict[str, Any]
State = Callable[[nn.Module], None]


class Difference(AssertionError):
    """What the applied model gives and the original does not."""


@dataclass(frozen=True)
class Outcome:
    """What became of a model under a strategy.

    Attributes:
        kind: "refused" by `plan`; "whole" if the plan cuts and divides nothing; "equal"; "late" if the applied model
            refuses inputs or values that the plan was not made with.
        message: what the refusal says.
    """

    kind: str
    message: str = ""


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


def variants(
    adversary: Callable[..., Any], base: type[nn.Module], attribute: str, bodies: dict[str, Any], *inputs: Any,
    **settings: Any,
) -> None:  # fmt: skip
    """Register a class per name that differs from `base` in one method or attribute."""
    for name, body in bodies.items():
        adversary(*inputs, **settings)(type(name, (base,), {attribute: body}))


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


@functools.cache
def outcome(case: Adversary, strategy: str) -> Outcome:
    """Plan with benign inputs, and compare the applied model with the original on all others.

    Raises `Difference` for what is silently wrong, or stops with an error that is not for users.
    """
    with autoshard.simulate("2x64MiB") as devices:
        try:
            plan = planned(case, strategy, devices)
        except autoshard.AutoshardError as error:
            return Outcome("refused", str(error))
        if not divides(plan):
            return Outcome("whole")
    expected = _expected(case)
    with autoshard.simulate("2x64MiB"):
        for number, change in enumerate(case.states):
            runs = _runs(case, change, plan)
            for done, wanted in enumerate(expected[number]):
                where = f"state {number}, run {done}"
                try:
                    found = next(runs)
                except autoshard.AutoshardError as error:
                    if number == done == 0:
                        raise Difference(f"refused only when it is called as it was planned for: {error}") from error
                    return Outcome("late", str(error))
                except Exception as error:
                    raise Difference(f"{where}: {type(error).__name__}: {error}") from error
                _check_equal(found, wanted, where)
    return Outcome("equal")


@functools.cache
def _expected(case: Adversary) -> list[list[Leaves]]:
    """What the original gives, per state and inputs."""
    return [list(_runs(case, change, None)) for change in case.states]


def _runs(case: Adversary, change: State, plan: autoshard.Plan | None) -> Iterator[Leaves]:
    """Results for the inputs one after another: of one model, or for training of one per inputs.

    Gradients become the parameters: parts of them, put back together by `remove`, can be compared.
    """
    model: nn.Module | None = None
    for inputs in case.others():
        if model is None or case.training:
            model = case.build()  # never a copy: that would lose hooks on parameters
            change(model)
            if plan is not None:
                autoshard.apply(model, plan)
        results = _results(case, model, inputs)
        if case.training:
            results |= _left(model, plan)
        yield results
    if model is not None and not case.training:
        yield _left(model, plan)


def _left(model: nn.Module, plan: autoshard.Plan | None) -> Leaves:
    """Parameters and buffers after all runs, those of an applied model after `remove`."""
    if plan is not None:
        autoshard.remove(model)
    return _leaves(dict(model.state_dict()), "state_dict after remove")


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


def _results(case: Adversary, model: nn.Module, inputs: Inputs) -> Leaves:
    """Outputs and the inputs as the call left them, with gradients; those of parameters become the parameters."""
    torch.manual_seed(9)
    if not case.training:
        with torch.no_grad():
            return _leaves(model(**inputs), "output") | _leaves(inputs, "inputs")
    inputs = {
        name: value.clone().requires_grad_() if value.is_floating_point() else value for name, value in inputs.items()
    }
    output = model(**inputs)
    loss_of(output).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    gradients = {name: value.grad for name, value in inputs.items()}
    return _leaves(output, "output") | _leaves(gradients, "gradient of inputs")


def _leaves(tree: Any, where: str) -> Leaves:
    """Return what lies in containers by its path; tensors as they are now."""
    leaves: Leaves = {}
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=lambda node: node is None)[0]:
        name = where + pytree.keystr(path)
        if isinstance(leaf, torch.Tensor):
            leaves[f"kind of {name}"] = type(leaf).__name__, str(leaf.device)
            leaves[name] = leaf.detach().to("cpu").clone()
        else:
            leaves[name] = leaf
    return leaves


def _check_equal(found: Leaves, expected: Leaves, where: str) -> None:
    if found.keys() != expected.keys():
        raise Difference(f"{where}: {sorted(found.keys() ^ expected.keys())} on one side only")
    largest = max((_size(value) for value in expected.values() if isinstance(value, torch.Tensor)), default=0.0)
    for path, value in expected.items():
        _check_leaf(found[path], value, f"{where}, {path}", largest)


def _size(tensor: torch.Tensor) -> float:
    """The largest finite number of a tensor."""
    if not tensor.is_floating_point():
        return 0.0
    return tensor.nan_to_num(0.0, 0.0, 0.0).abs().max().item() if tensor.numel() else 0.0


def _check_leaf(found: Any, expected: Any, where: str, largest: float) -> None:
    """Compare with 1e-5 of the tensor's own largest number; what is nought but for rounding, with 1e-12 of all."""
    if not isinstance(expected, torch.Tensor) or not isinstance(found, torch.Tensor):
        if type(found) is not type(expected) or found != expected:
            raise Difference(f"{where}: {found!r} instead of {expected!r}")
        return
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise Difference(f"{where}: {tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}")
    size = _size(expected)
    if expected.is_floating_point():
        tolerance = 1e-5 * size + 1e-12 * max(largest, 1.0)
        same = torch.allclose(found, expected, rtol=1e-5, atol=tolerance, equal_nan=True)
    else:
        same = torch.equal(found, expected)
    if not same:
        off = (found.double() - expected.double()).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
        raise Difference(f"{where}: off by {off / (size or 1.0):.2g} of the largest value")


REMEDY = re.compile(
    r"\w=\S|\b(Use|Do|Pass|Set|Plan|Place|Take|Give|Call|Return|Compute|Move|Train|Leave|Keep|Write|Make|Run|Choose"
    r"|Replace|Clone|Tell|Register|Store|Create|Let)\b"
)


def unhelpful(build: Callable[[], nn.Module], inputs: Inputs, message: str) -> str:
    """What a refusal lacks: the module, parameter, input, output or op that it is about, or something that works.

    Outputs have a name in a dict, a number in a tuple; that of a model which gives one is "its output".
    """
    model = build()
    names = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    names |= {name for name, _ in model.named_buffers()} | set(inputs)
    output = model(**inputs)
    outputs = set(output) if isinstance(output, dict) else {str(at) for at in range(len(output))}
    words = {word.rstrip(".") for word in re.findall(r"[\w.]+", message)}
    found = bool((names - {""}) & words) or any(re.search(rf"\boutput {name}\b", message) for name in outputs)
    found |= isinstance(output, torch.Tensor) and "its output" in message
    lacks = []
    if not found and not re.search(r"\baten\b|\b\w+ in the model itself|\w\.py:\d", message):
        lacks.append("no module, parameter, input, output or op")
    if not REMEDY.search(message):
        lacks.append("nothing that works")
    return ", ".join(lacks)
