"""What a pipeline costs: seconds by the clock, bytes by schedule, and both against what runs."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.errors import PlanError
from autoshard.pipeline_cost import estimate_pipeline
from autoshard.prove.batch import find_batch_axis
from autoshard.strategies.pipeline import pipeline
from tests.pipeline_models import Decoder, batch_of, halves, inputs_for, plan_by_hand, profile_of
from tests.runtime.pipelines import pipeline as pipeline_by_hand
from tests.runtime.pipelines import sentences, words


@pytest.fixture(scope="module")
def inference():
    return profile_of(Decoder().eval())


@pytest.fixture(scope="module")
def training():
    return profile_of(Decoder(), training=True)


def priced(profile, spec="2xA100-40GB", groups=None, *, processes=True, **options):
    plan = plan_by_hand(profile, spec, groups or halves(), **options)
    return estimate_pipeline(plan, profile, parse_devices(spec), processes=processes)


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
        estimate_pipeline(
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
    kept["again"] = estimate_pipeline(again, training, parse_devices(spec), processes=True)
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
        estimate_pipeline(plan, inference, parse_devices("2xA100-40GB"))


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_peaks_are_those_of_the_run_in_one_process(train):
    """Whichever schedule."""
    model = Decoder().train(train)
    profile = profile_of(model, training=train)
    for microbatches, schedule in ((2, "gpipe"), (8, "1f1b")) if train else ((2, "gpipe"), (4, "gpipe")):
        plan = pipeline(
            profile, parse_devices("3x1GiB"), batch_of(training=train),
            num_microbatches=microbatches, schedule=schedule, objective="memory",
        )  # fmt: skip
        checked = autoshard.verify(model, plan, inputs=inputs_for(training=train))
        assert checked.ok, checked.first_difference
        for peak in checked.peaks:
            assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.002)


def test_gradients_wait_until_the_last_micro_batch_has_gone_back():
    """One backward goes through all of them: sums stand beside their terms, and a lent table's gradient comes home."""
    model, inputs = words().float(), sentences(8, 4)
    workload = autoshard.Workload(mode="training", batch_size=8, optimizer="none")
    plan = pipeline_by_hand(model, inputs, count=4, workload=workload)
    checked = autoshard.verify(model, plan, inputs=inputs)
    assert checked.ok, checked.first_difference
    for peak in checked.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.002)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_modules_that_run_again_have_their_activations_one_after_the_other(schedule):
    """A gradient as large as all of them is there only when they have gone; what passes is there once more."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down, self.table = nn.Linear(16, 256), nn.Linear(256, 16), nn.Embedding(800, 16)

        def forward(self, x):
            near = torch.relu(self.up(x)).cumsum(1)
            return x + self.down(near * near) + self.table(x.abs().sum(-1).long().clamp(max=799))

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Wide() for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, inputs = Blocks(), {"x": torch.randn(8, 24, 16)}
    workload = autoshard.Workload(mode="training", batch_size=8, optimizer="none")
    profile = autoshard.profile(model, inputs, workload=workload)
    batch = find_batch_axis(model, inputs, workload)
    groups = [["blocks.0", "blocks.1"], ["blocks.2", "blocks.3"]]
    plan = plan_by_hand(profile, "2x1GiB", groups, schedule=schedule, batch=batch)
    plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    checked = autoshard.verify(model, plan, inputs=inputs)
    assert checked.ok, checked.first_difference
    for peak in checked.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.005)


def test_modules_that_run_again_keep_nothing_that_no_gradient_comes_to():
    """As where a codebook is looked up: autograd has the history until the nearest entries are known."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ELU(), nn.Linear(64, 64)) for _ in range(6))
            self.book, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return self.head(self.book(x.argmax(-1)))

    torch.manual_seed(0)
    model, inputs = Codes(), {"x": torch.randn(8, 48, 64)}
    workload = autoshard.Workload(mode="training", batch_size=8, optimizer="none")
    profile, batch = autoshard.profile(model, inputs, workload=workload), find_batch_axis(model, inputs, workload)
    plan = plan_by_hand(profile, "2x1GiB", [["parts"], ["book", "head"]], batch=batch)
    plan = replace(plan, stages=tuple(replace(stage, recompute=True) for stage in plan.stages))
    checked = autoshard.verify(model, plan, inputs=inputs)
    assert checked.ok, checked.first_difference
    for peak in checked.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.06), peak


def test_copies_of_outputs_are_no_outputs():
    """An output that a later stage reads too, as a whole or a view of it, is put together once: where it was made."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 4), nn.LayerNorm(64)])

        def forward(self, x):
            first, again, pooled = self.parts
            hidden = first(x)
            return {"hidden": hidden, "again": again(hidden), "pooled": pooled(hidden[:, 0])}

    torch.manual_seed(0)
    check_peaks(Encoder().eval(), {"x": torch.randn(8, 12, 16)})


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_copy_of_what_is_expanded_for_every_row_is_as_large_as_it(train):
    """And where modules run again it stays with what they were given."""

    class Add(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, x, places):
            return self.mix(x) + places

    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, 16), Add(), nn.Linear(16, 16)])
            self.register_buffer("places", torch.randn(1, 48, 16))

        def forward(self, x):
            first, second, third = self.parts
            return third(second(first(x), (self.places * 2).expand(len(x), -1, -1)))

    torch.manual_seed(0)
    check_peaks(Places().train(train), {"x": torch.randn(8, 48, 16)}, recompute=train)


def test_an_output_that_another_device_saves_goes_where_it_was_made():
    """Its copy is what backward needs: the original goes once the outputs are put together."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, 64), nn.Linear(64, 4), nn.Linear(4, 4)])

        def forward(self, x):
            first, second, third = self.parts
            hidden = first(x)
            return {"hidden": hidden, "last": third(second(hidden))}

    torch.manual_seed(0)
    check_peaks(Encoder().train(), {"x": torch.randn(8, 24, 16)})


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_what_the_model_keeps_is_there_once(train):
    """A table that every micro-batch finds."""

    def made(rows, length, width, device):
        return (torch.arange(length * width, device=device).reshape(length, width) / 1000.0).repeat(rows, 1, 1)

    class Places(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.table = nn.Linear(16, 64), None

        def forward(self, x):
            hidden = self.up(x)
            if self.table is None or self.table.shape != hidden.shape:
                self.table = made(*hidden.shape, x.device)
            return hidden + self.table

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Places(), nn.Linear(64, 16), Places()])

        def forward(self, x):
            for part in self.parts:
                x = part(x)
            return x

    torch.manual_seed(0)
    check_peaks(Several().train(train), {"x": torch.randn(8, 24, 16)})


def test_zeros_of_as_many_rows_are_divided_too():
    """As code makes them that adds scores of all heads to nothing."""

    class Scores(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)])

        def forward(self, x):
            rows, length, width = x.shape
            first, second, third = self.parts
            heads = second(first(x)).view(rows, length, 4, 4).transpose(1, 2).reshape(rows * 4, length, 4)
            empty = torch.zeros(rows * 4, length, length, dtype=x.dtype, device=x.device)
            scores = torch.baddbmm(empty, heads, heads.transpose(1, 2))
            return third((scores @ heads).view(rows, length, width))

    torch.manual_seed(0)
    check_peaks(Scores().eval(), {"x": torch.randn(8, 24, 16)})


@pytest.mark.parametrize("train", [False, True], ids=["inference", "training"])
def test_a_view_of_a_table_of_another_stage_comes_once_for_each_micro_batch(train):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([nn.Embedding(300, 16), nn.Linear(16, 64), Head()])

        def forward(self, ids):
            first, second, third = self.parts
            return third(second(first(ids)), first.weight.T)

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.narrow = nn.Linear(64, 16)

        def forward(self, x, table):
            x = self.narrow(torch.cat([x] * 9, -1)[..., :64])  # the most is there before the table is
            return x @ table[:, :4]

    torch.manual_seed(0)
    check_peaks(Tied().train(train), {"ids": torch.randint(0, 300, (8, 12))})


def check_peaks(model, inputs, *, recompute=False):
    """Planned peaks of four micro-batches on three devices are those of the run."""
    workload = autoshard.Workload(mode="training" if model.training else "inference", batch_size=8, optimizer="none")
    plan = pipeline_by_hand(model, inputs, find_batch_axis(model, inputs, workload), workload=workload)
    plan = replace(plan, stages=tuple(replace(stage, recompute=recompute) for stage in plan.stages))
    checked = autoshard.verify(model, plan, inputs=inputs)
    assert checked.ok, checked.first_difference
    for peak in checked.peaks:
        assert peak.predicted_bytes == pytest.approx(peak.measured_bytes, rel=0.01), peak
