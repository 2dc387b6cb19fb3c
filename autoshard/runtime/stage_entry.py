"""What one call of a module of a pipeline is given and gives back: tensors go to its position, results are followed.

caller      layer(h, cache, mask)            h made at position 0, mask known to all, cache filled by earlier calls
brought     h, mask ──▶ position 1           lists and dicts stay the objects they are
taken out   h2, remote everywhere but there  an argument that is handed on is the caller's own again
publish     logits ──▶ all positions         at the end of the outermost call
"""

import types
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from autoshard.nested import map_tensors
from autoshard.runtime.remote_tensor import StageTensor, staged
from autoshard.runtime.shape_rules import shape_of
from autoshard.runtime.stage_moves import Wire


class Entry:
    """What one call of a module is given: its tensors, brought to its position, and the way back of each."""

    def __init__(self, wire: Wire, position: int, plain: bool) -> None:
        self.wire, self.position, self.plain = wire, position, plain
        self.staged: list[StageTensor] = []  # arguments, at the position
        self.originals: dict[int, torch.Tensor] = {}  # id of what the module is given -> what the caller gave
        self.kept: list[Any] = []
        self.containers: list[Any] = []

    def brought(self, value: Any) -> Any:
        """Bring the tensors of nested arguments; lists and dicts stay the objects they are."""
        if isinstance(value, torch.Tensor):
            return self._brought(value)
        if type(value) is list:
            self.containers.append(value)
            for number, item in enumerate(value):
                value[number] = self.brought(item)
            return value
        if isinstance(value, dict) and not is_dataclass(value):
            self.containers.append(value)
            for name, item in list(value.items()):
                value[name] = self.brought(item)
            return value
        if isinstance(value, tuple):
            items = [self.brought(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return map_tensors(value, self._brought)

    def _brought(self, tensor: torch.Tensor) -> torch.Tensor:
        wire = self.wire
        tensor = wire.settled(tensor)
        if isinstance(tensor, StageTensor):
            moved = wire.moved(tensor, self.position)
            self.staged.append(moved)
            given: torch.Tensor = moved
            if self.plain:
                assert moved.value is not None
                given = moved.value
        else:
            given = wire.at_home(tensor) if self.plain else tensor
        self.originals[id(given)] = tensor
        self.kept.append(given)
        return given

    def taken_out(self, output: Any) -> Any:
        """Return an output as code between modules sees it; so become the lists and dicts that were given."""
        for container in self.containers:
            for key, item in enumerate(container) if type(container) is list else list(container.items()):
                container[key] = map_tensors(item, self._taken_out)
        return map_tensors(output, self._taken_out)

    def _taken_out(self, tensor: torch.Tensor) -> torch.Tensor:
        original = self.originals.get(id(tensor))
        if original is not None:
            return original
        if isinstance(tensor, StageTensor):
            return tensor
        here = self.wire.position == self.position
        made = staged(self.wire, self.position, tensor if here else None, shape_of(tensor))
        self.originals[id(tensor)] = made
        self.kept.append(tensor)
        return made

    def written(self) -> None:
        """Arguments may have been written: copies of them elsewhere are stale, and copies of others' go back."""
        wire = self.wire
        for one in self.staged:
            one.writes[0] += 1
            original = self.originals.get(id(one.value if self.plain else one))
            if isinstance(original, StageTensor) and original is not one:
                back = wire.moved(one, original.position)
                if original.value is not None:
                    with torch.inference_mode():
                        assert back.value is not None
                        original.value.copy_(back.value)
                original.writes[0] += 1


def publish(wire: Wire, output: Any) -> Any:
    """Return an output with tensors that all processes have.

    What is in it twice is told once, by its values where they are: a hook inside of a module may have kept what the
    module returned, which is a tensor of its own for the position that has it, and one and the same for the others.
    """
    known: dict[int, torch.Tensor] = {}
    kept = []

    def public(tensor: torch.Tensor) -> torch.Tensor:
        tensor = wire.settled(tensor)
        own = tensor.value if isinstance(tensor, StageTensor) and tensor.value is not None else tensor
        if id(own) not in known:
            kept.append(own)
            known[id(own)] = wire.published(tensor) if isinstance(tensor, StageTensor) else tensor
        return known[id(own)]

    return map_tensors(output, public)


def publish_kept(wire: Wire, value: Any) -> None:
    """Let lists and dicts of the caller's, which the model has written into, hold tensors that all processes have."""
    if isinstance(value, (tuple, list, dict)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, StageTensor) and not isinstance(value, tuple):
                value[key] = wire.published(item)
            else:
                publish_kept(wire, item)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as a call sees it that computes plainly."""
    return tensor.value if type(tensor) is StageTensor and tensor.value is not None else tensor


def change_kept(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the tensors that objects among arguments hold (a cache): as they are for a call that computes plainly,
    tensors of the position for one that is watched. Lists and dicts of the caller's are left as they are.
    """
    if isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            change_kept(item, change)
    elif not isinstance(value, _CLOSED):
        _change_inside(getattr(value, "__dict__", None), change, set())


_CLOSED = (torch.Tensor, nn.Module, type, str, int, float, types.FunctionType, types.ModuleType)


def _change_inside(holder: Any, change: Callable[[torch.Tensor], torch.Tensor], seen: set[int]) -> None:
    if not isinstance(holder, (list, dict)) or id(holder) in seen:
        return
    seen.add(id(holder))
    for key, item in list(enumerate(holder) if isinstance(holder, list) else holder.items()):
        if isinstance(item, torch.Tensor):
            new = change(item)
            if new is not item:
                holder[key] = new
        elif isinstance(item, (list, dict)):
            _change_inside(item, change, seen)
        elif not isinstance(item, _CLOSED):
            _change_inside(getattr(item, "__dict__", None), change, seen)
