"""Run a model's own forward in every process of a pipeline: modules of this position compute, the others are followed.

    process 0: embed, layers.0 compute                        process 1: the same program
      for layer in self.layers: h = layer(h, mask)              layers.0: only shapes; h is remote
      layers.1 is at position 1: h and mask are sent            layers.1: h and mask are received, it computes
    all: logits are broadcast by position 1, so that the code around (`generate`) goes on alike everywhere

Inside a module of this position everything is ordinary. It runs in inference mode, so what it makes can be told from
what all processes have, wherever it keeps it (a cache); results are those of the model in inference mode. Reads of
values (`.item()`, a mask as an index) are looked for while a module runs with arguments of a new kind; where there are
any, its process tells the others, each time.
"""

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError, RankError
from autoshard.nested import map_tensors, tensors_in
from autoshard.plan import Plan
from autoshard.runtime.agreement import random_states
from autoshard.runtime.merging import merge
from autoshard.runtime.microbatches import Divide
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.remembered import Remembered
from autoshard.runtime.remote_tensor import (
    StageTensor,
    run_at,
    tensors_of,
    traits_of,
    written_of,
)
from autoshard.runtime.stage_entry import Entry, change_kept, plain, publish, publish_kept
from autoshard.runtime.stage_moves import Kind, Wire
from autoshard.runtime.state import Division
from autoshard.torch_private import DispatchMode, no_dispatch_modes, run_composite


@dataclass(slots=True, kw_only=True)
class Following:
    """What the calls of one applied model share."""

    record: PipelineRecord
    wire: Wire
    divide: Divide | None = None


def divide_of(plan: Plan) -> Divide | None:
    """How a plan divides the calls of the model in a process of a pipeline, None if it does not."""
    if plan.batch is None or plan.num_microbatches < 2 or plan.mesh is None:
        return None
    if plan.batch.written or plan.batch.kept:  # each process has buffers and attributes of its own
        return None
    division = Division(
        batch=plan.batch, count=plan.num_microbatches, stages=plan.mesh.pipeline, schedule=plan.schedule
    )
    return Divide(None, division, None)  # type: ignore[arg-type]


class _Follow(DispatchMode):
    """Sees the ops of a module of one position: here they compute, elsewhere they give shapes."""

    def __init__(self, wire: Wire, position: int, path: str, kind: Kind) -> None:
        super().__init__()
        self.wire, self.position, self.path, self.kind = wire, position, path, kind
        self.arguments: set[int] = set()
        self.remembered: Remembered = wire.remembered

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        key = None
        if not self.wire.watched:
            key = self.remembered.key(self.position, func, args, kwargs)
            known = None if key is None else self.remembered.result(key, (self.wire, self.position), args)
            if known is not None:
                return known
        traits = traits_of(func)
        if traits.composite:
            with self:
                return run_composite(func, args, kwargs)
        if traits.written:
            for one in map(self.wire.settled, written_of(func, args, kwargs)):
                if not isinstance(one, StageTensor):
                    return self._on_ordinary(func, args, kwargs)
                self._note_write(one)
        self.kind.may_draw |= traits.draws
        result = run_at(self.wire, self.position, func, args, kwargs)
        if key is not None:
            self.remembered.keep(key, result)
        return result

    def _note_write(self, tensor: StageTensor) -> None:
        if id(tensor.writes) in self.arguments and not self.kind.writes:
            if not self.wire.watched:
                raise RankError(
                    f"{self.path} writes into an argument in this call, which it did not in others like it. Use "
                    "arguments of one kind, or a plan without a pipeline."
                )
            self.kind.writes = True

    def _on_ordinary(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Write into a tensor that all processes have: a counter, say, as the process does that runs the module."""
        if any(isinstance(one, StageTensor) for one in tensors_of(args, kwargs)):
            raise RankError(
                f"{self.path} writes what it computes into a tensor that all processes have ({func}), and runs in one "
                "only. Use autoshard.schedule(model), or a plan without a pipeline."
            )
        return func(*args, **kwargs)


_TELLING = ("tolist", "numpy")
_places = threading.local()
"""`stack`: for each call in progress in this thread that is looked at, (wire, position), the innermost last."""
_told_lock, _told = threading.Lock(), [0]


def _telling(name: str) -> Callable[..., Any]:
    usual = getattr(torch.Tensor, name)

    def read(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        stack = getattr(_places, "stack", None)
        if not stack:  # another thread, which reads what it likes
            return usual(self, *args, **kwargs)
        wire, position = stack[-1]
        own = None if wire.position != position else usual(self, *args, **kwargs)
        return wire.told(position, own)

    return read


@contextlib.contextmanager
def _values_told(wire: Wire, position: int) -> Iterator[None]:
    """Inside, `tolist` and `numpy` of this thread, which no mode sees, tell what they give, or ask for it."""
    stack = vars(_places).setdefault("stack", [])
    with _told_lock:
        _told[0] += 1
        if _told[0] == 1:
            for name in _TELLING:
                setattr(torch.Tensor, name, _telling(name))
    stack.append((wire, position))
    try:
        yield
    finally:
        stack.pop()
        with _told_lock:
            _told[0] -= 1
            if not _told[0]:
                for name in _TELLING:
                    delattr(torch.Tensor, name)


class Follower:
    """The `forward` of one module: it runs where it belongs. `position` is None for one with parts at several."""

    def __init__(self, module: nn.Module, path: str, position: int | None, following: Following) -> None:
        self.module, self.path, self.position, self.following = weakref.ref(module), path, position, following
        self.usual: Any = vars(module).get("forward")
        self.kinds: dict[Any, Kind] = {}

    @property
    def __wrapped__(self) -> Any:  # who asks for the signature of a forward means the model's own
        module = self.module()
        return self.usual or types.MethodType(type(module).forward, module)  # type: ignore[union-attr]

    def __deepcopy__(self, memo: dict) -> Any:
        module = memo.get(id(self.module()))
        if module is None:
            raise ApplyError("a part of a model that runs as a pipeline can't be copied alone. Copy the whole model.")
        return Follower(module, self.path, self.position, self.following)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        forward = self.__wrapped__
        wire, record = self.following.wire, self.following.record
        if record.silent:
            return forward(*args, **kwargs)
        if wire.depth == 0:
            return self._begin(module, forward, args, kwargs)
        if self.position is None or wire.inside == self.position:
            return forward(*args, **kwargs)
        if wire.inside is None:
            return self._stage(forward, *args, **kwargs)
        with no_dispatch_modes(), torch.inference_mode(False), torch.no_grad():
            return self._stage(forward, *args, **kwargs)

    def _begin(self, module: nn.Module, forward: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Run the outermost call: what comes out of it, all processes have."""
        wire = self.following.wire
        if torch.is_grad_enabled() and module.training:
            raise ApplyError(
                "this model runs as a pipeline over processes, where a forward alone can't be trained: call "
                "autoshard.schedule(model, loss).step(…), or model.eval() for inference."
            )
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = map_tensors(args, _ordinary), map_tensors(kwargs, _ordinary)
            wire.begin([tensor for _, tensor in tensors_in((args, kwargs))])
            wire.depth = 1
            try:
                run = forward if self.position is None else functools.partial(self._stage, forward)
                divide = None if self.path else self.following.divide
                parts = [] if divide is None else divide.parts(module, args, kwargs)
                if len(parts) < 2:
                    output = publish(wire, run(*args, **kwargs))
                    publish_kept(wire, (args, kwargs))
                    wire.check()
                    return output
                # nobody waits for the outputs of a part before all are under way: the first stage is ahead by then
                outputs = [run(*part.args, **part.kwargs) for part in parts]
                assert divide is not None
                outputs = [publish(wire, output) for output in outputs]
                wire.check()
                return merge(divide.division.batch, outputs, parts)
            finally:
                wire.depth = 0

    def _stage(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a module of one position, here or there."""
        wire, position = self.following.wire, self.position
        assert position is not None
        key = _kind_of(args, kwargs)
        kind = self.kinds.get(key)
        watched = kind is None or kind.reads or kind.draws
        kind = kind or Kind()
        before = wire.inside, wire.watched, wire.path, wire.kind
        wire.inside, wire.watched, wire.path, wire.kind = position, watched, self.path, kind
        here = position == wire.position
        entry = Entry(wire, position, plain=here and not watched)
        before_draws = random_states(wire.device) if here and watched else ()
        if here and watched:
            change_kept((args, kwargs), wire.settled)
        try:
            given_args, given_kwargs = entry.brought((args, kwargs))
            with contextlib.ExitStack() as stack:
                if entry.plain:
                    stack.enter_context(torch.inference_mode())
                else:
                    mode = _Follow(wire, position, self.path, kind)
                    mode.arguments = {id(one.writes) for one in entry.staged}
                    stack.enter_context(mode)
                if watched:
                    stack.enter_context(_values_told(wire, position))
                output = forward(*given_args, **given_kwargs)
        finally:
            wire.inside, wire.watched, wire.path, wire.kind = before
        output = entry.taken_out(output)
        if here and watched:
            change_kept((args, kwargs), plain)
        if watched and kind.may_draw:
            now = random_states(wire.device) if before_draws else ()
            drawn = not all(map(torch.equal, before_draws, now))
            kind.draws = wire.told(position, drawn)
        if kind.draws:
            wire.share_generator(position)
        if kind.writes:
            entry.written()
        self.kinds[key] = kind
        return output


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """An input that can be told from what a module makes."""
    if tensor.is_meta:
        raise RankError(
            "the model is given a tensor without values (on meta). Parameters of other stages are there: don't use the "
            "device of a parameter for inputs."
        )
    return tensor.clone() if tensor.is_inference() and type(tensor) is torch.Tensor else tensor


def is_over_several(module: nn.Module) -> bool:
    """Whether a module of a pipeline can be called and has parts at several positions."""
    forward = vars(module).get("forward")
    return isinstance(forward, Follower) and forward.position is None


def _kind_of(args: tuple, kwargs: dict) -> Any:
    """What kind of arguments these are: the same in all processes, and for most calls of a module."""

    def kind(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(min(size, 2) for size in value.shape), isinstance(value, StageTensor)
        if isinstance(value, (tuple, list)):
            return type(value), tuple(kind(item) for item in value)
        if isinstance(value, dict):
            return tuple((name, kind(item)) for name, item in value.items())
        return value if isinstance(value, (bool, str, type(None))) else type(value)

    return kind(args), kind(kwargs)
