"""Where a checkpoint and a model differ, said in one message."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from autoshard.checkpoint.data import Checkpoint, Source
from autoshard.checkpoint.traced import leaves
from autoshard.errors import CheckpointError, SpecError
from autoshard.integrations.words import count, first

ALLOWED = ("missing", "unexpected", "mismatched")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What of the model is not in the checkpoint, and what there is otherwise.

    Attributes:
        missing, unexpected: names of tensors; those of the checkpoint as the model would call them.
        shapes: name -> (shape in the checkpoint, shape in the model); `dtypes` likewise.
    """

    missing: Collection[str] = ()
    unexpected: Collection[str] = ()
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    dtypes: Mapping[str, tuple[torch.dtype, torch.dtype]] = field(default_factory=dict)


def check_differences(checkpoint: Checkpoint, model: str, found: Differences, allow: Collection[str]) -> None:
    """Raise `CheckpointError` for what is not allowed. Raises `SpecError` if `allow` makes no sense."""
    unknown = [one for one in ([allow] if isinstance(allow, str) else allow) if one not in ALLOWED]
    if unknown or isinstance(allow, str):
        raise SpecError(f"allow is {allow!r}; write any of {ALLOWED} in a tuple.")
    problems, needed = [], []
    # What has another shape is missing for the library too; say it once.
    missing = [name for name in sorted(found.missing) if name not in found.shapes]
    if missing and "missing" not in allow:
        problems.append(f"{count(missing, 'tensor')} of the model missing: {first(missing)}")
        needed.append("missing")
    if found.unexpected and "unexpected" not in allow:
        names = sorted(found.unexpected)
        problems.append(f"{count(names, 'tensor')} that the model does not have: {first(names)}")
        needed.append("unexpected")
    if "mismatched" not in allow:
        for what, others in (("shape", found.shapes), ("dtype", found.dtypes)):
            if others:
                rows = [f"{name} ({_said(there)}, the model has {_said(own)})" for name, (there, own) in others.items()]
                problems.append(f"{count(rows, 'tensor')} of another {what}: {first(sorted(rows))}")
                needed.append("mismatched")
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit this {model}. {'; '.join(problems)}. Check that the files are whole and "
            f"belong to this model; to load it nevertheless, pass allow={tuple(dict.fromkeys(needed))!r}."
        )


def other_kinds(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> dict[str, tuple[torch.dtype, torch.dtype]]:
    """Tensors that a cast would change more than rounding does: integers for floats, packed or 8-bit floats."""
    found = {}
    for name, source in sources.items():
        for dtype in {checkpoint.entries[entry].dtype for entry in leaves(source.made)}:
            if _kind(dtype) != _kind(source.dtype):
                found[name] = (dtype, source.dtype)
    return found


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    if dtype.is_floating_point:
        return "float" if dtype.itemsize > 1 else str(dtype)
    return "bool" if dtype == torch.bool else "integer"


def _said(value: "Iterable[int] | torch.dtype") -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(list(value))
