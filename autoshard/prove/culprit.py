"""Where rows mix: the first module whose outputs on parts of a batch are not parts of its outputs on the whole."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.prove.copied import Trial
from autoshard.prove.draws import TooLargeError
from autoshard.prove.parts import Division, Mixed, find_output, run, ways
from autoshard.torch_private import is_transformed

MOST_ELEMENTS = 1 << 27
"""Elements that are kept of what modules are given and make, 1 GiB in double precision: above, no module is named."""

Key = tuple[str, int]
"""(module path, how-manieth call of it)"""
Seen = dict[Key, dict[str, torch.Tensor]]


def find_mixer(division: Division) -> tuple[Key, bool] | None:
    """The innermost call of a module that is given rows of their own and mixes them; None if none is found.

    False beside it: what it is given is mixed already, by code of the module around it.
    """
    try:
        given, made = _watched(division.trial, division.args, division.kwargs)
        pieces = [_watched(division.trial, part.args, part.kwargs) for part in division.parts()]
    except Exception:  # what a part raises is told as it is
        return None

    def was_apart(key: Key) -> bool | None:
        return _apart(given[key], [piece[0].get(key) for piece in pieces], division)

    ended = list(made)
    for wanted in (False, None):  # other values where shapes go together; then shapes that don't
        for key, tensors in made.items():
            if _apart(tensors, [piece[1].get(key) for piece in pieces], division) is wanted:
                before = was_apart(key)
                if before is False:  # what was mixed already may have come from further out
                    while (around := _around(key, ended)) is not None and was_apart(around) is False:
                        key = around
                if before is not None:
                    return key, before
    return None


def _around(key: Key, ended: Sequence[Key]) -> Key | None:
    """The call of a module that a call was made by, which is the next one to end of those that it is inside of."""
    later = ended[ended.index(key) + 1 :]
    return next((one for one in later if not one[0] or key[0].startswith(f"{one[0]}.")), None)


def _watched(trial: Trial, args: tuple, kwargs: dict[str, Any]) -> tuple[Seen, Seen]:
    """What every call of a module was given, and what it made, in the order in which they ended."""
    given: Seen = {}
    made: Seen = {}
    with _hooks(trial.model, given, made):
        run(trial, args, kwargs)
    return given, made


@contextmanager
def _hooks(model: nn.Module, given: Seen, made: Seen) -> Iterator[None]:
    handles = []
    times: dict[str, int] = {}
    sizes: dict[int, int] = {}  # by object: what one module makes the next is given
    for path, module in model.named_modules():

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any, path: str = path) -> None:
            key = path, times.get(path, 0)
            times[path] = key[1] + 1
            given[key], made[key] = _comparable((args, kwargs)), _comparable(output)
            sizes.update((id(tensor), tensor.numel()) for kind in (given, made) for tensor in kind[key].values())
            if sum(sizes.values()) > MOST_ELEMENTS:
                raise TooLargeError("the model makes more than can be kept to compare")

        handles.append(module.register_forward_hook(after, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _comparable(value: Any) -> dict[str, torch.Tensor]:
    """The tensors in nested values, but for those that live only as long as a transform of `torch.func` runs."""
    return {path: tensor for path, tensor in nested.tensors_in(value) if not is_transformed(tensor)}


def _apart(
    whole: dict[str, torch.Tensor], pieces: Sequence[dict[str, torch.Tensor] | None], division: Division
) -> bool | None:
    """Whether the tensors of parts are parts of those of the whole; None if their shapes are not."""
    answer: bool | None = True
    for path, tensor in whole.items():
        own = [piece[path] for piece in pieces if piece is not None and path in piece]
        if len(own) < len(pieces):
            continue
        if not any(True for _ in ways(path, tensor, own, division)):
            answer = None
            continue
        try:
            find_output(path, tensor, own, division)
        except Mixed:
            return False
    return answer
