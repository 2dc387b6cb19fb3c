"""Plans for one process per device: the best recipe for a model on a cluster of equal devices, written as a Plan.

run of two samples ─▶ work ─┐
cluster ─▶ card, topology ──┼─▶ search ─▶ recipe ─▶ Plan (degrees, stages, micro-batches, recomputation, precision)
request ─▶ limits, given ───┘
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from autoshard.axes.tokens import can_divide_tokens
from autoshard.capture.graph import ModelGraph
from autoshard.capture.latest import Latest
from autoshard.check.stages import check_apart
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.cluster.topology import computing_devices, topology_of, unequal_reason, uneven_reason
from autoshard.common.module_paths import parent
from autoshard.common.sizes import format_seconds
from autoshard.engine.memory import RecipeEstimate
from autoshard.engine.precision import STORED_BYTES, inference_precision, training_precision
from autoshard.engine.price import layers_of_stages, split_stages
from autoshard.engine.pricer import needs_processes
from autoshard.engine.recipe import Recipe, Recompute, Stack
from autoshard.engine.timing import weakest_card
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Mesh, Plan, Stage
from autoshard.plan.batching import ASSUMED
from autoshard.plan.choices import Objective
from autoshard.plan.placement import covering_entry
from autoshard.plan.workload import Workload
from autoshard.runtime.answering import stage_modules
from autoshard.runtime.collectives import count_processes
from autoshard.runtime.stage_tensor import INSTEAD
from autoshard.search.best import AS_GOOD, Searched, SearchTask, on_one_device, search
from autoshard.search.candidates import on_mesh
from autoshard.search.gathered import gathered_alone
from autoshard.search.limits import Asked, check_given, limits_of
from autoshard.search.reasons import explain, in_words, refuse, remedy, shown_mesh, take_less
from autoshard.search.traced import Traced, trace
from autoshard.strategies.paths import collapse
from autoshard.strategies.refusal import pairs_of_tokens

_DIVIDES_TOKENS = Latest[bool]()
WORTH_SAYING = 0.95
"""What takes a larger part of the time is not offered as faster."""
STRATEGY_AXES: dict[str, tuple[str, ...]] = {
    "auto": ("dp", "fsdp", "tp", "pp", "cp", "ep"),
    "hybrid": ("dp", "fsdp", "tp", "pp", "cp", "ep"),
    "data-parallel": ("dp", "fsdp"),
    "ddp": ("dp",),
    "fsdp": ("dp", "fsdp"),
    "column-parallel": ("tp", "ep"),
    "pipeline": ("pp",),
}


def make_task(traced: Traced, cluster: Cluster, asked: Asked) -> SearchTask:
    """State what is searched. Raises `PlanError` where hosts are unequal or what was fixed makes no sense.

    Ranks have equal parts, so of unequal devices each is taken for the weakest.
    """
    topology = topology_of(cluster)
    if topology is None:
        raise PlanError(
            f"a process per device is planned for hosts of equally many devices, and {uneven_reason(cluster)}. "
            'Name as many of each, or plan with strategy="balanced" for one process.'
        )
    training = traced.workload.training
    stored = dtype_of(traced.graph) if asked.dtype == "auto" else asked.dtype
    if training and asked.dtype in STORED_BYTES:
        raise SpecError(
            f"weights of {asked.dtype} are for answers: training keeps at least 16 bits of each. Leave dtype out; "
            "--precision pure (precision=) keeps weights, gradients and moments of 16 bits."
        )
    if training:
        _, precision = training_precision(asked.precision, stored, traced.workload.optimizer)
    else:
        precision = inference_precision(stored)
    compute = {4: "float32", 8: "float64"}.get(precision.compute, "bfloat16")
    card = weakest_card(computing_devices(cluster), compute)
    card = replace(card, memory_bytes=int(card.memory_bytes * (1 - asked.reserve)))
    given = replace(asked, axes=STRATEGY_AXES[asked.strategy])
    widest = topology.devices if traced.workload.new_tokens else topology.devices_per_host
    together = _why_not_staged(traced, cluster) if traced.workload.generates else {}
    why_not = asked.why_undivided or ""
    limits = limits_of(traced.work, traced.samples, widest=widest, why_not=why_not, why_not_staged=together)
    ranks = next((degree for degree in limits.tensor if degree > 1), 1)
    if training and ranks > 1:
        divides = _DIVIDES_TOKENS.of(traced.graph, ranks, lambda: can_divide_tokens(traced.graph, ranks))
        limits = replace(limits, divides_tokens=divides)
    check_given(given, limits, topology.devices, training=training)
    return SearchTask(
        work=traced.work, card=card, topology=topology, limits=limits, given=given, precision=precision,
        stack="compiled" if is_compiled(asked, traced.workload) else "eager", training=training,
        prompt_tokens=traced.work.tokens, new_tokens=traced.workload.new_tokens,
    )  # fmt: skip


def _why_not_staged(traced: Traced, cluster: Cluster) -> dict[int, str]:
    """Number of stages -> what one of them keeps for another, of all numbers that can't answer.

    What goes with a stage for each layer goes with fewer.
    """
    found: dict[int, str] = {}
    layers = len(traced.work.layers)
    for count in range(layers, 1, -1):
        recipe = Recipe(pp=count)
        stages, _ = stages_of(traced, recipe, cluster.devices[:1] * count)
        try:
            check_apart(traced.graph, stage_modules(traced.model, stages, count))
        except PlanError as error:
            found[count] = str(error).removesuffix(f". {INSTEAD}")
            continue
        if count == layers:
            break
    return found


def dtype_of(graph: ModelGraph) -> str:
    """The dtype that most bytes of parameters have, by name."""
    totals: dict[torch.dtype, int] = {}
    for tensor in graph.tensors:
        if tensor.kind == "parameter":
            totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
    return str(max(totals, key=lambda one: totals[one], default=torch.float32)).removeprefix("torch.")


def plan_processes(traced: Traced, cluster: Cluster, asked: Asked) -> tuple[Plan, Searched, SearchTask]:
    """Plan with a process per device. Raises `PlanError` with the closest recipe and what would help."""
    task = make_task(traced, cluster, asked)
    found = search(task)
    if found.best is None:
        raise PlanError(refuse(task, found, lambda: _with_fewer_tokens(traced, cluster, asked)))
    plan = write_plan(traced, cluster, asked, found.best.recipe)
    *why, start = explain(task, found)
    if unequal := unequal_reason(cluster):
        why.append(f"{unequal}; ranks have equal parts, so each is planned with the least speed and memory of all")
    more = tuple(_if_changed(traced, cluster, asked, task, found.best))
    single = search(on_one_device(task)).best if asked.named and task.goal != "memory" else None
    if single is not None and single.seconds * AS_GOOD < found.best.seconds:
        why.insert(1, f"one device alone would take {format_seconds(single.seconds)}: {asked.strategy} was asked for")
    divided = plan.num_microbatches > 1 or (plan.mesh is not None and plan.mesh.data > 1)
    word = [ASSUMED] if asked.assume_independent_rows and divided else []
    return replace(plan, reasons=(*word, *why, *more, start)), found, task


def _with_fewer_tokens(traced: Traced, cluster: Cluster, asked: Asked) -> str:
    """The longest of a half of the tokens, a quarter and so on with which it fits, or that fewer tokens do not help."""
    tokens = traced.work.tokens if traced.derived else 0
    lengths = [tokens >> times for times in range(1, tokens.bit_length() - 9)]  # 512 and more
    said, longest, shortest = "", 0, len(lengths)
    while longest < shortest:
        middle = (longest + shortest) // 2
        workload = replace(traced.workload, sequence_length=lengths[middle])
        task = make_task(trace(traced.model, None, workload), cluster, asked)
        best = search(task).best
        if best is not None:
            said, shortest = f"With {lengths[middle]} tokens (--seq) it fits: {in_words(task, best)}", middle
            continue
        longest = middle + 1
        if longest == len(lengths):
            said = f"Shorter sequences alone do not help: with {lengths[middle]} tokens: {remedy(task) or take_less()}"
    return f"{pairs_of_tokens(traced.graph)}{said}"


def _if_changed(
    traced: Traced, cluster: Cluster, asked: Asked, task: SearchTask, best: RecipeEstimate
) -> Iterator[str]:
    """What it takes if kernels compute in 16 bits, where weights have 32, and if the user vouches for the batch."""
    changes: list[tuple[str, Asked]] = []
    if traced.workload.training and asked.precision in ("", "auto") and best.recipe.precision.compute == 4:
        word = "computed in bfloat16, with weights in float32 (--precision mixed)"
        changes.append((word, replace(asked, precision="mixed")))
    if task.limits.why_not and task.devices > 1 and task.limits.samples > 1:
        word = "with samples of its own for each replica (--assume-independent-rows)"
        changes.append((word, replace(asked, why_undivided="")))
    for word, changed in changes:
        other = search(make_task(traced, cluster, changed)).best
        if other is not None and other.seconds < WORTH_SAYING * best.seconds:
            takes = f"takes {format_seconds(other.seconds)} as {shown_mesh(other.recipe)}"
            yield f"{word}, {traced.workload.unit} {takes}"


def write_plan(traced: Traced, cluster: Cluster, asked: Asked, recipe: Recipe) -> Plan:
    """Write down a recipe for a model on the first devices of a cluster."""
    devices = computing_devices(cluster)[: recipe.devices]
    stages, placements = stages_of(traced, recipe, devices)
    trained = traced.workload.training and (recipe.devices > 1 or recipe.recompute != "none")
    layers = _gathered(traced) if trained and (recipe.pp > 1 or not stages) else []
    name = dtype_of(traced.graph) if asked.dtype == "auto" else asked.dtype
    degrees: dict[str, Any] = dict(recipe.mesh)
    if traced.workload.training:
        name = training_precision(asked.precision, name)[0]
    return Plan(
        strategy=strategy_of(recipe),
        objective=asked.objective,
        workload=traced.workload,
        devices=tuple(map(plan_device, devices)),
        placements=placements,
        num_microbatches=recipe.num_microbatches,
        schedule=recipe.schedule if recipe.pp > 1 and not traced.workload.new_tokens else "none",
        fingerprint=traced.graph.fingerprint,
        mesh=Mesh(**degrees, stages_outermost=recipe.pp > 1 and recipe.replicas > 1),  # as they are priced
        stages=stages,
        layers=tuple(layers),
        launch="processes" if recipe.devices > 1 else "one-process",
        micro_batch=recipe.micro_batch,
        recompute=recipe.recompute,
        kept_layers=recipe.kept_layers,
        precision=name,
        compiled=is_compiled(asked, traced.workload),
        divided_outputs=recipe.divided_outputs,
        sequence_parallel=recipe.sequence_parallel,
    )


def is_compiled(asked: Asked, workload: Workload) -> bool:
    """Whether modules are compiled: as asked, else where new tokens are generated."""
    return bool(workload.new_tokens) if asked.compiled is None else asked.compiled


def strategy_of(recipe: Recipe) -> str:
    """The name of a recipe's strategy: what is larger than 1; "sequential" for one device."""
    kinds = {
        "data-parallel": recipe.dp * recipe.fsdp > 1,
        "pipeline": recipe.pp > 1,
        "column-parallel": recipe.tp > 1 or recipe.ep > 1,
        "hybrid": recipe.cp > 1,
    }
    used = [name for name, yes in kinds.items() if yes]
    return used[0] if len(used) == 1 else "hybrid" if used else "sequential"


def stages_of(traced: Traced, recipe: Recipe, devices: Sequence[Device]) -> tuple[tuple[Stage, ...], dict[str, str]]:
    """The stages of a pipeline with the device of each; of trained replicas, the layers, gathered one at a time."""
    first = {"": devices[0].name}
    if recipe.pp == 1:
        layers = _gathered(traced) if recipe.replicas > 1 and traced.workload.training else []
        again = len(layers) - recipe.kept_layers if recipe.recompute == "full" else 0
        return tuple(Stage(paths=(path,), recompute=number < again) for number, path in enumerate(layers)), first
    count = recipe.pp * recipe.stages_per_rank
    stage_of_layer = [
        index for index, stage in enumerate(split_stages(traced.work, recipe)) for block, n in stage if block.layer
        for _ in range(n)
    ]  # fmt: skip
    places = dict(zip(traced.work.layers, stage_of_layer, strict=True))
    stage_of = {name: str(stage) for name, stage in _tensor_stages(traced.graph, places, count).items()}
    placed = collapse(stage_of, traced.graph)
    paths: list[list[str]] = [[] for _ in range(count)]
    for path, stage in placed.items():
        paths[int(stage)].append(path)
    per_rank = recipe.dp * recipe.fsdp * recipe.cp * recipe.tp
    heads = [devices[rank * per_rank].name for rank in range(recipe.pp)]
    placements = {path: heads[index % recipe.pp] for index, own in enumerate(paths) for path in own}
    return tuple(Stage(paths=tuple(own), recompute=recipe.recompute == "full") for own in paths), placements


def _gathered(traced: Traced) -> list[str]:
    """The layers whose parameters are gathered as one, and which are recomputed as one.

    Both is done around the call of a layer: not of a list of modules that are called one by one.
    """
    called = {call.path for call in traced.graph.calls}
    return gathered_alone(traced.graph, [path for path in traced.work.layers if path in called])


def _tensor_stages(graph: ModelGraph, places: dict[str, int], count: int) -> dict[str, int]:
    """Stage of every parameter and buffer: that of its layer, else of the next layer after it is read, else the last.

    One with several names, an embedding that is the head as well, is where the module of each name reads it.
    """
    reader: dict[int, int] = {}  # what is read -> the stage then; the walk goes back to the first that reads it
    by_module: dict[tuple[int, str], int] = {}
    stage = count - 1
    for op in reversed([one for one in graph.ops if not one.backward]):
        path = graph.calls[op.call].path
        layer = covering_entry(places, path)
        stage = stage if layer is None else places[layer]
        for value in op.inputs:
            reader[value] = by_module[value, path] = stage
    stages: dict[str, int] = {}
    for tensor in graph.tensors:
        layer = covering_entry(places, tensor.name)
        outside = by_module.get((tensor.value, parent(tensor.name)), reader.get(tensor.value, 0))
        stages[tensor.name] = outside if layer is None else places[layer]
    return stages


def for_workload(plan: Plan, workload: Workload) -> Plan:
    """A plan for processes with another batch, length or number of new tokens, everything else as it is.

    Raises `PlanError` where its micro-batches do not make up the batch, or it was made for the other mode.
    """
    assert plan.mesh is not None
    if workload.training != plan.workload.training:
        was, wanted = plan.workload.mode, workload.mode
        raise PlanError(f"the plan is for {was}, and {wanted} needs one of its own. Plan again with this workload.")
    if not workload.training or workload.batch_size == plan.workload.batch_size:
        return replace(plan, workload=workload)
    at_once = plan.mesh.data * plan.micro_batch
    count, left = divmod(workload.batch_size or at_once, at_once)
    if left or not count:
        raise PlanError(
            f"the plan computes {at_once} samples at once, and a batch of {workload.batch_size} is no multiple "
            "of that: give one that is, or plan again."
        )
    return replace(plan, workload=workload, num_microbatches=count)


def as_launched(plan: Plan, graph: ModelGraph) -> Plan:
    """Return an older version's plan over a mesh as one for processes, where it runs in them; others as they are."""
    if plan.launch or plan.mesh is None:
        return plan
    mesh = plan.mesh
    if count_processes() < 2 and not needs_processes(plan, (device.host for device in plan.devices)):
        return plan
    name, rows = dtype_of(graph), plan.workload.batch_size or (plan.batch.size if plan.batch else 1)
    if plan.workload.training:
        name = "pure" if name in ("bfloat16", "float16") else "full"
    micro_batch = max(1, rows // (mesh.data * plan.num_microbatches))
    again = "full" if any(stage.recompute for stage in plan.stages) else "none"
    return replace(plan, launch="processes", micro_batch=micro_batch, precision=name, recompute=again)


def asked_of(plan: Plan) -> Asked:
    """What was asked for a plan, as far as it says; its mesh may have been given or found."""
    precision, dtype = (plan.precision, "auto") if plan.workload.training else ("auto", plan.precision)
    return Asked(
        objective=cast(Objective, plan.objective), precision=precision, dtype=dtype, compiled=plan.compiled,
        divided_outputs=plan.divided_outputs,
    )  # fmt: skip


def recipe_of(plan: Plan) -> Recipe:
    """The recipe that a plan for processes says."""
    assert plan.mesh is not None
    training, layers, pp = plan.workload.training, len(plan.layers), plan.mesh.pp
    per_rank = max(1, len(plan.stages) // pp) if pp > 1 else 1
    if training:
        _, precision = training_precision(plan.precision, "", plan.workload.optimizer)
    else:
        precision = inference_precision(plan.precision)
    even = layers_of_stages(layers, pp, per_rank, layers / (pp * per_rank))
    own = [len(plan.layers_of(stage)) for stage in plan.stages]
    return on_mesh(
        plan.mesh,
        micro_batch=plan.micro_batch,
        num_microbatches=plan.num_microbatches,
        schedule=plan.schedule if plan.schedule != "none" else "gpipe",
        stages_per_rank=per_rank,
        recompute=cast(Recompute, plan.recompute),
        kept_layers=plan.kept_layers,
        balanced_stages=pp > 1 and layers > 0 and own != even,
        stack=cast(Stack, "compiled" if plan.compiled else "eager"),
        precision=precision,
        divided_outputs=plan.divided_outputs,
        sequence_parallel=plan.sequence_parallel,
    )
