"""One run of a model, reduced to what can be compared."""

import contextlib
import copy
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.backward import training_loss
from autoshard.common.packed import named_stored
from autoshard.nested import map_tensors, tensors_in
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.dtensors import whole_of
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.slices import merge


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One tensor that a run produced, on the CPU: when, where (module path, or ""), which, and its values.

    `parts`: of a tensor that ranks have different parts of, all of them.
    """

    during: str
    module: str
    output: str
    value: torch.Tensor
    parts: tuple[torch.Tensor, ...] = ()


_ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def rounding_of(tensor: torch.Tensor, coarsest: torch.dtype | None = None) -> float:
    """Errors up to this fraction of the largest value can come from adding in another order.

    `coarsest`: a type in which something on the way to it may have been computed.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return 0.0
    return max(_ROUNDING.get(tensor.dtype, 1e-5), 0.0 if coarsest is None else _ROUNDING[coarsest])


def largest(tensor: torch.Tensor) -> float:
    """The largest absolute value of floating-point and complex numbers; 0 of any others."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    return float((tensor.float() if tensor.element_size() == 1 else tensor).abs().max())  # float8 has no maximum


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a run does: a forward, or training steps with an optimizer, and then a cached greedy decode.

    Attributes:
        cut: the applied model is cut over ranks. divided: it runs in parts of its batch. Results of either are equal to
            rounding.
        coarsest: a type of fewer digits than its own that the original computes in, None for no such.
        staying_cut: paths of outputs that ranks keep parts of (caches), which no loss can be made of.
    """

    args: tuple
    kwargs: dict[str, Any]
    training: bool = False
    optimizer: str = "none"
    new_tokens: int = 0
    cut: bool = False
    divided: bool = False
    coarsest: torch.dtype | None = None
    staying_cut: frozenset[str] = frozenset()

    @property
    def reordered(self) -> bool:
        """Whether sums are made in another order than by the original."""
        return self.cut or self.divided

    @property
    def compared(self) -> tuple[str, ...]:
        stages = ["forward"]
        if self.training:
            stages += ["backward"] if self.optimizer == "none" else ["backward", "optimizer step"]
        return tuple([*stages, "decode"] if self.new_tokens else stages)


def run(
    model: nn.Module,
    work: Work,
    device: torch.device | None = None,
    measure: Callable[[], None] | None = None,
    results: list[RunResult] | None = None,
) -> list[RunResult]:
    """Run the model on copies of the inputs, placed on `device` (None: where they are).

    `results`, if given, is what results are added to, so that they are there if the run stops in between.
    `measure`, if given, is called before the pass whose peak counts: the decode if there is one, else a second pass or
    step, since that is what the estimate is of: by then all copies that are kept, and optimizer state, are there.
    """
    results = [] if results is None else results
    with contextlib.nullcontext() if work.training else torch.no_grad():
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = optimizer_of(work.optimizer, trained) if work.training else None
        results += list(_first_pass(model, work, device, optimizer))
        if measure is not None and not work.new_tokens:
            measure()
            _pass(model, work, device, lambda made: training_loss(made, type(model).__name__))
            if optimizer is not None:
                optimizer.step()
    if work.new_tokens:
        args, kwargs = _copied((work.args, work.kwargs), device)
        if measure is not None:
            measure()
        tokens = model.generate(*args, **kwargs, max_new_tokens=work.new_tokens, do_sample=False)  # type: ignore[operator]
        results += results_of("decode", "", "tokens", tokens)
    return results


def _first_pass(
    model: nn.Module, work: Work, device: torch.device | None, optimizer: torch.optim.Optimizer | None
) -> Iterator[RunResult]:
    """The pass, or step, that is compared."""
    whole = whole_tensors(model)
    args, kwargs, output, loss = _pass(
        model, work, device, lambda made: loss_of(made, lambda path: None if path in work.staying_cut else 0)
    )
    yield from results_of("forward", "", "output", output)
    for path, buffer in model.named_buffers():
        yield from results_of("forward", path.rpartition(".")[0], f"buffer {path}", whole(path, buffer))
    if loss is None:
        yield from results_of("forward", "", "argument", [*args, *kwargs.values()])
        return
    yield from results_of("backward", "", "loss", loss)
    for path, tensor in tensors_in((args, kwargs)):
        if tensor.is_leaf and tensor.grad is not None:
            yield from results_of("backward", "", f"gradient of argument {path}", tensor.grad)
    del args, kwargs, output, loss
    yield from after_backward(model, dict(model.named_parameters()), optimizer)


def _pass(
    model: nn.Module, work: Work, device: torch.device | None, to_loss: Callable[[Any], torch.Tensor]
) -> tuple[tuple, dict[str, Any], Any, torch.Tensor | None]:
    """A forward, in training with its backward: (arguments, those by name, output, loss)."""
    args, kwargs = _copied((work.args, work.kwargs), device)
    if not work.training:
        return args, kwargs, _listed(model(*args, **kwargs)), None
    model.zero_grad()
    output = _listed(model(*args, **kwargs))
    loss = to_loss(output)
    if not loss.requires_grad:  # this says what can't be trained
        loss = training_loss(output, type(model).__name__)
    loss.backward()
    return args, kwargs, output, loss


def after_backward(
    model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer | None,
    softened: float | None = None,
) -> Iterator[RunResult]:  # fmt: skip
    """Gradients from last to first, the order in which backward reaches them, and parameters after a step.

    `softened`: how much Adam is softened, which has to be alike on all ranks; None: by the largest gradient.
    """
    whole, most = whole_tensors(model), 0.0
    for name, parameter in reversed(list(parameters.items())):
        if parameter.grad is not None:
            gradient = whole(name, parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
            for result in results_of("backward", name.rpartition(".")[0], f"gradient of {name}", gradient):
                most = max(most, largest(result.value))
                yield result
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        if "eps" in group and (softened or most):  # or it divides gradients that are but rounding by themselves
            group["eps"] = softened or most
    optimizer.step()
    for name, parameter in parameters.items():
        yield from results_of("optimizer step", name.rpartition(".")[0], f"parameter {name}", whole(name, parameter))


def whole_tensors(model: nn.Module) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return what makes the whole of a parameter, buffer or gradient with a name; all ranks call it.

    Where ranks that should have the same have not, it makes NaNs, which equal nothing.
    """
    record = cut_record(model)

    def whole(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = whole_of(tensor)
        if record is None:
            return tensor
        cut = record.tensors.get(name)
        if cut is None and isinstance(tensor, RankTensor):
            first, *others = (part.detach().cpu() for part in tensor.parts)
            rtol = rounding_of(first)
            atol = rtol * largest(first)
            if not all(torch.allclose(part, first, rtol=rtol, atol=atol, equal_nan=True) for part in others):
                return torch.full_like(first, torch.nan, dtype=None if first.is_floating_point() else torch.float32)
        return merge(tensor, cut, record.ranks)

    return whole


def _copied(value: Any, device: torch.device | None) -> Any:
    """Copy arguments, so that a run that writes into them leaves the user's alone, and tensors to a device."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().clone() if device is None else tensor.detach().to(device, copy=True)
        return moved.requires_grad_(tensor.requires_grad)

    detached = map_tensors(value, lambda tensor: tensor if tensor.is_leaf else tensor.detach())
    return map_tensors(copy.deepcopy(detached), move)


def loss_of(output: Any, rows_of: Callable[[str], int | None]) -> torch.Tensor:
    """The output's own loss, else a weighted sum of log(1 + x²) over the tensors that count.

    It adds up over rows. Its gradient is no constant, which a copy between devices makes dense, and kernels may round
    the two otherwise; and weights differ along a row, since all that normalises would hide errors behind a gradient of
    zero. `rows_of`: the dimension of the rows of a tensor, by its path; None: it does not count.
    """
    found = {id(one): (path, one) for path, one in tensors_in(output) if one.is_floating_point()}
    own = next((one for path, one in found.values() if path.rpartition(".")[2] == "loss"), None)
    if own is not None:
        return own.sum()
    parts = torch.zeros(())
    for path, one in found.values():
        rows = rows_of(path)
        if rows is None:
            continue
        finite = (one if one.dtype == torch.float64 else one.float()).nan_to_num(0.0, 0.0, 0.0).clamp(-1e18, 1e18)
        terms = torch.log1p(finite**2)
        if terms.dim() > 1 and rows != terms.dim() - 1:
            weights = 2 + torch.arange(terms.shape[-1], dtype=torch.float32).cos()
            terms = terms * weights.to(terms.device, terms.dtype)
        parts = parts + terms.sum().to("cpu", torch.float32)
    return parts


def optimizer_of(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer that a workload names, with a small step; None for "none", or where there is nothing to train."""
    makers: dict[str, Any] = {
        "sgd": lambda: torch.optim.SGD(parameters, lr=1e-3),
        "momentum": lambda: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
        "adam": lambda: torch.optim.Adam(parameters, lr=1e-3),
        "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-3),
    }
    return makers[name]() if name in makers and parameters else None


def _listed(output: Any) -> Any:
    return list(output) if isinstance(output, types.GeneratorType) else output


def results_of(during: str, module: str, what: str, value: Any) -> Iterator[RunResult]:
    """The tensors in a value, copied to the CPU."""
    for path, whole in tensors_in(value):
        for name, tensor in named_stored(whole_of(whole)):
            parts = tensor.parts if isinstance(tensor, RankTensor) else (tensor,)
            values = tuple(part.detach().to("cpu", copy=True) for part in parts)
            where = f"{path}.{name}".strip(".")
            yield RunResult(
                during=during, module=module, output=f"{what} {where}".strip(), value=values[0],
                parts=values if isinstance(tensor, RankTensor) else (),
            )  # fmt: skip
