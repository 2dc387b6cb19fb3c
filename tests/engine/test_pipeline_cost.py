"""What a pipeline in one process costs: bytes by schedule, against what runs."""

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


def priced(profile, spec="2xA100-40GB", groups=None, **options):
    plan = plan_by_hand(profile, spec, groups or halves(), **options)
    return estimate_stages(plan, profile, parse_devices(spec))


def test_more_micro_batches_than_rows_are_refused(inference):
    with pytest.raises(PlanError, match="a batch of 8 can't be divided into 9"):
        priced(inference, microbatches=9)
    plan = plan_by_hand(inference, "2xA100-40GB", halves(), batch=None)
    with pytest.raises(PlanError, match="does not say how the batch is divided"):
        estimate_stages(plan, inference, parse_devices("2xA100-40GB"))


@pytest.mark.parametrize(
    ("train", "recompute"), [(True, True), (False, False), pytest.param(True, False, marks=pytest.mark.slow)]
)
def test_peaks_are_those_of_the_run_in_one_process(train, recompute):
    """Of the stages of a decoder with a tied matrix, whose outputs are put together on the first device."""
    model, inputs = Decoder(tied=True).train(train), inputs_for(training=train)
    workload = autoshard.Workload(mode="training" if train else "inference", batch_size=8, optimizer="none")
    batch = find_batch_axis(model, inputs, workload)
    plan = pipeline_by_hand(model, inputs, batch, recompute=recompute, workload=workload)
    checked = autoshard.verify(model, plan, inputs=inputs)
    assert checked.ok, checked.first_difference
    for peak in checked.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.06)
