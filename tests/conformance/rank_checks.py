"""What must hold of a model cut over real processes: every rank runs these, on the same plan, and compares with the
whole model, which it runs as well.

Sums over ranks are made in another order than in the whole model, so results agree to rounding of float32 and not bit
for bit: differences are measured against the largest value of each tensor.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.nested import tensors_in
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.slices import merge
from autoshard.strategies.cut_reasons import collectives
from tests.conformance.checks import loss_of, seed
from tests.models import by_name

RELATIVE = 1e-5  # of float32 rounding, through a few layers
GRADIENTS = 1e-4  # of the first step: sums over all tokens, and differences of large numbers
STEPS = 3
CACHES = ("default", "static", "sliding_window")
"""The caches of transformers that `generate()` can be asked for."""
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
"""Its name in this torch."""
ADD = "all_to_all_single"
"""How tensors in CPU memory are gathered that are added up then."""
VARYING = {"albert": "its one layer is called several times"}
"""Models with places that are passed more than once, or as often as values say."""


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the collectives that this process takes part in, but for those that compare inputs (float64)."""
    counts = {"all_reduce": 0, GATHER: 0}
    originals = {name: getattr(dist, name) for name in (*counts, ADD)}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[GATHER if name == ADD else name] += args[0].dtype != torch.float64
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def shared_plan(model: nn.Module, inputs: Any, **settings: Any) -> autoshard.Plan:
    """The plan of rank 0, on all ranks: as from a file."""
    text = [""]
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            text = [own_plan(model, inputs, **settings).to_json()]
        except Exception as problem:
            error = problem
    dist.broadcast_object_list(text)
    if error is not None:
        raise error
    if not text[0]:
        raise AssertionError("rank 0 could not plan")
    return autoshard.Plan.from_json(text[0])


def own_plan(model: nn.Module, inputs: Any, **settings: Any) -> autoshard.Plan:
    """The plan that this rank makes by itself; as much is cut as can be."""
    devices = {f"cpu:{rank}": "1GiB" for rank in range(dist.get_world_size())}
    return autoshard.plan(
        model, devices, inputs=inputs, strategy="column-parallel", **{"objective": "memory", **settings}
    )


def check_models(names: list[str], caches: tuple[str, ...] = CACHES) -> dict[str, str]:
    """Check several models one after the other; name -> what was cut and counted, for people."""
    return {name: check_model(name, caches) for name in names}


def check_model(name: str, caches: tuple[str, ...] = CACHES) -> str:
    """Forward, generation and training of one case equal to those of the whole model."""
    case = by_name(name)
    whole, model = case.model(), case.model()
    start = time.perf_counter()
    plan = shared_plan(model, case.example())
    seconds = time.perf_counter() - start
    assert plan.cuts, f"{name}: nothing was cut: {plan.reasons}"
    autoshard.apply(model, plan)
    said = check_forward(name, whole, model, plan, case)
    if case.generates:
        said += f", decoded with {check_generation(name, whole, model, case.example(), caches)}"
    check_training(name, whole, model, case.example())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    autoshard.remove(model)
    assert list(model.state_dict()) == list(whole.state_dict()), name
    assert all(value.shape == whole.state_dict()[key].shape for key, value in model.state_dict().items()), name
    cut = sum(before[key].shape != value.shape for key, value in model.state_dict().items())
    return f"{said}, {cut} of {len(before)} tensors cut, planned in {seconds:.1f} s"


def check_forward(name: str, whole: nn.Module, model: nn.Module, plan: autoshard.Plan, case: Any) -> str:
    """Outputs for all shapes; the collectives of a forward are as many as the plan says."""
    said = ""
    for number, shape in enumerate(case.shapes):
        inputs = case.example(shape)
        with torch.no_grad():
            seed()
            wanted = whole(**copy.deepcopy(inputs))
            with counted() as counts:
                seed()
                found = model(**copy.deepcopy(inputs))
        assert_close(f"{name} {shape}", found, wanted, RELATIVE)
        if not number:
            reduces, gathers = collectives(plan.cuts)
            if case.name not in VARYING:
                assert counts == {"all_reduce": reduces, GATHER: gathers}, (name, counts, plan.reasons)
            said = f"{counts['all_reduce']} all-reduces, {counts[GATHER]} gathers"
            assert not reduces or f"{reduces} all-reduce" in plan.reasons[0], plan.reasons
    return said


def check_generation(
    name: str, whole: nn.Module, model: nn.Module, inputs: dict[str, Any], caches: tuple[str, ...]
) -> str:
    """Greedy tokens are the same with every cache that the model can have."""
    given = {key: value for key, value in inputs.items() if key not in ("use_cache", "decoder_input_ids")}
    done = []
    for cache in caches:
        more = {} if cache == "default" else {"cache_implementation": cache}
        settings = {"do_sample": False, "min_new_tokens": 32, "max_new_tokens": 32, **more}
        try:
            wanted = whole.generate(**copy.deepcopy(given), **settings)
        except Exception:  # not every model has every cache
            assert cache != "default"
            continue
        found = model.generate(**copy.deepcopy(given), **settings)
        assert torch.equal(found, wanted), f"{name} with the {cache} cache: {found} is not {wanted}"
        done.append(cache)
    return "/".join(done)


def plan_of_answers(name: str, mesh: str, ranks: int) -> autoshard.Plan:
    """A plan to answer in stages, as from a file."""
    case = by_name(name)
    model, inputs = case.model().eval(), case.example()
    workload = autoshard.Workload(batch_size=len(inputs["input_ids"]), new_tokens=4)
    devices = {f"cpu:{rank}": "1GiB" for rank in range(ranks)}
    plan = autoshard.plan(model, devices, inputs=inputs, workload=workload, launch="processes", mesh=mesh)
    return autoshard.Plan.from_json(plan.to_json())


def check_answers(name: str, mesh: str, plan: autoshard.Plan | None = None) -> float:
    """Greedy, drawn and beam-searched tokens of a case in stages equal those of the whole model, and logits as well.

    Without a plan each rank makes its own. Returns the part of the parameters that this rank has.
    """
    case = by_name(name)
    whole, model, inputs = case.model().eval(), case.model().eval(), case.example()
    count = sum(one.numel() for one in whole.parameters())
    plan = plan or plan_of_answers(name, mesh, dist.get_world_size())
    autoshard.apply(model, plan, inputs=inputs)
    held = sum(one.numel() for one in model.parameters() if not one.is_meta and any(one.stride()))
    given = {key: value for key, value in inputs.items() if key not in ("use_cache", "decoder_input_ids", "labels")}
    with torch.no_grad():
        seed()
        wanted = whole(**copy.deepcopy(inputs))
        seed()
        assert_close(name, model(**copy.deepcopy(inputs)), wanted, RELATIVE if plan.mesh.tp > 1 else 0.0)
        for way in ({}, {"num_beams": 3}, {"do_sample": True}):
            settings = {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8, **way}
            seed()
            tokens = whole.generate(**copy.deepcopy(given), **settings)
            seed()
            found = model.generate(**copy.deepcopy(given), **settings)
            assert torch.equal(found, tokens), f"{name} {way}: {found} is not {tokens}"
    autoshard.remove(model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, whole.state_dict()[key]), f"{name}: {key} came back as something else"
    return held / count


def check_training(name: str, whole: nn.Module, model: nn.Module, inputs: dict[str, Any]) -> None:
    """Gradients of every step, the norm they are clipped by, and parameters after AdamW steps."""
    record = cut_record(model)
    # eps: without it a step divides gradients that are but rounding by themselves
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (whole, model)]
    for step in range(STEPS):
        for one, optimizer in zip((whole, model), optimizers, strict=True):
            optimizer.zero_grad()
            seed(step)
            loss = loss_of(one(**copy.deepcopy(inputs)))
            loss.backward()
        own = dict(model.named_parameters())
        largest = max(p.grad.abs().max().item() for p in whole.parameters() if p.grad is not None)
        for key, parameter in whole.named_parameters():
            where = f"{name}, step {step}, the gradient of {key}"
            assert (parameter.grad is None) == (own[key].grad is None), where
            if parameter.grad is not None:
                gradient = merge(own[key].grad, record.tensors.get(key), record.ranks)
                relative = GRADIENTS * 10**step  # rounding grows: steps divide by roots of small gradients
                assert_near(where, gradient, parameter.grad, relative, 1e-5 * largest)
        norms = [float(autoshard.clip_grad_norm_(one.parameters(), 0.1)) for one in (whole, model)]
        assert abs(norms[0] - norms[1]) <= 1e-4 * norms[0], (name, norms)
        for optimizer in optimizers:
            optimizer.step()
    for key, parameter in whole.named_parameters():
        value = merge(dict(model.named_parameters())[key].detach(), record.tensors.get(key), record.ranks)
        assert_near(f"{name}: {key} after {STEPS} steps", value, parameter.detach(), 1e-3, 1e-5)


def assert_close(where: str, found: Any, wanted: Any, relative: float) -> None:
    """Nested outputs hold the same tensors."""
    ours, theirs = dict(tensors_in(found)), dict(tensors_in(wanted))
    assert list(ours) == list(theirs), where
    for path, tensor in theirs.items():
        assert type(ours[path]) is torch.Tensor, where
        assert_near(f"{where} {path}", ours[path], tensor, relative)


def assert_near(where: str, found: torch.Tensor, wanted: torch.Tensor, relative: float, absolute: float = 0.0) -> None:
    assert found.shape == wanted.shape, f"{where}: {tuple(found.shape)} is not {tuple(wanted.shape)}"
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), where
        return
    finite = wanted.isfinite()
    assert torch.equal(finite, found.isfinite()), f"{where}: not finite in the same places"
    if finite.any():
        off, size = (found - wanted)[finite].abs().max().item(), wanted[finite].abs().max().item()
        assert off <= relative * size + absolute, f"{where}: differs by {off:.2g} of values up to {size:.2g}"
