"""Replicas in several processes: torch's DistributedDataParallel inside the user's own module.

    model(x)  ──▶  hooks of the model  ──▶  model.forward, which is a `Parallel`
                                              └──▶ DistributedDataParallel(Inner)  ──▶  the model's own forward
    gradients  ──▶  bucket by bucket, while backward goes on, their mean over the replicas

Sharded replicas are fully_shard's (`sharded.py`). Where a replica is cut over ranks of its own, gradients are averaged
over those that have the same part. `Inner` has the model's own tables of parameters and modules, so names and objects
are the same. Each process gives its own rows; the mean is over processes, and over rows where the plan gives devices
unequal shares of them. Without gradients a forward concerns nobody else: processes may evaluate or generate as they
like.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autoshard import torch_private
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import tensors_in
from autoshard.plan import Plan
from autoshard.runtime.agreement import Mark, agree, digest_of, mark_of
from autoshard.runtime.chunks import bind, count_rows
from autoshard.runtime.collectives import ProcessRanks, lost
from autoshard.runtime.cuts import Loader, apply_cuts, cut_record, let_gather, remove_cuts
from autoshard.runtime.devices import is_accelerator
from autoshard.runtime.groups import DEPARTED, Made, cut_groups, end_groups, outlive, shard_groups
from autoshard.runtime.hooks import to_device
from autoshard.runtime.launched import recompute_layers
from autoshard.runtime.moves import move_tensors, named_tensors
from autoshard.runtime.sharded import (
    Replaced,
    Sharing,
    check_shardable,
    forget_whole,
    is_sharded,
    no_sync,
    shard,
    shards,
    unshard,
    unshard_failed,
)


@dataclass(slots=True, kw_only=True)
class ReplicaRecord:
    """What of a plan of replicas over processes was applied to a model.

    Attributes:
        ranks: all processes of the plan; `replicas`: those that have the same part of the model.
        device: where this process computes; `originals`: name -> device it was on before.
        replaced: parameters that were replaced by sharded ones; `handles`: undo the hooks.
        made: groups that were made for this model.
    """

    plan: Plan
    ranks: ProcessRanks
    replicas: ProcessRanks
    device: torch.device
    originals: dict[str, torch.device]
    replaced: list[Replaced] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    made: Made = field(default_factory=Made)

    def __deepcopy__(self, memo: dict) -> "ReplicaRecord":
        return self  # a copy of the model runs on the same processes


def apply_replicas(
    model: nn.Module, plan: Plan, ranks: ProcessRanks, *, device: torch.device | None, problem: Exception | None = None,
    loader: Loader | None = None,
) -> nn.Module:  # fmt: skip
    """Make a model one of the replicas of a plan; returns the same object. All ranks call it.

    `device`: where this process computes, None if `problem` says why this rank can't go on. `loader`: fills parameters
    on meta, of which a rank has only its shards. Raises `PlanError`, `ApplyError`, or `RankError` if ranks don't agree;
    the model is then as it was.
    """
    mark, error = Mark(), problem
    DEPARTED.clear()
    tensors = named_tensors(model)
    originals = {name: tensor.device for name, tensor in tensors.items()}
    mesh = plan.mesh
    try:
        if problem is None:
            check_replicas(model, plan, filled=loader is not None and shards(plan))
            if shards(plan):
                check_shardable(model, plan)
            # each replica draws random numbers of its own
            mark = replace(mark_of(model, plan.cuts, device), plan=digest_of(plan), random=())
    except Exception as found:
        error = found
    agree(ranks, mark, error, device)
    assert device is not None and mesh is not None
    record = ReplicaRecord(plan=plan, ranks=ranks, replicas=ranks, device=device, originals=originals)
    if plan.cuts:
        _cut_replica(model, record, loader)
    try:
        if not plan.cuts:
            _move_replica(model, record)
        if shards(plan):
            _shard_replica(model, record, loader)
    except BaseException:
        _withdraw(model, record)
        raise
    if not shards(plan):
        average_gradients(model, record)
    return model


def _move_replica(model: nn.Module, record: ReplicaRecord) -> None:
    """Bring the tensors of this replica to its device, but for what goes there block by block when it is sharded."""
    tensors, error = named_tensors(model), None
    sharded = {id(parameter) for parameter in model.parameters()} if shards(record.plan) else set()
    target = {n: record.originals[n] if id(one) in sharded else record.device for n, one in tensors.items()}
    try:
        move_tensors(tensors, target)
    except Exception as found:
        error = found
    agree(record.ranks, Mark(), error)


def _withdraw(model: nn.Module, record: ReplicaRecord) -> None:
    """Make a model what it was, where ranks could not all become replicas."""
    if cut_record(model) is not None:
        remove_cuts(model)
        end_groups(record.made)
        return
    tensors = named_tensors(model)
    move_tensors(tensors, {name: record.originals[name] for name in tensors})


def _cut_replica(model: nn.Module, record: ReplicaRecord, loader: Loader | None) -> None:
    """Cut this replica over the ranks that share it; all ranks call it, and hear of what fails in another replica."""
    mesh, ranks, error = record.plan.mesh, record.ranks, None
    assert mesh is not None
    tensor_ranks, record.replicas = cut_groups(mesh, ranks, record.made)
    try:
        try:
            cuts, results = record.plan.cuts, record.plan.results
            apply_cuts(model, cuts, tensor_ranks, device=record.device, loader=loader, results=results)
        except Exception as found:
            error = found
        agree(ranks, Mark(), error)
    except BaseException:
        if cut_record(model) is not None:
            remove_cuts(model)
        end_groups(record.made)
        raise


def _shard_replica(model: nn.Module, record: ReplicaRecord, loader: Loader | None) -> None:
    """Shard the parameters of this replica; all ranks call it, and put them back if one of them fails."""
    error: Exception | None = None
    mesh = record.plan.mesh
    assert mesh is not None
    sharing = Sharing(record.ranks, *shard_groups(mesh, record.ranks, record.made))
    known = frozenset(name for name, _ in model.named_parameters())
    try:
        try:
            used = shard(model, record.plan, sharing, record.device, record.replaced)
            record.handles += [*used.handles, *recompute_layers(model, record.plan), *let_gather(model)]
            if loader is not None:
                loader.fill_shards(model, cut_record(model))
        except Exception as found:
            error = found
        agree(record.ranks, Mark(), error)
    except BaseException:
        unshard_failed(model, record.replaced)
        for handle in record.handles:
            handle.remove()
        end_groups(record.made)
        raise
    forget_whole(record.replaced)
    record.handles.append(model.register_forward_pre_hook(Marked(record, known)))
    _offer_no_sync(model, functools.partial(no_sync, model, used))


def check_replicas(model: nn.Module, plan: Plan, filled: bool = False) -> None:
    """Raise unless the model can be a replica: it has values, or is `filled`, and rows of its batch are not mixed."""
    if plan.batch is None and not plan.launch:
        raise PlanError(
            "this plan has replicas and does not say how the batch is divided. Plan again with "
            'strategy="data-parallel".'
        )
    if plan.cuts and plan.mesh is not None and plan.mesh.sharded and not plan.launch:
        raise PlanError("a plan can't cut parameters over ranks and shard them over replicas, too. Plan again.")
    for name, tensor in named_tensors(model).items():
        if tensor.is_meta and not filled:
            raise ApplyError(
                f"{name} has no data: it is on the meta device. autoshard.load(path, plan=plan, model=…) fills and "
                "divides such a model, or load the weights first."
            )


def average_gradients(model: nn.Module, record: ReplicaRecord) -> None:
    """Let gradients become their mean over `record.replicas` in every backward, until `stop_averaging`."""
    parallel = Parallel(model, record)
    vars(model)["forward"] = parallel
    _offer_no_sync(model, parallel.no_sync)


def _offer_no_sync(model: nn.Module, no_sync: Callable[[], Any]) -> None:
    """Give the model the method that DistributedDataParallel has, unless it has one of this name."""
    if not hasattr(model, "no_sync"):
        vars(model)["no_sync"] = no_sync


def stop_averaging(model: nn.Module) -> None:
    """Undo `average_gradients`."""
    parallel = vars(model).pop("forward")
    assert isinstance(parallel, Parallel)
    if parallel.usual is not None:
        vars(model)["forward"] = parallel.usual
    if vars(model).get("no_sync") == parallel.no_sync:
        del vars(model)["no_sync"]
    parallel.engine = None
    DEPARTED.clear()


def replica_record(model: nn.Module) -> ReplicaRecord | None:
    """What of replicas over processes was applied to a model, None if nothing was."""
    forward = vars(model).get("forward")
    if isinstance(forward, Parallel):
        return forward.record
    hooks = torch_private.forward_pre_hooks(model)
    return next((hook.record for hook in hooks if isinstance(hook, Marked)), None)


def remove_replicas(model: nn.Module) -> nn.Module:
    """Make a replica an ordinary model again, where it was, with its present values.

    All ranks call it where parameters are sharded or cut. Raises `ApplyError` if nothing is applied.
    """
    record = replica_record(model)
    if record is None:
        raise ApplyError("nothing to remove: this model is no replica.")
    parallel = vars(model).get("forward")
    if record.replaced:
        unshard(model, record.replaced, {} if record.plan.cuts else record.originals)
        for handle in record.handles:
            handle.remove()
        vars(model).pop("no_sync", None)
    else:
        stop_averaging(model)
    if record.plan.cuts:
        remove_cuts(model)
    end_groups(record.made, parallel)
    if not record.plan.cuts:
        tensors = named_tensors(model)
        move_tensors(tensors, {name: record.originals.get(name, tensor.device) for name, tensor in tensors.items()})
    return model


class Marked:
    """The hook on the root of a sharded replica that holds the record. `known`: names of the parameters at apply."""

    def __init__(self, record: ReplicaRecord, known: frozenset[str]) -> None:
        self.record, self.known = record, known

    def __call__(self, module: nn.Module, args: tuple) -> None:
        """Refuse to train parameters whose gradients nobody would average."""
        if not torch.is_grad_enabled():
            return
        named = ((name, one) for name, one in module.named_parameters() if name not in self.known)
        new = [name for name, one in named if one.requires_grad and not is_sharded(one)]
        if new:
            raise ApplyError(
                f"{new[0]} was added after autoshard.apply sharded the parameters, and each process would train its "
                "own. Call autoshard.remove(model), add it then, and apply the plan again."
            )


class Inner(nn.Module):
    """The model as DistributedDataParallel sees it: its own tables, and its own forward without its hooks.

    One more parameter is never used. Told to look for such parameters, which a forward that branches may have at any
    time, torch complains once if it finds none.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any], device: torch.device) -> None:
        super().__init__()
        own = vars(model)
        idle = nn.Parameter(torch.zeros(1, device=device))
        vars(self).update(
            _parameters={**own["_parameters"], "autoshard_idle": idle},
            _buffers=own["_buffers"], _modules=own["_modules"], run=run,
        )  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return vars(self)["run"](*args, **kwargs)
        except RuntimeError as error:  # the model's own, or one of torch's exchanges around it?
            vars(self)["raised"] = id(error)
            raise


class Parallel:
    """The forward of a replica. `usual`: what was set as its forward before, if anything was."""

    def __init__(self, model: nn.Module, record: ReplicaRecord) -> None:
        self.record = record
        self.usual: Any = vars(model).get("forward")
        self.model = model
        self.run = model.forward
        self.engine: DistributedDataParallel | None = None
        self.trained: tuple[int, ...] = ()
        self.syncs = True
        self.weight = 1.0 / record.replicas.size
        self.sums: list[torch.futures.Future[Any]] = []  # that are on the way in a backward
        functools.update_wrapper(self, self.run, updated=())
        self.__signature__ = inspect.signature(self.run)
        record.made.users.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if is_accelerator(self.record.device):
            args, kwargs = to_device((args, kwargs), self.record.device)
        if not torch.is_grad_enabled() or torch_private.autograd_node() is not None:
            return self.run(*args, **kwargs)
        trained = self._find_trained()
        if not trained:
            return self.run(*args, **kwargs)
        engine = self._engine_for(trained)
        if self.syncs and self._is_weighted():
            self._weigh(args, kwargs)
        with contextlib.nullcontext() if self.syncs else engine.no_sync():
            try:
                output = engine(*args, **kwargs)
            except RuntimeError as error:
                if vars(engine.module).pop("raised", None) == id(error):
                    raise
                raise lost(self.record.replicas, error) from error
        for _, tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                kept: Any = tensor.grad_fn.metadata
                kept[_MARK] = self  # a loss may outlive its model
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward keeps gradients in this process; they are in the mean of the next one outside."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def _find_trained(self) -> tuple[int, ...]:
        return tuple(id(parameter) for parameter in self.model.parameters() if parameter.requires_grad)

    def _engine_for(self, trained: tuple[int, ...]) -> DistributedDataParallel:
        """The engine for the parameters that are trained now; another one once others are."""
        if self.engine is None or self.trained != trained:
            first, self.engine = self.engine is None, None  # the last one lets go of its hooks
            buffers: dict[str, Any] = {_SYNC_BUFFERS: False}
            try:
                self.engine = DistributedDataParallel(
                    Inner(self.model, self.run, self.record.device),
                    process_group=self.record.replicas.group,
                    find_unused_parameters=True,
                    gradient_as_bucket_view=True,
                    init_sync=first,
                    **buffers,
                )
            except RuntimeError as error:  # it compares the parameters of all ranks
                raise lost(self.record.replicas, error) from error
            self.engine.register_comm_hook(weakref.ref(self), _average)  # its holder is none that Python can look into
            outlive(self.engine, self.engine.process_group)
            self.trained = trained
        return self.engine

    def _is_weighted(self) -> bool:
        mesh = self.record.plan.mesh
        return mesh is not None and len(set(mesh.shares)) > 1

    def _weigh(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Let gradients count by the rows that this process was given, of those of all."""
        batch, ranks = self.record.plan.batch, self.record.replicas
        assert batch is not None
        rows = torch.tensor([float(count_rows(batch, bind(self.model, args, kwargs)))], device=self.record.device)
        self.weight = float(rows / ranks.all_reduce(rows.clone()))

    def settle(self) -> None:
        """Wait for the sums of a backward. Raises `RankError` if a replica is gone."""
        try:
            for future in self.sums:
                future.wait()
        except RuntimeError as error:
            raise lost(self.record.replicas, error) from error
        finally:
            self.sums.clear()

    def __deepcopy__(self, memo: dict) -> "Parallel":
        copied = memo.get(id(self.model))
        if copied is None:
            raise ApplyError("the forward of a replica can't be copied without its model.")
        made = Parallel.__new__(Parallel)
        vars(made).update(vars(self), model=copied, engine=None, trained=(), sums=[])
        made.run = functools.partial(type(copied).forward, copied) if self.usual is None else self.usual
        self.record.made.users.add(made)
        return made

    def __reduce__(self) -> Any:
        raise ApplyError(
            "a replica can't be pickled: it belongs to running processes. Save model.state_dict(), call "
            "autoshard.save(model, path), or autoshard.remove(model) first."
        )


_MARK = "autoshard_replica"
_PARAMETERS = inspect.signature(DistributedDataParallel).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _PARAMETERS else "broadcast_buffers"


def _average(reference: "weakref.ref[Parallel]", bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Sum a bucket of gradients over the replicas, each with its weight."""
    parallel = reference()
    assert parallel is not None  # its backward is running
    ranks = parallel.record.replicas
    if bucket.index() == 0:  # torch would make an error of its own of what is raised in a hook: raise it afterwards
        parallel.sums.clear()
        torch_private.after_backward(parallel.settle)
    buffer = bucket.buffer()
    try:
        future = dist.all_reduce(buffer.mul_(parallel.weight), group=ranks.group, async_op=True).get_future()
    except RuntimeError as error:
        future = torch.futures.Future()
        future.set_exception(error)
    parallel.sums.append(future)
    return future.then(lambda _: buffer)
