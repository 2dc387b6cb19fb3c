"""Effects that published runs showed: what they add to memory and to seconds, each by hand."""

from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest

from autoshard.cluster.topology import Topology
from autoshard.engine import price
from autoshard.engine.collectives import Network
from autoshard.engine.efficiency import efficiency_of
from autoshard.engine.local import sums_of
from autoshard.engine.precision import Precision
from autoshard.engine.price import Passes, layers_of_stages, make_setting, price_step, split_stages
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card
from autoshard.schedules.orders import make_order
from autoshard.schedules.simulate import Times, simulate
from tests.search.models import traced

CARD = Card(generation="sm80", flops_per_second=312e12, bytes_per_second=2e12, memory_bytes=80 * 2**30)


def topology(devices, *, per_host=8, network=25e9):
    return Topology(
        hosts=-(-devices // per_host), devices_per_host=min(per_host, devices), local_bytes_per_second=300e9,
        network_bytes_per_second=network,
    )  # fmt: skip


def priced(recipe, **changes):
    return price_step(traced().work, recipe, CARD, topology(recipe.devices, **changes))


def moment(estimate, name):
    return next(one for one in estimate.memory.curve if one.name == name)


def test_logits_are_there_around_the_loss_alone():
    work = traced().work
    last = next(block for block in work.blocks if block.path == "last")
    logits = 8 * work.tokens * 4096
    assert sums_of(last).logits * 8 / work.samples == logits
    for each in (8, 16):  # hand-fused losses write over what they read
        assert moment(priced(Recipe(micro_batch=8, logit_bytes=each)), "loss").bytes["transient"] == logits * each
    assert moment(priced(Recipe(micro_batch=8)), "backward of a layer").bytes["transient"] < logits * 16


def test_sums_of_gradients_stay_whole_and_parameters_do_not():
    """FSDP that reduces once per step keeps sums of gradients; parameters of layers are freed all the same."""
    each = Recipe(fsdp=8, micro_batch=1, num_microbatches=4)
    once = replace(each, accumulate_unsharded=True)
    first, second = moment(priced(each), "loss"), moment(priced(once), "loss")
    parameters = traced().work.parameters
    assert second.bytes["gradients"] - first.bytes["gradients"] == pytest.approx(4 * parameters * 7 / 8)
    assert second.bytes["unsharded parameters"] == first.bytes["unsharded parameters"] < 2 * parameters


def test_an_optimizer_copies_gradients_of_16_bits():
    precision = Precision(parameters=2, compute=2, gradients=2, reduce=2, master=4)
    short = priced(Recipe(precision=precision))
    full = priced(Recipe(precision=replace(precision, gradients=4, reduce=4)))
    parameters = traced().work.parameters
    assert moment(short, "optimizer").bytes["transient"] == pytest.approx(6 * parameters)
    assert moment(full, "optimizer").bytes["transient"] == 0
    before = max(one.total for one in short.memory.curve[:-1])
    assert short.memory.reserved >= before + 6 * parameters


def test_balanced_stages_count_the_head():
    work = traced(256, 8).work  # the head of 4,096 words costs more than a layer of 256 columns
    even, balanced = (split_stages(work, Recipe(pp=4, balanced_stages=balanced)) for balanced in (False, True))
    layers = [[sum(count for block, count in stage if block.layer) for stage in stages] for stages in (even, balanced)]
    assert layers[0] == [2, 2, 2, 2] and sum(layers[1]) == 8
    assert layers[1][0] > layers[1][-1] >= 1


@pytest.mark.parametrize("layers, ranks, per_rank", [(24, 4, 4), (8, 4, 1), (10, 4, 2), (126, 16, 7), (6, 3, 2)])
def test_ranks_have_as_many_layers_as_each_other(layers, ranks, per_rank):
    """In all of their stages together: 24 layers in 16 stages gave ranks 8 and 4 of them."""
    found = layers_of_stages(layers, ranks, per_rank, layers / ranks / per_rank)
    of_ranks = [sum(found[rank::ranks]) for rank in range(ranks)]
    assert sum(found) == layers and len(found) == ranks * per_rank and min(found) >= 1
    assert max(of_ranks) - min(of_ranks) <= 1


def test_backward_hides_the_sum_of_gradients_of_replicas():
    """As far as it is long enough: between slow hosts what it does not hide is added whole."""
    fast, slow, slower = (priced(Recipe(dp=2), per_host=1, network=rate) for rate in (1e12, 2e8, 1e8))
    nbytes, reached = 4 * traced().work.parameters, efficiency_of("sm80", "eager")
    summed = nbytes / (2e8 * reached.network)  # over two hosts each byte is sent once
    assert slower.seconds - slow.seconds == pytest.approx(summed, rel=0.02)
    assert 0 < fast.exposed_seconds < 0.9 * nbytes / reached.network_limit


def test_each_micro_batch_of_a_pipeline_waits_for_its_sends():
    """Between hosts that are slow, 1F1B with many micro-batches takes two sends longer for each; GPipe hides them."""
    recipe = Recipe(pp=2, micro_batch=1, num_microbatches=32, sequence_parallel=False)
    fast, slow = (priced(recipe, per_host=1, network=rate) for rate in (1e15, 1e9))
    work = traced().work
    nbytes = work.tokens * 1024 * 2
    reached = efficiency_of("sm80", "eager")
    send = nbytes / (1e9 * reached.network) - nbytes / reached.network_limit  # which fast adapters don't exceed
    assert slow.seconds - fast.seconds == pytest.approx((32 * 2 * 0.5 + 2) * send, rel=0.02)
    gpipe = replace(recipe, schedule="gpipe")
    assert priced(gpipe, per_host=1, network=1e9).seconds < slow.seconds


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8])
def test_few_micro_batches_pass_through_every_stage_in_turn(schedule, microbatches):
    """Pieces of stages shorten the wait for the first micro-batch, not its way: as played in the schedule's order."""
    chunks = 1 if schedule == "gpipe" else 2
    stages = 4 * chunks
    times = Times(
        forward=[1.0] * stages, backward=[2.0] * stages, weight=[1.0] * stages,
        sends=[0.0] * (stages - 1), returns=[0.0] * (stages - 1),
    )  # fmt: skip
    played = simulate(make_order(schedule, 4, microbatches, stages_per_device=chunks), times)
    recipe = Recipe(pp=4, num_microbatches=microbatches, schedule=schedule, stages_per_rank=chunks)
    one = Passes(forward=1.0, backward=2.0, forward_compute=1.0, backward_compute=2.0)
    with mock.patch.object(price, "send_seconds", lambda setting, share: 0.0):
        seconds, bubble = price._pipelined(SimpleNamespace(recipe=recipe, share=None), [one] * stages)
    assert seconds == pytest.approx(played.seconds, rel=0.07 if schedule == "zero-bubble" else 1e-9)
    assert bubble == pytest.approx(played.bubble, abs=0.07)


def test_unfused_attention_makes_its_scores():
    """In forward they are written, read and written by softmax and dropout, and read; 5 bytes of each are kept."""
    recipe = Recipe(micro_batch=8, stack="fused")
    fused, unfused = priced(recipe), priced(replace(recipe, unfused_attention=True))
    work = traced().work
    scores = 8 * 16 * work.tokens**2  # heads of each of eight samples
    attention = sums_of(work.blocks[1]).attentions[0]
    setting = make_setting(work, recipe, CARD, topology(1))
    assert attention.scores_on(setting.share) == pytest.approx(scores)
    kept = [moment(one, "loss").bytes["activations"] for one in (fused, unfused)]
    assert kept[1] - kept[0] == pytest.approx(8 * 5 * scores)  # eight layers
    rate = CARD.bytes_per_second * setting.reached.memory
    assert unfused.seconds - fused.seconds > 8 * 30 * scores / rate


def test_no_adapter_is_filled_above_the_limit():
    reached = efficiency_of("sm90", "eager")
    slow, usual, fast = (
        Network(
            topology=Topology(
                hosts=2, devices_per_host=8, local_bytes_per_second=450e9, network_bytes_per_second=rate,
                network_latency_seconds=0.0, local_latency_seconds=0.0,
            ),
            reached=reached,
        ).between
        for rate in (12.5e9, 50e9, 100e9)
    )  # fmt: skip
    assert slow == pytest.approx(12.5e9 * reached.network) and usual == fast == reached.network_limit
