"""Pipelines in one process from a profile: what is chosen, that it fits, what is refused."""

from dataclasses import replace

import pytest

from autoshard.cluster.parse import parse_devices
from autoshard.engine.pipelines import estimate_stages, run_plan
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Plan
from autoshard.strategies.pipeline import opened, pipeline
from tests.pipeline_models import Decoder, batch_of, profile_of


@pytest.fixture(scope="module")
def inference():
    return profile_of(Decoder(width=256).eval(), length=64)


@pytest.fixture(scope="module")
def training():
    return profile_of(Decoder(width=256), length=64, training=True)


def planned(profile, spec="4xA100-40GB", **options) -> Plan:
    return pipeline(profile, parse_devices(spec), batch_of(training=profile.workload.training), **options)


def test_activations_are_computed_again_only_where_they_do_not_fit(training):
    roomy = planned(training, "2xA100-40GB", num_microbatches=8)
    assert not any(stage.recompute for stage in roomy.stages)
    run = run_plan(roomy, training, parse_devices("2xA100-40GB"))
    static = [s.nbytes.parameter + s.nbytes.buffer + s.nbytes.optimizer + s.nbytes.inputs for s in run.stages]
    more = [max(0.7 * 8 * s.nbytes.kept, 2.1 * s.nbytes.gradient) for s in run.stages]
    tight = replace(parse_devices("2xA100-40GB"), devices=tuple(
        replace(d, overhead_bytes=0, memory_bytes=int(static[i] + more[i]))
        for i, d in enumerate(parse_devices("2xA100-40GB").devices)
    ))  # fmt: skip
    plan = pipeline(training, tight, batch_of(training=True), num_microbatches=8)
    assert any(stage.recompute for stage in plan.stages)
    assert any("compute activations again" in reason for reason in plan.reasons)
    assert estimate_stages(plan, training, tight).fits


def test_one_process_uses_gpipe_and_says_when_one_device_is_faster(inference):
    plan = planned(inference, "2xA100-40GB")
    assert plan.schedule == "gpipe"
    assert any("one device alone would be faster" in reason for reason in plan.reasons)


def test_the_stages_of_unequal_devices_are_unequal(inference):
    cluster = parse_devices("2xA100-40GB")
    fast, slow = (replace(device, launch_seconds=0.0) for device in cluster.devices)
    slow = replace(slow, bytes_per_second=fast.bytes_per_second / 4)
    cluster = replace(cluster, devices=(fast, slow))
    plan = pipeline(inference, cluster, batch_of(), num_microbatches=4)
    first, second = estimate_stages(plan, inference, cluster).devices
    assert first.parameter_bytes > 2 * second.parameter_bytes


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_microbatches": 9}, "a batch of 8 can't be divided into 9 micro-batches"),
        ({"schedule": "interleaved"}, "needs a process per device"),
    ],
)
def test_what_can_not_be_is_refused(inference, options, words):
    with pytest.raises(SpecError, match=words):
        planned(inference, **options)


def test_one_device_and_too_little_memory_are_refused(inference):
    with pytest.raises(SpecError, match="at least two devices"):
        planned(inference, "1xA100-40GB")
    with pytest.raises(PlanError, match="no pipeline fits"):
        planned(inference, "2x1MiB")


def test_a_batch_that_nothing_divides_is_cut_raggedly():
    profile = profile_of(Decoder(width=256).eval(), 7, 64)
    cluster = parse_devices("2xA100-40GB")
    cluster = replace(cluster, devices=tuple(replace(device, launch_seconds=0.0) for device in cluster.devices))
    plan = pipeline(profile, cluster, batch_of(7))
    assert plan.num_microbatches in (2, 4, 7)


def test_stages_that_compute_again_name_their_layers(training):
    assert opened("layers", training.graph) == [f"layers.{i}" for i in range(8)]
    assert opened("layers.3", training.graph) == ["layers.3"]
    assert opened("", training.graph) == ["embed", *(f"layers.{i}" for i in range(8)), "norm", "head"]
