"""What the context of a generation leaves behind that is no state: in a real run the prompt left it, so it is as large.

    prompt     (2, 8)  ids ─▶ positions (2, 8)
    context    (2, 45) ids ─▶ positions (2, 45) ─▶ state
    decode     finds the state of 46 tokens, and positions (2, 8), not (2, 45)

A generating loop holds such things to its end: the ids it was given, say, and whatever was made of them.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

from autoshard.capture.graph import Call, Op, Storage, Value

_GIVEN = "0.1."
"""What the names of inputs begin with that only the context was given: it is the second prompt of the only argument."""


def as_the_prompt_left_it(
    storages: Sequence[Storage], values: Sequence[Value], ops: Sequence[Op], calls: Sequence[Call], context: range,
    state: Set[int],
) -> tuple[tuple[Storage, ...], tuple[Value, ...]]:  # fmt: skip
    """Return storages and values; what the context's prompt made and is not of the state has the prompt's sizes.

    `state` are indices of storages. What made a storage in the prompt is found by its place: the same op in the same
    module, the how-manieth. Without such an op it keeps its size.
    """
    outermost = [call for call in calls if call.parent < 0]
    steps = [call.begin for call in outermost if call.path == outermost[-1].path and call.begin in context]
    prefill = range(context.start, steps[1] if len(steps) > 1 else context.start)
    made: dict[int, list[Storage]] = {}
    for storage in storages:
        if storage.kind == "activation":
            made.setdefault(storage.born, []).append(storage)
    of_prompt = {place: made.get(op.index, []) for place, op in _places(ops[: context.start], calls)}
    resized = [
        replace(storage, nbytes=0) if storage.kind == "input" and (storage.name or "").startswith(_GIVEN) else storage
        for storage in storages
    ]
    for place, op in _places(ops[prefill.start : prefill.stop], calls):
        for storage, twin in zip(made.get(op.index, []), of_prompt.get(place, []), strict=False):
            if storage.died > context.stop and storage.index not in state:
                resized[storage.index] = replace(storage, nbytes=min(storage.nbytes, twin.nbytes))
    return tuple(resized), tuple([_within(value, resized[value.storage]) for value in values])


def _within(value: Value, storage: Storage) -> Value:
    """A value whose copies take no more bytes than there are."""
    copied = value.nbytes if value.copy_bytes < 0 else value.copy_bytes
    return value if copied <= storage.nbytes else replace(value, copy_bytes=storage.nbytes)


def _places(ops: Sequence[Op], calls: Sequence[Call]) -> Iterator[tuple[Any, Op]]:
    """Each op with its place: (what it does, in which module or "" outside of all, the how-manieth such op)."""
    counts: dict[Any, int] = {}
    for op in ops:
        call = calls[op.call]
        place = op.target, call.path if call.begin <= op.index < call.end else None
        counts[place] = counts.get(place, 0) + 1
        yield (*place, counts[place]), op
