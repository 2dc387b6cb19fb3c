"""Cut models on several processes. Starting processes takes a while, so each start runs many checks."""

import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autoshard
from autoshard.common.fingerprint import fingerprint
from autoshard.errors import PlanError, RankError
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts, cut_record, remove_cuts
from autoshard.runtime.dispatch import apply_plan
from autoshard.runtime.slices import join
from tests.blocks import Blocks
from tests.conformance.rank_checks import counted
from tests.conformance.tp_plans import slow_devices
from tests.ranks import run_jobs, run_ranks
from tests.runtime.cut_checks import CASES, TOLERANCE, assert_equal, check_case, loss_of, make
from tests.runtime.cut_models import decoder_cuts, make_decoder, uneven_shares
from tests.runtime.test_cuts_local import plan_of
from tests.runtime.test_results import Model, check_asked, planned
from tests.torch_releases import compiled_hooks


def generating():
    """The same tokens on all ranks, of beams and sampled ones too."""
    model = make_decoder()
    ids = torch.randint(1, 60, (2, 5), generator=torch.Generator().manual_seed(1))
    ways = [{"num_beams": 3}, {"do_sample": True}]

    def generate():
        made = []
        for way in ways:
            torch.manual_seed(3)
            made.append(model.generate(ids, **{"max_new_tokens": 6, "do_sample": False, "disable_compile": True} | way))
        return made

    expected = generate()
    apply_cuts(model, decoder_cuts(("model.layers.0", "model.layers.1")), ProcessRanks.of())
    for way, found, wanted in zip(ways, generate(), expected, strict=True):
        assert torch.equal(found, wanted), way


def equal(names, uneven=()):
    """Results of the original, with as many collectives as expected."""
    with counted() as counts:
        for name in names:
            check_case(name, ProcessRanks.of(), lambda: sum(counts.values()))
        for name in uneven:
            check_case(name, ProcessRanks.of(), lambda: sum(counts.values()), uneven_shares)


def compiled():
    """One module deep: a watch on the root itself would begin before the compiled code does."""
    for name, backend in (("attention", "eager"), ("fused", "aot_eager"), ("means", "eager")):
        case, original, model = CASES[name], make(name), nn.Sequential(make(name))
        cuts = [replace(cut, blocks=tuple(join("0", block) for block in cut.blocks)) for cut in case.cuts(2)]
        apply_cuts(model, cuts, ProcessRanks.of())
        torch._dynamo.reset()
        run = torch.compile(model, fullgraph=True, backend=backend)
        with torch.no_grad():
            assert_equal(run(*case.inputs), original(*case.inputs), **TOLERANCE)
        result = run(*case.inputs)
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


def other_degree():
    with pytest.raises(PlanError, match="over 4 ranks, and 2 run"):
        apply_cuts(make("perceptron"), CASES["perceptron"].cuts(4), ProcessRanks.of())


def failing_half_way():
    """A rank that runs out of memory while it cuts: every rank gives up, and the model is as it was."""
    model = make("attention")
    before = copy.deepcopy(model.state_dict())
    fails = mock.patch("autoshard.runtime.cuts._install", side_effect=torch.OutOfMemoryError("no room"))
    with pytest.raises((RankError, torch.OutOfMemoryError), match="no room"):
        if dist.get_rank() == 1:
            fails.start()
        apply_cuts(model, CASES["attention"].cuts(2), ProcessRanks.of())
    mock.patch.stopall()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model.config.heads == 12 and model.layers[0].config is model.config


def applied_again():
    """As removing first; a plan that one rank refuses leaves all of them cut as they were."""
    model, inputs = make("perceptron"), CASES["perceptron"].inputs
    plan, expected = plan_of(2, fingerprint(model)), model(*inputs)
    for _ in range(3):
        apply_plan(model, plan)
        torch.testing.assert_close(model(*inputs), expected)
    other = replace(plan, fingerprint="0" * 64) if dist.get_rank() == 1 else plan
    with pytest.raises((PlanError, RankError), match="made for another model"):
        apply_plan(model, other)
    torch.testing.assert_close(model(*inputs), expected)  # still cut, on both
    again = make("perceptron") if dist.get_rank() == 1 else model
    with pytest.raises(RankError, match="another"):
        apply_plan(again, plan)  # the other rank removes first: no hang
    assert cut_record(model) is not None


def exceptions_leave_no_mode():
    model, ranks = make("fused"), ProcessRanks.of()
    apply_cuts(model, CASES["fused"].cuts(2), ranks)
    for inputs in ((torch.ones(2, 5, 7),), (None,)):
        with pytest.raises((RuntimeError, AttributeError)):
            model(*inputs)
        assert torch._C._len_torch_function_stack() == 0


def copies():
    """A deep copy of a cut model is one too, with hooks of its own."""
    case = CASES["attention"]
    original, model = make("attention"), make("attention")
    apply_cuts(model, case.cuts(2), ProcessRanks.of())
    twin = copy.deepcopy(model)
    remove_cuts(model)
    loss_of(twin(*case.inputs)).backward()
    loss_of(original(*case.inputs)).backward()
    norm = original.layers[0].norm.weight.grad
    torch.testing.assert_close(twin.layers[0].norm.weight.grad, norm, rtol=1e-5, atol=1e-5)
    remove_cuts(twin)
    assert twin.layers[0].config.heads == 12 and twin.layers[0].q.weight.shape == (48, 8)
    assert twin.layers[0].config is not model.config


def unfrozen():
    """Parameters whose gradient is summed may be given one only later."""
    case = CASES["attention"]
    original, model = make("attention"), make("attention").requires_grad_(False)
    apply_cuts(model, case.cuts(2), ProcessRanks.of())
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


def planned_alike():
    """Cuts are made without being asked for where that is faster, as every rank finds by itself."""
    plan = autoshard.plan(Blocks(2, words=100), slow_devices(2), inputs=torch.arange(24).view(4, 6))
    assert plan.cuts and all(cut.proof for cut in plan.cuts)
    assert any(reason.startswith("not chosen: placement") for reason in plan.reasons)
    return plan.to_json()


TOGETHER = (
    exceptions_leave_no_mode, copies, unfrozen, generators, other_degree, failing_half_way, applied_again, generating,
    planned_alike,
)  # fmt: skip


def test_two_ranks():
    """Equal to the original, and what people do with a cut model."""
    torch.manual_seed(0)
    jobs = {job.__name__: (job,) for job in TOGETHER} | {"asked": (check_asked, planned(Model()))}
    even = [name for name in CASES if name != "even words"]
    one, other = run_ranks(run_jobs, 2, jobs | {"equal": (equal, even, ["attention", "fused", "means"])})
    assert one["planned_alike"] == other["planned_alike"]


def test_three_ranks():
    """Equal to the original; and ranks that do not agree say so, each as it knows it."""
    jobs = {what: (disagree, what) for what in ("weights", "model", "plan", "broken", "known")}
    results = run_ranks(run_jobs, 3, jobs | {"equal": (equal, ["attention"], ["words"])})
    for rank, result in enumerate(results):
        assert "ranks 1, 2 have other weights than rank 0" in result["weights"][1]
        assert "rank 1 has another model than rank 0" in result["model"][1]
        assert "rank 1 has another plan than rank 0" in result["plan"][1]
        assert ("not here" if rank == 1 else "rank 1 can't take part: not here") == result["known"][1]
        kind, text = result["broken"]
        assert kind == ("PlanError" if rank == 1 else "RankError")
        assert "nowhere" in text and (rank == 1 or text.startswith("rank 1 can't take part"))


def test_without_a_group():
    with pytest.raises(RankError, match="torchrun"):
        ProcessRanks.of()
