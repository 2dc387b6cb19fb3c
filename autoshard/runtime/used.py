"""Which sharded parameters got a gradient, so that those that nobody used have none, as on one device.

A parameter that one rank used and another did not (experts) must be scattered by both, so all are, as zeros where there
is nothing. Before an optimizer steps, ranks agree on which nobody used.
"""

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.dtensors import alike_on, is_sharded
from autoshard.runtime.exchanges import Order
from autoshard.runtime.scalars import Scalars, choose_kernels

Place = tuple[nn.Module, str]
REPLACED = "autoshard_replaced"
"""Attribute of a parameter that is not the model's for now."""
_NOTED = "autoshard_noted"


class Used:
    """Which sharded parameters of a model got a gradient on this rank since they had none.

    Attributes:
        order: the order in which blocks are gathered. scalars: parameters that are not sharded.
        places: (module, name) of the parameters. notes: hooks of the blocks, that of the model last.
        handles: of all hooks that follow the use.
        known: all parameters of the model when the plan was applied. whole: number -> the parameter that stands in the
            place of a sharded one while it is gathered.
        accumulates: gradients are whole for now, so one that is not there yet does not say that nobody made it.
        taken: numbers of parameters whose gradient was computed and not put into `.grad`.
        frozen: parameters that are kept in 16 bits because they were not trained, by name.
    """

    def __init__(
        self, model: nn.Module, places: Sequence[Place], ranks: ProcessRanks, order: Order, scalars: Scalars
    ) -> None:
        self.ranks, self.order, self.scalars, self.accumulates = ranks, order, scalars, False
        self.places = places
        self.parameters: list[Any] = [getattr(module, name) for module, name in self.places]  # between forwards
        self.known = list(model.parameters())
        every = {id(one): number for number, one in enumerate(self.known)}  # ranks may have experts of their own
        self.numbers, self.count = [every[id(one)] for one in self.parameters], len(every)
        self.empty = [(number, one) for number, one in enumerate(self.known) if not one.numel()]
        self.whole: dict[int, nn.Parameter] = {}
        self.seen: set[int] = set()
        self.taken: set[int] = set()
        self.frozen: dict[str, nn.Parameter] = {}
        self.memory = [_memory_of(one) for one in self.parameters]
        self.told: dict[int, int] = {}  # versions of parameters of which was said that they were assigned to
        self.handles: list[Any] = [
            before_block(model, self.check_assigned, first=True),
            before_block(model, self.check_replaced, first=True),
            model.register_state_dict_pre_hook(self.check_assigned),
        ]
        owners: dict[nn.Module, list[int]] = {}
        for index, (module, _) in enumerate(self.places):
            owners.setdefault(module, []).append(index)
        for module, inside in owners.items():
            loaded = functools.partial(self._take_loaded, inside)
            self.handles.append(module.register_load_state_dict_post_hook(loaded))
        self.notes: list[_Note] = []
        for block, inside in by_block(model, [module for module, _ in self.places]):
            self.notes.append(_Note(self, inside))
            self.handles.append(before_block(block, self.notes[-1].__call__))
        self.handles.append(before_block(model, self._forget))

    def _forget(self, *hooked: Any) -> None:
        """Forget who was used for gradients that are gone, also of blocks that this forward does not run."""
        if not self.accumulates and torch_private.autograd_node() is None:
            self.seen -= {index for index, one in enumerate(self.parameters) if one.grad is None}

    def accumulate(self) -> None:
        """Whole gradients are added up from now on, until they are averaged: forget who was used for earlier ones."""
        self._forget()
        self.accumulates = True

    def follow_steps(self) -> None:
        """Let ranks agree before each step of an optimizer that has parameters of the model."""
        _followed.append(weakref.ref(self, _followed.remove))
        _watch_steps()

    def remove(self) -> None:
        """Take the hooks off, and follow no optimizer any more, also before this is collected."""
        for handle in self.handles:
            handle.remove()
        _followed[:] = [one for one in _followed if one() is not self]

    def check_assigned(self, *hooked: Any) -> None:
        """Raise `ApplyError` if something was assigned to `.data` of a parameter: a DTensor goes on with its own part.

        Conversions of the model (`to`, `half`) change the part, too. What is written into it afterwards is not lost.
        """
        if hooked[2:] == (True,):  # `keep_vars`, as what loads a state asks: it may be what was advised
            return
        assigned: list[int] = []
        for index, (parameter, (before, part_before)) in enumerate(zip(self.parameters, self.memory, strict=True)):
            now, part = _memory_of(parameter)
            version = torch_private.version_of(parameter)
            if now is not before and part is part_before and self.told.setdefault(index, version) == version:
                assigned.append(index)
                continue
            self.told.pop(index, None)
            self.memory[index] = now, part
        if assigned:
            module, name = self.places[assigned[0]]
            raise ApplyError(
                f"{name} ({type(module).__name__}) was assigned to (parameter.data = …), which changes nothing of "
                "a parameter that is sharded. Write into it: parameter.copy_(…) inside of torch.no_grad(), or "
                "model.load_state_dict(…)."
            )

    def _take_loaded(self, inside: Sequence[int], module: nn.Module, _: Any) -> None:
        """Hook after a state was loaded: with `assign=True`, fully_shard goes on with other parameters."""
        for index in inside:
            now: Any = getattr(module, self.places[index][1])
            if is_sharded(now) and now is not self.parameters[index]:
                self.parameters[index], self.memory[index] = now, _memory_of(now)
                self.known.append(now)

    def check_replaced(self, model: nn.Module, args: tuple = ()) -> None:
        """Hook before a forward: raise `ApplyError` for a parameter that fully_shard does not know, or would put back.

        Such as registration hooks don't see (`refuse_changes`): in modules that assign in a way of their own, by `del`,
        `insert` of a list of layers, or in `_parameters`.
        """
        self.check_taken()
        wrong = ""
        if torch.is_grad_enabled():
            known = set(map(id, (*self.known, *self.whole.values())))
            new = ((name, one) for name, one in model.named_parameters() if id(one) not in known)
            wrong = next((name for name, one in new if one.requires_grad and not is_sharded(one)), "")
        for index, (module, name) in enumerate(self.places):
            now = getattr(module, name, None)
            if now is not self.parameters[index] and (now is None or now is not self.whole.get(index)):
                wrong = wrong or f"{name} ({type(module).__name__})"
        if wrong:
            raise ApplyError(
                f"{wrong} was added, removed or replaced after autoshard.apply divided the parameters: ranks would go "
                "on with the old ones, or each with its own. Call autoshard.remove(model), change it then, and apply "
                "the plan again."
            )

    def check_taken(self) -> None:
        """Raise `ApplyError` if code took gradients of whole parameters, which nobody has averaged over ranks."""
        if self.taken:
            module, name = self.places[self.taken.pop()]
            self.taken.clear()
            raise ApplyError(
                f"torch.autograd.grad was called for {name} ({type(module).__name__}) and other parameters that are "
                "sharded: it gives None, or the gradient of this rank's samples alone. Call loss.backward(), and take "
                "parameter.grad."
            )

    def check_frozen(self, *_: Any) -> None:
        """Hook before a forward: raise `ApplyError` if a parameter is trained now that is kept in 16 bits.

        An optimizer would lose small updates of it, and fully_shard averages gradients of one dtype.
        """
        trained = next((name for name, one in self.frozen.items() if one.requires_grad), "")
        if trained:
            raise ApplyError(
                f"{trained} was not trained when the plan was applied, so it is kept in {self.frozen[trained].dtype}. "
                "Set requires_grad before autoshard.plan and autoshard.apply; or call autoshard.remove(model), set it, "
                "plan and apply again, and make a new optimizer."
            )

    def take_parts(self, optimizer: torch.optim.Optimizer) -> None:
        """Let state of whole parameters, as one device saved and all ranks loaded it, become that of a rank's parts.

        Raises `ApplyError` for Adafactor, whose norms of rows torch can't take of parts.
        """
        if isinstance(optimizer, torch.optim.Adafactor):
            raise ApplyError(
                "Adafactor takes norms of rows and columns, which torch can't of parameters that are sharded over "
                "processes. Use AdamW or SGD."
            )
        if not inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim"):
            return  # may have plain state of its part
        for one in self.parameters:
            state = optimizer.state.get(one, {})
            for name, value in state.items():
                if is_sharded(value):
                    return
                if isinstance(value, torch.Tensor) and value.dim() and value.shape == one.shape:
                    whole: Any = alike_on(one, value)
                    state[name] = whole.redistribute(placements=one.placements)

    def drop_unused(self, stepped: set[int]) -> None:
        """Drop the gradients of parameters that no rank used, among those with these ids; all ranks call it."""
        own = [index for index, one in enumerate(self.parameters) if id(one) in stepped and one.grad is not None]
        if any(torch_private.gradient_hooks(self.parameters[index]) for index in own):
            raise ApplyError(
                "register_hook was called for a parameter that is sharded, and fully_shard calls no such hook. Use "
                "register_post_accumulate_grad_hook, or change the gradient before optimizer.step()."
            )
        if not own:
            return
        self.accumulates = False
        counts = torch.zeros(self.count)
        counts[[self.numbers[index] for index in own if index in self.seen]] = 1
        used = self.ranks.all_reduce(counts.to(self.parameters[own[0]].device)).tolist()
        for index in own:
            if not used[self.numbers[index]]:
                self.parameters[index].grad = None
        for number, one in self.empty:  # other ranks have it, and a state of their optimizer for it
            one.grad = torch.zeros_like(one) if used[number] and id(one) in stepped else None


def _memory_of(parameter: Any) -> tuple[Any, Any]:
    """Which memory a sharded parameter says that it has, and that of its part: torch keeps an object of each."""
    with torch.no_grad():
        return parameter.untyped_storage(), parameter.to_local().untyped_storage()


def by_block(model: nn.Module, owners: Sequence[nn.Module]) -> Iterator[tuple[nn.Module, list[int]]]:
    """Yield each block that is gathered as one with the numbers of the owners of parameters in it."""
    of_module: dict[nn.Module, list[int]] = {}
    for index, module in enumerate(owners):
        of_module.setdefault(module, []).append(index)
    blocks = [module for module in model.modules() if torch_private.is_fully_sharded(module)]
    for block in reversed(blocks):  # the model itself comes last
        yield block, [index for module in block.modules() for index in of_module.pop(module, [])]


def before_block(block: nn.Module, hook: Callable[[nn.Module, tuple], None], first: bool = False) -> RemovableHandle:
    """Run a hook, which hangs others on gathered parameters, before each forward of a block; `first`: not yet gathered.

    Not traced by torch.compile, which would find none of them on a parameter in any call, and put on one more.
    """
    return block.register_forward_pre_hook(torch.compiler.disable(hook), prepend=first)


class _Note:
    """Pre-hook of a block, whose parameters are whole now: look who of them gets a gradient."""

    def __init__(self, used: Used, indices: Sequence[int]) -> None:
        self.used, self.indices = used, indices

    def __call__(self, module: nn.Module, args: tuple) -> None:
        # computed again in a backward, some of its parameters may have been seen already; under a checkpoint with
        # use_reentrant=True, gradients are enabled there alone
        again, seen = torch_private.autograd_node() is not None, self.used.seen
        for index in self.indices:
            if self.used.parameters[index].grad is None and not self.used.accumulates and not again:
                seen.discard(index)
            if not torch.is_grad_enabled():
                continue
            inner, name = self.used.places[index]
            parameter: Any = getattr(inner, name)
            if parameter is None or is_sharded(parameter):
                continue
            self.used.whole[index] = parameter
            if parameter.requires_grad and _NOTED not in vars(parameter):
                vars(parameter)[_NOTED] = True
                parameter.register_hook(functools.partial(_take, self.used.taken, index))
                parameter.register_post_accumulate_grad_hook(functools.partial(_see, self.used, index))


def _take(taken: set[int], index: int, gradient: torch.Tensor) -> None:
    taken.add(index)


def _see(used: Used, index: int, parameter: torch.Tensor) -> None:
    used.taken.discard(index)
    used.seen.add(index)


_followed: "list[weakref.ref[Used]]" = []


@functools.cache
def _watch_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse an optimizer that has parameters which are no longer the model's, and settle who used which."""
    choose_kernels(optimizer)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for mark, when in (
        (REPLACED, "before autoshard.apply sharded the parameters"), (_NOTED, "between a forward and its backward"),
    ):  # fmt: skip
        if any(mark in vars(parameter) for parameter in parameters):
            raise ApplyError(
                f"this {type(optimizer).__name__} was made {when}, and would train nothing. Make it after "
                "autoshard.apply, before the model runs, from model.parameters()."
            )
    ids = set(map(id, parameters))
    for reference in list(_followed):
        used = reference()
        if used is not None:
            used.scalars.check(ids)
            used.check_taken()
            used.check_assigned()
            if not ids.isdisjoint(map(id, used.parameters)):
                used.take_parts(optimizer)
            used.drop_unused(ids)


@contextlib.contextmanager
def no_sync(model: Any, used: "Used") -> Iterator[None]:
    """Inside, backward keeps whole gradients in this process; they are in the mean of the next one outside."""
    if not used.accumulates:
        used.accumulate()
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
