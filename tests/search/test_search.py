"""The search: equal to pricing everything, never worse with more, and what was fixed stays fixed."""

import re
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.common.sizes import format_seconds
from autoshard.engine.recipe import Recipe
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Mesh, Plan
from autoshard.plan.workload import Workload
from autoshard.search.best import AS_GOOD, price_recipe, search
from autoshard.search.choose import choose
from autoshard.search.compared import compare_processes
from autoshard.search.estimates import estimate_processes
from autoshard.search.limits import Asked, Limits, check_given, parse_mesh
from autoshard.search.processes import make_task, plan_processes, recipe_of
from autoshard.search.reasons import explain, remedy, shown_mesh, take_less
from autoshard.search.traced import trace, why_undivided
from tests.models import by_name
from tests.search.models import Decoder, Layer, traced


def task_on(spec: str, *, reserve: float = 0.05, **changes):
    asked = replace(changes.pop("given", Asked()), reserve=reserve)
    return make_task(traced(**changes), parse_devices(spec), asked)


def test_the_best_is_the_least_of_all_that_fit():
    found = search(task_on("8xA100-40GB"))
    assert found.best is not None
    assert found.best.seconds <= min(one.seconds for one in found.ranking) * AS_GOOD
    assert all(one.fits for one in found.ranking) and found.priced > len(found.ranking)
    assert [one.seconds for one in found.ranking] == sorted(one.seconds for one in found.ranking)


@settings(max_examples=4)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([512, 2048]), st.integers(1, 64))
def test_more_devices_or_memory_never_make_it_worse(devices, width, samples):
    """AS_GOOD trades some seconds for a simpler mesh, so bests are compared before that."""
    few = task_on(f"{devices}xA100-40GB", width=width, samples=samples)
    more = replace(few, topology=task_on("8xA100-40GB").topology)
    larger = replace(few, card=replace(few.card, memory_bytes=2 * few.card.memory_bytes))
    seconds = [min((one.seconds for one in search(task).ranking), default=float("inf")) for task in (few, more, larger)]
    assert seconds[2] <= seconds[0] * (1 + 1e-9)
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


def test_more_memory_is_no_worse_where_stages_are_unlike():
    """With more memory, stages of equally many layers may be best as they are, and others once the head is weighed."""
    with torch.device("meta"):
        model = Decoder(2048, 32, 16, 262_144).to(torch.bfloat16)
    ids = torch.zeros(2, 2048, dtype=torch.long)
    work = trace(model, {"ids": ids, "labels": ids}, Workload(batch_size=64, sequence_length=2048, mode="training"))
    few = make_task(work, parse_devices("7xA100-80GB"), Asked(mesh={"pp": 7}))
    seconds = [
        min(one.seconds for one in search(replace(few, card=replace(few.card, memory_bytes=size << 30))).ranking)
        for size in range(24, 160, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_examples_of_one_sample_say_as_much_as_those_of_two():
    """A model that takes a number for all samples, beside them."""

    class Scaled(Decoder):
        def forward(self, ids, scale, labels=None):
            return super().forward(ids, labels) * scale.view(1)

    with torch.device("meta"):
        model = Scaled(64, 2)
    works = []
    for samples in (1, 2):
        ids = torch.zeros(samples, 16, dtype=torch.long)
        inputs = {"ids": ids, "scale": torch.ones(1), "labels": ids}
        found = trace(model, inputs, Workload(mode="training"))
        assert found.samples == samples
        works.append(found.work)
    assert works[0] == works[1]
    assert trace(model, inputs, Workload(mode="training", batch_size=8)).samples == 8


def test_what_is_fixed_stays_fixed():
    plan, _, _ = plan_processes(
        traced(), parse_devices("8xA100-40GB"),
        Asked(mesh={"fsdp": 4, "tp": 2}, micro_batch=4, recompute="full"),
    )  # fmt: skip
    assert plan.mesh == Mesh(fsdp=4, tp=2) and plan.strategy == "hybrid"
    assert (plan.micro_batch, plan.num_microbatches, plan.recompute) == (4, 2, "full")
    assert plan.launch == "processes" and plan.precision == "mixed"


def test_all_processes_that_run_take_part():
    """A small answer is fastest on one device; under torchrun the others would have nothing."""
    free, everyone = (search(task_on("4xA100-40GB", given=given, width=64, samples=4, training=False)).best
                      for given in (Asked(), Asked(everyone=True)))  # fmt: skip
    assert free is not None and everyone is not None
    assert free.recipe.devices <= everyone.recipe.devices == 4


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("fsdp=4", r"has 4 ranks, and there are 8 devices.*fsdp=8 would"),
        ("fsdp=8,tp=3", "has 24 ranks"),
        ("pp=8,tp=16", "has 128 ranks"),
        ("ep=2,fsdp=8", "no experts were found.*none of its modules is given rows, choices and weights"),
        ("pp=16", "has 16 ranks"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused_with_what_does(mesh, words):
    with pytest.raises(PlanError, match=words):
        task_on("8xA100-40GB", given=Asked(mesh=mesh))


@pytest.mark.parametrize("text", ["", "fsdp", "fsdp=0", "fsdp=two", "zz=2", "tp=2,tp=4"])
def test_text_that_is_no_mesh_is_refused(text):
    with pytest.raises(SpecError, match="mesh"):
        parse_mesh(text)


@pytest.mark.parametrize(
    "wishes", [{"mesh": {"zz": 2}}, {"mesh": {"fsdp": -2}}, {"mesh": [2]}, {"micro_batch": "2", "mesh": {"fsdp": 2}}]
)
def test_what_python_may_say_of_processes_is_checked_like_text(wishes):
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(SpecError, match=r"mesh|micro_batch"):
        autoshard.plan(model, "2xA100-40GB", inputs=torch.ones(2, 8), **wishes)


def test_degrees_that_the_model_does_not_allow_name_those_it_does():
    """Of 16 heads, 6 ranks would have 2 or 3."""
    with pytest.raises(
        PlanError, match=r"tp=6 is not possible: .* there are 16 in layers\.0\. Plan with a tp of 2, 4, or"
    ):
        task_on("6xA100-40GB", given=Asked(mesh={"tp": 6}))
    with pytest.raises(
        PlanError, match="tp=16 is not possible: ranks that share matrices are in one host, which has 8"
    ):
        task_on("16xA100-40GB", given=Asked(mesh={"tp": 16}))


def test_a_schedule_that_needs_more_layers_says_how_many():
    with pytest.raises(PlanError, match="takes 16 layers for pp=8, and the model has 8"):
        task_on("8xA100-40GB", given=Asked(mesh={"pp": 8}, schedule="interleaved"))


def test_an_optimizer_without_states_keeps_none_in_estimates_of_the_plan_too():
    work = traced()
    plain = replace(work, workload=replace(work.workload, optimizer="sgd"))
    asked = Asked(mesh={"fsdp": 2})
    for one, states in ((work, 2), (plain, 0)):
        plan, found, _ = plan_processes(one, parse_devices("2xA100-40GB"), asked)
        assert found.best is not None
        assert found.best.memory.curve[0].bytes["optimizer"] == 4 * states * work.work.parameters / 2
        figures = estimate_processes(plan, one, parse_devices("2xA100-40GB"))
        assert figures.latency_seconds == pytest.approx(found.best.seconds)


def test_what_makes_memory_small_uses_all_devices_and_is_compared_in_memory():
    model, ids = Decoder(width=1024), torch.zeros(1, 64, dtype=torch.long)
    workload = autoshard.Workload(batch_size=1, sequence_length=64, new_tokens=32)
    found = choose(
        model, {"ids": ids}, workload, parse_devices("4xA100-40GB"), Asked(objective="memory"),
    )  # fmt: skip
    assert found is not None and found.plan.mesh == Mesh(tp=4)
    assert any("times the memory" in reason for reason in found.plan.reasons)


def test_an_answer_that_has_no_room_is_offered_fewer_bits():
    with pytest.raises(PlanError, match=r"With 8-bit weights \(--dtype int8\) it fits: tp=2"):
        plan_processes(traced(4096, 80, training=False, new_tokens=8, samples=1), parse_devices("2xT4"), Asked())


def test_one_process_on_one_host_of_two_says_why_the_other_is_not_used():
    plan = autoshard.plan(Decoder(64, 2), "2 hosts of 1xT4", inputs={"ids": torch.zeros(1, 16, dtype=torch.long)})
    assert plan.reasons[0] == "everything is on cuda:0, the only device of the process"
    assert "one process has the devices of one host, here of host0 (2 hosts were given)" in plan.reasons[1]


def test_one_process_that_has_no_room_beside_a_cpu_is_offered_them_too():
    with torch.device("meta"):
        model = Decoder(8192, 20).to(torch.bfloat16)
    given = {"inputs": {"ids": torch.zeros(1, 64, dtype=torch.long)}, "workload": Workload(batch_size=1, new_tokens=8)}
    with pytest.raises(PlanError, match=r"cpu=128GiB; without a size .*disk=500GiB.* \(--dtype int8\) it fits: tp=2"):
        autoshard.plan(model, "2x12GiB,cpu=4GiB", **given)


def test_the_nearest_of_the_others_are_named_with_what_stands_against_faster_ones():
    task = task_on("8xA100-40GB")
    found = search(task)
    first, second, *_ = found.ranking
    said = " ".join(explain(task, replace(found, best=first)))
    named = [f"not chosen: {shown_mesh(one.recipe)}: " in said for one in found.ranking[1:]]
    assert named == [at < 3 for at in range(len(named))]
    twice = replace(second, recipe=replace(second.recipe, recompute="full"), seconds=0.98 * first.seconds)
    said = " ".join(explain(task, replace(found, best=first, ranking=(twice, first))))
    assert f"{shown_mesh(twice.recipe)}: {format_seconds(twice.seconds)}, 2% less, but it computes layers twice" in said
    assert "(5% of each card is kept free)" in said


def test_16_bits_are_not_offered_to_cards_without_units_for_them():
    work = traced()
    with torch.device("meta"):
        full = Decoder(1024, 8)
    given = {"ids": torch.zeros(2, 512, dtype=torch.long), "labels": torch.zeros(2, 512, dtype=torch.long)}
    work = trace(full, given, work.workload)
    for spec, offered in (("2xA100-40GB", True), ("2xV100-SXM2-32", False)):
        plan, _, _ = plan_processes(work, parse_devices(spec), Asked())
        assert any("--precision mixed" in reason for reason in plan.reasons) == offered


def test_micro_batches_that_do_not_make_up_the_batch_are_named():
    with pytest.raises(PlanError, match="batch of 32 samples in the micro-batches that were asked for"):
        plan_processes(traced(), parse_devices("4xA100-40GB"), Asked(mesh={"tp": 4}, micro_batch=3))


def test_more_replicas_than_samples_are_refused():
    with pytest.raises(PlanError, match="Give --batch 8 or more"):
        task_on("8xA100-40GB", samples=4, given=Asked(mesh={"fsdp": 8}))


def test_what_does_not_fit_says_by_how_much_where_and_what_would_help():
    with pytest.raises(PlanError, match=r"the closest, .* more than the .* It fits on \d+ such devices: "):
        plan_processes(traced(4096, 24), parse_devices("2xT4"), Asked())


@pytest.mark.parametrize(("samples", "nbytes"), [(1, 16 / 4 + 2), (2, 2 * 16)])
def test_sequences_in_parts_have_whole_logits_where_apply_makes_them(samples, nbytes):
    """Samples of 65,536 tokens with 4,096 logits each: of one, parts of 16 bytes per logit, and 2 for what is given."""
    fixed = Asked(mesh={"cp": 4}, micro_batch=samples)
    task = task_on("4xA100-40GB", samples=samples, tokens=65536, given=fixed)
    recipe = search(task).ranking[0].recipe
    assert recipe.cp == 4 and not recipe.loss_parallel
    changes = ({}, {"loss_parallel": True}, {"divided_outputs": True})
    made, parts, given_out = (price_recipe(task, replace(recipe, **change)) for change in changes)
    at_loss = [
        next(one for one in each.memory.curve if one.name == "loss").bytes["transient"]
        for each in (made, parts, given_out)
    ]
    in_parts = 16 / 4 if samples == 1 else nbytes
    assert at_loss == pytest.approx([65536 * 4096 * each for each in (nbytes, samples * 4, in_parts)])
    assert made.seconds > parts.seconds
    assert (given_out.seconds < made.seconds) == (samples == 1)


def test_a_plan_says_that_logits_stay_divided():
    for asked, said in ((Asked(mesh={"tp": 4}, divided_outputs=True), 1), (Asked(mesh={"tp": 4}), 0)):
        plan, _, _ = plan_processes(traced(), parse_devices("4xA100-40GB"), asked)
        assert plan.divided_outputs == bool(said)
        assert sum("logits.full_tensor()" in reason for reason in plan.reasons) == said


def test_a_refusal_says_that_logits_left_in_parts_would_fit():
    task = task_on("4xA100-40GB", samples=1, tokens=1 << 20, width=64)
    small = replace(task, card=replace(task.card, memory_bytes=23 << 30))
    assert search(small).best is None
    assert remedy(small).startswith("With logits left in parts behind the loss (--divided-outputs) it fits: tp=4, ")


def test_frozen_parameters_have_no_gradients_and_unread_ones_take_memory():
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    workload = Workload(batch_size=4, sequence_length=64, mode="training")

    def step(*, frozen: bool, unread: int = 1):
        with torch.device("meta"):
            model = Decoder(256, 2)
            model.later = nn.Linear(unread, unread, bias=False)
        for layer in model.layers if frozen else ():
            layer.requires_grad_(requires_grad=False)
        work = trace(model, {"ids": ids, "labels": ids}, workload)
        asked = Asked(precision="full", mesh={"fsdp": 2}, micro_batch=1)
        best = search(make_task(work, parse_devices("2xA100-40GB"), asked)).best
        assert best is not None
        layers = sum(one.numel() for one in model.layers.parameters())
        return best.seconds, best.memory.curve[-1].bytes, layers

    seconds, whole, layers = step(frozen=False)
    faster, part, _ = step(frozen=True)
    _, more, _ = step(frozen=True, unread=512)
    assert faster < seconds and part["weights"] == whole["weights"]
    assert whole["optimizer"] - part["optimizer"] == 8 * layers / 2
    assert whole["gradients"] - part["gradients"] == 4 * layers / 2
    assert more["weights"] - part["weights"] == 4 * (512**2 - 1) / 2 and more["optimizer"] == part["optimizer"]


@pytest.mark.parametrize(("precision", "dtype", "nbytes"), [
    ("mixed", torch.bfloat16, 2), ("mixed", torch.float32, 4), ("full", torch.bfloat16, 4), ("pure", torch.bfloat16, 2),
])  # fmt: skip
def test_frozen_parameters_of_16_bits_are_priced_as_they_are_kept(precision, dtype, nbytes):
    ids = torch.zeros(2, 64, dtype=torch.long, device="meta")
    workload = Workload(batch_size=4, sequence_length=64, mode="training")
    with torch.device("meta"):
        model = Decoder(256, 2).to(dtype)
        model.later = nn.Linear(512, 512, bias=False, dtype=dtype).requires_grad_(False)
    model.layers.requires_grad_(False)
    work = trace(model, {"ids": ids, "labels": ids}, workload)
    task = make_task(work, parse_devices("2xA100-40GB"), Asked(precision=precision, mesh={"fsdp": 2}, micro_batch=1))
    best = search(task).best
    assert best is not None
    frozen = sum(one.numel() for one in model.parameters() if not one.requires_grad)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    expected = nbytes * frozen + task.precision.parameters * trained
    assert best.memory.curve[-1].bytes["weights"] == pytest.approx(expected / 2)
    assert task.work.stored_bytes(task.precision) == pytest.approx(expected)  # of which recipes are ruled out


def test_logits_that_leave_no_room_are_named():
    work = traced(samples=1, tokens=262144)
    with pytest.raises(PlanError, match=r"10\.0 GiB are logits and their copies around the loss.* it fits: tp=2, "):
        plan_processes(work, parse_devices("2xT4"), Asked())


def test_why_there_are_no_replicas_is_said():
    asked = Asked(why_undivided="its rows depend on each other.")
    plan, _, _ = plan_processes(traced(), parse_devices("4xA100-40GB"), asked)
    assert plan.mesh is not None and plan.mesh.dp == plan.mesh.fsdp == 1
    assert "no replicas and no micro-batches: its rows depend on each other" in plan.reasons
    assert plan.num_microbatches == 1
    with pytest.raises(PlanError, match=r" s\. Its rows depend"):
        plan_processes(traced(samples=512), parse_devices("2xT4"), asked)
    plan, _, _ = plan_processes(traced(), parse_devices("4xA100-40GB"), replace(asked, micro_batch=4))
    assert plan.num_microbatches == 8 and "no replicas: its rows depend on each other" in plan.reasons


class Remembers(Layer):
    """Keeps a tensor for the layer after it, or reads that."""

    def forward(self, x, kept, reads):
        if reads:
            return super().forward(x + kept.last)
        kept.last = self.norm(x)
        return super().forward(x)


class Kept(Decoder):
    """The last layer reads what the one before it keeps."""

    def __init__(self, layers):
        super().__init__(32, 0, 4, 64)
        self.layers = nn.ModuleList(Remembers(32, 4) for _ in range(layers))

    def forward(self, ids):
        x, kept = self.embed(ids), SimpleNamespace()
        for at, layer in enumerate(self.layers):
            x = layer(x, kept, at == len(self.layers) - 1)
        return self.head(self.norm(x))


def test_stages_that_share_what_a_layer_keeps_are_not_planned():
    model, devices = Kept(4), {f"cpu:{rank}": "1GiB" for rank in range(4)}
    wishes = {"inputs": {"ids": torch.zeros(2, 8, dtype=torch.long)}, "launch": "processes"}
    wishes["workload"] = Workload(batch_size=2, new_tokens=4)
    reads = r"layers\.3 uses what layers\.2 keeps"
    with pytest.raises(PlanError, match=rf"pp=4 is not possible: {reads}.* Plan with tp or dp, or with fewer stages\."):
        autoshard.plan(model, devices, mesh="pp=4", **wishes)
    plan = autoshard.plan(model, devices, strategy="pipeline", **wishes)
    assert plan.mesh.pp == 2 and any(re.search(f"no 3 stages, since {reads}", why) for why in plan.reasons)
    with pytest.raises(PlanError, match=r"no 2 stages, since layers\.1 uses what layers\.0 keeps"):
        autoshard.plan(Kept(2), dict(list(devices.items())[:2]), strategy="pipeline", **wishes)


def test_one_device_is_compared_with_nothing_that_takes_several():
    with torch.device("meta"):
        model = Decoder(64, 2)
    ids, cluster = torch.zeros(4, 16, dtype=torch.long, device="meta"), parse_devices("1xT4")
    workload = Workload(batch_size=4, sequence_length=16, mode="training")
    chosen = choose(
        model, {"ids": ids, "labels": ids}, workload, cluster, Asked(micro_batch=1),
    )  # fmt: skip
    assert chosen is not None and chosen.plan.num_microbatches == 4
    rows = compare_processes(chosen, cluster).alternatives
    assert [row.name for row in rows if row.plan is not None] == ["one device"]
    assert {row.refused for row in rows if row.plan is None} == {"it takes several devices, and there is one"}


class OneLength(Decoder):
    def forward(self, input_ids, labels=None):
        if input_ids.shape[1] != 48:
            raise ValueError("sequences have 48 tokens")
        return super().forward(input_ids, labels)


def test_a_model_that_takes_one_length_is_followed_with_that():
    with torch.device("meta"):
        model = OneLength(64, 2)
    ids = torch.zeros(2, 48, dtype=torch.long, device="meta")
    workload = Workload(batch_size=2, sequence_length=48, mode="training")
    followed = trace(model, {"input_ids": ids, "labels": ids}, workload)
    assert why_undivided(replace(followed, derived=True)) == ""


def test_the_estimate_of_a_plan_is_that_of_the_search():
    """Read back from its file, too."""
    cluster = parse_devices("16xA100-40GB")
    for work in (traced(), traced(training=False, new_tokens=64), traced(training=False)):
        plan, found, _ = plan_processes(work, cluster, Asked())
        again = Plan.from_json(plan.to_json())
        assert again == plan and found.best is not None
        figures = estimate_processes(again, work, cluster)
        assert bool(figures.prompt_seconds) == bool(work.workload.new_tokens)  # a forward is no answer
        assert figures.latency_seconds == pytest.approx(found.best.seconds)
        assert figures.tokens_per_second > 0
        used = [device for device in figures.devices if device.peak_bytes]
        assert len(used) == plan.mesh.size == len(plan.devices)
        kinds = ("parameter", "gradient", "optimizer", "activation", "cache", "transfer", "overhead", "buffer")
        for device in used:
            assert sum(getattr(device, f"{kind}_bytes") for kind in kinds) == device.peak_bytes


def test_stages_hold_every_tensor_once_and_end_with_the_head():
    work = traced()
    plan, _, _ = plan_processes(work, parse_devices("4xA100-40GB"), Asked(mesh={"pp": 4}, micro_batch=4))
    paths = [path for stage in plan.stages for path in stage.paths]
    assert len(paths) == len(set(paths)) and set(paths) == set(plan.placements)
    assert "embed" in plan.stages[0].paths and {"norm", "head"} <= set(plan.stages[-1].paths)
    names = {name for name, _ in work.model.named_parameters()}
    held = [name for name in names for path in paths if name == path or name.startswith(f"{path}.")]
    assert sorted(held) == sorted(names)


def test_the_stage_with_the_head_has_fewer_layers_where_that_is_faster():
    """A head of 32,768 words is as much as five layers of a width of 512; the plan's file tells as much."""
    ids, cluster = torch.zeros(2, 512, dtype=torch.long), parse_devices("4xA100-40GB")
    with torch.device("meta"):
        model = Decoder(512, 16, 8, 32768).to(torch.bfloat16)
    workload = autoshard.Workload(batch_size=64, mode="training")
    work = trace(model, {"ids": ids, "labels": ids.clone()}, workload)
    asked = Asked(mesh={"pp": 4}, schedule="1f1b")
    plan, found, task = plan_processes(work, cluster, asked)
    assert found.best is not None
    sizes = [len(plan.layers_of(stage)) for stage in plan.stages]
    assert sizes[-1] < sizes[0] == max(sizes) and sum(sizes) == 16
    even = price_recipe(task, replace(found.best.recipe, balanced_stages=False))
    assert found.best.seconds < even.seconds
    assert recipe_of(Plan.from_json(plan.to_json())) == found.best.recipe


def test_plan_takes_a_recipe_and_prints_the_mesh(tmp_path):
    """Through the public call: a model of a few million parameters on cards that are not here."""
    with torch.device("meta"):
        model = Decoder(512, 4, 8)
    ids = torch.zeros(2, 64, dtype=torch.long)
    plan = autoshard.plan(
        model, "4xH100-80GB", inputs={"ids": ids, "labels": ids}, mesh={"fsdp": 2, "tp": 2},
        workload=autoshard.Workload(batch_size=8, sequence_length=64, mode="training"),
    )  # fmt: skip
    assert prod(plan.mesh.degrees.values()) == 4 and "torchrun --nproc-per-node=4" in plan.reasons[-1]
    with pytest.raises(PlanError, match="for 4 processes, one per device, and this is none of torchrun's"):
        autoshard.apply(model, plan)


def test_what_no_devices_have_room_for_is_refused_with_what_processes_lack():
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    devices = parse_devices("2xH100-80GB")
    tight = devices.with_memory({device.name: 700 << 10 for device in devices.devices})
    with pytest.raises(PlanError, match="no recipe fits: the closest"):
        autoshard.plan(model, tight, inputs=torch.ones(2, 256))


def test_a_smaller_batch_is_named_only_where_samples_are_computed_together():
    """A batch of which one sample at a time has no room has none either where it has fewer samples."""
    for samples, why_not, together in ((1, "", 1), (8, "", 1), (8, "rows meet", 8)):
        task = task_on("1xT4", samples=samples)
        tight = replace(task.card, memory_bytes=2**20)
        task = replace(task, card=tight, limits=replace(task.limits, why_not=why_not))
        closest = search(task).closest
        assert closest is not None and closest.recipe.micro_batch == together
        assert not remedy(task) and ("a smaller batch" in take_less(closest)) == (together > 1)


def test_a_refusal_names_a_sequence_that_fits_and_why_the_given_one_is_so_large():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=8, vocab_size=512,
        max_position_embeddings=2**20, attn_implementation="eager",
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    devices = parse_devices("2xT4")

    def made(tokens):
        workload = autoshard.Workload(mode="training", batch_size=2, sequence_length=tokens)
        return choose(model, None, workload, devices, Asked(launch="processes"))

    with pytest.raises(PlanError, match=r"makes a number for every pair of tokens, \d+ GiB for each sample") as refused:
        made(65536)
    found = re.search(r"With (\d+) tokens \(--seq\) it fits: \w+=2, micro-batches of", str(refused.value))
    assert found is not None
    assert made(int(found[1])) is not None
    with pytest.raises(PlanError, match="no recipe fits"):
        made(2 * int(found[1]))


def test_of_unequal_devices_the_fastest_share_the_model():
    """Devices in turns are no faster than one of the fastest; ranks on several of these are. The others are named."""
    model = Decoder(width=512, layers=2)
    ids = torch.zeros(16, 256, dtype=torch.long)
    workload = autoshard.Workload(mode="training", batch_size=16, sequence_length=256)
    asked = Asked()
    given = model, {"ids": ids, "labels": ids}, workload
    found = choose(*given, parse_devices("4xH100-80GB,2xA100-40GB"), asked)
    assert found is not None and [one.name for one in found.plan.devices] == [f"cuda:{i}" for i in range(4)]
    assert "cuda:4 and 1 more (A100-SXM-40) are not used" in found.plan.reasons[0]
    assert choose(*given, parse_devices("1xH100-80GB,2xA100-40GB"), asked) is None
    with_cpu = choose(*given, parse_devices("4xH100-80GB,2xA100-40GB,cpu=64GiB"), asked)
    assert with_cpu is not None and with_cpu.plan.mesh == found.plan.mesh


def test_where_one_of_unequal_devices_answers_it_is_said_what_more_of_its_kind_would_do():
    with torch.device("meta"):
        model = Decoder(4096, 8, 32).to(torch.bfloat16)
    given = model, {"ids": torch.zeros(1, 256, dtype=torch.long)}, Workload(batch_size=1, new_tokens=64)
    found = choose(*given, parse_devices("2xH100-80GB,1xA100-40GB"), Asked())
    assert found is not None and len(found.plan.devices) == 1
    assert "cuda:2 (A100-SXM-40) is not used" in found.plan.reasons[0]
    assert any("tp=2 would take" in reason and "less than 2 times as fast" in reason for reason in found.plan.reasons)


@pytest.mark.parametrize(
    ("devices", "used"),
    [
        ("2xA100-80GB,2xA100-40GB", 4),  # one rate, a little less bandwidth
        ("1xA100-80GB,1xA100-40GB", 2),
        ("2xH100-80GB,2xT4", 2),
        ("4xA100-40GB,4xT4", 4),  # of less than half the rate, and through PCIe
        ("1xH100-80GB,2xT4", 0),
        ("1 host of 4xA100-40GB, 1 host of 2xA100-40GB", 4),
        ("2 hosts of 4xA100-40GB, 1 host of 2xA100-40GB", 8),
    ],
)
def test_devices_take_part_where_equal_parts_are_faster(devices, used):
    with torch.device("meta"):
        model = Decoder(width=512, layers=4)
    ids = torch.zeros(16, 1024, dtype=torch.long)
    workload = autoshard.Workload(mode="training", batch_size=16, sequence_length=1024)
    found = choose(model, {"ids": ids, "labels": ids}, workload, parse_devices(devices), Asked())
    assert used == (0 if found is None else len(found.plan.devices))
    if devices.startswith("2xA100-80GB"):
        assert any("the devices are unequal" in reason for reason in found.plan.reasons)


def test_stages_that_fit_only_with_fewer_layers_beside_the_head_are_found():
    """A mesh whose stages of equally many layers have no room was not looked at with others."""
    model = traced(256, 8)
    workload = replace(model.workload, mode="training", batch_size=8)
    asked = Asked(mesh={"pp": 4}, micro_batch=1, schedule="1f1b", recompute="full")
    task = make_task(replace(model, workload=workload, samples=8), parse_devices("4xA100-40GB"), asked)
    recipe = search(task).best.recipe
    needs = [price_recipe(task, replace(recipe, balanced_stages=balanced)).memory for balanced in (False, True)]
    assert needs[1].used < needs[0].used
    tight = replace(task, card=replace(task.card, memory_bytes=int(needs[0].used + needs[1].used) // 2))
    found = search(tight).best
    assert found is not None and found.recipe.balanced_stages and found.fits


@pytest.mark.parametrize(
    "devices",
    [
        "2xRTX4090",
        "2 hosts of 1xRTX4090",
        "2xRTX4090,1xRTX3090",
        pytest.param("1xRTX4090,1xRTX3090", marks=pytest.mark.slow),
    ],
)
def test_one_device_answers_unless_ranks_are_twice_as_fast_unequal_or_not(devices):
    """A slower card beside it changes nothing. The model is recorded once for all sets of devices."""
    ids = torch.zeros(1, 64, dtype=torch.long)
    workload = autoshard.Workload(batch_size=1, sequence_length=64, new_tokens=8)
    with torch.device("meta"):
        model = Decoder(width=2048, layers=8)
    with mock.patch("autoshard.search.choose.trace", wraps=trace) as recorded:
        found = choose(model, {"ids": ids}, workload, parse_devices(devices), Asked())
    assert found is not None and [one.name for one in found.plan.devices] == ["cuda:0"]
    assert any("tp=2 would take" in reason for reason in found.plan.reasons)
    assert recorded.call_count == 1


def running(model, inputs, devices=("cpu:0", "cpu:1"), **asked):
    """What is planned where a process runs for each device."""
    with mock.patch("autoshard.search.choose.count_processes", lambda: len(devices)):
        return autoshard.plan(model, dict.fromkeys(devices, "64MiB"), inputs=inputs, **asked)


@pytest.mark.parametrize(("strategy", "degree"), [("data-parallel", "data"), ("pipeline", "pp"), ("auto", "size")])
def test_processes_that_run_are_planned_as_a_mesh(strategy, degree):
    ids = torch.zeros(6, 16, dtype=torch.long)
    workload = autoshard.Workload(batch_size=6, mode="training")
    three = [f"cpu:{index}" for index in range(3)]
    plan = running(Decoder(64, 3, 4), {"ids": ids, "labels": ids}, three, strategy=strategy, workload=workload)
    assert plan.launch == "processes" and getattr(plan.mesh, degree) == 3 and len(plan.devices) == 3


class Mixed(nn.Sequential):
    def forward(self, x):
        return super().forward(x - x.mean(0, keepdim=True))


def test_a_strategy_that_is_named_is_refused_where_one_device_would_be_planned():
    def planned(strategy, model, rows=8, mode="training", **settings):
        return autoshard.plan(
            model, "4xH100-80GB", inputs=torch.ones(rows, 8), strategy=strategy, launch="processes",
            workload=Workload(mode=mode), **settings,
        )  # fmt: skip

    mixed, free = (kind(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for kind in (Mixed, nn.Sequential))
    for strategy in ("data-parallel", "ddp", "fsdp"):
        with pytest.raises(PlanError, match=f"{strategy} gives each replica its own samples, but .*mean"):
            planned(strategy, mixed)
        assert planned(strategy, mixed, assume_independent_rows=True).mesh.size > 1
        with pytest.raises(PlanError, match=f"{strategy} gives each replica its own samples, and the batch has 1"):
            planned(strategy, free, rows=1)
        assert planned(strategy, free).mesh.size > 1
        with pytest.raises(PlanError, match="no mesh of 4 devices goes with a batch of 5 samples"):
            planned(strategy, free, rows=5)
    with pytest.raises(PlanError, match="fsdp shards what is trained"):
        planned("fsdp", free, mode="inference")
    with pytest.raises(PlanError, match="no matrix of this model was found that ranks can share"):
        planned("column-parallel", nn.Sequential(nn.ReLU(), nn.LayerNorm(8)))
    assert planned("column-parallel", free).mesh.tp > 1


def test_processes_that_run_place_a_model_that_no_mesh_divides():
    model, workload = Mixed(nn.Linear(5, 7), nn.Linear(7, 3)), autoshard.Workload(batch_size=6)
    assert not running(model, torch.ones(6, 5), workload=workload).launch
    with pytest.raises(PlanError, match="2 stages need as many layers"):
        running(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), torch.ones(6, 5), strategy="pipeline")


def test_ranks_on_unequal_devices_have_the_part_of_the_weakest():
    """Whichever comes first, as on two of the slower kind with the memory of the smaller one."""
    ids = torch.zeros(32, 64, dtype=torch.long)
    asked = {"launch": "processes", "workload": autoshard.Workload(batch_size=32, mode="training")}
    model, inputs = Decoder(256, 4), {"ids": ids, "labels": ids}
    plans = [autoshard.plan(model, spec, inputs=inputs, **asked) for spec in ("1xT4,1xH100-80GB", "1xH100-80GB,1xT4")]
    for plan in plans:
        assert plan.mesh.size == 2 and any("each is planned with the least speed" in why for why in plan.reasons)
    equal = autoshard.plan(model, "2xT4", inputs=inputs, **asked)
    assert {plan.mesh for plan in plans} == {equal.mesh}


def test_matrices_of_a_model_without_repeated_layers_can_be_cut():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 16))
    workload = Workload(batch_size=8, mode="training")
    chosen = choose(
        model, torch.zeros(8, 16), workload, parse_devices("4xT4"), Asked(mesh={"tp": 2, "fsdp": 2}),
    )  # fmt: skip
    assert chosen is not None and (chosen.plan.mesh.tp, chosen.plan.mesh.fsdp) == (2, 2)


def test_training_in_float64_keeps_twice_as_much_and_computes_at_its_own_rate():
    found = []
    for dtype in (torch.float32, torch.float64):
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).to(dtype)
        traced = trace(model, torch.zeros(2, 512, dtype=dtype), Workload(mode="training", batch_size=8192))
        asked = Asked(precision="auto", mesh={"fsdp": 2})
        found.append(search(make_task(traced, parse_devices("2xL40S"), asked)).ranking[0])
    single, double = found
    weights = [one.memory.curve[0].bytes["weights"] for one in (single, double)]
    assert weights[1] == 2 * weights[0] and double.compute_seconds > 8 * single.compute_seconds


def test_experts_are_divided_among_replicas_only():
    limits = Limits(samples=8, tokens=64, layers=4, tensor=(1, 2, 4, 8), experts=8, attention=True)
    with pytest.raises(PlanError, match="tp=4,ep=4: experts are divided among replicas"):
        check_given(Asked(mesh={"tp": 4, "ep": 4}), limits, 4, training=True)
    with pytest.raises(SpecError, match="experts are divided among replicas: the 2 of dp, fsdp and cp"):
        Recipe(fsdp=2, tp=4, ep=4)
    check_given(Asked(mesh={"fsdp": 4, "tp": 2, "ep": 4}), limits, 8, training=True)


@pytest.mark.parametrize(("name", "divides"), [("llama", True), ("gpt2", False)])
def test_tokens_that_ranks_can_not_divide_are_counted_whole(name, divides):
    """Layers of the second ask how long their input is."""
    case, asked = by_name(name), Workload(mode="training", batch_size=2)
    model, inputs = case.model().train(), case.example()
    plan = autoshard.plan(model, "2xA100-80GB", inputs=inputs, workload=asked, launch="processes", mesh="tp=2")
    assert plan.sequence_parallel == divides
    profile = autoshard.profile(model, inputs, workload=asked)
    peaks = [
        autoshard.estimate(replace(plan, sequence_parallel=divided), profile).devices[0].activation_bytes
        for divided in (True, False)
    ]
    assert peaks[0] < peaks[1]
