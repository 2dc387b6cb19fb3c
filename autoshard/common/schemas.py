"""What torch says of an op: its name, its arguments and results, and which of them it writes."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.fx.operator_schemas import get_signature_for_torch_op

from autoshard.torch_private import OpOverload


@cache
def schema_of(op: Any) -> Any:
    """The schema of an op; None of other functions, and of the few ops of which torch can't write a signature."""
    if not isinstance(op, OpOverload):
        return None
    try:
        _, schemas = get_signature_for_torch_op(op, return_schemas=True)
    except (NameError, RuntimeError, ValueError):  # record_stream, conv_tbc_backward
        return None
    return schemas[0] if schemas else None


def arguments_of_op(op: Any) -> Any:
    """The arguments that the schema of an op lists; none of what has no schema."""
    schema = schema_of(op)
    return () if schema is None else schema.arguments


def written_by(op: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an op writes into, by its schema."""
    found: list[torch.Tensor] = []
    schema = schema_of(op)
    if schema is None or not schema.is_mutable:
        return found
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [one for one in (value if isinstance(value, (list, tuple)) else [value]) if one is not None]
    return found


def reads_shape_alone(op: Any) -> bool:
    """Whether an op reads the shape of its tensors, never their values: `zeros_like`, `new_full`."""
    return any(word in op.name() for word in ("_like", "new_"))


def name_of_op(op: Any) -> str:
    """The name that all overloads of an op have, "aten::add"; "" of other functions."""
    return op.name().partition(".")[0] if isinstance(op, OpOverload) else ""
