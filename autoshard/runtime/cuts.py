"""Cut a model over ranks, in place, and undo it.

apply_cuts:   check, agree with the other ranks  ──▶  cut tensors, set scales, install actions, all or nothing
remove_cuts:  actions off, old integers back     ◀──  put the tensors together again, with the values they have now

`ranks` is `ProcessRanks.of(group)`, one process per device, or `LocalRanks.of(devices)`, all of them in this process.
"""

import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from autoshard import torch_private
from autoshard.common.fingerprint import fingerprint
from autoshard.common.model_state import empty_caches, forget_tensors
from autoshard.common.module_paths import above, join, parent
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import map_tensors, tensors_in
from autoshard.plan.sharding import Cut, Results, Scale
from autoshard.runtime.actions import check, install
from autoshard.runtime.agreement import RankState, SameInputs, agree, state_of_rank, together
from autoshard.runtime.around import NOT_EXPORTABLE
from autoshard.runtime.clipping import forget_norms, refuse_scaled_losses, watch_norms
from autoshard.runtime.collectives import ProcessRanks, Ranks
from autoshard.runtime.cut_state import CutRecord, CutState
from autoshard.runtime.devices import CPU, META
from autoshard.runtime.draws import watch_draws
from autoshard.runtime.function_calls import leave_interrupted
from autoshard.runtime.given import Given
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.moves import Undo, check_filled, named_tensors, revert
from autoshard.runtime.outsiders import check_not_shared, refuse_changes, refuse_nested, sharded_inside
from autoshard.runtime.partial import SumGradient, find_partial, sum_gathered, sum_gradients
from autoshard.runtime.rank_tensor import OF_RANKS, RanksMode, RankTensor, collect, give, running
from autoshard.runtime.refused import allow_methods, keep_experts
from autoshard.runtime.results import watch_results
from autoshard.runtime.scales import find_scales, restore, set_scales
from autoshard.runtime.slices import cut_tensors, find_cut_tensors, merge_tensors
from autoshard.runtime.steps import Memo, Step, Tokens


class Loader(Protocol):
    """Gives values to a model that is cut while its tensors are on meta."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for one part."""

    def fill(self, model: nn.Module, record: "CutRecord") -> None:
        """Fill the parts of this process's ranks. No other rank may be waited for."""

    def fill_rest(
        self, model: nn.Module, record: "CutRecord | None", device: torch.device, absent: Collection[str] = ()
    ) -> None:
        """Fill what this rank has of a model that is divided, but for `absent`. No other rank may be waited for."""


def apply_cuts(
    model: nn.Module,
    cuts: Sequence[Cut],
    ranks: Ranks,
    *,
    device: torch.device | str | None = None,
    shapes_only: bool = False,
    problem: Exception | None = None,
    loader: Loader | None = None,
    absent: Collection[str] = (),
    results: Sequence[Results] = (),
) -> nn.Module:
    """Cut the parameters of a model over `ranks` and let its forward add up what it must; returns the same object.

    All ranks call it, with the same whole model and the same cuts. `device`: where this process computes, None where
    the model is. `shapes_only`: the model may be on meta, since nobody wants its values. `problem`: why this rank can't
    go on, if that is known already: it is raised, and the other ranks learn of it. `loader`: what gives values to
    tensors on meta; the CPU counts as where they were. `absent`: those that are not this rank's, so may be. `results`:
    as in a plan; without them, what modules give is not looked at. Raises `PlanError` if the cuts don't belong to the
    model, `RankError` if the ranks don't agree, and `ApplyError` if it can't be done; the model is then as it was.
    """
    ready: _Ready | None = None
    state, error = RankState(), problem
    target = None if device is None else torch.device(device)
    try:
        if problem is None:
            ready = _prepare(model, tuple(cuts), ranks, shapes_only or loader is not None, absent)
            ready.record.output_device = target
            state = RankState() if shapes_only else state_of_rank(model, ready.record.cuts, target)
    except Exception as found:
        error = found
    agree(ranks, state, error, target)
    assert ready is not None
    log: list[Undo] = []
    try:
        with together(ranks):
            allocate = None if loader is None else loader.allocate
            cut_tensors(model, ready.record.tensors, ranks, target, log, allocate)
            if loader is not None:
                loader.fill(model, ready.record)
                empty = [name for name, place in ready.record.devices.items() if place == META and name not in absent]
                ready.record.devices.update(dict.fromkeys(empty, CPU))
            if isinstance(ranks, LocalRanks):
                ready.record.caches = empty_caches(model)
            set_scales(model, ready.scales, ranks.rank or 0, ready.record.scales)
            _install(model, ready, results, staged=bool(absent))
    except BaseException:
        _undo(model, ready.record, log)
        raise
    return model


def remove_cuts(model: nn.Module) -> nn.Module:
    """Put the whole parameters back, with the values they have now, and take all hooks off; all ranks call it.

    Raises `ApplyError` if nothing is cut.
    """
    record = cut_record(model)
    if record is None:
        raise ApplyError("nothing to remove: this model is not cut.")
    log: list[Undo] = []
    try:
        merge_tensors(model, record.tensors, record.ranks, record.devices, log)
    except BaseException:
        revert(log)
        raise
    _undo(model, record, [])
    return model


def let_gather(model: nn.Module, averaged: bool = False) -> list[Any]:
    """Prepare a cut model, whose parameters are now sharded as well, for their being gathered; returns handles.

    `averaged`: gradients become means over the ranks of the cuts, too.
    """
    record = cut_record(model)
    if record is None:
        return []
    record.gathered = True
    return sum_gathered(model, record.partial, record.ranks, averaged)


def cut_record(model: nn.Module) -> CutRecord | None:
    """What was cut in a model, None if nothing was."""
    return next((h.record for h in torch_private.forward_pre_hooks(model) if isinstance(h, Arrive)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ready:
    """What was checked and can be done: steps by module path, memos by block, and the integers to set."""

    record: CutRecord
    steps: dict[str, list[Step]]
    memos: dict[str, Memo]
    scales: list[tuple[str, Scale]]


def _prepare(
    model: nn.Module, cuts: tuple[Cut, ...], ranks: Ranks, shapes_only: bool, absent: Collection[str] = ()
) -> _Ready:
    """Check everything there is to check; the model is not touched."""
    if cut_record(model) is not None:
        raise ApplyError("this model is cut already. Call autoshard.remove(model) first.")
    tensors = named_tensors(model)
    if not shapes_only:
        check_filled({name: tensor for name, tensor in tensors.items() if name not in absent})
    for cut in cuts:
        _check_cut(cut, ranks)
    found = find_cut_tensors(model, cuts)
    if isinstance(ranks, ProcessRanks | LocalRanks):  # a check cuts copies of its own
        check_not_shared(model, tensors, found)
    record = CutRecord(
        cuts=cuts,
        ranks=ranks,
        fingerprint=fingerprint(model),
        tensors=found,
        devices={name: tensor.device for name, tensor in tensors.items()},
        partial=find_partial(cuts, tensors, found),
    )
    if isinstance(ranks, ProcessRanks | LocalRanks):  # a check cuts copies of its own, without hooks
        _check_not_hooked(tensors, {*record.tensors, *record.partial})
    steps, memos = _find_steps(model, cuts, ranks)
    return _Ready(record=record, steps=steps, memos=memos, scales=find_scales(model, cuts))


def _check_not_hooked(tensors: Mapping[str, torch.Tensor], cut: Collection[str]) -> None:
    """Raise `ApplyError` for a hook on the gradient of a parameter of which each rank has a part."""
    for name in cut:
        hooked = any(not isinstance(hook, SumGradient) for hook in torch_private.gradient_hooks(tensors[name]))
        if hooked or torch_private.has_accumulation_hooks(tensors[name]):
            raise ApplyError(
                f"{name} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), and the "
                "plan cuts it: the hook would see one rank's part of the gradient. Take the hook off, or place whole "
                'modules (strategy="balanced").'
            )


def _check_cut(cut: Cut, ranks: Ranks) -> None:
    if cut.degree != ranks.size:
        raise PlanError(
            f"the plan cuts {cut.title or 'an axis'} over {cut.degree} ranks, and {ranks.size} run. "
            f"Start {cut.degree} processes (torchrun --nproc-per-node {cut.degree}), or plan for {ranks.size}."
        )
    if sum(cut.shares) != cut.size or min(cut.shares) < 0:
        raise PlanError(
            f"the shares {cut.shares} of a cut do not add up to its {cut.size} slices. Make the plan again."
        )
    if isinstance(ranks, LocalRanks) and len(set(cut.shares)) > 1:
        raise PlanError(
            f"the plan cuts {cut.title or 'an axis'} unevenly ({':'.join(map(str, cut.shares))}), which takes one "
            "process per rank: start it with torchrun, or plan for a number of devices that divides the axis."
        )
    if any(len(scale.local) != cut.degree for scale in cut.scales):
        raise PlanError("a scale of the plan does not have one value per rank. Make the plan again.")


def _find_steps(model: nn.Module, cuts: Sequence[Cut], ranks: Ranks) -> tuple[dict[str, list[Step]], dict[str, Memo]]:
    """Module path -> what happens there; block -> what its steps remember of a forward."""
    modules = dict(model.named_modules(remove_duplicate=False))
    memos: dict[str, Memo] = {}
    tokens = Tokens()
    steps: dict[str, list[Step]] = {}
    for cut in cuts:
        for block in cut.blocks:
            if block not in modules:
                raise PlanError(f"the plan cuts {block!r}, which this {type(model).__name__} does not have.")
            memo = memos.setdefault(block, Memo(tokens))
            for action in cut.actions:
                path = join(block, action.module)
                where = f"{action.function} in {path or 'the model'}" if action.function else path or "the model"
                if path not in modules:
                    raise PlanError(f"the plan acts at {path!r}, which this {type(model).__name__} does not have.")
                check(action, where)
                try:
                    steps.setdefault(path, []).append(Step(action, cut.shares, ranks, memo, where))
                except ValueError as error:
                    raise PlanError(
                        f"the plan has an action at {where} with something that is no axis: {error}"
                    ) from None
    return steps, memos


def _install(model: nn.Module, ready: _Ready, results: Sequence[Results], *, staged: bool) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    handles = ready.record.handles
    for path, steps in ready.steps.items():
        handles += install(modules[path], steps)
    for tokens in {memo.tokens for memo in ready.memos.values()}:
        handles.append(model.register_forward_pre_hook(tokens.begin, with_kwargs=True))
        handles.append(model.register_forward_hook(tokens.end, always_call=True))
    for block, memo in ready.memos.items():
        for path in {block, ""}:  # a block may be a container that is never called itself
            handles.append(modules[path].register_forward_hook(memo.forget, always_call=True))
    for path in _may_meet_nested(ready):
        handles.append(modules[path].register_forward_pre_hook(refuse_nested, prepend=True))
    handles += watch_draws(model, ready.record.cuts, ready.record.ranks)
    handles += watch_results(model, ready.record, results, staged=staged)
    arrive = Arrive(ready.record, _find_parts(modules, ready.record))
    handles.append(model.register_forward_pre_hook(arrive, with_kwargs=True, prepend=True))
    own_samples = any(action.kind == "dispatch" for cut in ready.record.cuts for action in cut.actions)
    if isinstance(ready.record.ranks, ProcessRanks) and not own_samples:
        same = SameInputs(ready.record.ranks)
        handles.append(model.register_forward_pre_hook(same, with_kwargs=True, prepend=True))
    if isinstance(ready.record.ranks, LocalRanks):
        inside = {path for block in ready.memos if block for path in modules if path.startswith(f"{block}.")}
        for path, module in model.named_modules():
            if path not in inside:
                if path:
                    first = partial(_begin_alone, ready.record)
                    handles.append(module.register_forward_pre_hook(first, with_kwargs=True, prepend=True))
                handles.append(module.register_forward_hook(_leave, always_call=True))
    if isinstance(ready.record.ranks, ProcessRanks | LocalRanks):  # not while something is checked
        handles += refuse_changes(model, ready.record.tensors)
        for path, module in model.named_modules():
            handles += CutState(ready.record, path).put_on(module)
        keep_experts(model)
    sum_gradients(model, ready.record.partial, ready.record.ranks)
    watch_norms(model, ready.record.tensors, ready.record.ranks)


def _may_meet_nested(ready: _Ready) -> set[str]:
    """Blocks; of what is cut outside of blocks, the modules around it: code of the model may make nested tensors."""
    outside = [shard.name for cut in ready.record.cuts if "" in cut.blocks for shard in cut.shards]
    return {*ready.memos, *(path for name in outside for path in above(parent(name)))}


def _undo(model: nn.Module, record: CutRecord, log: list[Undo]) -> None:
    for handle in record.handles:
        handle.remove()
    record.handles.clear()
    for module in model.modules():
        allow_methods(module)
    forget_norms(model)
    for tensor in named_tensors(model).values():
        torch_private.drop_gradient_hooks(tensor, SumGradient)
    restore(model, record.scales)
    revert(log)


Part = tuple[nn.Module, str, nn.Parameter]


def _find_parts(modules: Mapping[str, nn.Module], record: CutRecord) -> list[Part]:
    """The owner of each parameter that is cut over processes, its name there, and this rank's part."""
    if not isinstance(record.ranks, ProcessRanks):
        return []
    places = ((modules[parent(name)], name.rpartition(".")[2]) for name in record.tensors)
    found = [(owner, name, getattr(owner, name)) for owner, name in places]
    return [(owner, name, part) for owner, name, part in found if isinstance(part, nn.Parameter)]


class Arrive:
    """Pre-hook of the root: where the record of the cut is kept, and where a forward begins. `parts`: of this model."""

    def __init__(self, record: CutRecord, parts: list[Part]) -> None:
        self.record, self.parts = record, parts

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        record = self.record
        if torch.compiler.is_exporting():
            raise ApplyError(NOT_EXPORTABLE)
        if not torch.compiler.is_compiling() and torch_private.autograd_node() is None:
            leave_interrupted(record.ranks)
            if isinstance(record.ranks, ProcessRanks):
                _refuse_wrapped(module, record)
                if not record.gathered:  # else fully_shard puts its own there
                    self._check_parts()
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # for copies of the model, too
            if not record.gathered:
                sum_gradients(module, record.partial, record.ranks)
            watch_norms(module, record.tensors, record.ranks)
            if isinstance(record.ranks, ProcessRanks):
                refuse_scaled_losses()
        if not isinstance(record.ranks, LocalRanks):
            return None
        devices = record.ranks.devices
        name = next(iter(record.tensors), "")
        tensor = named_tensors(module).get(name)
        if isinstance(tensor, RankTensor) and tuple(part.device for part in tensor.parts) != tuple(devices):
            raise ApplyError(
                f"this model was moved after autoshard.apply: {name} is on {tensor.parts[0].device}, and it is cut "
                f"over {', '.join(map(str, devices))}. Call autoshard.remove(model) before moving a model."
            )
        if left := running():  # by a forward that was interrupted: torch calls no hooks then
            left.__exit__(None, None, None)
        return _begin(record, module, args, kwargs)

    def _check_parts(self) -> None:
        """Raise `ApplyError` for a whole parameter in the place of a part, where no registration hook saw it."""
        for owner, name, part in self.parts:
            now = getattr(owner, name, None)
            if now is not part and now is not None and now.shape != part.shape:
                raise ApplyError(
                    f"{name} ({type(owner).__name__}) is of shape {list(now.shape)}, and this rank has a part of shape "
                    f"{list(part.shape)} of it: it was replaced after autoshard.apply. Call autoshard.remove(model), "
                    "replace it then, and apply the plan again."
                )


def _refuse_wrapped(module: nn.Module, record: CutRecord) -> None:
    """Raise `ApplyError` where torch takes the parts that ranks have for copies: it gives all the first one's."""
    ddp = nn.parallel.DistributedDataParallel.forward.__code__
    in_ddp = any(frame.f_code is ddp for frame, _ in traceback.walk_stack(None))
    wrapped, kind = "DistributedDataParallel" if in_ddp else "", module
    if not record.gathered and (found := sharded_inside(module)) is not None:
        wrapped, kind = "fully_shard", found
    if wrapped:
        raise ApplyError(
            f"{wrapped} was called for a {type(kind).__name__} whose matrices are cut over processes, and took parts "
            "of ranks for copies of one: the weights are lost. Use the model as apply returned it, in a loop of your "
            "own (a Trainer and Accelerator.prepare wrap models). For replicas plan with a mesh of dp or fsdp and tp."
        )


def _begin_alone(record: CutRecord, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pre-hook of other modules: one called while no forward of the root runs is a forward on all ranks by itself.

    As `generate()` calls an encoder, or a tower. A layer that is recomputed in backward is given tensors of all ranks.
    """
    return None if running() is not None or not _ordinary(args, kwargs) else _begin(record, module, args, kwargs)


def _ordinary(args: tuple, kwargs: dict) -> list[torch.Tensor]:
    return [tensor for _, tensor in tensors_in((args, kwargs)) if not isinstance(tensor, RankTensor)]


def _begin(record: CutRecord, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Enter a forward of `module` on all ranks of this process, and return its arguments, given to each of them."""
    assert isinstance(record.ranks, LocalRanks)
    devices = record.ranks.devices
    ordinary = _ordinary(args, kwargs)
    made: dict[int, torch.Tensor] = {}  # what is given twice stays one tensor
    for tensor in ordinary:
        if id(tensor) not in made:
            made[id(tensor)] = give(tensor, devices)
    given = map_tensors((args, kwargs), lambda tensor: made.get(id(tensor), tensor))
    output_device = ordinary[0].device if ordinary else devices[0]
    mode = RanksMode(devices, output_device, module)
    mode.given, mode.caches = Given(*given), record.caches
    mode.__enter__()
    return given


def _leave(module: nn.Module, args: tuple, result: Any) -> Any:
    """Hook, also after an exception: a forward on all ranks in this process ends where it began."""
    mode = running()
    if mode is None or mode.began is not module:
        return None
    mode.__exit__(None, None, None)
    forget_tensors(mode.caches)  # other models may call the same functions
    if result is not None:
        mode.given.check(type(module).__name__, OF_RANKS)
    return map_tensors(result, lambda tensor: collect(tensor, mode.output_device))
