"""Answers of a model in stages: every process runs the model's own forward, and generate(), and computes its stages.

                      rank of stage 0                      rank of stage 1
    embed, layers.0   computed                             run on meta: shapes alone, a cache grows as it does there
    code between      computed on what all ranks have; what one stage has is sent where values are needed
    layers.1, head    run on meta                          computed
    outputs           on all ranks, so that all sample the same token

While one stage computes, the others run it on meta, so the host's work for it costs no time. Compiled are modules that
a rank computes itself, alone: for shapes inductor makes graphs that are wrong.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard.common.module_paths import is_below, is_container, join
from autoshard.errors import ApplyError, first_line
from autoshard.nested import attributes_of, flat_tensors, leaves_in, map_tensors, tensors_within
from autoshard.plan import Plan, Stage
from autoshard.plan.placement import covering_entry
from autoshard.runtime.agreement import SameInputs
from autoshard.runtime.around import surround
from autoshard.runtime.devices import META
from autoshard.runtime.moves import named_tensors, set_data
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.stage_tensor import INSTEAD, StageTensor
from autoshard.torch_private import DispatchMode

_WATCHED = 2
"""Calls of a module (a prompt and a token) whose ops are looked at one by one where it is computed: not every op of
torch minds that a tensor has no memory."""


def stage_modules(model: nn.Module, stages: Sequence[Stage], pp: int) -> dict[str, int]:
    """Path of every module that one of `pp` pipeline ranks computes, by its stages -> the rank.

    Containers are never called, so what is in them counts; modules without parameters are run by every rank.
    """
    modules = dict(model.named_modules())
    found: dict[str, int] = {}
    for number, stage in enumerate(stages):
        waiting = list(stage.paths)
        while waiting:
            path = waiting.pop()
            if path not in modules:  # another name of a module that is there already
                continue
            if is_container(modules[path]):
                waiting += [join(path, name) for name, _ in modules[path].named_children()]
            elif next(modules[path].parameters(), None) is not None:
                found[path] = number % pp
    return found


def shared_by_all(model: nn.Module, plan: Plan) -> set[str]:
    """Names of the tensors that the code between stages may read: every rank has them."""
    assert plan.mesh is not None
    owned = stage_modules(model, plan.stages, plan.mesh.pp)
    return {name for name in named_tensors(model) if covering_entry(owned, name) is None}


def hook_answers(model: nn.Module, record: PipelineRecord) -> list[Any]:
    """Let an applied model be called, with or without generate(); returns handles."""
    assert record.plan.mesh is not None
    modules = stage_modules(model, record.plan.stages, record.plan.mesh.pp)
    forward = _Forward(record)
    paths = dict(model.named_modules())
    inside = {path for path in paths if path not in modules and covering_entry(modules, path) is not None}
    cuts = [(block, action) for cut in record.plan.cuts for block in cut.blocks for action in cut.actions]
    acted = {join(block, action.module) for block, action in cuts}
    handles: list[Any] = []
    mixed = _mixed(model, record, modules)
    for path, module in paths.items():
        if path in inside or is_container(module):
            continue
        if path not in modules:
            surround(module, torch.compiler.disable(forward.__call__))
            continue
        call = _StageCall(forward, path, modules[path], path in mixed)
        layer = call.run if path in acted else call.__call__  # the hooks of cuts, around it, want plain tensors
        surround(module, torch.compiler.disable(layer, recursive=not call.own))
        if path not in acted:
            continue
        handles.append(module.register_forward_pre_hook(call.enter, with_kwargs=True, prepend=True))
        handles.append(module.register_forward_hook(call.leave, with_kwargs=True, always_call=True))
    for path in record.plan.alike:
        outer = covering_entry(modules, path)
        if outer is None:
            continue
        if modules[outer] == record.pp_rank:
            handles.append(paths[path].register_forward_hook(partial(_check_alike, path), with_kwargs=True))
        else:
            surround(paths[path], _stand_in)
    same = SameInputs(record.across)
    handles.append(model.register_forward_pre_hook(same, with_kwargs=True, prepend=True))
    return handles


def _mixed(model: nn.Module, record: PipelineRecord, modules: Mapping[str, int]) -> set[str]:
    """Paths of modules of other stages in which there are tensors that are not on meta.

    They have layers of their own, so code that decides by masks; they share a parameter with a stage of this rank; or
    code asks a model for its device by their first parameter: then they are given zeros, which take no memory.
    """
    others = [path for path, stage in modules.items() if stage != record.pp_rank]
    paths = dict(model.named_modules())
    layered = {path for path in others if any(is_container(one) for one in paths[path].modules())}
    shared = {name for name in named_tensors(model) if record.has(name)}
    found = {path for path in others if any(is_below(name, path) for name in shared)}
    for path, module in paths.items():
        name = next((join(path, name) for name, _ in module.named_parameters()), "")
        outer = covering_entry(modules, name)
        if outer is not None and covering_entry(modules, path) is None and not record.has(name):
            found.add(outer)
    for name, tensor in named_tensors(model).items():
        if tensor.is_meta and covering_entry(found, name) is not None:
            set_data(tensor, torch.zeros((), dtype=tensor.dtype, device=record.device).expand(tensor.shape))
    return found | layered


class _Forward:
    """Around the modules whose code every rank runs: how deep calls are nested, and how values get to other ranks.

    `seen`: ids of the objects that stages were given in this call of the model.
    """

    def __init__(self, record: PipelineRecord) -> None:
        self.record, self.depth = record, 0
        self.seen: set[int] = set()

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            result = forward(*args, **kwargs)
        finally:
            self.depth -= 1
        return self.given_out(result)

    def given_out(self, result: Any) -> Any:
        """What a call gives: of the outermost one, what all ranks have."""
        if self.depth:
            return result
        self.seen.clear()

        def common(one: torch.Tensor) -> torch.Tensor:
            if isinstance(one, StageTensor):
                return one.everywhere()
            if one.is_meta:
                raise ApplyError(f"the model gives out a tensor that it took from inside of a stage. {INSTEAD}")
            return one

        return map_tensors(result, common)

    def check_objects(self, path: str, given: Any) -> None:
        """Raise `ApplyError` for an object whose length, a tensor, would grow where a layer is computed alone.

        Lengths begin at 0; others are constants.
        """
        for _, one in leaves_in(given):
            if isinstance(one, torch.Tensor) or not attributes_of(one) or id(one) in self.seen:
                continue
            self.seen.add(id(one))
            for where, tensor in tensors_within(one):
                if tensor.dtype == torch.int64 and not tensor.dim() and not tensor.is_meta and not tensor.any():
                    raise ApplyError(
                        f"{path} is given a {type(one).__name__} that counts in a tensor ({where}), as static caches "
                        "do, and other ranks than that of a layer would not know how long it is. Use a cache that "
                        'grows (leave cache_implementation="static" out), or plan without stages: mesh="tp=…".'
                    )

    def send(self, value: torch.Tensor, stage: int) -> torch.Tensor:
        """Give all ranks the values of a tensor that one stage has."""
        record = self.record
        if stage == record.pp_rank:
            sent = value.detach().contiguous()
            record.across.broadcast(_bytes_of(sent), stage)
            return value
        made = torch.empty(value.shape, dtype=value.dtype, device=record.device)
        record.across.broadcast(_bytes_of(made), stage)
        return made


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: not every backend sends every dtype."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.reshape(-1).view(torch.uint8)


class _StageCall:
    """Around a module that one stage computes: others run it on shapes, and what it gives is a tensor of the stage."""

    def __init__(self, forward: _Forward, path: str, stage: int, mixed: bool) -> None:
        self.forward, self.path, self.stage, self.mixed = forward, path, stage, mixed
        self.given: list[dict[int, StageTensor]] = []
        self.enter, self.leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        self.own = stage == forward.record.pp_rank
        self.watched = _WATCHED if self.own else 0

    def __call__(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = None
        try:
            args, kwargs = self.enter(module, args, kwargs)
            result = self.run(module, forward, *args, **kwargs)
        finally:
            result = self.leave(module, args, kwargs, result)
        return result

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Take what the module is given: values where it is computed, shapes elsewhere."""
        self.forward.depth += 1
        known: dict[int, StageTensor] = {}
        self.given.append(known)
        self.forward.check_objects(self.path, (args, kwargs))

        def take(one: torch.Tensor) -> torch.Tensor:
            made = one
            if isinstance(one, StageTensor):
                made = one.value if one.stage == self.stage else one.everywhere()
            if self.own and made.is_meta:
                raise ApplyError(f"{self.path} is given a tensor that other ranks have. {INSTEAD}")
            if not self.own and (isinstance(one, StageTensor) or not self.mixed):
                made = _on_meta(made)
            if isinstance(one, StageTensor):
                known[id(made)] = one
            return made

        return map_tensors((args, kwargs), take)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Give out what the module made, as tensors of its stage."""
        forward, own = self.forward, self.own
        forward.depth -= 1
        known = self.given.pop()

        def made(one: torch.Tensor) -> torch.Tensor:
            if id(one) in known:
                return known[id(one)]
            if own and one.is_meta:
                raise ApplyError(f"{self.path} made a tensor of what other ranks have. {INSTEAD}")
            return StageTensor(one.detach() if own else _on_meta(one), self.stage, forward.send, forward.record.device)

        return forward.given_out(map_tensors(result, made))

    def run(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the forward; what it can't do because another rank has a tensor is told as that."""
        watched, self.watched = self.watched, max(0, self.watched - 1)
        mode: Any = nullcontext()
        if watched:
            mode = _RefuseAbsent()
        elif self.mixed:
            mode = _OnMeta(module, self.forward.record.device)
        try:
            with mode:
                return forward(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "meta" in str(error):
                said = first_line(error)
                raise ApplyError(f"{self.path} uses what another rank has computed: {said} {INSTEAD}") from error
            raise


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else tensor.detach().to("meta")


class _RefuseAbsent(DispatchMode):
    """Raises where an op is given a tensor without memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if any(one.is_meta for one in flat_tensors((args, kwargs))):
            raise RuntimeError(f"{func} is given a tensor on meta.")
        return func(*args, **kwargs or {})


class _OnMeta(DispatchMode):
    """Runs ops of a module of another stage: on shapes alone where its weights take part, or what came of them."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.weights = {id(tensor) for tensor in named_tensors(module).values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        absent = any(one.is_meta or id(one) in self.weights for one in flat_tensors((args, kwargs)))
        if kwargs.get("device") is not None:  # masks go where the layers' inputs are, and keep their values
            kwargs = {**kwargs, "device": META if absent else self.device}
        if not absent:
            return func(*args, **kwargs)
        return func(*map_tensors(args, _on_meta), **map_tensors(kwargs, _on_meta))


def _stand_in(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a module gives whose result is as large as what it is given, and which can't run on shapes alone."""
    return flat_tensors((args, kwargs))[0] if _of_tensors(args, kwargs) else forward(*args, **kwargs)


def _of_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a module is given tensors and numbers alone: no cache, which every rank has to let grow."""
    leaves = [leaf for _, leaf in leaves_in((args, kwargs))]
    return all(leaf is None or isinstance(leaf, torch.Tensor | int | float | str) for leaf in leaves)


def _check_alike(path: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
    """Raise `ApplyError` unless a result is as other ranks take it to be."""
    if not _of_tensors(args, kwargs):
        return
    given = flat_tensors((args, kwargs))[0]
    if not isinstance(result, torch.Tensor) or (result.shape, result.dtype) != (given.shape, given.dtype):
        raise ApplyError(f"{path} gave a tensor of another shape than when it was recorded. {INSTEAD}")
