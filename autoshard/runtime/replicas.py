"""Replicas in one process: each call of the model runs in parts of its batch, one per device, at the same time.

    call of the root ── RootHook: inputs go to the first device
                     ── Scatter:  replica 1 on cuda:1 (part 1), replica 2 on cuda:2 (part 2) …     only queued there
                     ── forward(part 0)                                     the model itself, on the first device
                     ── Collect:  outputs become one, where the inputs came from
                     ── Leave

A replica is made of shells: objects of the same classes whose attributes are those of the model's own modules, except
that modules, parameters and buffers are their counterparts on its device. Nobody sees them: `model.modules()`, the
optimizer and state dicts know the model only.

    weight (cuda:0) ──▶ copy on cuda:1 ──▶ alias with history, one per forward       gradients of all replicas are added
          ▲                                  │ gradient                              along a tree, in a fixed order
          └──────────── Spread ◀─────────────┘

Copies stay from call to call; they are made anew when the weight was written, when a backward has run since, and when
gradients are switched on or off: then also a write through `.data`, which torch does not count, is seen.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.module_paths import join
from autoshard.nested import flat_tensors, tensors_within
from autoshard.packed import own_attributes
from autoshard.runtime.devices import copy_tensor, current_index, is_accelerator, set_current
from autoshard.runtime.freshness import versions
from autoshard.runtime.given import Given
from autoshard.runtime.hooks import to_device
from autoshard.runtime.left_behind import LeftBehind
from autoshard.runtime.merging import merge
from autoshard.runtime.microbatches import OF_PARTS, Divide
from autoshard.runtime.outsiders import explain_devices
from autoshard.runtime.shells import MODULE_TABLES, attributes_of, but, counterpart_of, empty, held
from autoshard.runtime.state import Division, Runtime
from autoshard.sharding import shares_of

_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_COMPILED = "_compiled_call_impl"
"""What `Module.compile` sets: a function of the very module, so that its replicas run as they are written."""


def hook_replicas(model: nn.Module, runtime: Runtime, division: Division) -> list[Any]:
    """Hook the root of an applied model, behind the hook that moves its inputs; returns handles.

    Raises `ApplyError` for a model of which replicas can't be made.
    """
    refuse_shared(model, division.batch.attributes)
    collect = Collect(runtime, division)
    return [
        model.register_forward_pre_hook(Scatter(runtime, division, collect), with_kwargs=True),
        model.register_forward_hook(collect, prepend=True),
        model.register_forward_hook(explain_devices, always_call=True),
    ]


class Scatter(Divide):
    """Pre-hook of the root: runs the parts of the batch on their replicas, and leaves the first part to the call."""

    __slots__ = ("replicas",)
    undivided = "on the first device alone"

    def __init__(self, runtime: Runtime, division: Division, together: Any) -> None:
        super().__init__(runtime, division, together)
        self.replicas = Replicas(division.devices, division.batch.attributes)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict | None = None) -> tuple[tuple, dict] | None:
        if kwargs is None:  # taken off a moment ago, by `adopt`: torch hides keyword arguments from it
            return None
        call, *around = reversed(self.runtime.local.calls)
        if any(other.parts is not None for other in around) or torch_private.autograd_node() is not None:
            return None
        parts = self.parts(module, args, kwargs)
        if len(parts) < 2 or not self.is_next_to_forward(module):
            return None
        devices = self.division.devices[: len(parts)]
        given = [
            (to_device(part.args, device), to_device(part.kwargs, device))
            for part, device in zip(parts[1:], devices[1:], strict=True)
        ]
        outputs = []
        replicas, left = self.replicas.ready(module), LeftBehind(self.division.batch, module)
        for index, (replica, (own_args, own_kwargs)) in enumerate(zip(replicas, given, strict=False), 1):
            left.begin(replica.root, functools.partial(copy_tensor, device=replica.device))
            known = Given((own_args, own_kwargs))
            with _current(replica.device):
                outputs.append(replica.root.forward(*own_args, **own_kwargs))
            known.check(type(module).__name__, OF_PARTS)
            left.end(index, replica.root)
        left.begin(move=functools.partial(copy_tensor, device=devices[0]))
        call.parts = parts, outputs, replicas[len(parts) - 2], left
        return parts[0].args, parts[0].kwargs

    def shares(self, rows: int) -> Sequence[int]:
        """Rows of each part, in the proportion of the plan; fewer parts where there are fewer rows than devices."""
        count = min(rows, len(self.division.devices))
        return shares_of(rows, count, self.division.shares[:count])

    def __setstate__(self, state: tuple[Runtime, Division, Any]) -> None:
        super().__setstate__(state)
        self.replicas = Replicas(self.division.devices, self.division.batch.attributes)


class Collect:
    """Post-hook of the root: puts the outputs of the parts together, where the inputs came from."""

    __slots__ = ("division", "runtime")
    uncounted = True

    def __init__(self, runtime: Runtime, division: Division) -> None:
        self.runtime = runtime
        self.division = division

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> Any:
        call = self.runtime.local.calls[-1]
        if call.parts is None:
            return None
        (parts, outputs, last, left), call.parts = call.parts, None
        left.end(0)
        left.close(parts, to_device)
        first = self.division.devices[0]
        keep_written(module, self.division.batch.written, last, first)
        home = call.output_device or first
        return merge(self.division.batch, [to_device(one, home) for one in (output, *outputs)], parts, to_device)


@dataclass(slots=True, eq=False)
class Replica:
    """The model on another device.

    Attributes:
        root: shell of the model.
        tables: (table of a shell, the module's own table) of parameters and of buffers, to be filled before a run.
        holders: (shell, attribute, the module's own value) of attributes that hold tensors.
        tensors: id of a tensor of the model -> its counterpart, for this run.
    """

    device: torch.device
    root: nn.Module
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    holders: list[tuple[nn.Module, str, Any]] = field(default_factory=list)
    tensors: dict[int, torch.Tensor] = field(default_factory=dict)


def keep_written(model: nn.Module, names: Sequence[str], last: Replica, home: torch.device) -> None:
    """Give the model the buffers that the last part has written."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        own, other = model.get_submodule(path), last.root.get_submodule(path)
        source, target = other._buffers[leaf], own._buffers[leaf]
        if source is None or target is None or source.shape != target.shape:
            own._buffers[leaf] = None if source is None else copy_tensor(source.detach(), home)
        else:
            with torch.no_grad():
                target.copy_(source)


@dataclass(slots=True, eq=False)
class _Copies:
    """A tensor of the model, its copies on the other devices, and the versions of all of them."""

    source: torch.Tensor
    copies: tuple[torch.Tensor, ...]
    version: Any
    copied_versions: list[Any]


def _give_attributes(tensor: torch.Tensor, counterpart: torch.Tensor, device: torch.device) -> None:
    """Give a copy what users have put on the tensor (a scale, say) as it is now, and nothing else."""
    for name in own_attributes(counterpart):
        delattr(counterpart, name)
    for name, value in own_attributes(tensor).items():
        setattr(counterpart, name, to_device(value, device))


def refuse_shared(model: nn.Module, changing: Sequence[str]) -> None:
    """Raise `ApplyError` where an object keeps tensors that all replicas would compute with, on one device.

    `changing`: attributes that every forward makes.
    """
    for path, module in model.named_modules():
        inner = {id(one) for one in module.modules()}
        places = {join(path, name): value for name, value in vars(module).items() if name not in _TORCH}
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            places |= {f"{join(path, name)}.{own}": value for own, value in own_attributes(tensor).items()}
        for place, value in places.items():
            if place in changing or id(value) in inner:
                continue
            known = {id(tensor) for tensor in flat_tensors(value)}
            if any(id(tensor) not in known and tensor.dim() for _, tensor in tensors_within(value)):
                raise ApplyError(
                    f"{place} is a {type(value).__name__} with tensors in it, and replicas in one process would share "
                    "them. Keep them in buffers, start one process per device (torchrun), or place whole modules "
                    '(strategy="balanced").'
                )


class Replicas:
    """The replicas of one model; made at its first run, and again when its modules have other attributes.

    `changing`: attributes that every forward changes, of which replicas are given what they need call by call.
    """

    def __init__(self, devices: Sequence[torch.device], changing: Sequence[str] = ()) -> None:
        self.devices = tuple(devices)
        self.changing: dict[str, set[str]] = {}
        for path, _, attribute in (name.rpartition(".") for name in changing):
            self.changing.setdefault(path, set()).add(attribute)
        self.made: list[Replica] = []
        self.seen: list[tuple[nn.Module, dict, dict, dict, set[str]]] = []
        self.values: dict[int, _Copies] = {}
        self.backward_ran = False
        self.with_gradients = False

    def ready(self, model: nn.Module) -> list[Replica]:
        """The replicas with the values and attributes that the model has now."""
        if not self._is_as_seen(model):
            self._make(model)
        gradients = torch.is_grad_enabled()
        renew = self.backward_ran or gradients != self.with_gradients
        self.backward_ran, self.with_gradients = False, gradients
        used: dict[int, _Copies] = {}
        for tensor in self._tensors(model):
            used[id(tensor)] = entry = self._copies_of(tensor, renew and tensor.requires_grad)
            tracked = gradients and tensor.requires_grad and tensor.is_leaf
            counterparts = Spread.apply(tensor, self, entry.copies) if tracked else entry.copies
            for replica, counterpart in zip(self.made, counterparts, strict=True):
                replica.tensors[id(tensor)] = counterpart
                if vars(tensor) or vars(counterpart):
                    _give_attributes(tensor, counterpart, replica.device)
        self.values = used
        for replica in self.made:
            for table, own in replica.tables:
                table.update({name: None if one is None else replica.tensors[id(one)] for name, one in own.items()})
            for shell, name, value in replica.holders:
                vars(shell)[name] = counterpart_of(value, {}, replica.tensors)[0]
        return self.made

    def _tensors(self, model: nn.Module) -> Iterator[torch.Tensor]:
        """Every parameter, buffer and tensor in an attribute, once."""
        found = {id(one): one for module, *_ in self.seen for one in (*module._parameters.values(),
                                                                      *module._buffers.values())}  # fmt: skip
        if self.made:
            for _, _, value in self.made[0].holders:
                found |= {id(one): one for one in held(value)}
        return (one for one in found.values() if one is not None)

    def _copies_of(self, tensor: torch.Tensor, renew: bool) -> _Copies:
        entry, version = self.values.get(id(tensor)), versions([tensor])[0]
        if (
            entry is not None
            and not renew
            and entry.source is tensor
            and entry.version == version
            and entry.copied_versions == versions(entry.copies)
        ):
            return entry
        made = [tensor.detach()]
        with torch.inference_mode(False), torch.no_grad():
            for index in range(1, len(self.devices)):  # along a tree: 1, 2 and 4 from 0, 3 from 2, 5 and 6 from 4 …
                source = made[index & (index - 1)]
                copied = copy_tensor(source, self.devices[index])
                made.append(copied if copied is not source else copied.clone())
        if tensor.requires_grad and tensor.is_leaf:
            made = [one.requires_grad_() for one in made]
        copies = tuple(made[1:])
        return _Copies(tensor, copies, version, versions(copies))

    def _is_as_seen(self, model: nn.Module) -> bool:
        """Whether modules, parameters and attributes are those that the replicas were made of."""
        modules = list(model.modules())
        if not self.made or len(modules) != len(self.seen):
            return False
        try:
            return all(
                module is known
                and (but(vars(module), changing) if changing else vars(module)) == attributes
                and module._parameters == parameters
                and module._modules == children
                for module, (known, attributes, parameters, children, changing) in zip(modules, self.seen, strict=True)
            )
        except Exception:  # whatever comparing values that are no longer the same objects raises
            return False

    def _make(self, model: nn.Module) -> None:
        self.seen = []
        for path, module in model.named_modules():
            changing = self.changing.get(path, set())
            own = but(attributes_of(module), changing)
            self.seen.append((module, own, dict(module._parameters), dict(module._modules), changing))
        modules = [module for module, *_ in self.seen]
        self.made = []
        for device in self.devices[1:]:
            shells = {id(module): empty(module) for module in modules}
            replica = Replica(device, shells[id(model)])
            for module, *_, changing in self.seen:
                shell = shells[id(module)]
                for name, value in but(attributes_of(module), changing).items():
                    if name not in (*MODULE_TABLES, _COMPILED):
                        vars(shell)[name], holds = counterpart_of(value, shells, {})
                        if holds:
                            replica.holders.append((shell, name, counterpart_of(value, shells, {})[0]))
                children = {
                    name: None if child is None else shells[id(child)] for name, child in module._modules.items()
                }
                vars(shell).update(_parameters={}, _buffers={}, _modules=children)
                replica.tables += [(shell._parameters, module._parameters), (shell._buffers, module._buffers)]
            self.made.append(replica)


class Spread(torch.autograd.Function):
    """Hand out aliases of a tensor's copies (in a tuple, unseen by autograd) whose gradients go to it, added up."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, replicas: Replicas, copies: tuple[torch.Tensor, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.device, ctx.replicas = source.device, replicas
        return tuple(one.detach() for one in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.replicas.backward_ran = True
        sums = [gradient for gradient in gradients if gradient is not None]
        step = 1
        while step < len(sums):  # 1 to 0, 3 to 2, …; then 2 to 0, 6 to 4, …
            for index in range(0, len(sums) - step, 2 * step):
                sums[index] = sums[index] + copy_tensor(sums[index + step], sums[index].device)
            step *= 2
        return copy_tensor(sums[0], ctx.device) if sums else None, None, None


@contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Inside, an accelerator is the current one."""
    before = current_index(device) if is_accelerator(device) else None
    if before is None or before == device.index:
        yield
        return
    set_current(device, device.index)
    try:
        yield
    finally:
        set_current(device, before)
