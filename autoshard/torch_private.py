"""Every private torch API in use, imported here and nowhere else, so that one test tells when one of them moves."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "autograd_node",
    "conj_and_neg_keys",
    "flop_formulas",
    "node_sequence",
    "sequence_number",
]


def autograd_node() -> Any:
    """The autograd node that is running in this thread, or None outside of a backward."""
    return torch._C._current_autograd_node()


def sequence_number() -> int:
    """The number the next autograd node made in this thread will get; forward and backward are matched by it."""
    return torch._C._autograd._get_sequence_nr()


def node_sequence(node: Any) -> int:
    """The number an autograd node got when the forward op made it (2**64 - 1 for the nodes that fill `.grad`)."""
    return node._sequence_nr()


def flop_formulas() -> dict[Any, Any]:
    """FLOP formulas by op packet; each takes the op's arguments and `out_val`."""
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def conj_and_neg_keys(tensor: torch.Tensor) -> Any:
    """The dispatch keys that mark a lazily conjugated or negated tensor, for a wrapper of it to carry too."""
    keys = torch._C._additional_keys_to_prop_for_wrapper_tensors
    return torch._C._dispatch_keys(tensor) & keys
