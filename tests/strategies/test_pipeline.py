"""Pipelines from a profile: what is chosen, that it fits, what is refused."""

from dataclasses import replace

import pytest

from autoshard.capture.stages import divide
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


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_every_schedule_can_be_asked_for(training, schedule):
    plan = planned(training, processes=4, num_microbatches=8, schedule=schedule)
    assert (plan.schedule, plan.num_microbatches, plan.mesh.pipeline) == (schedule, 8, 4)
    assert len(plan.stages) == (4 if schedule != "interleaved" else len(plan.stages)) and len(plan.stages) % 4 == 0
    names = [device.name for device in plan.devices]
    for number, stage in enumerate(plan.stages):
        assert stage.paths and all(plan.placements[path] == names[number % 4] for path in stage.paths)
    assert not divide(training.graph, [stage.paths for stage in plan.stages]).problems


def test_activations_are_computed_again_only_where_they_do_not_fit(training):
    roomy = planned(training, "2xA100-40GB", processes=2, num_microbatches=8, schedule="1f1b")
    assert not any(stage.recompute for stage in roomy.stages)
    run = run_plan(roomy, training, parse_devices("2xA100-40GB"), processes=True)
    static = [s.nbytes.parameter + s.nbytes.buffer + s.nbytes.optimizer + s.nbytes.inputs for s in run.figures.stages]
    more = [max(0.7 * 8 * s.nbytes.kept, 2.1 * s.nbytes.gradient) for s in run.figures.stages]
    tight = replace(parse_devices("2xA100-40GB"), devices=tuple(
        replace(d, overhead_bytes=0, memory_bytes=int(static[i] + more[i]))
        for i, d in enumerate(parse_devices("2xA100-40GB").devices)
    ))  # fmt: skip
    plan = pipeline(training, tight, batch_of(training=True), processes=2, num_microbatches=8, schedule="gpipe")
    assert any(stage.recompute for stage in plan.stages)
    assert any("compute activations again" in reason for reason in plan.reasons)
    assert estimate_stages(plan, training, tight, processes=True).fits


def test_one_process_uses_gpipe_and_says_when_one_device_is_faster(inference):
    plan = planned(inference, "2xA100-40GB")
    assert plan.schedule == "gpipe"
    assert any("one device alone would be faster" in reason for reason in plan.reasons)


def test_the_stages_of_unequal_devices_are_unequal(inference):
    cluster = parse_devices("2xA100-40GB")
    slow = replace(cluster.devices[1], launch_seconds=cluster.devices[0].launch_seconds * 4)
    cluster = replace(cluster, devices=(cluster.devices[0], slow))
    plan = pipeline(inference, cluster, batch_of(), processes=2, num_microbatches=4)
    seconds = estimate_stages(plan, inference, cluster, processes=True).pipelining.stages
    shares = {stage.device: len(plan.stages[i].paths) for i, stage in enumerate(seconds)}
    assert shares[cluster.names[0]] > shares[cluster.names[1]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_microbatches": 9}, "a batch of 8 can't be divided into 9 micro-batches"),
        ({"num_microbatches": 3, "processes": 4}, "not a multiple of 3. Use 2 micro-batches"),
        ({"schedule": "interleaved"}, "needs a process per device"),
        ({"schedule": "fast"}, "unknown schedule 'fast'"),
        ({"processes": 3}, "needs as many processes; 3 run"),
        ({"objective": "speed"}, "unknown objective"),
    ],
)
def test_what_can_not_be_is_refused(inference, options, words):
    with pytest.raises(SpecError, match=words):
        planned(inference, **options)


def test_more_stages_than_modules_and_too_little_memory_are_refused(inference):
    with pytest.raises(PlanError, match="a stage would be without parameters"):
        planned(profile_of(Decoder(layers=1).eval()), "16xA100-40GB", processes=16)
    with pytest.raises(SpecError, match="at least two devices"):
        planned(inference, "1xA100-40GB")
    with pytest.raises(PlanError, match="no pipeline fits"):
        planned(inference, "2x1MiB")


def test_a_batch_that_nothing_divides_is_cut_raggedly_in_one_process_only():
    profile = profile_of(Decoder(width=256).eval(), 7, 64)
    cluster = parse_devices("2xA100-40GB")
    cluster = replace(cluster, devices=tuple(replace(device, launch_seconds=0.0) for device in cluster.devices))
    plan = pipeline(profile, cluster, batch_of(7))
    assert plan.num_microbatches in (2, 4, 7)
    with pytest.raises(SpecError, match="Use 1 micro-batches"):
        pipeline(profile, cluster, batch_of(7), num_microbatches=2, processes=2)


def test_stages_that_compute_again_name_their_layers(training):
    assert opened("layers", training.graph) == [f"layers.{i}" for i in range(8)]
    assert opened("layers.3", training.graph) == ["layers.3"]
    assert opened("", training.graph) == ["embed", *(f"layers.{i}" for i in range(8)), "norm", "head"]
