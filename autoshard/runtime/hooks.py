"""What runs at the boundaries of an applied model: one pre-hook per placement root, a post-hook where one is needed.

    Hook        pre-hook: moves a module's direct tensor arguments to its home; all that most modules have
    Hook+Guard  also: current device, watched ops, copies to write back; the post-hook `Leave` takes that down again
    RootHook    the hook of the root; also: was the model moved since?

A run begins with the outermost call: of the root, or, from code around the forward (a `generate` that calls parts of
the model one by one), of any hooked module. Its outputs go to where its inputs were, so that such code has all it
works with on one device.

Nothing in here refers to a module: hooks get it as an argument. So there are no reference cycles through the model,
and a deep copy of the model has hooks of its own.
"""

import sys
import types
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.nested import map_tensors, tensors_in
from autoshard.runtime.devices import copy_tensor, current_index, set_current
from autoshard.runtime.state import Call, Runtime

_PLAIN = frozenset((type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device))
"""Classes of arguments in which there is no tensor."""


def _holds_tensor(values: tuple) -> bool:
    """Whether there is a tensor in nested tuples."""
    return any(
        isinstance(value, torch.Tensor) or (isinstance(value, tuple) and _holds_tensor(value)) for value in values
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What a module needs besides its arguments while it runs.

    Attributes:
        current: device to make the current one.
        watched: bring the tensors of each torch call in the module together (the module is aligned).
        target: where they go; None: to the last stage among them.
        writes_back: copy what is written into copied arguments back to their sources.
    """

    current: torch.device | None = None
    watched: bool = False
    target: torch.device | None = None
    writes_back: bool = False


class Hook:
    """Pre-hook: moves to `home` every tensor found directly in the arguments or in tuples of them (None: does not).

    Lists, dicts and other objects are passed as they are, since what a module writes into them must reach the caller;
    if a list or dict holds a tensor of another device, the module's ops are watched from then on. So are those of a
    `mixed` module that is given a tuple of tensors: memories of layers, say, that are on several devices.
    """

    __slots__ = ("guard", "home", "mixed", "path", "runtime")

    def __init__(
        self, runtime: Runtime, path: str, home: torch.device | None, guard: Guard | None = None, mixed: bool = False
    ) -> None:
        self.mixed = mixed
        self.runtime = runtime
        self.path = path
        self.home = home
        self.guard = guard

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        # For most calls of most modules this loop is all that happens: what it costs is what an applied model costs.
        if self.guard is None and self.runtime.copies.in_run:
            values = [*args, *kwargs.values()]
            for value in values:
                kind = type(value)
                if kind is torch.Tensor:
                    if value.device != self.home:
                        break
                elif kind is tuple and not self.mixed:
                    values += value
                elif kind not in _PLAIN:
                    break
            else:
                return None
        return self.prepare(module, args, kwargs, sys._getframe(1))

    def prepare(self, module: nn.Module, args: tuple, kwargs: dict, frame: Any) -> tuple[tuple, dict] | None:
        """Move the arguments and set up the guard, if any, for a module call made from `frame`."""
        outermost = self.is_outermost()
        if outermost:
            self.begin(module)
        values = (*args, *kwargs.values())
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        result = None
        if self.home is not None:
            given = self.moved(args, moved), {name: self.moved(value, moved) for name, value in kwargs.items()}
            result = given if moved else None
            if self.holds_foreign(values):
                self.watch_from_now_on(module)
        if self.guard is None:
            return result
        call = self.enter(module, frame)
        if outermost:
            call.output_device = _device_of_caller(values)
        if self.guard.writes_back:
            call.copied = [(source, copy, copy._version) for source, copy in moved.values()]
        return result

    def is_outermost(self) -> bool:
        """Whether no other hooked module is running in this thread; those run again in backward belong to a forward."""
        return not self.runtime.local.calls and torch_private.autograd_node() is None

    def begin(self, module: nn.Module) -> None:
        """A run begins with this module; from now on it is ready to send outputs back and to write to its inputs."""
        if self.guard is None:
            self.runtime.handles.append(add_leave(module, self))
        self.guard = replace(self.guard or Guard(), writes_back=True)
        self.runtime.copies.begin()

    def watch_from_now_on(self, module: nn.Module) -> None:
        """Watch the torch calls of a module that was given tensors of other devices in a list or a dict."""
        if self.guard is None:
            self.runtime.handles.append(add_leave(module, self))
        guard = self.guard or Guard()
        if not guard.watched:
            self.guard = Guard(current=guard.current, watched=True, target=self.home, writes_back=guard.writes_back)

    def moved(self, value: Any, moved: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Return an argument with its direct tensors at home, through the memo; `moved` collects (source, copy)."""
        if isinstance(value, torch.Tensor):
            if self.home is None or value.device == self.home:
                return value
            if id(value) not in moved:  # one object stays one, also where the memo makes a new copy every time
                moved[id(value)] = value, self.runtime.copies.get(value, self.home)
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
                if any(tensor.device != self.home for _, tensor in tensors_in(value)):
                    return True
            elif isinstance(value, tuple) and (self.holds_foreign(value) or (self.mixed and _holds_tensor(value))):
                return True
        return False

    def enter(self, module: nn.Module, frame: Any) -> Call:
        """Set up the guard for a module call made from `frame`."""
        guard = self.guard
        assert guard is not None
        call = Call(self, frame)
        current = guard.current
        if current is not None:
            call.previous_device = current_index(current)
            if call.previous_device is not None and call.previous_device != current.index:
                set_current(current, current.index)
        if guard.watched:
            self.runtime.watch(call, guard.target)
        if self.runtime.unfused and not self.runtime.local.calls and torch.backends.mha.get_fastpath_enabled():
            call.unfused = True
            torch.backends.mha.set_fastpath_enabled(False)
        self.runtime.local.calls.append(call)
        return call

    def leave(self) -> Call | None:
        """Take down what `enter` set up; returns the call, None if it never got that far."""
        calls = self.runtime.local.calls
        if not any(call.hook is self for call in calls):
            return None
        while True:  # calls above it, if any, were cut short by an interrupt
            call = calls.pop()
            self.take_down(call)
            if call.hook is self:
                break
        if not calls:
            self.runtime.copies.end()
        return call

    def take_down(self, call: Call) -> None:
        if call.unfused:
            torch.backends.mha.set_fastpath_enabled(True)
        self.runtime.unwatch(call)
        guard = call.hook.guard
        if guard.current is not None and call.previous_device is not None:
            set_current(guard.current, call.previous_device)
        for source, copy, version in call.copied:
            if copy._version != version:
                self.check_alone(source, call)
                self.runtime.copies.write_back(source, copy)

    def check_alone(self, written: torch.Tensor, call: Call) -> None:
        """Raise `ApplyError` if another argument has memory of the one that was written: its copy has old values."""
        for source, _, _ in call.copied:
            if source is not written and torch_private.share_memory(source, written):
                raise ApplyError(
                    f"{self.path or 'the model'} changes an argument of shape {list(written.shape)} in place, and "
                    f"another one, of shape {list(source.shape)}, is a view of the same memory. They were copied to "
                    f"{self.home} one by one, so the other one kept old values. Give it copies (clone())."
                )


class RootHook(Hook):
    """Pre-hook of the root, which may have been moved, or interrupted, since its last forward."""

    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        runtime = self.runtime
        if runtime.local.calls:
            self.drop_interrupted()
        runtime.check_moved()
        return self.prepare(module, args, kwargs, sys._getframe(1))

    def is_outermost(self) -> bool:
        """The root sends its outputs back wherever it is called."""
        return True

    def drop_interrupted(self) -> None:
        """Take down calls that an interrupt (Ctrl-C) cut short, for which torch runs no hooks."""
        running = set()
        frame: Any = sys._getframe()
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
        calls = self.runtime.local.calls
        while calls and id(calls[-1].frame) not in running:
            self.take_down(calls.pop())


def _device_of_caller(values: tuple) -> torch.device | None:
    """Return where the code that made a call works: on the device of its first tensor that is no parameter.

    Parameters that it passes on are where the plan put them, which says nothing about the rest.
    """
    tensors = [tensor for _, tensor in tensors_in(values)]
    own = (t for t in tensors if not isinstance(t, nn.Parameter) and not isinstance(t._base, nn.Parameter))
    first = next(own, tensors[0] if tensors else None)
    return None if first is None else first.device


class Leave:
    """Post-hook of a guarded module, also called when its forward raises."""

    __slots__ = ("hook",)

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        call = self.hook.leave()
        if call is None or output is None:
            return None
        if isinstance(output, types.GeneratorType):
            return _relay(module, self.hook, output, call.output_device)
        if call.output_device is None:
            return None
        moved = to_device(output, call.output_device)
        return None if moved is output else moved


def add_leave(module: nn.Module, hook: Hook) -> Any:
    """Register the post-hook of a guarded module."""
    return module.register_forward_hook(Leave(hook), with_kwargs=True, always_call=True)


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


def _relay(module: nn.Module, hook: Hook, generator: Generator, device: torch.device | None) -> Generator:
    """Run each step of a generator output as its module's forward runs: watched, on its device, results sent home."""
    resume: Any = generator.send
    value: Any = None
    while True:
        hook.enter(module, sys._getframe())
        try:
            item = resume(value)
        except StopIteration as stop:
            return stop.value
        finally:
            hook.leave()
        try:
            value = yield item if device is None else to_device(item, device)
            resume = generator.send
        except GeneratorExit:
            generator.close()
            raise
        except BaseException as error:
            resume, value = generator.throw, error
