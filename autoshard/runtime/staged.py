"""Keep only one's own stages of a pipeline: the rest of the model goes to meta, in place, and comes back on removal.

    rank 0   embed ██  layers.0 ██  layers.1 ░░  head ░░          ██ values   ░░ meta: names and shapes only
    rank 1   embed ░░  layers.0 ░░  layers.1 ██  head ██

Where several ranks share a stage, its parameters are then cut over them. Small buffers stay everywhere: tables and
masks decide which way a forward goes.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from autoshard.common.module_paths import above, is_below, parent
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Mesh, Plan
from autoshard.plan.placement import covering_entry
from autoshard.plan.sharding import Cut, Results
from autoshard.runtime.agreement import RankState, agree, digest_of, state_of_rank, together
from autoshard.runtime.answering import hook_answers, shared_by_all
from autoshard.runtime.around import take_off
from autoshard.runtime.clipping import forget_norms, watch_staged_norms
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cut_state import WholeState
from autoshard.runtime.cuts import Loader, apply_cuts, cut_record, remove_cuts
from autoshard.runtime.devices import META
from autoshard.runtime.dtensors import whole_of
from autoshard.runtime.groups import control_group, end_groups, grid_of, group_of, lines, shard_groups
from autoshard.runtime.launched import recompute_layers
from autoshard.runtime.moves import (
    SMALL_BUFFER,
    Undo,
    check_filled,
    move_tensors,
    named_tensors,
    on_meta,
    set_data,
    tied_groups,
)
from autoshard.runtime.pipeline_record import PipelineRecord, StagesHook, stages_of, written_down
from autoshard.runtime.refused import COPIES, MOVES, SHARE, allow_methods, refuse_methods, stand_in
from autoshard.runtime.sharded import Sharing, check_shardable, forget_whole
from autoshard.runtime.sharded_stages import lower, shard_stages, shards_stages, unshard_stages, withdraw


def apply_stages(
    model: nn.Module, plan: Plan, ranks: ProcessRanks, *, device: torch.device | None, problem: Exception | None = None,
    loader: Loader | None = None,
) -> nn.Module:  # fmt: skip
    """Keep the stages of a plan that are this process's; returns the same object. All ranks call it.

    `device`: where this process computes, None if `problem` says why this rank can't go on. `loader`: fills what this
    rank has of tensors on meta, at the end. Raises `PlanError`, `ApplyError`, or `RankError` if ranks don't agree; the
    model is then as it was.
    """
    tensors = named_tensors(model)
    record, device = _agreed(model, plan, ranks, device, problem, loaded=loader is not None)
    assert plan.mesh is not None
    tensor_ranks = _make_groups(plan.mesh, ranks, record)
    sharing = None
    if shards_stages(plan):
        sharing = Sharing(record.replicas or ranks, *shard_groups(plan.mesh, ranks, record.made))
        if record.replicas is None:
            sharing = replace(sharing, ranks=sharing.shared)
    if plan.mesh.data > 1:  # replicas draw random numbers of their own
        agree(record.across, RankState(random=state_of_rank(model, (), device).random), device=device)
    undo: Undo | None = None
    marked = StagesHook(record)
    try:
        with together(ranks):
            undo = move_tensors(tensors, _resting(record, tensors))
        with together(ranks):  # other ranks than those that cut the same stage must hear of it, too
            absent = {name for name in tensors if not record.has(name)}
            if tensor_ranks is not None:
                cuts = own_cuts(record)
                results = own_results(plan, cuts)
                apply_cuts(model, cuts, tensor_ranks, absent=absent, results=results, loader=loader)
            _hook(model, marked, tensors)
            recompute_layers(model, plan)
            if sharing is not None:
                marked.handles += shard_stages(model, record, sharing)
            if loader is not None:
                loader.fill_rest(model, cut_record(model), device, absent)
    except BaseException:
        withdraw(model, record)
        _unhook(model, marked)
        if cut_record(model) is not None:
            remove_cuts(model)
        if undo is not None:
            undo()
        end_groups(record.made, marked)
        raise
    forget_whole(record.replaced)
    marked.parameters = dict(model.named_parameters(remove_duplicate=False))
    if "skeleton" in record.extras:  # which knows of nothing that changes from now on
        record.extras["applied"] = {path: written_down(module) for path, module in model.named_modules()}
    return model


def _agreed(
    model: nn.Module, plan: Plan, ranks: ProcessRanks, device: torch.device | None, problem: Exception | None, *,
    loaded: bool,
) -> tuple[PipelineRecord, torch.device]:  # fmt: skip
    """Check that this process can have its stages, and that all ranks are about to do the same."""
    state, error, record = RankState(), problem, None
    try:
        if problem is None:
            assert device is not None
            tensors = named_tensors(model)
            check_stages(plan, tensors)
            if shards_stages(plan):
                check_shardable(model, plan)
            record = _record(model, plan, ranks, device, tensors)
            if not loaded:
                check_filled({name: tensor for name, tensor in tensors.items() if record.has(name)})
            state = _rank_state(model, plan, device)
            if not plan.workload.generates and (plan.cuts or (plan.launch and plan.workload.training)):
                record.extras["skeleton"] = skeleton_of(model, plan)
    except Exception as found:
        error = found
    agree(ranks, state, error, device)
    assert record is not None and device is not None
    return record, device


def _hook(model: nn.Module, marked: StagesHook, tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse calls of the model and of its modules, which a schedule makes, and let norms count the other stages."""
    record = marked.record
    marked.handles.append(model.register_forward_pre_hook(marked))
    watch_staged_norms(model, record)
    refuse_methods(model, *MOVES, *(COPIES if shards_stages(record.plan) else (SHARE,)))
    if record.plan.workload.generates:
        marked.handles += hook_answers(model, record)
    if not hasattr(model, "no_sync"):
        stand_in(model, "no_sync", contextlib.nullcontext)  # each step sums what its own micro-batches made
    pp_ranks: dict[str, set[int]] = {}
    for name, holders in record.holders.items():
        for path in above(name):
            pp_ranks.setdefault(path, set()).add(holders[0])
    record.around = tuple(path for path, of_path in pp_ranks.items() if len(of_path) > 1)
    for path, module in model.named_modules():
        marked.handles += StagesState(record, path).put_on(module)
        if path and path in pp_ranks and parent(path) in record.around and not record.plan.workload.generates:
            marked.handles.append(module.register_forward_pre_hook(marked.refuse))


def _unhook(model: nn.Module, marked: StagesHook) -> None:
    """Undo `_hook`, and recomputation."""
    forget_norms(model)
    take_off(model)
    allow_methods(model)
    for handle in marked.handles:
        handle.remove()


def remove_stages(model: nn.Module) -> nn.Module:
    """Bring the whole model back, with its present values, to where it was; all ranks call it.

    Raises `ApplyError` if nothing is applied, `RankError` if a rank is gone.
    """
    marked = stages_of(model)
    if marked is None:
        raise ApplyError("nothing to remove: this model is not divided into stages.")
    record = marked.record
    unshard_stages(model, record)
    if cut_record(model) is not None:
        remove_cuts(model)
    tensors = named_tensors(model)
    for names in tied_groups(tensors):
        _bring_back([tensors[name] for name in names], record, names[0])
    _unhook(model, marked)
    end_groups(record.made, marked)
    return model


def whole_value(value: torch.Tensor, name: str, record: PipelineRecord) -> torch.Tensor:
    """The value of a parameter or buffer on its owner's position; all ranks call it.

    What was registered after `apply` is each rank's own. Raises `ApplyError` where it was made of what others have.
    """
    if name not in record.holders:
        if value.is_meta:
            raise ApplyError(
                f"{name} was registered after autoshard.apply, and made of a tensor that another rank has. Call "
                "autoshard.remove(model), register it, and apply a plan that was made with it."
            )
        return value.detach()
    have = record.has(name) and not value.is_meta
    own = whole_of(value.detach()) if have else torch.empty(value.shape, dtype=value.dtype, device=record.device)
    sent = own.contiguous()
    record.across.broadcast(sent, record.owner(name))
    return sent


class StagesState(WholeState):
    """The same for a module of a model in stages: values of other stages come from there."""

    def __init__(self, record: PipelineRecord, path: str) -> None:
        super().__init__(record.across, path)
        self.record = record

    def whole(self, value: torch.Tensor, name: str) -> torch.Tensor:
        own = parent(name) == self.path  # what is further inside is whole already
        return whole_value(value, name, self.record) if own else value


def check_stages(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `PlanError` unless the stages of a plan have all tensors, and each of them some, on whole replicas."""
    assert plan.mesh is not None
    if plan.mesh.sharded and not plan.launch:
        raise PlanError(
            "a plan can't divide a model into stages and shard them over replicas, too: replicas of stages keep all "
            'of a stage. Plan with launch="processes", which does both.'
        )
    if not plan.stages or len(plan.stages) % plan.mesh.pp:
        raise PlanError(
            f"this plan has {len(plan.stages)} stages for {plan.mesh.pp} positions of a pipeline. Plan again "
            'with strategy="pipeline".'
        )
    stages = stage_of_tensors(plan, tensors)
    for number, stage in enumerate(plan.stages):
        if number not in set(stages.values()):
            listed = ", ".join(stage.paths[:3]) or "nothing"
            raise PlanError(
                f"stage {number} of the plan ({listed}) has no parameters. Plan with fewer stages than "
                f"{len(plan.stages)}."
            )


def stage_of_tensors(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Name of every parameter and buffer -> the stage whose paths have it. Raises `PlanError` if none has."""
    of_path = {path: str(number) for number, stage in enumerate(plan.stages) for path in stage.paths}
    found: dict[str, int] = {}
    for name in tensors:
        entry = covering_entry(of_path, name)
        if entry is None:
            raise PlanError(f"no stage of the plan has {name}. Plan this model again.")
        found[name] = int(of_path[entry])
    return found


def own_names(model: nn.Module, plan: Plan, ranks: ProcessRanks, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """The parameters and buffers of this process's stages. Raises `PlanError` if a plan is not for these tensors."""
    check_stages(plan, tensors)
    record = _record(model, plan, ranks, META, tensors)
    return {name for name in tensors if record.has(name)}


def _record(
    model: nn.Module, plan: Plan, ranks: ProcessRanks, device: torch.device, tensors: Mapping[str, torch.Tensor]
) -> PipelineRecord:
    mesh = plan.mesh
    assert mesh is not None
    replica, pp_rank, tensor_rank = mesh.place(ranks.rank)
    stages = stage_of_tensors(plan, tensors)
    holders: dict[str, tuple[int, ...]] = {}
    common = shared_by_all(model, plan) if plan.workload.generates else set()
    for names in tied_groups(tensors):
        places = [stage % mesh.pp for stage in sorted({stages[name] for name in names})]
        if not common.isdisjoint(names):
            places += range(mesh.pp)
        holders.update(dict.fromkeys(names, tuple(dict.fromkeys(places))))
    return PipelineRecord(
        plan=plan,
        ranks=ranks,
        across=ranks,
        replica=replica,
        pp_rank=pp_rank,
        tensor_rank=tensor_rank,
        device=device,
        stages=tuple(range(pp_rank, len(plan.stages), mesh.pp)),
        holders=holders,
        originals={name: tensor.device for name, tensor in tensors.items()},
    )


def _rank_state(model: nn.Module, plan: Plan, device: torch.device) -> RankState:
    """What all ranks must have alike; weights can be compared only where all are there."""
    state = state_of_rank(model, plan.cuts, device)
    alone = plan.mesh is not None and plan.mesh.data > 1
    partial = any(tensor.is_meta for tensor in named_tensors(model).values())
    weights, random = "" if partial else state.weights, () if alone else state.random
    return replace(state, plan=digest_of(plan), weights=weights, random=random)


def _make_groups(mesh: Mesh, ranks: ProcessRanks, record: PipelineRecord) -> ProcessRanks | None:
    """Make the groups along the mesh, and return the ranks that share this stage if several do; all ranks call it."""
    if mesh.size == mesh.pp:
        record.control = control_group([list(range(mesh.size))], ranks, record.across, record.made)
        return None
    grid = grid_of(mesh).reshape(mesh.data, mesh.pp, mesh.tp)
    across = lines(grid, 1)
    record.across = group_of(across, ranks, record.made)
    record.replicas = group_of(lines(grid, 0), ranks, record.made) if mesh.data > 1 else None
    record.control = control_group(across, ranks, record.across, record.made)
    return group_of(lines(grid, 2), ranks, record.made) if mesh.tp > 1 else None


def own_cuts(record: PipelineRecord) -> tuple[Cut, ...]:
    """The cuts of a plan in the stages of this process. Raises `PlanError` for a block that several stages have."""
    plan = record.plan
    paths = {path: number for number, stage in enumerate(plan.stages) for path in stage.paths}
    found: list[Cut] = []
    for cut in plan.cuts:
        blocks = []
        for block in cut.blocks:
            stages = {number for path, number in paths.items() if is_below(path, block) or is_below(block, path)}
            if len(stages) != 1:
                raise PlanError(
                    f"{block or 'the model'} is cut over ranks and is in {len(stages)} stages. Plan again: stages "
                    "begin and end between such blocks."
                )
            if stages <= set(record.stages):
                blocks.append(block)
        if blocks:
            found.append(replace(cut, blocks=tuple(blocks)))
    return tuple(found)


def own_results(plan: Plan, cuts: Sequence[Cut]) -> tuple[Results, ...]:
    """What a plan knows of modules around blocks, and of the blocks of these cuts, which other ranks don't have."""
    blocks = {block for cut in plan.cuts for block in cut.blocks}
    others = blocks - {block for cut in cuts for block in cut.blocks}
    # parts: only a cut of the whole model leaves them between modules, and that is in several stages
    rows = ((row, tuple(path for path in row.modules if path not in others)) for row in plan.results)
    return tuple(replace(row, modules=modules, parts=()) for row, modules in rows if modules)


def skeleton_of(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of a model without its weights, which computes in the dtype of a plan; small buffers are there."""
    skeleton = on_meta(model)
    lower(skeleton, plan)
    return skeleton


def _resting(record: PipelineRecord, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.device]:
    """Where every tensor is while the plan is applied."""
    parameters = {name for name, tensor in tensors.items() if isinstance(tensor, nn.Parameter)}

    def stays(name: str) -> bool:
        small = name not in parameters and tensors[name].numel() <= SMALL_BUFFER and not record.plan.workload.generates
        return record.has(name) or (small and not tensors[name].is_meta)

    return {
        name: record.device if any(stays(one) for one in names) and not tensors[name].is_meta else META
        for names in tied_groups(tensors)
        for name in names
    }


def _bring_back(tensors: list[torch.Tensor], record: PipelineRecord, name: str) -> None:
    """Give tensors that share one storage the values of their owner, where they were before."""
    objects = list({id(tensor): tensor for tensor in tensors}.values())
    first = objects[0]
    target = record.originals.get(name, record.device)
    if len(objects) == 1:
        value = whole_value(first, name, record).to(target)
        set_data(first, value if value is not first.detach() else value.clone())
        return
    size = first.untyped_storage().nbytes() // first.element_size()
    whole = whole_value(first.detach().as_strided((size,), (1,), 0), name, record).to(target)
    for part in objects:
        set_data(part, whole.view(part.dtype).as_strided(part.shape, part.stride(), part.storage_offset()))
