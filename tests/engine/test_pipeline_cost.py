"""What a pipeline costs: seconds by the clock, bytes by schedule, and both against what runs."""

from dataclasses import replace

import pytest

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pipelines import estimate_stages
from autoshard.errors import PlanError
from tests.pipeline_models import Decoder, halves, inputs_for, plan_by_hand, profile_of
from tests.runtime.pipelines import pipeline as pipeline_by_hand


@pytest.fixture(scope="module")
def inference():
    return profile_of(Decoder().eval())


@pytest.fixture(scope="module")
def training():
    return profile_of(Decoder(), training=True)


def priced(profile, spec="2xA100-40GB", groups=None, *, processes=True, **options):
    plan = plan_by_hand(profile, spec, groups or halves(), **options)
    return estimate_stages(plan, profile, parse_devices(spec), processes=processes)


def test_events_add_up_to_the_devices_and_end_with_the_pass(training):
    figures = priced(training)
    for device in figures.devices:
        own = [e for e in figures.pipelining.events if e.device == device.name and e.kind != "transfer"]
        assert sum(e.end_seconds - e.begin_seconds for e in own) == pytest.approx(device.compute_seconds)
        came = [e for e in figures.pipelining.events if e.device == device.name and e.kind == "transfer"]
        assert sum(e.end_seconds - e.begin_seconds for e in came) == pytest.approx(device.transfer_seconds)
    assert max(e.end_seconds for e in figures.pipelining.events) == pytest.approx(figures.latency_seconds)
    assert figures.lower_bound_seconds <= figures.latency_seconds


def test_more_micro_batches_wait_less_where_compute_counts():
    profile = profile_of(Decoder(width=512), length=64)
    cluster = parse_devices("2xA100-40GB")
    cluster = replace(cluster, devices=tuple(replace(device, launch_seconds=0.0) for device in cluster.devices))
    bubbles = [
        estimate_stages(
            plan_by_hand(profile, "2xA100-40GB", halves(), microbatches=m), profile, cluster, processes=True
        ).pipelining.bubble
        for m in (1, 2, 4, 8)
    ]
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[0] > 0.4


def test_1f1b_keeps_less_than_gpipe_and_recomputing_least(training):
    groups, spec = halves(stages=4), "4xA100-40GB"
    kept = {}
    for name in ("gpipe", "1f1b"):
        kept[name] = priced(training, spec, groups, microbatches=8, schedule=name)
    again = plan_by_hand(training, spec, groups, microbatches=8, schedule="1f1b")
    again = replace(again, stages=tuple(replace(stage, recompute=True) for stage in again.stages))
    kept["again"] = estimate_stages(again, training, parse_devices(spec), processes=True)
    gpipe, plain, least = ([device.peak_bytes for device in kept[name].devices] for name in kept)
    assert all(a >= b for a, b in zip(gpipe, plain, strict=True))
    assert least[0] < plain[0]  # the first stage has most in flight
    assert [stage.in_flight for stage in kept["1f1b"].pipelining.stages] == [4, 3, 2, 1]
    assert kept["again"].latency_seconds > kept["1f1b"].latency_seconds
    assert {event.kind for event in kept["again"].pipelining.events} >= {"recompute", "forward", "backward"}


def test_a_tied_matrix_is_held_by_both_stages_under_processes_and_lent_in_one():
    profile = profile_of(Decoder(tied=True), training=True)
    apart, together = priced(profile), priced(profile, processes=False)
    table = 100 * 64 * 4
    assert apart.all_reduces == 1 and together.all_reduces == 0
    assert apart.devices[1].optimizer_bytes == together.devices[1].optimizer_bytes + 2 * table
    assert any(event.kind == "all-reduce" for event in apart.pipelining.events)


def test_one_thread_can_not_launch_faster_than_it_can(inference):
    alone, apart = priced(inference, processes=False, microbatches=8), priced(inference, microbatches=8)
    assert alone.latency_seconds > apart.latency_seconds


def test_more_micro_batches_than_rows_and_a_cut_through_a_write_are_refused(inference):
    with pytest.raises(PlanError, match="a batch of 8 can't be divided into 9"):
        priced(inference, microbatches=9)
    plan = plan_by_hand(inference, "2xA100-40GB", halves(), batch=None)
    with pytest.raises(PlanError, match="does not say how the batch is divided"):
        estimate_stages(plan, inference, parse_devices("2xA100-40GB"))


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "inference"])
def test_peaks_are_those_of_the_run_in_one_process(schedule, recompute):
    """Of the stages of a decoder with a tied matrix, whose outputs are put together on the first device."""
    train = schedule != "inference"
    model, inputs = Decoder(tied=True).train(train), inputs_for(training=train)
    workload = autoshard.Workload(mode="training" if train else "inference", batch_size=8, optimizer="none")
    options = {"schedule": schedule if train else "gpipe", "recompute": recompute, "workload": workload}
    plan = pipeline_by_hand(model, inputs, find_batch_axis(model, inputs, workload), **options)
    checked = autoshard.verify(model, plan, inputs=inputs)
    assert checked.ok, checked.first_difference
    for peak in checked.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.06)
