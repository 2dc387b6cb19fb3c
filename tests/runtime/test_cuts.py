"""Cut models on several processes. Starting processes takes a while, so each start runs several checks."""

import copy
import os
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import ApplyError, PlanError, RankError
from autoshard.plan.sharding import Action
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts, cut_record, remove_cuts
from autoshard.runtime.slices import join
from tests.conformance.rank_checks import ADD, GATHER
from tests.ranks import run_ranks
from tests.runtime.cut_checks import CASES, TOLERANCE, assert_equal, check_case, check_checkpoint, loss_of, make
from tests.runtime.cut_models import decoder_cuts, make_decoder, uneven_shares
from tests.torch_releases import compiled_hooks


def generating():
    """Two all-reduces per layer and forward, and the same tokens on all ranks, sampled ones too."""
    model, counter = make_decoder(), Counter()
    ids = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    common = {"max_new_tokens": 6, "do_sample": False, "disable_compile": True}
    ways = [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True}]

    def generate():
        made = []
        for way in ways:
            torch.manual_seed(3)
            made.append(model.generate(ids, **{**common, **way}))
        return made

    expected = generate()
    apply_cuts(model, decoder_cuts(("model.layers.0", "model.layers.1")), ProcessRanks.of())
    with torch.no_grad():
        model(ids)
    assert counter.count == 4
    for way, found, wanted in zip(ways, generate(), expected, strict=True):
        assert torch.equal(found, wanted), way


def test_generates_the_same_tokens():
    run_ranks(generating, 2)


class Counter:
    """Counts the collectives of torch.distributed in this process."""

    def __init__(self):
        self.count = 0
        for name in ("all_reduce", GATHER, ADD):
            setattr(dist, name, self._counted(getattr(dist, name)))

    def _counted(self, call):
        def counted(*args, **kwargs):
            self.count += 1
            return call(*args, **kwargs)

        return counted


def all_cases():
    counter = Counter()
    for name in CASES:
        check_case(name, ProcessRanks.of(), lambda: counter.count)
    for name in ("perceptron", "attention", "words", "fused", "means"):
        check_case(name, ProcessRanks.of(), lambda: counter.count, uneven_shares)
    check_checkpoint(ProcessRanks.of())


def test_equal_to_the_original():
    run_ranks(all_cases, 2)


def on_three():
    check_case("attention", ProcessRanks.of())
    check_case("words", ProcessRanks.of(), divide=uneven_shares)


def test_equal_to_the_original_on_three_ranks():
    run_ranks(on_three, 3)


def compiled():
    """One module deep: a watch on the root itself would begin before the compiled code does."""
    for name, backend in (("attention", "eager"), ("fused", "aot_eager"), ("means", "eager")):
        case, original, model = CASES[name], make(name), nn.Sequential(make(name))
        cuts = [replace(cut, blocks=tuple(join("0", block) for block in cut.blocks)) for cut in case.cuts(2)]
        apply_cuts(model, cuts, ProcessRanks.of())
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend=backend)
        result = run(*case.inputs)  # without gradients: tests/conformance/test_ranks.py
        assert_equal(result, original(*case.inputs), **TOLERANCE)
        loss_of(result).backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        model.zero_grad()
        loss_of(model(*case.inputs)).backward()
        for n, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[n], parameter.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@compiled_hooks
def test_compiles_without_graph_breaks():
    run_ranks(compiled, 2, timeout_seconds=240.0)  # compilers take their time on a busy machine


def disagree(what):
    rank = dist.get_rank()
    torch.manual_seed(rank if what == "weights" else 0)
    model = CASES["perceptron"].make()
    if what == "model" and rank == 1:
        model.register_parameter("more", nn.Parameter(torch.ones(1)))
    cuts = CASES["perceptron"].cuts(3)
    if what == "plan" and rank == 1:
        cuts = tuple(replace(cut, title="another") for cut in cuts)
    if what == "broken" and rank == 1:
        cuts = tuple(replace(cut, blocks=("nowhere",)) for cut in cuts)
    problem = PlanError("not here") if what == "known" and rank == 1 else None
    before = {name: (id(one), one.clone()) for name, one in model.state_dict(keep_vars=True).items()}
    try:
        apply_cuts(model, cuts, ProcessRanks.of(), problem=problem)
    except (RankError, PlanError) as error:
        for name, one in model.state_dict(keep_vars=True).items():
            assert before[name][0] == id(one) and torch.equal(before[name][1], one)
        assert cut_record(model) is None
        return type(error).__name__, str(error)
    return None


def disagreements(whats):
    return {what: disagree(what) for what in whats}


def test_ranks_that_do_not_agree():
    results = run_ranks(disagreements, 3, ["weights", "model", "plan", "broken", "known"])
    for rank, result in enumerate(results):
        assert "ranks 1, 2 have other weights than rank 0" in result["weights"][1]
        assert "rank 1 has another model than rank 0" in result["model"][1]
        assert "rank 1 has another plan than rank 0" in result["plan"][1]
        assert ("not here" if rank == 1 else "rank 1 can't take part: not here") == result["known"][1]
        kind, text = result["broken"]
        assert kind == ("PlanError" if rank == 1 else "RankError")
        assert "nowhere" in text and (rank == 1 or text.startswith("rank 1 can't take part"))


def other_degree():
    with pytest.raises(PlanError, match="over 4 ranks, and 2 run"):
        apply_cuts(make("perceptron"), CASES["perceptron"].cuts(4), ProcessRanks.of())
    return failing_half_way()


def failing_half_way():
    """A rank that runs out of memory while it cuts: every rank gives up, and the model is as it was."""
    import autoshard.runtime.cuts as cuts

    model = make("attention")
    before = copy.deepcopy(model.state_dict())
    if dist.get_rank() == 1:

        def fail(*args):
            raise torch.OutOfMemoryError("no room")

        cuts._install = fail
    with pytest.raises((RankError, torch.OutOfMemoryError), match="no room"):
        apply_cuts(model, CASES["attention"].cuts(2), ProcessRanks.of())
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.config.heads == 12 and model.layers[0].config is model.config
    return "as it was"


def test_another_number_of_ranks_and_failures_half_way():
    assert run_ranks(other_degree, 2) == ["as it was"] * 2


def dying():
    ranks = dist.get_world_size()
    model = make("perceptron")
    apply_cuts(model, CASES["perceptron"].cuts(ranks), ProcessRanks.of())
    model(*CASES["perceptron"].inputs)
    if dist.get_rank() == 1:
        os._exit(1)
    started = time.monotonic()
    with pytest.raises(RankError, match=f"rank {dist.get_rank()} lost rank 1 in a collective: that process ended"):
        for _ in range(3):
            model(*CASES["perceptron"].inputs)
    return time.monotonic() - started


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_rank_that_dies(count):
    seconds = run_ranks(dying, count, may_die=True)
    assert seconds.pop(1) is None and all(one < 30 for one in seconds)


def odd_uses():
    ranks = ProcessRanks.of()
    exceptions_leave_no_mode(ranks)
    copies(ranks)
    unfrozen(ranks)
    generators()


def exceptions_leave_no_mode(ranks):
    model = make("fused")
    apply_cuts(model, CASES["fused"].cuts(2), ranks)
    for inputs in ((torch.ones(2, 5, 7),), (None,)):
        with pytest.raises((RuntimeError, AttributeError)):
            model(*inputs)
        assert torch._C._len_torch_function_stack() == 0


def copies(ranks):
    """A deep copy of a cut model is one too, with hooks of its own."""
    case = CASES["attention"]
    original, model = make("attention"), make("attention")
    apply_cuts(model, case.cuts(2), ranks)
    twin = copy.deepcopy(model)
    remove_cuts(model)
    loss_of(twin(*case.inputs)).backward()
    loss_of(original(*case.inputs)).backward()
    norm = original.layers[0].norm.weight.grad
    torch.testing.assert_close(twin.layers[0].norm.weight.grad, norm, rtol=1e-5, atol=1e-5)
    remove_cuts(twin)
    assert twin.layers[0].config.heads == 12 and twin.layers[0].q.weight.shape == (48, 8)
    assert twin.layers[0].config is not model.config


def unfrozen(ranks):
    """Parameters whose gradient is summed may be given one only later."""
    case = CASES["attention"]
    original, model = make("attention"), make("attention").requires_grad_(False)
    apply_cuts(model, case.cuts(2), ranks)
    model.layers[1].norm.weight.requires_grad_()
    loss_of(model(*case.inputs)).backward()
    loss_of(original(*case.inputs)).backward()
    expected = original.layers[1].norm.weight.grad
    torch.testing.assert_close(model.layers[1].norm.weight.grad, expected, rtol=1e-5, atol=1e-5)


def generators():
    """Every rank draws what rank 0 draws."""
    torch.manual_seed(0)
    model = CASES["dropout"].make()
    torch.manual_seed(dist.get_rank())
    apply_cuts(model, CASES["dropout"].cuts(2), ProcessRanks.of())
    found = model(*CASES["dropout"].inputs).detach()
    both = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(both, found)
    assert torch.equal(*both)


def test_odd_uses():
    run_ranks(odd_uses, 2)


def test_what_makes_no_sense_is_refused():
    run_ranks(refusals, 1)


def refusals():
    ranks = ProcessRanks.of()
    (cut,) = CASES["perceptron"].cuts(1)
    shard, action = cut.shards[0], cut.actions[0]
    for changed, message in (
        (replace(cut, blocks=("blocks.7",)), "does not have"),
        (replace(cut, shards=(replace(shard, dim=1),)), "its shape is"),
        (replace(cut, shards=(replace(shard, axis="*12x2"),)), "does not have 24 slices"),
        (replace(cut, shards=(replace(shard, axis="*24x"),)), "no axis"),
        (replace(cut, shards=(shard, replace(shard, axis="1x*24"))), "in two ways"),
        (replace(cut, shares=(23,)), "do not add up"),
        (replace(cut, actions=(replace(action, module="across"),)), "acts at 'blocks.0.across'"),
        (replace(cut, actions=(Action(kind="gather", module="up"),)), "says no axis"),
        (replace(cut, actions=(Action(kind="enter", module="up", gathered=True),)), "without being a sum"),
        (replace(cut, actions=(Action(kind="lookup", module="up", function="linear", axis="*24"),)), "only embedding"),
        (replace(cut, summed=("up.weight",)), "also told to cut"),
    ):
        model = make("perceptron")
        with pytest.raises(PlanError, match=message):
            apply_cuts(model, (changed,), ranks)
        assert cut_record(model) is None
    model = make("attention")
    model.config.heads = 10
    with pytest.raises(PlanError, match=r"expects config\.heads = 12"):
        apply_cuts(model, CASES["attention"].cuts(1), ranks)
    with pytest.raises(ApplyError, match="nothing to remove"):
        remove_cuts(model)
    with torch.device("meta"):
        model = CASES["perceptron"].make()
    with pytest.raises(ApplyError, match="has no data"):
        apply_cuts(model, (cut,), ranks)


def test_without_a_group():
    with pytest.raises(RankError, match="torchrun"):
        ProcessRanks.of()
