"""Every model, placed by every means: the output is bit for bit that of the unplaced model."""

import functools
import pathlib
import re

import pytest
import torch

import autoshard
from tests.conformance.checks import (
    difference_when_placed,
    forward,
    measured_peaks,
    plan_tightly,
    profiled,
    random_map,
    run_plainly,
    split_before,
    train,
)
from tests.models import HF_CASES, REFUSED_CASES, WORKING_CASES, Case, by_name, over
from tests.torch_releases import SHARDS_REPLICAS

TRAINING = autoshard.Workload(mode="training", optimizer="adamw")
THREE = ["cpu:0", "cpu:1", "cpu:2"]


@functools.cache
def profile_of(name: str, training: bool):
    """The profile of a case, and its graph, taken once for all tests that look at it."""
    case = by_name(name)
    return profiled(case.model, case.example(), TRAINING if training else None)


@functools.cache
def tight_plan(name: str, strategy: str, training: bool = False):
    """The plan of a case, made once for all tests that look at it."""
    return plan_tightly(profile_of(name, training), strategy)


def forwards(case: Case):
    """All shapes one after the other."""
    return [lambda model, shape=shape: forward(model, case.example(shape)) for shape in case.shapes]


def trainings(case: Case):
    return [lambda model: train(model, case.example())]


@functools.cache
def unplaced(name: str, runs):
    """What the case gives unplaced, found once for all placements of it."""
    case = by_name(name)
    return run_plainly(case.model, runs(case))


def placement_of(case: Case, how: str, training: bool = False):
    """A plan without hints for three unequal devices, or a device of its own luck for every module with parameters."""
    if how.startswith("random"):
        return random_map(case.model(), THREE, int(how.split()[1]))
    plan, estimate = tight_plan(case.name, how, training)
    assert estimate.fits and {device.name for device in plan.devices} == set(THREE)
    return plan


LATER = [pytest.param(how, marks=pytest.mark.slow) for how in ("sequential", "random 1", "random 2")]


@pytest.mark.parametrize("how", ["balanced", "random 0", *LATER])
@over(WORKING_CASES)
def test_forward(case, how):
    """All shapes one after the other after one apply."""
    placement = placement_of(case, how)
    assert not difference_when_placed(case.model, placement, forwards(case), known=unplaced(case.name, forwards))


@pytest.mark.parametrize("how", ["random 0", pytest.param("balanced", marks=pytest.mark.slow)])
@over(WORKING_CASES)
def test_training(case, how):
    """Gradients of the first step, the losses and all tensors after three AdamW steps."""
    known, placement = unplaced(case.name, trainings), placement_of(case, how, training=True)
    assert not difference_when_placed(case.model, placement, trainings(case), known=known, rounding=1e-4)


def assert_predicted(estimate, measured, part, least_bytes):
    """Within a part of what was measured on every device, or so many bytes."""
    predicted = {device.name: device.peak_bytes for device in estimate.devices}
    off = {name: abs(predicted[name] - nbytes) for name, nbytes in measured.items()}
    assert all(off[name] <= max(part * measured[name], least_bytes) for name in measured), (predicted, measured)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@over(WORKING_CASES)
def test_predicted_peak(case, training):
    """Of training less exactly: gradients of copies."""
    if case.name == "attention" and not training and not SHARDS_REPLICAS:
        pytest.xfail("torch 2.11 keeps 1.7 KiB more in its attention on one device than is told, 8.3 KiB predicted")
    plan, estimate = tight_plan(case.name, "balanced", training)
    measured = measured_peaks(case.model(), plan, case.example(), training)
    assert_predicted(estimate, measured, *((0.05, 4096) if training else (0.01, 128)))


@pytest.mark.parametrize("new_tokens", [8, pytest.param(40, marks=pytest.mark.slow)])
@over([case for case in HF_CASES if case.generates], ("t5",))
def test_predicted_peak_of_generation(case, new_tokens):
    """Of a prompt and all steps after it, for a plan that was told how many."""
    inputs = {name: value for name, value in case.example().items() if not name.startswith("decoder_")}
    inputs.pop("use_cache", None)

    def build():
        model = case.model()
        model.config.use_cache = model.generation_config.use_cache = True
        return model

    plan, estimate = plan_tightly(profiled(build, inputs, autoshard.Workload(new_tokens=new_tokens)), "balanced")
    assert_predicted(estimate, measured_peaks(build(), plan, inputs, False, new_tokens), 0.01, 2048)


@over([case for case in HF_CASES if case.name in ("llama", "convnext")])
def test_predicted_peak_within_autocast(case):
    """Torch keeps what it cast of the parameters until autocast ends."""
    autocast = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
    with autocast():
        plan, estimate = plan_tightly(profiled(case.model, case.example()), "balanced")
    assert_predicted(estimate, measured_peaks(case.model(), plan, case.example(), False, around=autocast), 0.01, 64)


@over(REFUSED_CASES)
def test_refused_at_plan_time(case):
    """What can't be right is refused before anything moves, with the file and the line."""
    model = case.model()
    with pytest.raises(autoshard.CaptureError) as caught:
        autoshard.plan(model, "2x1MiB", inputs=case.example())
    file, line = re.search(r"(/\S+\.py):(\d+)", str(caught.value)).groups()
    assert case.refused in pathlib.Path(file).read_text().splitlines()[int(line) - 1]


def generations(case: Case):
    """Greedy generation of 16 tokens with a cache."""
    inputs = {k: v for k, v in case.example().items() if not k.startswith("decoder_") and k != "use_cache"}
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "use_cache": True}
    return [lambda model: model.generate(**inputs, **settings)]


@over([case for case in HF_CASES if case.generates], ("t5",))
def test_generate_split_at_every_layer(case):
    known, model = unplaced(case.name, generations), case.model()
    assert known.results[0].unique().numel() > 2  # tokens that say something
    for index in range(len(model.get_submodule(case.layers))):
        device_map = split_before(model, f"{case.layers}.{index}", THREE)
        difference = difference_when_placed(case.model, device_map, generations(case), known=known)
        assert not difference, f"split before layer {index}"


@over([case for case in HF_CASES if case.generates], ())
def test_generate_on_a_plan_for_the_forward(case):
    """Nobody said that the model would generate; it does all the same."""
    for strategy in ("sequential", "balanced"):
        plan, _ = tight_plan(case.name, strategy)
        known = unplaced(case.name, generations)
        difference = difference_when_placed(case.model, plan, generations(case), known=known)
        assert not difference, strategy


@over([case for case in HF_CASES if case.name in ("llama", "t5", "vit")], ("llama",))
def test_training_with_checkpointing(case):
    def build():
        model = case.model().train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    plan, _ = plan_tightly(profiled(build, case.example(), TRAINING), "balanced")
    difference = difference_when_placed(build, plan, [lambda model: train(model, case.example())], rounding=1e-4)
    assert not difference
