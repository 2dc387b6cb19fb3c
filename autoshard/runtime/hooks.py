"""What runs at the boundaries of an applied model, around the forward of each placement root.

    Hook        moves a module's direct tensor arguments to its execution device; all that most modules have
    Hook+CallGuard  also: current device, watched ops, copies to write back, which is taken down again after the call
    RootHook    that of the root; also: was the model moved since?

A run begins with the outermost call: of the root, or, from code around the forward (a `generate` that calls parts of
the model one by one), of any hooked module. Its outputs go to where its inputs were, so that such code has all it
works with on one device.

Nothing in here refers to a module: hooks get it as an argument. So there are no reference cycles through the model,
and a deep copy of the model has hooks of its own.
"""

import contextlib
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.nested import flat_tensors, map_tensors, tensors_in
from autoshard.runtime.devices import copy_tensor, current
from autoshard.runtime.moves import memory_of, share_memory
from autoshard.runtime.state import Runtime
from autoshard.torch_private import version_of

_PLAIN = frozenset((type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device))
"""Classes of arguments in which there is no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallGuard:
    """What a module needs besides its arguments while it runs.

    Attributes:
        current: device to make the current one.
        moves_inside: bring the tensors of each torch call in the module together (a mixed-device module).
        target: where they go; None: to the last stage among them.
        writes_back: copy what is written into copied arguments back to their sources.
    """

    current: torch.device | None = None
    moves_inside: bool = False
    target: torch.device | None = None
    writes_back: bool = False


@dataclass(slots=True, eq=False)
class Hook:
    """Moves to `execution_device` every tensor found directly in the arguments or in tuples of them (None: does not).

    Lists, dicts and other objects are passed as they are, since what a module writes into them must reach the caller;
    if a list or dict holds a tensor of another device, the module's ops are watched from then on. So are those of a
    `mixed` module that is given a tuple of tensors: memories of layers, say, that are on several devices.
    """

    runtime: Runtime
    path: str
    execution_device: torch.device | None
    guard: CallGuard | None = None
    mixed: bool = False

    def __call__(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # For most calls of most modules this loop is all that happens: what it costs is what an applied model costs.
        if self.guard is None and self.runtime.copies.in_run:
            values = [*args, *kwargs.values()]
            for value in values:
                kind = type(value)
                if kind is torch.Tensor:
                    if value.device != self.execution_device:
                        break
                elif kind is tuple and not self.mixed:
                    values += value
                elif kind not in _PLAIN:
                    break
            else:
                return forward(*args, **kwargs)
        return self.run(forward, args, kwargs)

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a forward with its arguments on its device, guarded if it has to be."""
        outermost, device, runtime = self.is_outermost(), None, self.runtime
        with contextlib.ExitStack() as around:
            if outermost:
                runtime.copies.begin()
                around.callback(runtime.end_run)
            values = (*args, *kwargs.values())
            moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            if self.execution_device is not None:
                args, kwargs = self.moved(args, moved), {key: self.moved(value, moved) for key, value in kwargs.items()}
                if self.holds_foreign(values) and not (self.guard and self.guard.moves_inside):
                    self.guard = replace(self.guard or CallGuard(), moves_inside=True, target=self.execution_device)
            guard = replace(self.guard or CallGuard(), writes_back=True) if outermost else self.guard
            if guard is None:
                return forward(*args, **kwargs)
            device = _device_of_caller(values, runtime.root()) if outermost else None
            runtime.local.calls.append(device)
            around.callback(runtime.local.calls.pop)
            if guard.writes_back and moved:
                around.callback(self.bring_back, [(*pair, version_of(pair[1])) for pair in moved.values()])
            self.set_up(guard, around)
            output = forward(*args, **kwargs)
        if isinstance(output, types.GeneratorType):
            return self.steps(output, device)
        return output if device is None else to_device(output, device)

    def steps(self, generator: Iterator[Any], device: torch.device | None) -> Iterator[Any]:
        """Run each step of a generator output as the forward of its module runs."""
        with contextlib.suppress(StopIteration):
            while True:
                item = self.run(partial(next, generator), (), {})
                yield item if device is None else to_device(item, device)

    def is_outermost(self) -> bool:
        """Whether no other hooked module is running in this thread; those run again in backward belong to a forward."""
        return not self.runtime.local.calls and torch_private.autograd_node() is None

    def moved(self, value: Any, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Return an argument with its direct tensors on the device, through the memo; `moved` collects (source,
        copy)."""
        if isinstance(value, torch.Tensor):
            if self.execution_device is None or value.device == self.execution_device:
                return value
            if id(value) not in moved:  # one object stays one, also where the memo makes a new copy every time
                moved[id(value)] = value, self.runtime.copies.get(value, self.execution_device)
            return moved[id(value)][1]
        if isinstance(value, PackedSequence):  # its batch sizes stay where torch wants them, on the CPU
            data, order, back = (self.moved(part, moved) for part in (value.data, *value[2:]))
            return PackedSequence(data, value.batch_sizes, order, back)
        if isinstance(value, tuple):
            items = [self.moved(item, moved) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def holds_foreign(self, values: Iterable[Any]) -> bool:
        """Whether a list or dict among the arguments, also in tuples, holds a tensor of another device."""
        for value in values:
            if isinstance(value, (list, dict)):
                if any(tensor.device != self.execution_device for _, tensor in tensors_in(value)):
                    return True
            elif isinstance(value, tuple) and (self.holds_foreign(value) or (self.mixed and flat_tensors(value))):
                return True
        return False

    def set_up(self, guard: CallGuard, around: contextlib.ExitStack) -> None:
        """Set up the guard for a call; `around` takes it down again."""
        if guard.current is not None:
            around.enter_context(current(guard.current))
        if guard.moves_inside:
            around.enter_context(self.runtime.watching(guard.target))
        if self.runtime.unfused and torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            around.callback(torch.backends.mha.set_fastpath_enabled, True)

    def bring_back(self, copied: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        """Bring what was written into copies of arguments to their sources: (source, copy, its version before).

        Raises `ApplyError` if another argument has memory of one that was written: its copy has old values.
        """
        for written, copy, version in copied:
            if version_of(copy) == version:
                continue
            for source, _, _ in copied:
                if source is not written and share_memory(source, written):
                    raise ApplyError(
                        f"{self.path or 'the model'} changes an argument of shape {list(written.shape)} in place, and "
                        f"another one, of shape {list(source.shape)}, is a view of the same memory. They were copied "
                        f"to {self.execution_device} one by one, so the other one kept old values. Give it clones."
                    )
            self.runtime.copies.write_back(written, copy)


class RootHook(Hook):
    """The hook of the root, which may have been moved since its last forward."""

    __slots__ = ()

    def __call__(self, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self.runtime.check_moved()
        self.runtime.model = weakref.ref(module)
        try:
            return self.run(forward, args, kwargs)
        except RuntimeError as error:
            if "same device" in str(error):
                self.runtime.check_replaced(module)
            raise

    def is_outermost(self) -> bool:
        """The root sends its outputs back wherever it is called."""
        return True


def _device_of_caller(values: tuple, model: nn.Module | None) -> torch.device | None:
    """Return where the code that made a call works: on the device of its first tensor that is no parameter.

    Parameters of the model that it passes on, and views of them, are where the plan put them, which says nothing about
    the rest.
    """
    tensors = [tensor for _, tensor in tensors_in(values)]
    others = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    if model is not None and len({tensor.device for tensor in tensors}) > 1:  # else all are where the first one is
        known = {memory_of(parameter) for parameter in model.parameters()}
        others = [tensor for tensor in others if memory_of(tensor) not in known]
    first = next(iter(others or tensors), None)
    return None if first is None else first.device


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in a nested output; a tensor that is in it twice is one tensor afterwards, too."""
    copies: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = copy_tensor(tensor, device)
        return copies[id(tensor)]

    return map_tensors(value, move)
