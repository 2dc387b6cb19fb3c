"""What a forward that runs in parts leaves in attributes of modules: an auxiliary loss, positions for the next call.

    self.aux = gate.mean()          whole call: of all rows          parts: each makes one of its own rows

begin    lists and dicts are as the call found them; what else is there the forward replaces
end      the tensors that a part left are noted
close    they become one as outputs do, and that is what the model has afterwards
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.batching import BatchAxis
from autoshard.errors import PlanError
from autoshard.nested import leaves_in, map_tensors, replace_at, tensors_in
from autoshard.runtime.chunks import Part
from autoshard.runtime.merging import Unmerged, merge

_TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, children, hooks."""
_CONTAINERS = (list, deque, dict)
_NESTED = (torch.Tensor, tuple, list, dict)
Move = Callable[[torch.Tensor], torch.Tensor]


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all that modules hold besides what torch has in each of them, if tensors can be in it."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _TABLES and (isinstance(value, _NESTED) or is_dataclass(value)):
                yield (f"{path}.{attribute}" if path else attribute), value


def tensors_left(model: nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The tensors in attributes, by "path.attribute" and the path inside it."""
    found: dict[str, torch.Tensor] = {}
    for name in names:
        module, attribute = _owner(model, name)
        found.update(tensors_in(vars(module).get(attribute), name))
    return found


def new_tensors(model: nn.Module, known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in any attribute besides those that are known, as `tensors_left` names them."""
    ids = set(map(id, known))
    found = (pair for name, value in attributes(model) for pair in tensors_in(value, name))
    return {place: tensor for place, tensor in found if id(tensor) not in ids}


class Attributes:
    """Lists and dicts in attributes of modules, with what is in them now, to be brought back.

    A tensor is not: the forward sets another one, whatever it finds there, and the old one should go then.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.model = model
        self.held: dict[str, Callable[[Move], Any] | None] = {}
        for name in names:
            module, attribute = _owner(model, name)
            value = vars(module).get(attribute)
            self.held[name] = _contents(value) if isinstance(value, _CONTAINERS) else None

    def bring_back(self, model: nn.Module, move: Move) -> None:
        """Let the attributes of a model, or of a replica of it, be what they were, with tensors where it is."""
        for name, contents in self.held.items():
            module, attribute = _owner(model, name)
            own = vars(_owner(self.model, name)[0])
            if contents is not None:
                vars(module)[attribute] = contents(move)
            elif model is not self.model:
                vars(module).pop(attribute, None)
                if attribute in own:
                    vars(module)[attribute] = map_tensors(own[attribute], move)


class LeftBehind:
    """The attributes that parts of one call change, as its plan lists them."""

    def __init__(self, batch: BatchAxis, model: nn.Module) -> None:
        self.batch = replace(batch, outputs=batch.kept)
        self.model = model
        self.before = Attributes(model, batch.attributes)
        self.there: list[torch.Tensor] = []
        self.parts: dict[int, dict[str, torch.Tensor]] = {}
        self.places: dict[str, str] = {}

    def begin(self, shell: nn.Module | None = None, move: Move | None = None) -> None:
        """Before each part. `shell`: the replica that runs it, which has its own modules and the same lists and dicts;
        `move` brings tensors to where the part runs.
        """
        if move is not None:
            for name in self.batch.cached:
                module, attribute = _owner(self.model, name)
                if isinstance(vars(module).get(attribute), _CONTAINERS):
                    Attributes(self.model, [name]).bring_back(shell or self.model, move)
        if self.batch.attributes:
            self.before.bring_back(shell or self.model, move or _as_it_is)
            self.there = list(tensors_left(shell or self.model, self.batch.attributes).values())

    def end(self, part: int, shell: nn.Module | None = None) -> None:
        """After each part; `shell` as in `begin`."""
        there, self.there = set(map(id, self.there)), []
        found = tensors_left(shell or self.model, self.batch.attributes)
        new = {place: tensor for place, tensor in found.items() if id(tensor) not in there}
        self.places = match([one.path for one in self.batch.outputs], new, self.batch.attributes)
        self.parts[part] = {known: new[place] for known, place in self.places.items()}

    def close(self, parts: Sequence[Part], move: Callable[[Any, torch.device], Any], history: bool = True) -> None:
        """Leave in the model what the whole call would have left; without `history`, tensors that hold no graph.

        `places` are those of the part that the model itself ran last; `move` brings values of replicas to it.
        """
        if len(self.parts) < len(parts):
            return
        here = tensors_left(self.model, self.batch.attributes)
        for known, place in self.places.items():
            pieces = [part[known] for _, part in sorted(self.parts.items()) if known in part]
            if len(pieces) == len(parts) and place in here:
                device = here[place].device
                made = merge(self.batch, [{known: move(piece, device)} for piece in pieces], parts)[known]
                _put(self.model, self.batch.attributes, place, made if history else made.detach())


class OnStages(Unmerged):
    """In place of a tensor in an attribute where forwards run as stages on several processes: any use of it says so."""

    def __init__(self, place: str) -> None:
        super().__init__(place, "tensor")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        raise next(one for _, one in leaves_in((args, kwargs)) if isinstance(one, cls))._error()

    def __add__(self, other: Any = None) -> Any:
        raise self._error()

    __radd__ = __mul__ = __rmul__ = __float__ = __bool__ = __add__

    def _error(self) -> PlanError:
        return PlanError(
            f"{self._said[0]} is set by the forward, which runs in micro-batches as stages on several processes: none "
            "has it for the whole batch. Return it from the forward, beside the output or in the loss."
        )


def put_on_stages(model: nn.Module, batch: BatchAxis) -> None:
    """Let what a forward leaves with a history, which a loss may be made of, be unknown."""
    for name in batch.attributes:
        module, attribute = _owner(model, name)
        if any(is_in(place, name) for place in batch.tracked):
            vars(module)[attribute] = OnStages(name)


def match(known: Iterable[str], found: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Which of the tensors found in attributes is which of those known: known place -> place.

    One after the other where an attribute has as many, since a list may have grown and a dict may have other keys.
    """
    known, found = list(known), list(found)
    matched: dict[str, str] = {}
    for name in names:
        own, others = [one for one in known if is_in(one, name)], [one for one in found if is_in(one, name)]
        matched |= (
            dict(zip(own, others, strict=True))
            if len(own) == len(others)
            else {one: one for one in own if one in others}
        )
    return matched


def is_in(place: str, attribute: str) -> bool:
    """Whether a tensor, by its place, is what an attribute is or has in it."""
    return place == attribute or place.startswith(f"{attribute}.")


def _owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module and the attribute that a name is made of."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute


def _put(model: nn.Module, names: Iterable[str], place: str, tensor: torch.Tensor) -> None:
    """Put a tensor where `tensors_left` found one; lists and dicts stay the objects that they are."""
    name = next(one for one in names if is_in(place, one))
    module, attribute = _owner(model, name)
    value, inner = vars(module)[attribute], place[len(name) + 1 :]
    made = replace_at(value, inner, tensor)
    if isinstance(value, list):
        value[:] = made
    elif isinstance(value, dict):
        value.update(made)
    else:
        vars(module)[attribute] = made


def _contents(value: Any) -> Callable[[Move], Any]:
    """How to bring back a value that may be written since: containers are the same objects, with what was in them."""
    if not isinstance(value, _CONTAINERS):
        return lambda move: map_tensors(value, move) if isinstance(value, (torch.Tensor, tuple)) else value
    items = [(key, _contents(item)) for key, item in (value.items() if isinstance(value, dict) else enumerate(value))]

    def again(move: Move) -> Any:
        made = {key: item(move) for key, item in items}
        value.clear()
        if isinstance(value, dict):
            value.update(made)
        else:
            value.extend(made.values())
        return value

    return again


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
